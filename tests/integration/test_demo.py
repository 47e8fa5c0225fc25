"""``make demo`` at its fewest iterations: both trainings and the report; what they reach is never looked at here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lrmoe.report.demo import LEAST_ITERATIONS


@pytest.mark.slow
@pytest.mark.dist
def test_the_demo_trains_twice_and_writes_its_report(tmp_path: Path) -> None:
    sizes = ["--output", str(tmp_path), "--iterations", str(LEAST_ITERATIONS)]
    command = [sys.executable, "-m", "megatron_lrmoe.cli", "demo", *sizes]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    report = (tmp_path / "report.md").read_text()
    assert "retention 0.8" in report and report.strip() in run.stdout
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "metrics.csv").read_text().count("\n") > LEAST_ITERATIONS
