"""Our scalars on Megatron's MoE metrics report, on one process."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.mcore import metrics
from megatron_lrmoe.pairs import DrawKey
from megatron_lrmoe.recalibration.plan import KeepPlan


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Size]]:
    """No other ranks and nothing recorded; gives the shapes that were reduced."""
    shapes: list[torch.Size] = []
    monkeypatch.setattr(metrics.dist, "all_reduce", lambda tensor: shapes.append(tensor.shape))
    metrics.forget()
    yield shapes
    metrics.forget()


def plan(layer: int, loads_SE: list[list[int]], retention: str = "1/2", **lrm: Any) -> KeepPlan:
    key = DrawKey(seed=0, iteration=0, microbatch=0, layer=layer, data_parallel=0)
    return KeepPlan(LrmConfig(retention=0.5, **lrm), key, Fraction(retention), loads_SE, rank=0)


def stock_report(
    self: Any,
    loss_scale: float,
    iteration: int,
    writer: Any = None,
    wandb_writer: Any = None,
    per_layer_logging: bool = False,
    force_initialize: bool = False,
    track_names: Any = None,
    num_layers: int | None = None,
    moe_layer_freq: Any = None,
    mtp_num_layers: int | None = None,
) -> str:
    """Megatron's signature, as far as our wrapper looks at it."""
    return f" stock: {loss_scale} |"


class FakeWriter:
    """Stands for TensorBoard's SummaryWriter and for a W&B run."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.scalars += [(name, value, step) for name, value in scalars.items()]


def test_shares_are_quotients_of_sums_not_means_of_quotients() -> None:
    metrics.record(plan(1, [[10, 0], [10, 0]]))  # 20 rows for expert 0 of rank 0, 10 kept
    metrics.record(plan(1, [[0, 1], [0, 1]]))  # 2 rows for expert 1 of rank 1, 1 kept
    metrics.record(plan(2, [[60, 40], [0, 0]], "1"))
    figures = metrics.collect(2, "cpu", per_layer=False)
    assert figures == {
        "moe-lrm/kept_share": pytest.approx(111 / 122),
        "moe-lrm/rows_kept": pytest.approx(111 / 2 / 3),  # mean over 2 ranks and 3 calls
        "moe-lrm/imbalance": pytest.approx((20 + 2 + 60) / (10 + 1 + 50)),
        "moe-lrm/imbalance_kept": pytest.approx((10 + 1 + 60) / (5 + 0.5 + 50)),
    }


def test_rows_over_a_limit_are_those_of_the_rank_furthest_above_it_averaged_over_calls() -> None:
    limit = {"rank_rows": 8, "min_retention": 0.25}
    metrics.record(plan(1, [[40, 8], [20, 8]], **limit))  # 60 rows on rank 0, floor 15; 8 of 16 on rank 1
    metrics.record(plan(1, [[10, 8], [10, 8]], **limit))  # 8 and 8 rows
    metrics.record(plan(2, [[0, 0], [0, 0]], **limit))
    figures = metrics.collect(2, "cpu", per_layer=True)
    assert figures["moe-lrm/rows_over_limit"] == pytest.approx((15 - 8) / 3)
    assert figures["moe-lrm/rows_over_limit_layer_1"] == (15 - 8) / 2
    assert figures["moe-lrm/rows_kept"] == pytest.approx((15 + 8 + 8 + 8) / 2 / 3)


def test_rows_over_a_limit_are_reported_with_a_limit_or_the_joint_policys_aim_only() -> None:
    loads = [[40, 2], [40, 2]]
    for lrm, reported in (
        ({}, False),
        ({"quota": "balanced"}, False),
        ({"quota": "joint"}, True),
        ({"rank_rows": 50}, True),
    ):
        metrics.record(plan(1, loads, **lrm))
        figures = metrics.collect(1, "cpu", per_layer=False)
        assert ("moe-lrm/rows_over_limit" in figures) is reported
        assert figures.get("moe-lrm/rows_over_limit", 0) == 0


def test_what_was_collected_is_forgotten() -> None:
    metrics.record(plan(1, [[4, 4]]))
    assert metrics.collect(1, "cpu", per_layer=False)
    assert metrics.collect(1, "cpu", per_layer=False) == {}


def test_nothing_recorded_or_nothing_routed_reports_nothing_but_joins_the_collective(
    alone: list[torch.Size],
) -> None:
    assert metrics.collect(3, "cpu", per_layer=True) == {}
    metrics.record(plan(2, [[0, 0], [0, 0]]))
    assert metrics.collect(3, "cpu", per_layer=True) == {}
    assert alone == [torch.Size([4, len(metrics._NAMES)])] * 2


def test_an_empty_layer_does_not_spoil_the_others() -> None:
    metrics.record(plan(1, [[0, 0]]))
    metrics.record(plan(3, [[4, 4]]))
    figures = metrics.collect(3, "cpu", per_layer=True)
    assert figures["moe-lrm/kept_share"] == 0.5
    layers = {name.rpartition("_layer_")[2] for name in figures if "_layer_" in name}
    assert layers == {"3"} and figures["moe-lrm/kept_share_layer_3"] == 0.5


def test_a_layer_beyond_the_model_is_an_error_that_names_it() -> None:
    metrics.record(plan(5, [[4, 4]]))
    with pytest.raises(RuntimeError, match=r"found MoE layers \[5\], allowed are numbers up to 4"):
        metrics.collect(4, "cpu", per_layer=False)


@pytest.mark.parametrize("positional", [False, True])
def test_report_writes_ours_at_the_iteration_of_megatrons(positional: bool) -> None:
    metrics.record(plan(3, [[6, 2], [0, 8]]))
    report = metrics.reporting(stock_report, per_layer=False)
    assert report.__wrapped__ is stock_report
    writer, run = FakeWriter(), FakeWriter()
    if positional:
        line = report(None, 0.25, 17, writer, run, False, True, [], 2, [1, 1], 1)
    else:
        line = report(
            None, loss_scale=0.25, iteration=17, writer=writer, wandb_writer=run, num_layers=2, mtp_num_layers=1
        )
    assert line.startswith(" stock: 0.25 | moe-lrm/kept_share: 0.5 | moe-lrm/rows_kept: 4 |")
    assert line.endswith(" |") and line.count("|") == 5
    assert writer.scalars == run.scalars
    assert len(writer.scalars) <= 8
    assert {step for _, _, step in writer.scalars} == {17}
    assert ("moe-lrm/kept_share", 0.5, 17) in writer.scalars


def test_each_layer_is_written_only_with_detail_and_never_on_the_console() -> None:
    lines, names = [], []
    for detail in (False, True):
        for layer in (1, 2):
            metrics.record(plan(layer, [[4, 4]]))
        writer = FakeWriter()
        report = metrics.reporting(stock_report, per_layer=detail)
        lines.append(report(None, 1.0, iteration=1, writer=writer, num_layers=2))
        names.append([name for name, _, _ in writer.scalars])
    assert lines[0] == lines[1] and "_layer_" not in lines[1]
    assert len(names[0]) == 4 and len(names[1]) == 12
    assert names[1][:4] == names[0]
    assert "moe-lrm/imbalance_kept_layer_2" in names[1]


def test_without_anything_of_ours_the_line_and_the_writers_are_megatrons() -> None:
    writer, run = FakeWriter(), FakeWriter()
    report = metrics.reporting(stock_report, per_layer=True)
    line = report(None, 0.5, iteration=3, writer=writer, wandb_writer=run, num_layers=2)
    assert line == " stock: 0.5 |"
    assert writer.scalars == run.scalars == []


def test_tensorboard_finds_the_scalars_at_their_iteration(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    report = metrics.reporting(stock_report, per_layer=False)
    with SummaryWriter(str(tmp_path)) as writer:
        for iteration in (5, 6):
            metrics.record(plan(1, [[8, 8]]))
            report(None, 1.0, iteration, writer, num_layers=1)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("moe-lrm/kept_share")] == [(5, 0.5), (6, 0.5)]
