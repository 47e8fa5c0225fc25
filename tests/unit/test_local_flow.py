"""The experts' backward where the dispatcher moves every row: chosen by the owner, dense at both ends."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_lrmoe.compute.activation import Activation
from megatron_lrmoe.compute.bias import PROBE_SUMS
from megatron_lrmoe.compute.experts import ExpertWeights, expert_mlp
from megatron_lrmoe.compute.local_flow import LocalFlow
from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.pairs import DrawKey
from megatron_lrmoe.recalibration.plan import KeepPlan
from megatron_lrmoe.recalibration.quality import SELECTION_SUMS

HIDDEN, WIDTH = 8, 6
COUNTS = [5, 0, 1, 12]


def plan(retention: float = 0.5, **lrm: Any) -> KeepPlan:
    config = LrmConfig(retention=retention, **lrm)
    return KeepPlan(config, DrawKey(0, 0, 0, 1), Fraction(repr(retention)), [COUNTS], rank=0)


@dataclass(frozen=True)
class Run:
    """One forward and backward over COUNTS, and what autograd saved in between."""

    flow: LocalFlow
    dx_ND: torch.Tensor
    dalpha_N: torch.Tensor | None
    dfc1: list[torch.Tensor]
    reports: dict[str, torch.Tensor]
    saved: list[torch.Tensor]


def run(retention: float = 0.5, alpha_needs_grad: bool = True, **lrm: Any) -> Run:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    reports: dict[str, torch.Tensor] = {}
    flow = LocalFlow(plan(retention, **lrm), reports.__setitem__)
    fc1 = [torch.nn.Parameter(normal(2 * WIDTH, HIDDEN)) for _ in COUNTS]
    fc2 = [torch.nn.Parameter(normal(HIDDEN, WIDTH)) for _ in COUNTS]
    x_ND, alpha_N = normal(sum(COUNTS), HIDDEN).requires_grad_(), normal(sum(COUNTS)).requires_grad_(alpha_needs_grad)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        y_ND = expert_mlp(x_ND, alpha_N, ExpertWeights(fc1, fc2), Activation(F.silu, gated=True), flow, "loop")
    g_ND = normal(*y_ND.shape)
    before_ND = g_ND.clone()
    y_ND.backward(g_ND)
    assert torch.equal(g_ND, before_ND)
    assert x_ND.grad is not None
    return Run(flow, x_ND.grad, alpha_N.grad, [w.grad for w in fc1 if w.grad is not None], reports, saved)


@pytest.mark.parametrize("when", ["backward", "forward"])
@pytest.mark.parametrize("selection", ["unbiased", "topk"])
def test_the_quota_of_each_expert_is_kept_and_dropped_rows_get_zeros(selection: str, when: str) -> None:
    r = run(selection=selection, when=when)
    assert r.flow.kept is not None and r.flow.kept.counts_e == (2, 0, 1, 6)
    kept_N = torch.zeros(sum(COUNTS), dtype=torch.bool).index_fill_(0, r.flow.kept.rows_M, True)
    assert torch.equal(r.dx_ND.abs().sum(1) > 0, kept_N)
    assert r.dalpha_N is not None and torch.equal(r.dalpha_N != 0, kept_N)
    assert len(r.dfc1) == len(COUNTS) and not r.dfc1[1].any()


def test_chosen_in_forward_only_kept_rows_are_saved() -> None:
    early, late = (sum(x.nbytes for x in run(when=when).saved) for when in ("forward", "backward"))
    assert early * sum(COUNTS) == late * (2 + 1 + 6)


def test_weights_that_need_no_gradient_get_none() -> None:
    assert run(alpha_needs_grad=False).dalpha_N is None


def test_what_was_chosen_late_costs_what_is_reported() -> None:
    sums = dict(zip(SELECTION_SUMS, run(selection="topk").reports["selection"].tolist(), strict=True))
    assert sums["kept"] == 9 and 0 < sums["dropped"] < sums["mass"]


@pytest.mark.parametrize("when", ["backward", "forward"])
def test_a_probe_keeps_every_row_and_is_reported(when: str) -> None:
    r = run(probe_interval=1, when=when)
    assert r.flow.kept is not None and r.flow.kept.counts_e == tuple(COUNTS)
    sums = dict(zip(PROBE_SUMS, r.reports["probe"].tolist(), strict=True))
    assert 0 < sums["dropped"] < sums["mass"] and sums["bias"] > 0


@pytest.mark.parametrize("lrm", [{"scope": "source"}, {"router_grad": "baseline"}], ids=str)
def test_what_needs_a_pairs_source_is_refused(lrm: dict[str, Any]) -> None:
    ((name, value),) = lrm.items()
    with pytest.raises(ValueError, match=f"{name}: found '{value}', allowed is"):
        LocalFlow(plan(**lrm))
