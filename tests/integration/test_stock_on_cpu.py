"""Unmodified Megatron trains on CPU and gloo, from the wheel and from a checkout."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.launch import SCRIPT_ENTRY, WHEEL_ENTRY, Run, RunError, kill_tree, tiny_args, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.dist]


def stock_args(folder: Path, **overrides: object) -> list[str]:
    return tiny_args(folder, train_iters=5, expert_model_parallel_size=2, **overrides)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stock")


@pytest.fixture(scope="module")
def wheel_run(folder: Path) -> Run:
    return torchrun(2, WHEEL_ENTRY, stock_args(folder))


def test_loss_falls_and_validation_is_finite(wheel_run: Run) -> None:
    assert len(wheel_run.losses) == 5
    assert wheel_run.losses[-1] < wheel_run.losses[0] - 0.1
    assert len(wheel_run.validation_losses) == 3
    assert all(math.isfinite(loss) for loss in wheel_run.validation_losses)


def test_one_line_says_that_the_cpu_device_is_active_and_one_which_flags_it_added(wheel_run: Run) -> None:
    assert wheel_run.stdout.count("Megatron runs on the CPU device") == 1
    assert wheel_run.stdout.count("flags added for the CPU device: --distributed-backend gloo") == 1


def test_a_checkouts_own_script_gives_the_same_losses(folder: Path, wheel_run: Run) -> None:
    checkout = os.environ.get("MEGATRON_PATH")
    if not checkout:
        pytest.skip("MEGATRON_PATH names no checkout of Megatron-LM")
    script = str(Path(checkout) / "pretrain_gpt.py")
    run = torchrun(2, SCRIPT_ENTRY, [script, *stock_args(folder)])
    assert run.losses == wheel_run.losses
    assert run.validation_losses == wheel_run.validation_losses


def is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return not Path("/proc", str(pid), "stat").read_text().rpartition(") ")[2].startswith(("Z", "X"))
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_killed_run_leaves_no_worker_in_a_session_of_its_own() -> None:
    worker = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    starter = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {worker!r}], start_new_session=True)"
    process = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    kill_tree(process.pid)
    # The pipe ends when the last process that holds it is gone.
    assert process.communicate(timeout=60) == ("", None)
    assert process.returncode == -signal.SIGKILL
    # A killed process closes its files before it counts as dead.
    until = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(pid)


def test_a_run_without_an_end_is_an_error() -> None:
    with pytest.raises(RunError, match=r"no end after 0\.2 s"):
        torchrun(2, WHEEL_ENTRY, [], timeout=0.2)
