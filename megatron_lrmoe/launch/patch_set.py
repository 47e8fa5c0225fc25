"""The patches that travel with the plugin: one folder per Megatron release, a manifest and a patch file in each.

Every patch puts one line under ``import torch``. A hunk is looked for by its lines, not by its numbers, so it fits a
file whose other lines have changed.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path

from megatron_lrmoe.launch.shipped import folder

PACKAGE_INFO = Path("megatron/core/package_info.py")


class State(Enum):
    """What a file is to a hunk."""

    CLEAN = "not applied"
    APPLIED = "applied"
    DIFFERS = "does not match"


@dataclass(frozen=True)
class Hunk:
    """One file's change, as the bytes of the lines before and after."""

    old: bytes
    new: bytes

    def state(self, content: bytes) -> State:
        """Whether the lines are there in their old or their new form, in just one place."""
        if self._places(content, self.new) == 1:
            return State.APPLIED
        return State.CLEAN if self._places(content, self.old) == 1 else State.DIFFERS

    def changed(self, content: bytes, reverse: bool) -> bytes:
        """The content with the hunk applied, or taken out; its state has to allow it."""
        old, new = (self.new, self.old) if reverse else (self.old, self.new)
        return (b"\n" + content).replace(b"\n" + old, b"\n" + new, 1)[1:]

    @staticmethod
    def _places(content: bytes, lines: bytes) -> int:
        # A line feed in front of both, so that a hunk begins where a line does.
        return (b"\n" + content).count(b"\n" + lines)


@dataclass(frozen=True)
class Base:
    """A tree that the patch was tested on.

    Args:
        name: tag, or branch.
        commit: 40 hexadecimal digits.
        sha256: of each file before and after.
    """

    name: str
    commit: str
    sha256: dict[str, dict[str, str]]


@dataclass(frozen=True)
class PatchSet:
    """The patches of one Megatron release.

    Args:
        path: its folder.
        version: major and minor, such as 0.19.
        bases: trees that it was tested on.
    """

    path: Path
    version: str
    bases: tuple[Base, ...]

    @property
    def diff(self) -> Path:
        """The patch file."""
        return self.path / "adaptor.patch"

    @cached_property
    def hunks(self) -> dict[str, Hunk]:
        """The hunk of each file, by its path in a checkout."""
        parts = re.split(rb"^--- a/(.+)\n\+\+\+ b/.+\n@@ .*\n", self.diff.read_bytes(), flags=re.MULTILINE)[1:]
        return {name.decode(): _hunk(body) for name, body in zip(parts[::2], parts[1::2], strict=True)}

    def tested(self, name: str, content: bytes) -> str | None:
        """The base whose file this is, patched or not; None if it is none of them."""
        digest = hashlib.sha256(content).hexdigest()
        return next((base.name for base in self.bases if digest in base.sha256[name].values()), None)


def _hunk(body: bytes) -> Hunk:
    lines = body.splitlines(keepends=True)
    old = b"".join(line[1:] for line in lines if line[:1] in b" -")
    return Hunk(old, b"".join(line[1:] for line in lines if line[:1] in b" +"))


def patch_sets() -> list[PatchSet]:
    """Every release that there is a patch for, oldest first."""
    found = []
    for path in sorted(folder("patches").glob("*/manifest.json")):
        manifest = json.loads(path.read_text())
        bases = tuple(Base(**base) for base in manifest["bases"])
        found.append(PatchSet(path.parent, manifest["version"], bases))
    return sorted(found, key=lambda patches: [int(part) for part in patches.version.split(".")])


def version_of(checkout: Path) -> str | None:
    """Major and minor version of a checkout of Megatron-LM, read and not imported; None if it is none."""
    try:
        text = (checkout / PACKAGE_INFO).read_text()
    except (OSError, UnicodeDecodeError):
        return None
    numbers = [re.search(rf"^{name} *= *(\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR")]
    return ".".join(number[1] for number in numbers if number) if all(numbers) else None


def supported(sets: list[PatchSet]) -> str:
    """The releases in words."""
    return ", ".join(f"{patches.version} ({', '.join(base.name for base in patches.bases)})" for patches in sets)
