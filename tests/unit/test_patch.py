"""``megatron-lrmoe patch`` on small trees; real checkouts are in tests/checkout."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe.cli import main
from megatron_lrmoe.launch import patch
from megatron_lrmoe.launch.patch_set import Hunk, State, patch_sets, version_of

LINE = b"import megatron_lrmoe.megatron_adaptor\n"
NAMES = ("pretrain_gpt.py", "pretrain_hybrid.py")
SCRIPT = b"# script\nfrom functools import partial\n\nimport torch\n\nfrom builders import builder\n\nbuilder(torch)\n"
PATCHED = SCRIPT.replace(b"import torch\n", b"import torch\n" + LINE)


def tree(folder: Path, version: str = "0.19", content: bytes = SCRIPT) -> Path:
    """A checkout as far as the command looks at it."""
    major, minor = version.split(".")
    info = folder / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = 7\n")
    for name in NAMES:
        (folder / name).write_bytes(content)
    return folder


def contents(checkout: Path) -> list[bytes]:
    return [(checkout / name).read_bytes() for name in NAMES]


def with_git(checkout: Path) -> Path:
    git = ["git", "-C", str(checkout), "-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "all"], check=True)
    return checkout


@pytest.fixture(params=["no git", "git"])
def checkout(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    made = tree(tmp_path / "Megatron-LM")
    return with_git(made) if request.param == "git" else made


def test_apply_apply_again_and_reverse(checkout: Path, capsys: pytest.CaptureFixture) -> None:
    (checkout / NAMES[0]).chmod(0o755)
    assert main(["patch", str(checkout)]) == 0
    assert contents(checkout) == [PATCHED, PATCHED]
    assert os.stat(checkout / NAMES[0]).st_mode & 0o777 == 0o755
    capsys.readouterr()
    assert main(["patch", str(checkout)]) == 0
    assert "already applied" in capsys.readouterr().out
    assert contents(checkout) == [PATCHED, PATCHED]
    assert main(["patch", str(checkout), "--reverse"]) == 0
    assert contents(checkout) == [SCRIPT, SCRIPT]
    assert main(["patch", str(checkout), "--reverse"]) == 0
    assert "nothing to reverse" in capsys.readouterr().out
    assert {path.name for path in checkout.iterdir()} - {".git"} == {"megatron", *NAMES}


@pytest.mark.parametrize("version", [patches.version for patches in patch_sets()])
def test_every_release_has_its_patch(tmp_path: Path, version: str) -> None:
    checkout = tree(tmp_path / "tree", version)
    assert main(["patch", str(checkout)]) == 0
    assert contents(checkout) == [PATCHED, PATCHED]


def test_git_says_the_same(checkout: Path) -> None:
    """The patch file itself applies, by git, with the least context."""
    if not (checkout / ".git").exists():
        pytest.skip("needs a repository")
    (patches,) = [patches for patches in patch_sets() if patches.version == "0.19"]
    subprocess.run(["git", "-C", str(checkout), "apply", str(patches.diff)], check=True)
    assert contents(checkout) == [PATCHED, PATCHED]
    subprocess.run(["git", "-C", str(checkout), "apply", "--reverse", str(patches.diff)], check=True)
    assert contents(checkout) == [SCRIPT, SCRIPT]


@pytest.mark.parametrize("flag", ["--check", "--dry-run", "--diff"])
def test_what_only_looks_changes_nothing(checkout: Path, capsys: pytest.CaptureFixture, flag: str) -> None:
    assert main(["patch", str(checkout), flag]) == 0
    assert contents(checkout) == [SCRIPT, SCRIPT]
    said = capsys.readouterr().out
    expected = {"--check": "not applied", "--dry-run": "would be patched", "--diff": f"+{LINE.decode()}"}[flag]
    assert said.count(expected) == 2
    main(["patch", str(checkout)])
    capsys.readouterr()
    assert main(["patch", str(checkout), flag]) == 0
    after = {"--check": ": applied", "--dry-run": "already applied", "--diff": f"+{LINE.decode()}"}[flag]
    assert capsys.readouterr().out.count(after) == 2


def refused(checkout: Path, capsys: pytest.CaptureFixture, *flags: str) -> str:
    """What is said; exit status 1, and no byte has changed."""
    before = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file() and ".git" not in path.parts}
    assert main(["patch", str(checkout), *flags]) == 1
    after = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file() and ".git" not in path.parts}
    assert before == after
    said = capsys.readouterr().err
    assert "0.18 (core_v0.18.0, core_v0.18.2), 0.19 (core_v0.19.0), 0.20 (main)" in said
    assert "nothing is changed" in said
    return said


@pytest.mark.parametrize("flags", [(), ("--check",), ("--dry-run",), ("--reverse",)])
@pytest.mark.parametrize("version", ["0.17", "0.21", "1.0"])
def test_another_version(tmp_path: Path, capsys: pytest.CaptureFixture, version: str, flags: tuple[str, ...]) -> None:
    assert f"found Megatron {version}" in refused(tree(tmp_path / "tree", version), capsys, *flags)


def test_no_checkout(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert "found no checkout of Megatron-LM" in refused(tmp_path, capsys)
    assert "found no checkout of Megatron-LM" in refused(tmp_path / "nothing", capsys)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (SCRIPT.replace(b"\n", b"\r\n"), "end in CR LF"),
        (SCRIPT.replace(b"import torch\n\n", b"import torch\nimport numpy\n\n"), "are not there just once"),
        (SCRIPT + b"\nimport torch\n\n", "are not there just once"),
        (b"", "are not there just once"),
    ],
    ids=["CRLF", "edited at the place", "two places", "empty"],
)
def test_the_first_file_that_differs_is_named(
    checkout: Path, capsys: pytest.CaptureFixture, content: bytes, reason: str
) -> None:
    (checkout / NAMES[1]).write_bytes(content)
    said = refused(checkout, capsys)
    assert f"{checkout / NAMES[1]}: does not match the patch for Megatron 0.19" in said
    assert reason in said


def test_a_missing_file_is_named(checkout: Path, capsys: pytest.CaptureFixture) -> None:
    (checkout / NAMES[0]).unlink()
    assert f"{checkout / NAMES[0]}: does not match" in (said := refused(checkout, capsys))
    assert "no such file" in said


def test_other_edits_are_left_alone_and_said(checkout: Path, capsys: pytest.CaptureFixture) -> None:
    edited = SCRIPT.replace(b"builder(torch)", b"builder(torch, 1)  # mine").removesuffix(b"\n")
    (checkout / NAMES[0]).write_bytes(edited)
    assert main(["patch", str(checkout)]) == 0
    assert "pretrain_gpt.py: applied (changed elsewhere since the tested commits" in capsys.readouterr().out
    assert main(["patch", str(checkout), "--reverse"]) == 0
    assert contents(checkout) == [edited, SCRIPT]


def test_a_file_as_tested_is_said_to_be() -> None:
    (patches,) = [patches for patches in patch_sets() if patches.version == "0.19"]
    base = patches.bases[0]
    changed = {name: {"before": hashlib.sha256(SCRIPT).hexdigest(), "after": ""} for name in base.sha256}
    fitted = type(patches)(patches.path, "0.19", (type(base)("mine", base.commit, changed),))
    assert fitted.tested(NAMES[0], SCRIPT) == "mine"
    assert fitted.tested(NAMES[0], SCRIPT + b"#") is None


def test_a_half_patched_tree_is_completed_and_reversed(checkout: Path) -> None:
    (checkout / NAMES[1]).write_bytes(PATCHED)
    assert main(["patch", str(checkout)]) == 0
    assert contents(checkout) == [PATCHED, PATCHED]
    (checkout / NAMES[0]).write_bytes(SCRIPT)
    assert main(["patch", str(checkout), "--reverse"]) == 0
    assert contents(checkout) == [SCRIPT, SCRIPT]


def test_a_tree_that_cannot_be_written_stays_as_it_was(
    checkout: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second file cannot be written: the first is put back. Permissions would not stop root."""
    original = Path.write_bytes

    def failing(self: Path, content: bytes) -> int:
        if NAMES[1] in self.name and content == PATCHED:
            raise PermissionError(13, "Permission denied", str(self))
        return original(self, content)

    monkeypatch.setattr(Path, "write_bytes", failing)
    monkeypatch.setattr(patch, "_git_apply", lambda *_: None)
    assert main(["patch", str(checkout)]) == 1
    assert "Permission denied" in capsys.readouterr().err
    assert contents(checkout) == [SCRIPT, SCRIPT]


def test_a_git_that_fails_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = with_git(tree(tmp_path / "tree"))
    (checkout / ".git" / "index").write_bytes(b"broken")
    real = subprocess.run
    monkeypatch.setattr(
        patch.subprocess,
        "run",
        lambda command, **kwargs: (
            subprocess.CompletedProcess(command, 128, "", "fatal: broken")
            if "apply" in command
            else real(command, **kwargs)
        ),
    )
    assert main(["patch", str(checkout)]) == 1
    assert "git apply: fatal: broken" in capsys.readouterr().err
    assert contents(checkout) == [SCRIPT, SCRIPT]


def test_without_git_on_the_path_a_repository_is_patched_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = with_git(tree(tmp_path / "tree"))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert main(["patch", str(checkout)]) == 0
    assert contents(checkout) == [PATCHED, PATCHED]


def test_a_checkout_inside_another_repository(tmp_path: Path) -> None:
    """There git apply would look for the files at the outer top, and skip them without a word."""
    checkout = tree(tmp_path / "outer" / "Megatron-LM")
    with_git(tmp_path / "outer")
    assert main(["patch", str(checkout)]) == 0
    assert contents(checkout) == [PATCHED, PATCHED]


def test_a_linked_file_stays_a_link(tmp_path: Path) -> None:
    checkout = tree(tmp_path / "tree")
    (checkout / NAMES[0]).rename(tmp_path / "real.py")
    (checkout / NAMES[0]).symlink_to(tmp_path / "real.py")
    assert main(["patch", str(checkout)]) == 0
    assert (checkout / NAMES[0]).is_symlink()
    assert (tmp_path / "real.py").read_bytes() == PATCHED


lines = st.lists(st.sampled_from([b"", b"import torch", b"import os", b"  import torch", b"x = 1"]), max_size=6)


@given(before=lines, after=lines, ends=st.booleans())
def test_reverse_undoes_apply(before: list[bytes], after: list[bytes], ends: bool) -> None:
    hunk = Hunk(b"import torch\n\n", b"import torch\n" + LINE + b"\n")
    content = b"\n".join([*before, b"import torch", b"", *after]) + (b"\n" if ends else b"")
    if hunk.state(content) is not State.CLEAN:
        assert hunk.state(content) is State.DIFFERS
        return
    patched = hunk.changed(content, reverse=False)
    assert patched.count(LINE) == 1 and len(patched) == len(content) + len(LINE)
    assert hunk.state(patched) is State.APPLIED
    assert hunk.changed(patched, reverse=True) == content


def test_the_version_is_read_not_imported(tmp_path: Path) -> None:
    checkout = tree(tmp_path / "tree")
    info = checkout / "megatron" / "core" / "package_info.py"
    info.write_text(info.read_text() + "raise RuntimeError\n")
    assert version_of(checkout) == "0.19"
    info.write_text("MAJOR = 0\n")
    assert version_of(checkout) is None
