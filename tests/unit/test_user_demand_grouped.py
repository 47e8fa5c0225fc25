"""What users of grouped GEMMs have run into, as in tests/dist/test_user_demand.py: groups that dropping has emptied."""

import threading
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_lrmoe.compute.activation import Activation
from megatron_lrmoe.compute.compaction import pack_rows
from megatron_lrmoe.compute.experts import ExpertWeights, expert_mlp
from megatron_lrmoe.compute.grouped import Backend, rows_times_weights, weight_grads
from megatron_lrmoe.compute.local_flow import LocalFlow
from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.pairs import DrawKey, KeptRows
from megatron_lrmoe.recalibration.plan import KeepPlan

pytestmark = pytest.mark.usefixtures("on_device")
INNER, OUTER = 16, 24
BACKENDS: list[Backend] = ["loop", "grouped"]
HANG_S = 60.0


class GivenRows(LocalFlow):
    """A flow whose kept rows are the test's: quotas leave an expert that has rows at least one."""

    def __init__(self, counts_e: list[int], kept_e: list[int]) -> None:
        config, key = LrmConfig(retention=0.5), DrawKey(seed=0, iteration=0, microbatch=0, layer=1)
        super().__init__(KeepPlan(config, key, Fraction(1, 2), [counts_e], 0))
        starts = [sum(counts_e[:e]) for e in range(len(counts_e))]
        rows_M = torch.tensor([start + i for start, kept in zip(starts, kept_e, strict=True) for i in range(kept)])
        self.given = KeptRows(rows_M, torch.ones(len(rows_M)), tuple(kept_e))

    def take_kept_gradient(self, g_ND: torch.Tensor) -> tuple[KeptRows, torch.Tensor]:
        self.kept = self.given
        return self.kept, pack_rows(g_ND, self.kept.rows_M, None)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def parameters(experts: int) -> tuple[list[Any], list[Any]]:
    fc1, fc2 = drawn(experts, OUTER, INNER) / 4, drawn(experts, INNER, OUTER) / 4
    return [torch.nn.Parameter(w.clone()) for w in fc1], [torch.nn.Parameter(w.clone()) for w in fc2]


def gradients(
    counts_e: list[int], kept_e: list[int], backend: Backend, main_grad: float | None = None
) -> tuple[list[Any], list[Any], torch.Tensor | None]:
    """Weights after a backward over the kept rows, with fused accumulation where ``main_grad`` is given; and dX."""
    fc1, fc2 = parameters(len(counts_e))
    if main_grad is not None:
        for weight in fc1 + fc2:
            weight.main_grad = torch.full_like(weight, main_grad)
    rows = sum(counts_e)
    x_ND, alpha_N = drawn(rows, INNER).requires_grad_(), torch.full((rows,), 0.5)
    weights = ExpertWeights(fc1, fc2, fuse_into_main_grad=main_grad is not None)
    flow, relu = GivenRows(counts_e, kept_e), Activation(F.relu, gated=False)
    expert_mlp(x_ND, alpha_N, weights, relu, flow, backend).backward(drawn(rows, INNER + 1)[:, :INNER].contiguous())
    return fc1, fc2, x_ND.grad


def expected(counts_e: list[int], kept_e: list[int]) -> tuple[list[Any], list[Any], torch.Tensor | None]:
    """The same by autograd, one expert after another, over kept rows only."""
    fc1, fc2 = parameters(len(counts_e))
    rows = sum(counts_e)
    x_ND, g_ND = drawn(rows, INNER).requires_grad_(), drawn(rows, INNER + 1)[:, :INNER]
    start = 0
    for w1, w2, count, kept in zip(fc1, fc2, counts_e, kept_e, strict=True):
        part = slice(start, start + kept)
        (0.5 * F.relu(x_ND[part] @ w1.t()) @ w2.t()).backward(g_ND[part])
        start += count
    return [w.grad for w in fc1], [w.grad for w in fc2], x_ND.grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rows", "kept"), [([2, 0], [2, 0]), ([2, 3], [2, 0])], ids=["empty", "all dropped"])
def test_a03_an_empty_group_stays_when_accumulated_and_is_zero_when_overwritten(
    rows: list[int], kept: list[int], backend: Backend
) -> None:
    exact1, exact2, _ = expected(rows, kept)
    fc1, fc2, _ = gradients(rows, kept, backend, main_grad=7.0)
    for weights, exact in ((fc1, exact1), (fc2, exact2)):
        assert (weights[1].main_grad == 7.0).all()
        torch.testing.assert_close(weights[0].main_grad, 7.0 + exact[0])
        assert exact[0].any()
    fc1, fc2, _ = gradients(rows, kept, backend)
    for weights, exact in ((fc1, exact1), (fc2, exact2)):
        assert (weights[1].grad == 0.0).all()
        torch.testing.assert_close(weights[0].grad, exact[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [[8, 0, 8], [10, 3, 9]], ids=["empty", "all dropped"])
def test_a04_backward_with_an_empty_group_ends(rows: list[int], backend: Backend) -> None:
    kept = [8, 0, 8]
    found: list[tuple] = []
    worker = threading.Thread(target=lambda: found.append(gradients(rows, kept, backend)), daemon=True)
    exact1, exact2, exact_dx = expected(rows, kept)
    worker.start()
    worker.join(HANG_S)
    assert not worker.is_alive(), f"no end after {HANG_S:g} s"
    ((fc1, fc2, dx_ND),) = found
    for weights, exact in ((fc1, exact1), (fc2, exact2)):
        for e, weight in enumerate(weights):
            torch.testing.assert_close(weight.grad, torch.zeros_like(weight) if exact[e] is None else exact[e])
    torch.testing.assert_close(dx_ND, exact_dx)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a26_bf16_takes_any_number_of_rows_unpadded(backend: Backend) -> None:
    """Kept rows [44, 7]: no multiple of 8 or 16. The loop's gradients, up to one rounding to bf16."""
    counts = [44, 7]
    g_MO, x_MI = drawn(51, OUTER).bfloat16(), drawn(51, INNER).bfloat16()
    weights = [w.bfloat16() for w in drawn(2, OUTER, INNER)]
    grads = weight_grads(g_MO, x_MI, counts, backend)
    dx_MI = rows_times_weights(g_MO, weights, counts, backend, transpose=False)
    assert dx_MI.shape == (51, INNER)
    for e, (g, x, dx) in enumerate(zip(g_MO.split(counts), x_MI.split(counts), dx_MI.split(counts), strict=True)):
        for got, exact in ((grads[e], g.double().t() @ x.double()), (dx, g.double() @ weights[e].double())):
            scale = exact.abs().max()
            torch.testing.assert_close(got.double() / scale, exact / scale, rtol=0, atol=2**-8)
