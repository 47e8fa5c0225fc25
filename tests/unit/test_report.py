"""From the log of a training run to the table, the plot and the files of the demo."""

import csv
import json
from pathlib import Path

import pytest

from megatron_lrmoe.report import demo, training
from megatron_lrmoe.report.comparison import WARM_UP, Run, table, write_csv, write_plot
from megatron_lrmoe.report.training_log import (
    Iteration,
    add_probe,
    failure_tail,
    parse_iteration,
    parse_log,
)

LINE = (
    " [2026-01-02 03:04:05.678901] iteration        2/      12 | consumed samples:           16 | "
    "elapsed time per iteration (ms): 824.2 | learning rate: 2.000000E-04 | global batch size:     8 | "
    "lm loss: 5.767766E+00 | load_balancing_loss: 1.117590E+00 |{more} loss scale: 1.0 | grad norm: 8.801 | "
)
VALIDATION = " validation loss at iteration {at} | lm loss value: {loss:E} | lm loss PPL: 8.8E+01 | "


def rows(count: int, **values) -> tuple[Iteration, ...]:
    return tuple(Iteration(i, train_loss=5 - 0.1 * i, wall_ms=10.0 * i, **values) for i in range(1, count + 1))


def two_runs() -> list[Run]:
    measured = {"moe_forward_cpu_ms": 50.0, "moe_backward_cpu_ms": 200.0, "moe_backward_bytes": 2_000_000}
    fewer = {**measured, "moe_backward_cpu_ms": 160.0, "moe_backward_bytes": 1_500_000, "kept_share": 0.79}
    runs = [
        Run("stock", ("torchrun", "--a", "1"), rows(12, **measured)),
        Run("lrm", ("torchrun",), rows(12, **fewer)),
    ]
    runs[0].rows[-1].validation_loss, runs[1].rows[-1].validation_loss = 2.5, 2.6
    return runs


def test_an_iteration_line_glued_to_another_ranks_output():
    row = parse_iteration("Number of parameters: 0.01" + LINE.format(more="") + "Number of parameters: 0.01\n")
    assert row == Iteration(2, train_loss=5.767766, wall_ms=824.2, kept_share=1.0)


def test_the_kept_share_is_read_where_the_plugin_logs_it():
    row = parse_iteration(LINE.format(more=" moe-lrm/kept_share: 0.7931 | moe-lrm/rows_kept: 812.5 |"))
    assert row and row.kept_share == 0.7931


def test_other_lines_are_no_iterations():
    assert parse_iteration("  ckpt_step ... None\n") is None
    assert parse_iteration("[Rank 0] (after 2 iterations) memory (MB) | allocated: 0.00") is None


def test_a_changed_log_format_is_an_error():
    with pytest.raises(ValueError, match="lm loss"):
        parse_iteration(LINE.format(more="").replace("lm loss", "loss"))


def test_validation_losses_join_their_iteration_and_the_last_counts():
    log = [
        VALIDATION.format(at=2, loss=9.0),
        LINE.format(more=""),
        VALIDATION.format(at=2, loss=4.5),
        VALIDATION.format(at="2 on validation set", loss=4.25),
        VALIDATION.format(at="2 on test set", loss=1.0),
    ]
    assert [row.validation_loss for row in parse_log(log)] == [4.25]


def test_the_probe_of_every_rank_is_summed(tmp_path):
    for rank, scale in enumerate((1, 10)):
        lines = [
            {
                "iteration": i,
                "forward_cpu_ms": i * scale,
                "backward_cpu_ms": 2.0 * scale,
                "backward_bytes": 3 * scale,
            }
            for i in (1, 2, 99)
        ]
        (tmp_path / f"p{rank}").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = rows(3)
    add_probe(found, [tmp_path / "p0", tmp_path / "p1"])
    assert [r.moe_forward_cpu_ms for r in found] == [11, 22, None]
    assert (found[1].moe_backward_cpu_ms, found[1].moe_backward_bytes) == (22.0, 33)


def test_medians_leave_out_the_warm_up():
    run = two_runs()[0]
    assert run.median("wall_ms") == 10.0 * (WARM_UP + 1 + 12) / 2


def test_the_table_shows_both_runs_and_their_ratio():
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in table(two_runs()).splitlines()]
    by_label = {label: values for label, *values in cells}
    assert cells[0] == ["", "stock", "lrm", "ratio"]
    assert by_label["validation loss, nats per byte"] == ["2.5000", "2.6000", "1.040"]
    assert by_label["MoE backward, CPU ms"] == ["200.0", "160.0", "0.800"]
    assert by_label["MoE backward, MB sent"] == ["2.000", "1.500", "0.750"]
    assert by_label["pairs kept in backward, share"] == ["1.000", "0.790", "0.790"]
    assert len({len(line) for line in table(two_runs()).splitlines()}) == 1


def test_csv_has_a_row_per_run_and_iteration(tmp_path):
    write_csv(tmp_path / "m.csv", two_runs())
    with (tmp_path / "m.csv").open() as lines:
        table_rows = list(csv.DictReader(lines))
    assert [(r["run"], r["iteration"]) for r in table_rows[11:13]] == [("stock", "12"), ("lrm", "1")]
    assert (table_rows[11]["validation_loss"], table_rows[12]["validation_loss"]) == ("2.5", "")
    assert table_rows[12]["moe_backward_bytes"] == "1500000"


def test_the_plot_is_a_png(tmp_path):
    write_plot(tmp_path / "loss.png", two_runs())
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_is_whole_and_says_what_it_does_not_show(tmp_path):
    demo.write_report(tmp_path, two_runs())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "metrics.csv", "report.md"]
    text = (tmp_path / "report.md").read_text()
    for part in (
        table(two_runs()),
        "One seed (1234)",
        "CPU device",
        "torch 2.",
        "torchrun \\\n  --a 1",
        " cores",
    ):
        assert part in text


def test_a_crash_in_the_report_leaves_the_old_one(tmp_path, monkeypatch):
    (tmp_path / "loss.png").write_bytes(b"old")

    def stops_halfway(path: Path, runs: object) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(demo, "write_plot", stops_halfway)
    with pytest.raises(OSError, match="disk full"):
        demo.write_report(tmp_path, two_runs())
    assert (tmp_path / "loss.png").read_bytes() == b"old"
    assert not (tmp_path / "report.md").exists()


def test_the_end_of_a_failed_log_is_the_cause_and_not_torchruns_account():
    log = "\n".join([*map(str, range(100)), "[rank0]: ValueError: the cause"])
    account = "\nW1 api.py:1012] Sending process 7 closing signal SIGTERM\nRoot Cause: no idea\n" * 30
    tail = failure_tail(log + account).splitlines()
    assert tail[:2] == ["61", "62"] and "[rank0]: ValueError: the cause" in tail and "no idea" not in "".join(tail)


def test_a_failed_run_ends_the_demo_with_its_log(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "prepare_corpus", lambda prefix: None)
    monkeypatch.setattr(training.sys, "executable", _executable(tmp_path, "echo the cause; exit 3"))
    assert demo.run(tmp_path / "out") == 1
    err = capsys.readouterr().err
    assert "megatron-lrmoe: error: the run 'stock' failed" in err and "the cause" in err
    assert not (tmp_path / "out" / "report.md").exists()


def test_a_run_that_says_too_little_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(training.sys, "executable", _executable(tmp_path, f"echo '{LINE.format(more='')}'"))
    with pytest.raises(training.RunFailedError, match="do not hold all 12 iterations"):
        training.train("stock", [], tmp_path / "run", ranks=2, iterations=12)


def test_a_good_run_is_read_back(tmp_path, monkeypatch):
    probe = '{"iteration": 2, "forward_cpu_ms": 1.0, "backward_cpu_ms": 2.0, "backward_bytes": 3}'
    script = f"echo '{LINE.format(more='')}'; echo '{probe}' > $LRMOE_PROBE.rank0; echo \"$@\""
    monkeypatch.setattr(training.sys, "executable", _executable(tmp_path, script))
    run = training.train("stock", ["--seed", "7"], tmp_path / "run", ranks=2, iterations=1)
    assert run.rows[0].moe_backward_cpu_ms == 2.0
    assert run.command == (
        "torchrun",
        *("--standalone", "--nproc-per-node", "2", "-m", "megatron_lrmoe.pretrain_gpt", "--seed", "7"),
    )
    assert " ".join(run.command[1:]) in (tmp_path / "run" / "train.log").read_text()


def _executable(directory: Path, script: str) -> str:
    path = directory / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)
