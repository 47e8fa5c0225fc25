"""Pairs chosen in forward: the gradients they give, what is saved, and who chooses, on one process."""

from fractions import Fraction
from typing import Any

import pytest
import torch

from megatron_lrmoe.compute.bias import PROBE_SUMS
from megatron_lrmoe.compute.compaction import add_rows
from megatron_lrmoe.compute.exchange import HostCopy
from megatron_lrmoe.compute.experts import ExpertWeights, expert_mlp
from megatron_lrmoe.compute.stage import OutputStage, Stage
from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.pairs import DrawKey, KeptRows
from megatron_lrmoe.recalibration.plan import KeepPlan, PairFacts
from megatron_lrmoe.recalibration.quality import SELECTION_SUMS, selection_sums, sums_of_kept
from megatron_lrmoe.reference import keep_best
from tests.unit.test_baseline_flow import inputs, reference_of
from tests.unit.test_compute import EXPERTS, SWIGLU, TOKENS, Problem, dispatched, problem

BASELINE = "baseline"


def forward(p: Problem, backend: str = "loop") -> torch.Tensor:
    """The layer's stages as the dispatcher strings them together; on one rank nothing is sent."""
    flow = p.flow
    x_ND, alpha_N = dispatched(p)
    flow.attach_alpha(alpha_N)
    y_ND = expert_mlp(x_ND, alpha_N, ExpertWeights(p.fc1, p.fc2), SWIGLU, flow, backend)
    flow.share_norms()
    flow.share_choice()
    y_PD = Stage.apply(torch.clone, flow.unsort_backward, y_ND)
    stage = OutputStage if flow.plan.config.router_grad == BASELINE else Stage
    return stage.apply(lambda y: add_rows(y, flow.token_P, TOKENS), flow.unpermute_backward, y_PD)


def kept_map(p: Problem) -> torch.Tensor:
    """(T, E) weights of the pairs that were chosen; on one rank expert order is wire order."""
    kept, weight_TE = p.flow.early.kept, torch.zeros(TOKENS, EXPERTS, dtype=torch.float64)
    weight_TE[p.flow.token_P[kept.rows_M], p.flow.expert_P[kept.rows_M]] = kept.weight_M.double()
    return weight_TE


def check(p: Problem, tolerance: float = 1e-10) -> torch.Tensor:
    """Compare every gradient with the reference's for the chosen pairs; their weights are returned."""
    x, probs, map_TE, g = inputs(p)
    reference, weight_TE = reference_of(p), kept_map(p)
    exact = reference.backward(x, probs, g, weight_TE)
    dprobs_TE = exact.dprobs_TE
    if p.flow.plan.config.router_grad == BASELINE:
        dprobs_TE = reference.baseline_dprobs(x, probs, map_TE, g, weight_TE > 0)
    dfc1, dfc2 = (torch.stack([w.grad for w in weights]) for weights in (p.fc1, p.fc2))
    pairs = ((p.x_TD.grad, exact.dx_TD), (p.probs_TE.grad, dprobs_TE), (dfc1, exact.dfc1), (dfc2, exact.dfc2))
    for got, expected in pairs:
        scale = expected.abs().max()
        torch.testing.assert_close(got.double() / scale, expected / scale, rtol=0, atol=tolerance)
    return weight_TE


@pytest.mark.parametrize("scope", ["expert", "source"])
@pytest.mark.parametrize("selection", ["topk", "unbiased"])
@pytest.mark.parametrize("router_grad", ["drop", BASELINE])
@pytest.mark.parametrize("score", ["lrm", "alpha", "random"])
def test_gradients_are_the_references_for_what_was_kept(
    scope: str, selection: str, router_grad: str, score: str
) -> None:
    p = problem(when="forward", scope=scope, selection=selection, router_grad=router_grad, score=score)
    out = forward(p)
    later = problem(scope=scope, selection=selection, router_grad=router_grad, score=score)
    assert torch.equal(out, forward(later))
    out.backward(p.g_TD)
    kept_TE = check(p) > 0
    assert kept_TE.sum(0).tolist() == p.flow.plan.quota_E and (kept_TE & ~p.map_TE).sum() == 0


@pytest.mark.parametrize("backend", ["loop", "grouped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_and_grouped_gemms(backend: str, dtype: torch.dtype) -> None:
    p = problem(dtype=dtype, when="forward")
    # Rows of multiples of 16 bytes: WIDTH is 6.
    p.fc1 = [torch.nn.Parameter(w.detach().repeat(2, 1)[:16].clone()) for w in p.fc1]
    p.fc2 = [torch.nn.Parameter(w.detach().repeat(1, 2)[:, :8].clone()) for w in p.fc2]
    forward(p, backend).backward(p.g_TD)
    check(p, 1e-5 if dtype == torch.float32 else 3e-2)


def test_topk_keeps_the_largest_activations_times_weight() -> None:
    p = problem(when="forward", selection="topk")
    forward(p)
    x, probs, map_TE, _ = inputs(p)
    score_TE = reference_of(p).forward_scores(x, probs, map_TE)
    assert torch.equal(kept_map(p) > 0, keep_best(score_TE, map_TE, Fraction(1, 2)))


def test_backward_can_run_twice_and_two_calls_do_not_share_anything() -> None:
    first, second = problem(when="forward"), problem(when="forward", score="random")
    out, other = forward(first), forward(second)
    out.backward(first.g_TD, retain_graph=True)
    once = first.x_TD.grad.clone()
    other.backward(second.g_TD)
    check(second)
    out.backward(first.g_TD)
    torch.testing.assert_close(first.x_TD.grad, 2 * once)


def test_nan_in_an_activation_is_kept() -> None:
    p = problem(when="forward")
    with torch.no_grad():
        p.x_TD[3] = torch.nan
    forward(p).backward(p.g_TD)
    routed = p.map_TE[3]
    assert (kept_map(p)[3][routed] > 0).any() and torch.stack([w.grad for w in p.fc2]).isnan().any()


# what is saved


def saved_bytes(retention: float, **lrm: Any) -> int:
    p, sizes = problem(retention=retention, dtype=torch.float32, **lrm), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.nbytes), x)[1], lambda x: x):
        forward(p)
    return sum(sizes)


def test_saved_bytes_are_those_of_kept_rows() -> None:
    everything = saved_bytes(0.5)
    rows, kept = problem().flow.plan.rows_R[0], problem(0.25).flow.plan.kept_R[0]
    assert saved_bytes(0.25) == everything
    assert saved_bytes(0.25, when="forward") * rows == everything * kept
    assert kept / rows < 0.3


def live_after_forward(**lrm: Any) -> int:
    """Bytes that were allocated in forward and not freed by its end, from the allocator's own record."""
    p = problem(retention=0.25, dtype=torch.float32, **lrm)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        out = forward(p)
    assert out.grad_fn is not None
    return sum(event.self_cpu_memory_usage for event in profile.events())


def test_nothing_holds_the_rows_of_dropped_pairs() -> None:
    """The allocator says what of forward is still there: not x, fc1's output, norms and weights of all rows."""
    plan = problem(0.25).flow.plan
    rows, kept = int(plan.rows_R[0]), int(plan.kept_R[0])
    row = (8 + 2 * 6) * 4
    freed = live_after_forward() - live_after_forward(when="forward")
    # Of each kept row: number, weight, 1/probability; alpha and norm are kept instead of those of every row.
    added = kept * (8 + 4 + 4)
    assert freed == pytest.approx((rows - kept) * (row + 4 + 4) - added, abs=256)
    assert freed > 0.5 * rows * row


# who chooses


LOADS = [[5, 0, 9, 3], [1, 7, 2, 0], [6, 4, 0, 1]]


@pytest.mark.parametrize("selection", ["topk", "unbiased"])
@pytest.mark.parametrize("score", ["lrm", "alpha", "random"])
@pytest.mark.parametrize("retention", [0.5, 0.15])
def test_an_owner_chooses_for_each_source_what_the_source_would(selection: str, score: str, retention: float) -> None:
    config = LrmConfig(retention=retention, scope="source", selection=selection, score=score, when="forward")
    key = DrawKey(seed=1, iteration=2, microbatch=3, layer=4)
    loads = [[*row, *row] for row in LOADS][:2]  # two ranks of four experts each
    generator = torch.Generator().manual_seed(0)
    norms, alphas = ([[torch.rand(n, generator=generator) for n in row] for row in loads] for _ in range(2))
    by_source, by_owner = set(), set()
    for rank in range(2):
        plan = KeepPlan(config, key, config.retention_fraction, loads, rank)
        facts = PairFacts(torch.ones(sum(loads[rank])), torch.cat(norms[rank]), torch.cat(alphas[rank]))
        by_source |= named(plan.select_as_source(facts).kept, [(rank, e, n) for e, n in enumerate(loads[rank])])
        cells = [(s, e, loads[s][e]) for e in plan.experts_of(rank) for s in range(2)]
        norm_N, alpha_N = (torch.cat([of[s][e] for s, e, _ in cells]) for of in (norms, alphas))
        kept, inverse_M = plan.select_in_forward(norm_N, alpha_N)
        by_owner |= named(kept, cells)
        assert kept.counts_e == tuple(plan.kept_e) and sum(kept.counts_e) == len(kept.rows_M)
        assert (inverse_M is None) is (selection == "topk")
    assert by_owner == by_source and len(by_owner) > 3


def named(kept: KeptRows, cells: list[tuple[int, int, int]]) -> set[tuple[int, int, int, float]]:
    """Source, expert, index and weight of each kept row."""
    rows = [(source, expert, i) for source, expert, n in cells for i in range(n)]
    return {(*rows[row], weight) for row, weight in zip(kept.rows_M.tolist(), kept.weight_M.tolist(), strict=True)}


# what it cost


def test_costs_are_estimated_from_the_kept_rows() -> None:
    """Over evenly spaced offsets each row is kept as often as its probability says: the mean is the whole."""
    size_N = torch.tensor([6.0, 1.0, 4.0, 2.0, 3.0])
    config = LrmConfig(retention=0.5, when="forward")
    found, exact = [], []
    for iteration in range(3000):
        plan = KeepPlan(config, DrawKey(0, iteration, 0, 1), Fraction(1, 2), [[5]], 0)
        kept, inverse_M = plan.select_in_forward(size_N.square(), size_N)
        mass_N = size_N.square() * torch.arange(1.0, 6.0)
        found.append(sums_of_kept(mass_N[kept.rows_M], kept, inverse_M, None))
        exact.append(selection_sums(mass_N, kept, inverse_M, None))
    found, exact = torch.stack(found), torch.stack(exact)
    error = (found - exact).std(0) / len(found) ** 0.5
    assert ((found - exact).mean(0).abs() <= 4 * error + 1e-9).all()
    assert torch.equal(found[:, 2:], exact[:, 2:]) and not torch.equal(found[:, :2], exact[:, :2])


@pytest.mark.parametrize("selection", ["topk", "unbiased"])
def test_a_flow_reports_its_costs_in_backward(selection: str) -> None:
    p, reports = problem(when="forward", selection=selection), []
    p.flow.report = lambda kind, sums: reports.append((kind, sums))
    out = forward(p)
    assert not reports
    out.backward(p.g_TD)
    ((kind, sums),) = reports
    assert kind == "selection"
    mass, dropped, variance, kept, _ = sums.tolist()
    assert kept == sum(p.flow.plan.quota_E)
    if selection == "topk":
        assert mass == dropped == variance == 0
        return
    x, probs, map_TE, g = inputs(p)
    score_TE, weight_TE = reference_of(p).scores(x, probs, map_TE, g).nan_to_num(), kept_map(p)
    assert mass == pytest.approx((score_TE * weight_TE).sum().item())
    assert variance == pytest.approx((score_TE * weight_TE * (weight_TE - 1).clamp_min(0)).sum().item())
    assert dropped == pytest.approx((score_TE * (weight_TE - 1).clamp_min(0)).sum().item())


def test_a_probe_is_a_full_backward_and_reports_the_same_as_when_chosen_in_backward() -> None:
    found = []
    for when in ("backward", "forward"):
        p, reports = problem(when=when, probe_interval=1), []
        p.flow.report = lambda kind, sums, reports=reports: reports.append((kind, sums))
        forward(p).backward(p.g_TD)
        assert [kind for kind, _ in reports] == ["selection", "probe"]
        found.append((p.x_TD.grad, *(sums for _, sums in reports)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert len(found[0][1]) == len(SELECTION_SUMS) and len(found[0][2]) == len(PROBE_SUMS)


def test_counts_reach_the_host() -> None:
    assert HostCopy(torch.tensor([3, 0, 5])).read() == [3, 0, 5]
