"""``megatron-lrmoe patch CHECKOUT``: put the adaptor's import into a checkout's scripts, or take it out again.

All files or none: every file is looked at before one is written, and what was written is put back if a later one cannot
be.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_lrmoe.launch.patch_set import Hunk, PatchSet, State, patch_sets, supported, version_of

DONE, FAILED = 0, 1


@dataclass(frozen=True)
class Target:
    """One file of a checkout.

    Args:
        name: its path in the checkout.
        path: where it is.
        content: its bytes; None if it cannot be read.
        hunk: its change.
    """

    name: str
    path: Path
    content: bytes | None
    hunk: Hunk

    @property
    def state(self) -> State:
        """What it is to its hunk."""
        return State.DIFFERS if self.content is None else self.hunk.state(self.content)

    @property
    def reason(self) -> str:
        """Why its hunk has no place."""
        if self.content is None:
            return "there is no such file" if not self.path.exists() else "it cannot be read"
        if b"\r\n" in self.content:
            return "its lines end in CR LF, Megatron's own in LF"
        return f"the lines {self.hunk.old.decode()!r} are not there just once"


class MismatchError(Exception):
    """A tree that is not as a patch expects it; nothing was changed."""


def run(checkout: Path, action: str) -> int:
    """Do one of the command's actions.

    Args:
        checkout: folder of Megatron-LM.
        action: apply, reverse, check, dry-run or diff.

    Returns:
        0 if the tree is now, or was already, as asked (check: if it could be); 1 if it does not match or cannot be
        written, and then nothing is changed.
    """
    try:
        patches = _patches_for(checkout)
        targets = _targets(checkout, patches)
        return _ACTIONS[action](checkout, patches, targets)
    except (MismatchError, OSError, subprocess.CalledProcessError) as error:
        print(f"megatron-lrmoe patch: {error}", file=sys.stderr)
        return FAILED


def _patches_for(checkout: Path) -> PatchSet:
    sets, version = patch_sets(), version_of(checkout)
    for patches in sets:
        if patches.version == version:
            return patches
    found = "no checkout of Megatron-LM" if version is None else f"Megatron {version}"
    raise MismatchError(f"{checkout}: found {found}, supported are {supported(sets)}; nothing is changed")


def _targets(checkout: Path, patches: PatchSet) -> list[Target]:
    targets = []
    for name, hunk in patches.hunks.items():
        path = checkout / name
        try:
            content = path.read_bytes()
        except OSError:
            content = None
        targets.append(Target(name, path, content, hunk))
    for target in targets:
        if target.state is State.DIFFERS:
            raise MismatchError(
                f"{target.path}: does not match the patch for Megatron {patches.version}: {target.reason}; "
                f"supported are {supported(patch_sets())}; nothing is changed"
            )
    return targets


def _check(checkout: Path, patches: PatchSet, targets: list[Target]) -> int:
    for target in targets:
        print(f"{target.name}: {target.state.value}{_note(patches, target)}")
    return DONE


def _note(patches: PatchSet, target: Target) -> str:
    base = patches.tested(target.name, target.content or b"")
    return f" (as in {base})" if base else " (changed elsewhere since the tested commits; the patch fits)"


def _diff(checkout: Path, patches: PatchSet, targets: list[Target]) -> int:
    print(patches.diff.read_text(), end="")
    return DONE


def _dry_run(checkout: Path, patches: PatchSet, targets: list[Target]) -> int:
    for target in targets:
        print(f"{target.name}: {'would be patched' if target.state is State.CLEAN else 'already applied'}")
    return DONE


def _apply(checkout: Path, patches: PatchSet, targets: list[Target]) -> int:
    return _change(checkout, patches, targets, reverse=False)


def _reverse(checkout: Path, patches: PatchSet, targets: list[Target]) -> int:
    return _change(checkout, patches, targets, reverse=True)


_ACTIONS: dict[str, Callable[[Path, PatchSet, list[Target]], int]] = {
    "check": _check,
    "diff": _diff,
    "dry-run": _dry_run,
    "apply": _apply,
    "reverse": _reverse,
}


def _change(checkout: Path, patches: PatchSet, targets: list[Target], reverse: bool) -> int:
    todo = [target for target in targets if target.state is (State.APPLIED if reverse else State.CLEAN)]
    if not todo:
        print(f"{checkout}: {'not applied, nothing to reverse' if reverse else 'already applied'}")
        return DONE
    wanted = {target.path: target.hunk.changed(target.content or b"", reverse) for target in todo}
    before = {target.path: target.content or b"" for target in todo}
    try:
        # git takes all files of the patch or none, so it is of no use where one of them is done.
        if len(todo) == len(targets) and _is_top_of_repository(checkout):
            _git_apply(checkout, patches.diff, reverse)
        for path, content in wanted.items():
            if path.read_bytes() != content:
                _replace(path, content)
    except BaseException:
        for path, content in before.items():
            if path.read_bytes() != content:
                _replace(path, content)
        raise
    for target in todo:
        done = "taken out" if reverse else "applied"
        print(f"{target.name}: {done}{_note(patches, target)}")
    return DONE


def _is_top_of_repository(checkout: Path) -> bool:
    """Whether git is there and the checkout is the top of its tree: below that, git apply skips files silently."""
    if shutil.which("git") is None:
        return False
    command = ["git", "-C", str(checkout), "rev-parse", "--show-toplevel"]
    said = subprocess.run(command, capture_output=True, text=True)
    return said.returncode == 0 and Path(said.stdout.strip()).resolve() == checkout.resolve()


def _git_apply(checkout: Path, diff: Path, reverse: bool) -> None:
    # Line endings as they are, whatever the user's settings say.
    command = ["git", "-C", str(checkout), "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn"]
    said = subprocess.run(
        [*command, *(["--reverse"] if reverse else []), str(diff.resolve())], capture_output=True, text=True
    )
    if said.returncode:
        raise MismatchError(f"git apply: {said.stderr.strip()}; nothing is changed")


def _replace(path: Path, content: bytes) -> None:
    """Write beside the file and rename, with its mode; a link stays a link."""
    path = path.resolve()
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(content)
        shutil.copymode(path, beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
