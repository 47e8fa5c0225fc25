"""The stages of one process with the router's baseline, and with a probe, against the reference."""

from fractions import Fraction

import pytest
import torch

from megatron_lrmoe.compute.bias import PROBE_SUMS
from megatron_lrmoe.compute.compaction import add_rows
from megatron_lrmoe.compute.experts import ExpertWeights, expert_mlp
from megatron_lrmoe.compute.flow import PairFlow
from megatron_lrmoe.compute.stage import OutputStage, Stage
from megatron_lrmoe.recalibration.balance import RowBytes
from megatron_lrmoe.recalibration.draw import CERTAIN
from megatron_lrmoe.recalibration.selection import inclusion_probabilities
from megatron_lrmoe.reference import ReferenceLayer, keep_best
from tests import layers
from tests.unit.test_compute import EXPERTS, HIDDEN, SWIGLU, TOKENS, Problem, dispatched, problem
from tests.unit.test_compute import forward as plain_forward


def forward(p: Problem, alpha_dtype: torch.dtype | None = None) -> torch.Tensor:
    """The layer's stages with the last one's output kept."""
    flow = p.flow
    x_ND, alpha_N = dispatched(p)
    flow.attach_alpha(alpha_N if alpha_dtype is None else alpha_N.to(alpha_dtype))
    y_ND = expert_mlp(x_ND, alpha_N, ExpertWeights(p.fc1, p.fc2), SWIGLU, flow, "loop")
    flow.share_norms()
    y_PD = Stage.apply(torch.clone, flow.unsort_backward, y_ND)
    return OutputStage.apply(lambda y: add_rows(y, flow.token_P, TOKENS), flow.unpermute_backward, y_PD)


def reference_of(p: Problem) -> ReferenceLayer:
    fc1, fc2 = (torch.stack([w.detach().double() for w in weights]) for weights in (p.fc1, p.fc2))
    return ReferenceLayer(fc1, fc2, layers.ACTIVATIONS["swiglu"])


def inputs(p: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return p.x_TD.detach().double(), p.probs_TE.detach().double(), p.map_TE, p.g_TD.double()


def kept_map(p: Problem) -> torch.Tensor:
    """(T, E) weights of the pairs that the flow chooses."""
    flow: PairFlow = p.flow
    flow._reset()
    with torch.no_grad():
        flow._select(p.g_TD, flow.token_P)
    weight_TE = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64)
    weight_TE[flow._token_M, flow.expert_P[flow.sent.rows_M]] = flow.sent.weight_M.double()
    return weight_TE


@pytest.mark.parametrize("scope", ["expert", "source"])
@pytest.mark.parametrize("selection", ["topk", "unbiased"])
@pytest.mark.parametrize("retention", [0.5, 0.8, 0.05])
def test_the_baseline_equals_the_references(scope: str, selection: str, retention: float) -> None:
    p = problem(retention=retention, scope=scope, selection=selection, router_grad="baseline")
    forward(p).backward(p.g_TD)
    found = p.probs_TE.grad, p.x_TD.grad
    weight_TE = kept_map(p)
    x, probs, map_TE, g = inputs(p)
    reference = reference_of(p)
    torch.testing.assert_close(found[0], reference.baseline_dprobs(x, probs, map_TE, g, weight_TE > 0))
    torch.testing.assert_close(found[1], reference.backward(x, probs, g, weight_TE).dx_TD)
    # What a softmax subtracts from every dalpha of a token is exact.
    exact = reference.backward(x, probs, g, map_TE.double()).dprobs_TE
    torch.testing.assert_close((found[0] * probs).sum(1), (exact * probs).sum(1))
    assert not torch.equal(found[0], exact)


def test_backward_with_the_baseline_can_run_twice_over_one_graph() -> None:
    p = problem(router_grad="baseline")
    out = forward(p)
    out.backward(p.g_TD, retain_graph=True)
    once = p.probs_TE.grad.clone()
    out.backward(p.g_TD)
    torch.testing.assert_close(p.probs_TE.grad, 2 * once)


def test_an_output_changed_in_place_is_an_error_and_no_wrong_gradient() -> None:
    p = problem(router_grad="baseline")
    out = forward(p)
    with torch.no_grad():
        out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(p.g_TD)


def test_the_baseline_keeps_the_output_and_alpha_and_nothing_else() -> None:
    saved: list[list[int]] = []
    for router_grad in ("drop", "baseline"):
        p = problem(dtype=torch.float32, router_grad=router_grad)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: (sizes.append(x.nbytes), x)[1], lambda x: x
        ):
            (forward if router_grad == "baseline" else plain_forward)(p)
        saved.append(sizes)
    assert sum(saved[1]) - sum(saved[0]) == TOKENS * HIDDEN * 4
    assert p.flow.alpha_P is not None and p.flow.alpha_P.nbytes == len(p.flow.token_P) * 4
    plain, baseline = (RowBytes.of(64, 32, True, 2, top_k) for top_k in (None, 8))
    assert baseline.saved - plain.saved == 4 + 64 * 2 // 8 and baseline.work == plain.work
    assert RowBytes.of(5, 32, True, 2, 3).saved - RowBytes.of(5, 32, True, 2).saved == 4 + 4  # 10 / 3 rounded up


def test_in_bf16_the_baseline_is_near_the_reference() -> None:
    p = problem(dtype=torch.bfloat16, router_grad="baseline")
    forward(p).backward(p.g_TD)
    found = p.probs_TE.grad
    x, probs, map_TE, g = inputs(p)
    exact = reference_of(p).baseline_dprobs(x, probs, map_TE, g, kept_map(p) > 0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double() / exact.abs().max(), exact / exact.abs().max(), rtol=0, atol=3e-2)


@pytest.mark.parametrize("frozen", ["probs", "x"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    p = problem(router_grad="baseline")
    (p.probs_TE if frozen == "probs" else p.x_TD).requires_grad_(False)
    forward(p).backward(p.g_TD)
    assert (p.probs_TE.grad is None) is (frozen == "probs") and (p.x_TD.grad is None) is (frozen == "x")


def probe_sums(p: Problem) -> dict[str, float]:
    """What the reference says that the probe should report."""
    x, probs, map_TE, g = inputs(p)
    reference = reference_of(p)
    score_TE = reference.scores(x, probs, map_TE, g)
    dropped_TE = map_TE & ~keep_best(score_TE, map_TE, Fraction(1, 2))
    variance = 0.0
    for e in range(EXPERTS):
        rows = score_TE[map_TE[:, e], e]
        if len(rows):
            units_N = inclusion_probabilities(rows.sqrt(), [len(rows)], [max(1, len(rows) // 2)])
            variance += ((CERTAIN / units_N.double() - 1) * rows).sum().item()
    return {
        "mass": score_TE[map_TE].sum().item(),
        "dropped": score_TE[dropped_TE].sum().item(),
        "bias": reference.backward(x, probs, g, dropped_TE.double()).dfc2.square().sum().item(),
        "variance": variance,
    }


@pytest.mark.parametrize("backend", ["loop", "grouped"])
@pytest.mark.parametrize("selection", ["topk", "unbiased"])
def test_a_probe_runs_the_full_backward_and_reports_what_topk_would_leave_out(backend: str, selection: str) -> None:
    dtype = torch.float64 if backend == "loop" else torch.float32
    p = problem(dtype=dtype, selection=selection, probe_interval=1)
    if backend == "grouped":
        p.fc1 = [torch.nn.Parameter(w.detach()[:8].clone()) for w in p.fc1]
        p.fc2 = [torch.nn.Parameter(w.detach()[:, :4].clone()) for w in p.fc2]
    reports: list[tuple[str, torch.Tensor]] = []
    p.flow.report = lambda kind, sums: reports.append((kind, sums))
    x_ND, alpha_N = dispatched(p)
    y_ND = expert_mlp(x_ND, alpha_N, ExpertWeights(p.fc1, p.fc2), SWIGLU, p.flow, backend)
    p.flow.share_norms()
    y_PD = Stage.apply(torch.clone, p.flow.unsort_backward, y_ND)
    out = Stage.apply(lambda y: add_rows(y, p.flow.token_P, TOKENS), p.flow.unpermute_backward, y_PD)
    out.backward(p.g_TD)
    assert [kind for kind, _ in reports] == ["selection", "probe"]
    found = dict(zip(PROBE_SUMS, reports[1][1].tolist(), strict=True))
    assert found == pytest.approx(probe_sums(p), rel=1e-9 if backend == "loop" else 1e-4)
    assert found["bias"] > 0 and found["dropped"] > 0
    x, probs, map_TE, g = inputs(p)
    full = reference_of(p).backward(x, probs, g, map_TE.double())
    tolerance = 1e-9 if backend == "loop" else 1e-4
    for got, exact in ((p.x_TD.grad, full.dx_TD), (torch.stack([w.grad for w in p.fc2]), full.dfc2)):
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=tolerance * exact.abs().max().item())


def test_without_a_probe_no_dropped_gradient_is_computed() -> None:
    p = problem()
    reports: list[str] = []
    p.flow.report = lambda kind, sums: reports.append(kind)
    out = forward(p)
    out.backward(p.g_TD)
    assert reports == ["selection"]
    assert p.flow.bias_probe(p.g_TD) is None


def test_a_probe_with_frozen_experts_reports_nothing() -> None:
    p = problem(probe_interval=1)
    reports: list[str] = []
    p.flow.report = lambda kind, sums: reports.append(kind)
    for weight in p.fc1 + p.fc2:
        weight.requires_grad_(False)
    forward(p).backward(p.g_TD)
    assert reports == ["selection"]
