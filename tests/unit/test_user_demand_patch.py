"""Patch and version drift, as users met it with other plugins (user demand A36)."""

from pathlib import Path

import pytest

from megatron_lrmoe.cli import main
from tests.unit.test_patch import NAMES, PATCHED, SCRIPT, contents, tree


def test_a36_a_tree_of_another_release_then_the_right_one_twice_then_back(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    old = tree(tmp_path / "old", "0.17")
    assert main(["patch", str(old), "--dry-run"]) == 1
    said = capsys.readouterr().err
    assert "found Megatron 0.17, supported are 0.18 (core_v0.18.0, core_v0.18.2), 0.19 (core_v0.19.0)" in said
    assert contents(old) == [SCRIPT, SCRIPT]

    # A release whose script has moved on: the first file that does not match is named.
    drifted = tree(tmp_path / "drifted", "0.18")
    (drifted / NAMES[0]).write_bytes(SCRIPT.replace(b"import torch\n\n", b"import torch\nimport triton\n\n"))
    assert main(["patch", str(drifted), "--dry-run"]) == 1
    said = capsys.readouterr().err
    assert str(drifted / NAMES[0]) in said and "supported are 0.18" in said
    assert (drifted / NAMES[1]).read_bytes() == SCRIPT

    right = tree(tmp_path / "right", "0.18")
    assert main(["patch", str(right)]) == 0
    assert contents(right) == [PATCHED, PATCHED]
    capsys.readouterr()
    assert main(["patch", str(right)]) == 0
    assert "already applied" in capsys.readouterr().out
    assert main(["patch", str(right), "--reverse"]) == 0
    assert contents(right) == [SCRIPT, SCRIPT]
