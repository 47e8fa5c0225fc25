"""Read YAML of a known shape, and collect everything that is wrong with it, each with its place."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def load(path: Path) -> Any:
    """Content of a YAML file.

    Raises:
        ValueError: the file is missing or no YAML, or a key stands twice in a mapping.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}, expected a plan file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: found invalid YAML: {error}") from error


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, of which YAML would drop the first without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if repeated := [key for key in keys if keys.count(key) > 1]:
            problem = f"the key {repeated[0]!r} stands twice"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


@dataclass
class Section:
    """A mapping of the plan; its problems are collected with their place."""

    content: Any
    place: str
    problems: list[str]
    asked: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if not isinstance(self.content, dict):
            self.problem("", self.content, "a mapping of names to values")
            self.content = {}

    def problem(self, key: Any, found: Any, allowed: str) -> None:
        """Write down one thing that is wrong; the key may be empty for the mapping itself."""
        place = f"{self.place}.{key}".strip(".") or "the plan"
        self.problems.append(f"{place}: found {found!r}, allowed is {allowed}")

    def take(self, key: str, ok: Callable[[Any], bool], allowed: str, default: Any = ...) -> Any:
        """The value, or the default where it is missing or wrong; without a default a missing one is a problem."""
        self.asked.add(key)
        value = self.content.get(key, default)
        if value is ... or (value is not default and not ok(value)):
            self.problem(key, None if value is ... else value, allowed)
            return None if default is ... else default
        return value

    def names(self) -> list[str]:
        """Keys that can be names in this plan."""
        for key in self.content:
            if not (isinstance(key, str) and NAME.fullmatch(key)):
                self.problem("", key, "a name of letters, digits, dots, dashes and underscores")
        return [key for key in self.content if isinstance(key, str) and NAME.fullmatch(key)]

    def inside(self, key: str, default: Any = ...) -> "Section":
        """The mapping under a key."""
        self.asked.add(key)
        content = self.content.get(key, None if default is ... else default)
        return Section({} if content is None and default is not ... else content, f"{self.place}.{key}", self.problems)

    def refuse_others(self) -> None:
        """Everything that was not asked for is a problem."""
        for key in self.content:
            if key not in self.asked:
                place = f"{self.place}.{key}".strip(".")
                self.problems.append(f"{place}: found a key that is not known here, allowed are {sorted(self.asked)}")


def is_list_of(value: Any, ok: Callable[[Any], bool]) -> bool:
    """A list with at least one value, all of them right and none twice."""
    return isinstance(value, list) and bool(value) and all(map(ok, value)) and len(set(value)) == len(value)


def is_count(value: Any) -> bool:
    """A whole number >= 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_seed(value: Any) -> bool:
    """A whole number >= 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_share(value: Any) -> bool:
    """A number between 0 and 1, both left out."""
    return isinstance(value, float) and math.isfinite(value) and 0 < value < 1


def as_list(value: Any) -> list[Any]:
    """A list as it is, anything else as a list of one."""
    return value if isinstance(value, list) else [value]
