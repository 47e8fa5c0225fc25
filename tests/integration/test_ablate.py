"""The harness as a user runs it: killed in the middle, started again, and every cell what torchrun gives."""

import contextlib
import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_lrmoe.report.ablate_cells import Cell, grid
from megatron_lrmoe.report.ablate_code import code
from megatron_lrmoe.report.ablate_plan import read_plan
from megatron_lrmoe.report.ablate_results import Result, read
from tests.integration.launch import ROOT, WHEEL_ENTRY, kill_tree, torchrun

pytestmark = pytest.mark.slow

SMOKE = Path("configs/ablation/smoke.yaml")
LIMIT_S = 240.0


def start(output: Path, plan: Path = SMOKE) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatron_lrmoe.cli", "ablate", str(plan), "--output", str(output), "--jobs", "2"]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except BaseException:
        kill_tree(process.pid)
        raise
    return process.returncode, out, err


def kill_in_the_middle(output: Path, results: int) -> None:
    """Kill a run with SIGKILL when it has this many results, and see that its workers end as well."""
    process = start(output)
    try:
        end = time.monotonic() + LIMIT_S
        while len(list(output.glob("cells/**/*.json"))) < results:
            assert process.poll() is None and time.monotonic() < end, process.communicate()[1][-3000:]
            time.sleep(0.1)
        assert processes_in(output)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    except BaseException:
        kill_tree(process.pid)
        raise
    end = time.monotonic() + 20
    while (alive := processes_in(output)) and time.monotonic() < end:
        time.sleep(0.1)
    assert alive == []


def processes_in(folder: Path) -> list[str]:
    """Processes whose working directory this is: the workers, and what they have started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").resolve(strict=True) == folder.resolve():
                found.append(process.name)
    return found


def test_a_killed_grid_goes_on_and_a_cell_is_that_of_torchrun(tmp_path, monkeypatch):
    output = tmp_path / "smoke"
    cells = grid(read_plan(ROOT / SMOKE), code())
    kill_in_the_middle(output, 1)
    kept = {path: path.read_bytes() for path in output.rglob("*.json")}
    before = {cell.id: read(cell, output) for cell in cells}

    status, out, err = finish(start(output))
    assert status == 0, err[-3000:]
    finished = sum(
        result is not None and cell.variant != "start" for cell, result in zip(cells, before.values(), strict=True)
    )
    count = sum(cell.variant != "start" for cell in cells)
    assert 1 <= finished < count and out.startswith(f"{finished} of {count} cells are finished already\n")
    assert {path: path.read_bytes() for path in kept} == kept
    results = {cell.id: result for cell in cells if (result := read(cell, output))}
    assert len(results) == len(cells)
    check_report(output, cells, results)

    monkeypatch.chdir(output)
    cell = next(cell for cell in cells if cell.id == "warm/unbiased@0.8/s1")
    alone = torchrun(1, WHEEL_ENTRY, list(cell.flags))
    assert tuple(alone.losses) == results[cell.id].losses
    assert alone.validation_losses == [results[cell.id].validation_loss]

    status, out, _ = finish(start(output))
    assert status == 0 and out.startswith(f"{count} of {count} cells are finished already\n")


def check_report(output: Path, cells: list[Cell], results: dict[str, Result]) -> None:
    """What must hold of any finished run of the smoke plan."""
    text = (output / "report.md").read_text()
    assert f"All {sum(cell.variant != 'start' for cell in cells)} cells are finished." in text
    assert str(output) not in text and str(ROOT) not in text
    with (output / "cells.csv").open() as lines:
        rows = {row["cell"]: row for row in csv.DictReader(lines)}
    for cell in cells:
        if cell.variant == "start":
            continue
        result, stock = results[cell.id], results[f"{cell.regime}/stock/s{cell.seed}"]
        share = int(rows[cell.id]["backward_rows"]) / int(rows[cell.id]["backward_rows_stock"])
        assert share == (1 if cell.variant == "stock" else pytest.approx(cell.retention, abs=0.02))
        # Paired: the first loss is that of weights and data alone.
        assert result.losses[0] == stock.losses[0]
        assert cell.variant == "stock" or result.losses[1:] != stock.losses[1:]
    assert (output / "differences.png").read_bytes().startswith(b"\x89PNG")


def test_flags_that_megatron_refuses_are_said_before_training(tmp_path):
    text = (ROOT / SMOKE).read_text()
    variants = "variants:\n  wrong: {no-such-flag: 1}\n  worse: {selection: best}\n"
    (tmp_path / "plan.yaml").write_text(text[: text.index("variants:")] + variants)
    status, _, err = finish(start(tmp_path / "out", tmp_path / "plan.yaml"))
    assert status == 2
    assert "unrecognized arguments: --moe-lrm-no-such-flag 1" in err and "scratch/wrong@0.8" in err
    assert "argument --moe-lrm-selection: invalid choice: 'best'" in err
    assert not list((tmp_path / "out").rglob("*.json"))
