"""Kept share, kept rows, load imbalance and rows over a limit, on Megatron's MoE console line, TensorBoard and W&B."""

import inspect
from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from megatron_lrmoe.recalibration.plan import KeepPlan

PREFIX = "moe-lrm/"

_COLUMNS = 7
_CALLS, _ROWS, _KEPT, _PEAK_ROWS, _PEAK_KEPT, _LIMITED, _OVER = range(_COLUMNS)
_sums: dict[int, list[float]] = {}


def record(plan: KeepPlan) -> None:
    """Add one layer call. Every number is a host integer already, so this costs no synchronisation.

    Rows are per rank of the expert-parallel group: the mean over its ranks, the busiest rank's, and with a limit on
    kept rows what the rank furthest above its own keeps too many.
    """
    rows_R, kept_R, limit_R = plan.rows_R, plan.kept_R, plan.limit_R
    over = 0 if limit_R is None else max(0, (kept_R - limit_R).max())
    new = [1, rows_R.mean(), kept_R.mean(), rows_R.max(), kept_R.max(), limit_R is not None, over]
    old = _sums.setdefault(plan.key.layer, [0.0] * _COLUMNS)
    _sums[plan.key.layer] = [a + b for a, b in zip(old, new, strict=True)]


def collect(num_layers: int, device: torch.device | str | int, per_layer: bool) -> dict[str, float]:
    """Sum what all ranks recorded since the last call, and forget it.

    Shares are quotients of sums, never means of quotients, so ranks without rows cannot make them undefined;
    where nothing was routed nothing is reported.

    Args:
        num_layers: layers of the whole model, so that every pipeline stage brings a tensor of one size.
        device: that the process group communicates on.
        per_layer: also give each layer's own figures.

    Returns:
        Scalars by name.

    Raises:
        RuntimeError: a layer recorded under a number above ``num_layers``.
    """
    if beyond := [layer for layer in _sums if layer > num_layers]:
        raise RuntimeError(f"found MoE layers {beyond}, allowed are numbers up to {num_layers}")
    sums = torch.zeros(num_layers + 1, _COLUMNS, dtype=torch.float64)
    for layer, values in _sums.items():
        sums[layer] += torch.tensor(values, dtype=torch.float64)
    _sums.clear()
    sums = sums.to(device)
    dist.all_reduce(sums)
    table: list[list[float]] = sums.tolist()
    scalars = _figures([sum(column) for column in zip(*table, strict=True)], "")
    for layer, values in enumerate(table if per_layer else []):
        scalars |= _figures(values, f"_layer_{layer}")
    return scalars


def _figures(sums: Sequence[float], suffix: str) -> dict[str, float]:
    if not sums[_ROWS]:
        return {}
    figures = {
        f"{PREFIX}kept_share{suffix}": sums[_KEPT] / sums[_ROWS],
        f"{PREFIX}rows_kept{suffix}": sums[_KEPT] / sums[_CALLS],
        f"{PREFIX}imbalance{suffix}": sums[_PEAK_ROWS] / sums[_ROWS],
        f"{PREFIX}imbalance_kept{suffix}": sums[_PEAK_KEPT] / sums[_KEPT],
    }
    if sums[_LIMITED]:
        figures[f"{PREFIX}rows_over_limit{suffix}"] = sums[_OVER] / sums[_LIMITED]
    return figures


def reporting(stock_report: Any, per_layer: bool) -> Any:
    """Wrap ``MoEMetricsTracker.report``: ours are written with the same writers, at the same iteration.

    Every rank must call the wrapped method, as Megatron's training loop does: ours is one more collective.

    Args:
        stock_report: the method to wrap.
        per_layer: also write each layer's own figures (not on the console).
    """
    signature = inspect.signature(stock_report)

    @wraps(stock_report)
    def report(self: Any, *args: Any, **kwargs: Any) -> str:
        line = stock_report(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        layers = (given.get("num_layers") or 0) + (given.get("mtp_num_layers") or 0)
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        scalars = collect(layers, device, per_layer)
        writer, wandb_writer = given.get("writer"), given.get("wandb_writer")
        if writer is not None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, given["iteration"])
        if wandb_writer is not None and scalars:
            wandb_writer.log(scalars, given["iteration"])
        return line + "".join(f" {k}: {v:.4g} |" for k, v in scalars.items() if "_layer_" not in k)

    return report
