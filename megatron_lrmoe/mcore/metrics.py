"""What is kept and what dropping costs, on Megatron's MoE console line, TensorBoard and W&B.

Known in forward, from host integers: kept share, kept rows, load imbalance, rows over a limit. Summed up in backward,
on the device, with R a pair's squared fc2 gradient norm (not with the score grad-abs, whose g norms are not known):

- dropped_mass: sum of R over dropped pairs / sum of R over all.
- variance_ratio: variance that the draw adds to the fc2 gradients (``recalibration/quality.py``) / sum of R. The
  denominator estimates the noise that a gradient has anyway: it is what the gradient's squared norm would be if its
  pairs had nothing in common.
- cap_hits: share of kept pairs whose 1/probability is at ``--moe-lrm-max-weight`` or above.

With ``--moe-lrm-when forward`` only kept pairs' g is known. So with unbiased the sums of R are estimated from kept
pairs, each standing for 1/probability pairs; with topk dropped_mass and variance_ratio are not reported.

With ``--moe-lrm-adaptive``, retention: what the layers' retention was, their mean over layers and iterations.

From calls that probe (``--moe-lrm-probe-interval``), whatever the selection of the run:

- kappa: squared norm of the sum of those gradients that topk drops / the sum of their squared norms; 1 if they had
  nothing in common, more if they point the same way.
- topk_dropped_mass, unbiased_variance: what the first two would be with topk and with unbiased.

With ``--moe-lrm-replica-policy``: imbalance is that of the routed rows at their masters, imbalance_placed what is left
of it with replicas, imbalance_kept that of the kept rows where they are computed. replicas and forward_only of a layer
call; pushed_mib and returned_mib, weights sent to replicas (in forward and again in backward) and gradients sent home
by a rank in a call, on average; exposed_wait_ms and plan_ms of a rank in a call, on the host. From calls that are
planned without dropping too (``replication.SAMPLED``), replicas_spared: how many fewer replicas there are than then.

With ``--log-throughput``, flops_share (``mcore/throughput.py``).
"""

import inspect
import logging
from collections.abc import Sequence
from fractions import Fraction
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_lrmoe.compute.bias import PROBE_SUMS
from megatron_lrmoe.compute.replicas import Moved
from megatron_lrmoe.config import flag_of
from megatron_lrmoe.mcore import throughput
from megatron_lrmoe.recalibration.plan import KeepPlan
from megatron_lrmoe.recalibration.quality import SELECTION_SUMS

logger = logging.getLogger(__name__)

PREFIX = "moe-lrm/"

MOMENTUM_STEPS = 19
"""Steps that Adam's running mean of gradients averages: (1 + b) / (1 - b) with its usual b = 0.9."""

_HOST = ("calls", "rows", "kept", "peak_rows", "peak_kept", "limited", "over")
_DEVICE = {"selection": SELECTION_SUMS, "probe": PROBE_SUMS}
_LAST = ("retention", "asked", "topk_probes")
_PLANNED = ("replica_calls", "placed", "replicas", "forward_only", "plan_seconds", "compared", "spared")
_MOVED = ("pushed", "returned", "waited")
_NAMES = (*_HOST, *_PLANNED, *_MOVED, *(f"{kind}_{name}" for kind, names in _DEVICE.items() for name in names), *_LAST)
_sums: dict[int, list[float]] = {}
_costs: dict[tuple[int, str], torch.Tensor] = {}
_retentions: dict[int, list[float]] = {}
_topk_probes: dict[int, int] = {}
_planned: dict[int, list[float]] = {}
_moved: dict[int, list[Moved]] = {}
_has_advised = False


class Planned(NamedTuple):
    """Figures of one call's plan; rows are those of the busiest rank."""

    placed: int
    replicas: int
    forward_only: int
    plan_seconds: float
    compared: bool
    spared: int


def record(plan: KeepPlan, placed: KeepPlan | None = None) -> None:
    """Add one layer call. Every number is a host integer already, so this costs no synchronisation.

    Rows are per rank of the expert-parallel group: the mean over its ranks, the busiest rank's, and with a limit on
    kept rows what the rank furthest above its own keeps too many.

    Args:
        plan: loads by expert, at their owners.
        placed: with replicas, the call's rows and quotas where they are computed.
    """
    rows_R, limit_R = plan.rows_R, plan.limit_R
    kept_R = (placed or plan).kept_R
    over = 0 if limit_R is None else max(0, (kept_R - limit_R).max())
    new = [1, rows_R.mean(), kept_R.mean(), rows_R.max(), kept_R.max(), limit_R is not None, over]
    old = _sums.setdefault(plan.key.layer, [0.0] * len(_HOST))
    _sums[plan.key.layer] = [a + b for a, b in zip(old, new, strict=True)]


def record_moved(layer: int, moved: Moved) -> None:
    """Add what is moved for the replicas of one layer call, which counts on until the figures are collected."""
    _moved.setdefault(layer, []).append(moved)


def record_replicas(layer: int, planned: Planned) -> None:
    """Add the plan of one layer call."""
    new = [1.0, *(float(value) for value in planned)]
    old = _planned.setdefault(layer, [0.0] * len(_PLANNED))
    _planned[layer] = [a + b for a, b in zip(old, new, strict=True)]


def record_retention(layer: int, retention: Fraction) -> None:
    """Add the retention that one forward call of a layer was given."""
    total, asked = _retentions.get(layer, [0.0, 0])
    _retentions[layer] = [total + float(retention), asked + 1]


def record_cost(layer: int, topk: bool, kind: str, sums: torch.Tensor) -> None:
    """Add what the backward of one layer call cost. The numbers stay on the device until they are collected.

    Args:
        layer: number from 1.
        topk: whether the run selects by top-k.
        kind: 'selection' or 'probe'.
        sums: in the order of ``SELECTION_SUMS`` or ``PROBE_SUMS``.
    """
    old = _costs.get((layer, kind))
    _costs[layer, kind] = sums if old is None else old + sums
    if kind == "probe" and topk:
        _topk_probes[layer] = _topk_probes.get(layer, 0) + 1


def forget() -> None:
    """Drop everything recorded since the last ``collect``."""
    for recorded in (_sums, _costs, _retentions, _topk_probes, _planned, _moved):
        recorded.clear()


def collect(num_layers: int, device: torch.device | str | int, per_layer: bool) -> dict[str, float]:
    """Figures of what all ranks recorded since the last call, which is then forgotten; see ``reduced``.

    Args:
        num_layers: layers of the whole model, so that every pipeline stage brings a tensor of one size.
        device: that the process group communicates on.
        per_layer: also give each layer's own figures.

    Returns:
        Scalars by name.
    """
    return scalars_of(reduced(num_layers, device), per_layer)


def reduced(num_layers: int, device: torch.device | str | int) -> list[dict[str, float]]:
    """Sum what all ranks recorded since the last call, and forget it: one dict of sums for each layer number from 0.

    Raises:
        RuntimeError: a layer recorded under a number above ``num_layers``.
    """
    layers = {*_sums, *_retentions, *(layer for layer, _ in _costs)}
    if beyond := sorted(layer for layer in layers if layer > num_layers):
        raise RuntimeError(f"found MoE layers {beyond}, allowed are numbers up to {num_layers}")
    sums = torch.zeros(num_layers + 1, len(_NAMES), dtype=torch.float64)
    for layer, values in _sums.items():
        sums[layer, : len(_HOST)] = torch.tensor(values, dtype=torch.float64)
    first = len(_HOST)
    for layer, values in _planned.items():
        sums[layer, first : first + len(values)] = torch.tensor(values, dtype=torch.float64)
    first += len(_PLANNED)
    for layer, calls in _moved.items():
        for place, name in enumerate(_MOVED, first):
            sums[layer, place] = sum(getattr(moved, name) for moved in calls)
    for layer, values in _retentions.items():
        sums[layer, -3:-1] = torch.tensor(values, dtype=torch.float64)
    for layer, times in _topk_probes.items():
        sums[layer, -1] = times
    sums = sums.to(device)
    for (layer, kind), values in _costs.items():
        first = _NAMES.index(f"{kind}_{_DEVICE[kind][0]}")
        sums[layer, first : first + len(values)] = values.to(sums)
    forget()
    dist.all_reduce(sums)
    return [dict(zip(_NAMES, values, strict=True)) for values in sums.tolist()]


def scalars_of(table: Sequence[dict[str, float]], per_layer: bool) -> dict[str, float]:
    """Scalars by name, of all layers together and, if ``per_layer``, of each.

    Shares are quotients of sums, never means of quotients, so ranks without rows cannot make them undefined;
    where nothing was routed nothing is reported.
    """
    scalars = _figures({name: sum(sums[name] for sums in table) for name in _NAMES}, "")
    for layer, sums in enumerate(table if per_layer else []):
        scalars |= _figures(sums, f"_layer_{layer}")
    return scalars


def _figures(s: dict[str, float], suffix: str) -> dict[str, float]:
    figures: dict[str, float] = {}

    def quotient(name: str, part: float, whole: float) -> None:
        if whole:
            figures[f"{PREFIX}{name}{suffix}"] = part / whole

    if s["rows"]:
        quotient("kept_share", s["kept"], s["rows"])
        quotient("rows_kept", s["kept"], s["calls"])
        quotient("imbalance", s["peak_rows"], s["rows"])
        quotient("imbalance_kept", s["peak_kept"], s["kept"])
        quotient("rows_over_limit", s["over"], s["limited"])
    if s["replica_calls"]:
        quotient("imbalance_placed", s["placed"], s["rows"])
        quotient("replicas", s["replicas"], s["replica_calls"])
        quotient("forward_only", s["forward_only"], s["replica_calls"])
        quotient("plan_ms", 1e3 * s["plan_seconds"], s["replica_calls"])
        quotient("exposed_wait_ms", 1e3 * s["waited"], s["replica_calls"])
        quotient("replicas_spared", s["spared"], s["compared"])
        # Of a rank on average; a call's ranks together have moved as many times that as there are.
        quotient("pushed_mib", s["pushed"] / 2**20, s["replica_calls"])
        quotient("returned_mib", s["returned"] / 2**20, s["replica_calls"])
    quotient("retention", s["retention"], s["asked"])
    quotient("dropped_mass", s["selection_dropped"], s["selection_mass"])
    quotient("variance_ratio", s["selection_variance"], s["selection_mass"])
    if s["selection_capped"]:
        quotient("cap_hits", s["selection_capped"], s["selection_kept"])
    quotient("kappa", s["probe_bias"], s["probe_dropped"])
    quotient("topk_dropped_mass", s["probe_dropped"], s["probe_mass"])
    quotient("unbiased_variance", s["probe_variance"], s["probe_mass"])
    return figures


def topk_advice(table: Sequence[dict[str, float]], draws: int) -> str | None:
    """What to say to a run that selects by top-k although a draw would cost it less; None if nothing.

    Of the dropped pairs' gradients, sum to the squared norm B, R of them to D: were they independent of each other, B
    would be D. So D is noise that averages out over h gradients, and B - D is bias, which does not. A draw's variance
    V averages out. Top-k costs more where (B - D) + D / h > V / h, that is kappa > 1 + (V / D - 1) / h.

    Args:
        table: from ``reduced``.
        draws: gradients averaged in one iteration, microbatches times data-parallel groups; h is ``MOMENTUM_STEPS``
            times as many.
    """
    worst = None
    for layer, s in enumerate(table):
        if not s["topk_probes"] or not s["probe_dropped"]:
            continue
        horizon = MOMENTUM_STEPS * draws
        kappa, rest = s["probe_bias"] / s["probe_dropped"], s["probe_variance"] / s["probe_dropped"]
        bound = 1 + (rest - 1) / horizon
        if kappa > bound and (worst is None or kappa - bound > worst[1] - worst[2]):
            worst = layer, kappa, bound
    if worst is None:
        return None
    layer, kappa, bound = worst
    return (
        f"{flag_of('selection')} topk: in layer {layer} the gradients that it drops point the same way, kappa "
        f"{kappa:.2f}, and above {bound:.2f} that bias costs more than the noise of a draw; advised is "
        f"{flag_of('selection')} unbiased, or a later {flag_of('start_iter')}, or a higher {flag_of('retention')}"
    )


def _advise(table: Sequence[dict[str, float]]) -> None:
    """Give ``topk_advice`` once, on the first rank."""
    global _has_advised
    if _has_advised or not any(s["topk_probes"] for s in table) or dist.get_rank():
        return
    advice = topk_advice(table, _draws_per_iteration())
    if advice is not None:
        _has_advised = True
        logger.warning(advice)


def _draws_per_iteration() -> int:
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    return get_num_microbatches() * parallel_state.get_expert_data_parallel_world_size()


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
        table = reduced(layers, device)
        _advise(table)
        scalars = scalars_of(table, per_layer) | throughput.figures(table)
        writer, wandb_writer = given.get("writer"), given.get("wandb_writer")
        if writer is not None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, given["iteration"])
        if wandb_writer is not None and scalars:
            wandb_writer.log(scalars, given["iteration"])
        return line + "".join(f" {k}: {v:.4g} |" for k, v in scalars.items() if "_layer_" not in k)

    return report
