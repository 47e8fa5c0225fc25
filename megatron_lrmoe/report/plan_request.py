"""What ``megatron-lrmoe plan`` was asked: its flags, checked all at once. No numpy here."""

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

LARGEST = 2**31 - 1
"""Of whole numbers, and of all rows together: the planner multiplies two counts of rows in 64 bits."""

MOST_EXPERTS = 2**16
BACKWARD_FACTOR = Fraction(101, 100)
"""Backward limit where none is given: that many times the mean of the routed rows."""

_MOST_FACTOR = 1000
_MOST_GROUP = 2**20
_MOST_SLOTS = 1024
_MOST_GIB = 2**20
_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{0,12})?|\.[0-9]{1,12}|[0-9]{1,12}/0*[1-9][0-9]{0,11}")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The flags of ``megatron-lrmoe plan``, under their names; its help describes each.

    Shares and limits are text, so that 0.8 is 4/5 and not the nearest binary float.
    """

    ranks: int
    file: Path | None = None
    workload: str | None = None
    experts: int | None = None
    tokens: int | None = None
    top_k: int | None = None
    seed: int | None = None
    iteration: int | None = None
    layer: int | None = None
    microbatch: int | None = None
    slots: int = 1
    retention: str = "1.0"
    min_retention: str | None = None
    quota: Literal["proportional", "balanced", "joint"] = "proportional"
    forward_limit: str | None = None
    backward_limit: str | None = None
    budget_gib: str | None = None
    hidden: int | None = None
    ffn: int | None = None
    domain: int | None = None
    tile_rows: int = 1
    group_rows: int = 0
    policy: str = "lrm"
    strong: bool = False
    backend: Literal["auto", "compiled", "readable"] = "auto"

    @property
    def share(self) -> Fraction:
        """``retention`` as the fraction that was written."""
        return _number("retention", self.retention)

    @property
    def least(self) -> Fraction:
        """``min_retention`` as the fraction that was written, or what it is when not given."""
        if self.min_retention is None:
            return min(Fraction(1, 2), self.share)
        return _number("min_retention", self.min_retention)

    @property
    def budget_bytes(self) -> int | None:
        """``budget_gib`` in whole bytes."""
        return None if self.budget_gib is None else int(_number("budget_gib", self.budget_gib) * 2**30)

    def input_problems(self) -> list[str]:
        """What is wrong with the choice of loads, a sentence each."""
        found: list[str] = []
        if (self.file is None) == (self.workload is None):
            both = "both" if self.file is not None else "neither"
            found.append(f"FILE and --workload: found {both}, allowed is one of them")
        found += self._out_of_range("ranks", 1, MOST_EXPERTS)
        found += self._out_of_range("experts", 1, MOST_EXPERTS)
        for name in ("tokens", "top_k", "seed"):
            found += self._out_of_range(name, 0)
            if self.workload is None and getattr(self, name) is not None:
                found.append(f"{flag(name)}: found {getattr(self, name)}, allowed only with --workload")
        if self.workload is not None and self.experts is None:
            found.append("--experts: not given, needed with --workload")
        return found

    def setting_problems(self) -> list[str]:
        """What is wrong with the other flags, a sentence each."""
        found = [*self._share_problems()]
        found += self._out_of_range("slots", 0, _MOST_SLOTS)
        for name, least in (("hidden", 1), ("ffn", 1), ("domain", 1)):
            found += self._out_of_range(name, least)
        for name, least in (("tile_rows", 1), ("group_rows", 0)):
            found += self._out_of_range(name, least, _MOST_GROUP)
        for name in ("forward_limit", "backward_limit"):
            found += _problem_of(parse_limit, name, getattr(self, name))
        given = [name for name in ("hidden", "ffn") if getattr(self, name) is not None]
        if self.budget_gib is None:
            found += [f"{flag(name)}: allowed only with --budget-gib" for name in given]
            return found
        found += [
            f"{flag(name)}: not given, needed with --budget-gib" for name in ("hidden", "ffn") if name not in given
        ]
        limits = [name for name in ("forward_limit", "backward_limit") if getattr(self, name) is not None]
        # A budget counts the memory of rows, and neither tiles nor launches need any.
        limits += [name for name, usual in (("tile_rows", 1), ("group_rows", 0)) if getattr(self, name) != usual]
        found += [f"{flag(name)}: not allowed with --budget-gib" for name in limits]
        return found

    def _share_problems(self) -> list[str]:
        found: list[str] = []
        for name, low, high, allowed in (
            ("retention", 0, 1, "0 < retention <= 1"),
            ("min_retention", -1, 1, "0 <= share <= 1"),
            ("budget_gib", 0, _MOST_GIB, f"a number > 0, at most {_MOST_GIB}"),
        ):
            text = getattr(self, name)
            problem = _problem_of(_number, name, text)
            if text is not None and not problem and not low < _number(name, text) <= high:
                problem = [f"{flag(name)}: found {text}, allowed is {allowed}"]
            found += problem
        if not found and self.least > self.share:
            found.append(
                f"--min-retention: found {self.min_retention}, allowed is at most --retention, {self.retention}"
            )
        return found

    def _out_of_range(self, name: str, least: int, most: int = LARGEST) -> list[str]:
        value = getattr(self, name)
        if value is None or least <= value <= most:
            return []
        return [f"{flag(name)}: found {value}, allowed is {least} to {most}"]


def flag(name: str) -> str:
    """Command-line flag of a field."""
    return "--" + name.replace("_", "-")


def parse_limit(name: str, text: str) -> int | Fraction | Literal["finest"] | None:
    """A limit as its flag writes it: rows, a factor of the mean (``1.01x``), ``finest``, or None for ``none``.

    Raises:
        ValueError: anything else, with the flag.
    """
    if text == "finest":
        return "finest"
    if text == "none":
        return None
    factor = text.endswith("x") and _NUMBER.fullmatch(text[:-1]) and Fraction(text[:-1])
    if factor and factor <= _MOST_FACTOR:
        return factor
    if re.fullmatch("[0-9]{1,10}", text) and 1 <= int(text) <= LARGEST:
        return int(text)
    raise ValueError(
        f"{flag(name)}: found {text!r}, allowed are rows from 1 to {LARGEST}, a multiple of the mean up to "
        f"{_MOST_FACTOR}x such as 1.01x, 'finest' and 'none'"
    )


def _number(name: str, text: str) -> Fraction:
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{flag(name)}: found {text!r}, allowed is a number such as 0.8 or 4/5")
    return Fraction(text)


def _problem_of(parse, name: str, text: str | None) -> list[str]:
    try:
        if text is not None:
            parse(name, text)
    except ValueError as error:
        return [str(error)]
    return []
