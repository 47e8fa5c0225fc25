"""The three ways of use on real checkouts of Megatron-LM: patched, run for two steps, and back as they were.

    MEGATRON_CHECKOUTS=PATH:PATH .venv/bin/python -m pytest tests/checkout

The checkouts are cloned, and never touched themselves.
"""

import os
import subprocess
from pathlib import Path

import pytest

from megatron_lrmoe.cli import main
from megatron_lrmoe.launch.patch_set import version_of
from tests.integration.launch import SCRIPT_ENTRY, Run, tiny_args, torchrun

CHECKOUTS = [Path(path) for path in os.environ.get("MEGATRON_CHECKOUTS", "").split(os.pathsep) if path]
FLAGS = {"train_iters": 2, "moe_lrm_retention": 0.8, "moe_lrm_start_iter": 0}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUTS, reason="MEGATRON_CHECKOUTS names no checkouts of Megatron-LM"),
]


@pytest.fixture(scope="module", params=CHECKOUTS or [Path("none")], ids=lambda path: path.name)
def checkout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    clone = tmp_path_factory.mktemp("clone") / "Megatron-LM"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(request.param), str(clone)], check=True)
    return clone


def status(checkout: Path) -> str:
    return subprocess.check_output(["git", "-C", str(checkout), "status", "--porcelain"], text=True)


def two_steps(checkout: Path, tmp_path: Path, **flags: object) -> Run:
    args = tiny_args(tmp_path, **{**FLAGS, **flags})
    return torchrun(2, checkout / "pretrain_gpt.py", args)


def test_patch_train_and_back(checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["patch", str(checkout), "--check"]) == 0
    assert capsys.readouterr().out.count("not applied (as in ") == 2
    assert main(["patch", str(checkout)]) == 0
    assert status(checkout) == " M pretrain_gpt.py\n M pretrain_hybrid.py\n"
    assert main(["patch", str(checkout)]) == 0
    assert "already applied" in capsys.readouterr().out

    run = two_steps(checkout, tmp_path / "lrm")
    assert len(run.losses) == 2
    assert "dropping MoE backward work from iteration 0 on" in run.stdout
    assert f"replaced in Megatron {version_of(checkout)}" in run.stdout
    assert "moe-lrm/kept_share: 0.7" in run.stdout or "moe-lrm/kept_share: 0.8" in run.stdout

    # Without flags: to the last printed digit what the unpatched script gives.
    off = {"moe_lrm_retention": None, "moe_lrm_start_iter": None}
    patched = two_steps(checkout, tmp_path / "off", **off)
    assert "moe-lrm/" not in patched.stdout

    assert main(["patch", str(checkout), "--reverse"]) == 0
    assert status(checkout) == ""
    stock_args = tiny_args(tmp_path / "stock", **{**FLAGS, **off})
    stock = torchrun(2, SCRIPT_ENTRY, [str(checkout / "pretrain_gpt.py"), *stock_args])
    assert patched.losses == stock.losses
    assert patched.losses[0] == run.losses[0]
