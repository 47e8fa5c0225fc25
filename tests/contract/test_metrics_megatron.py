"""Our scalars beside Megatron's own MoE metrics, on two ranks.

Module-level functions without a test's name run in the gloo workers.
"""

import inspect
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gloo import Pool
from tests.layers import parallel


def report_with_one_silent_rank(per_layer: bool) -> dict[str, Any]:
    """As on a pipeline whose second stage has no MoE layer: only rank 0 records, both report."""
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

    from megatron_lrmoe.config import LrmConfig
    from megatron_lrmoe.mcore import metrics
    from megatron_lrmoe.pairs import DrawKey
    from megatron_lrmoe.recalibration.plan import KeepPlan

    parallel(1)
    metrics.forget()
    if dist.get_rank() == 0:
        key = DrawKey(seed=0, iteration=0, microbatch=0, layer=2, data_parallel=0)
        metrics.record(KeepPlan(LrmConfig(retention=0.5), key, Fraction(3, 4), [[8, 4]], rank=0))
    stock = inspect.unwrap(MoEMetricsTracker.report)
    answers = {}
    for name, method in (("stock", stock), ("ours", metrics.reporting(stock, per_layer))):
        tracker = MoEMetricsTracker()
        tracker.record("load_balancing_loss", torch.tensor(3.0), layer_number=1, num_layers=2)
        tracker.record("z_imbalance", torch.tensor(5.0), layer_number=2, num_layers=2)
        losses: dict[str, Any] = {}
        line = method(
            tracker,
            loss_scale=0.5,
            iteration=4,
            force_initialize=True,
            track_names=["load_balancing_loss", "z_imbalance"],
            num_layers=2,
            moe_layer_freq=1,
            total_loss_dict=losses,
        )
        cleared = all(not entry.values.any() for entry in tracker.metrics.values())
        answers[name] = (line, {key: float(value) for key, value in losses.items()}, cleared)
    return answers


@pytest.mark.dist
@pytest.mark.parametrize("per_layer", [False, True])
def test_a_rank_without_moe_layers_joins_and_every_rank_knows_the_figures(gloo2: Pool, per_layer: bool) -> None:
    for answers in gloo2(report_with_one_silent_rank, per_layer):
        line, losses, cleared = answers["ours"]
        stock_line, stock_losses, stock_cleared = answers["stock"]
        assert line.removeprefix(stock_line) == (
            " moe-lrm/kept_share: 0.75 | moe-lrm/rows_kept: 9 | moe-lrm/imbalance: 1 | moe-lrm/imbalance_kept: 1 |"
        )
        assert "z_imbalance" in stock_line and "loss" not in stock_line
        assert losses == stock_losses and set(losses) == {"load_balancing_loss"}
        assert cleared and stock_cleared
