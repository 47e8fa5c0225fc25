"""``make demo`` in a few iterations: both trainings and the report; losses and times are never looked at here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plans import IN_CI

ITERATIONS = 18  # the table has medians, and dropping begins when the learning rate has warmed up, at the 10th


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.skipif(not IN_CI, reason="the demo runs where CI=true")
def test_the_demo_trains_twice_and_writes_its_report(tmp_path: Path) -> None:
    sizes = ["--output", str(tmp_path), "--iterations", str(ITERATIONS)]
    command = [sys.executable, "-m", "megatron_lrmoe.cli", "demo", *sizes]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    report = (tmp_path / "report.md").read_text()
    rows = [line for line in report.splitlines() if line.startswith("|")]
    assert "retention 0.8" in rows[0] and "\n".join(rows) in run.stdout
    (kept,) = (row for row in rows if "pairs kept" in row)
    assert float(kept.split("|")[2]) == 1 > float(kept.split("|")[3])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "metrics.csv").read_text().count("\n") > ITERATIONS
