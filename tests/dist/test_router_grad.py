"""The real layer with the router's baseline, shrunk weights, the score alpha and a probe, against the reference."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lrmoe.compute.bias import PROBE_SUMS
from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.reference import ReferenceLayer, keep_best, stack_sources
from tests import layers
from tests.dist.test_layer_gradients import check_all
from tests.dist.test_unbiased import DRAWS, dprobs_of, draw, full_dprobs, problems
from tests.gloo import Pool
from tests.layers import Case

pytestmark = pytest.mark.dist

BASELINE = {"router_grad": "baseline"}


def stacked(case: Case, ranks: int) -> dict[str, torch.Tensor]:
    parts = [layers.settle(case, rank) for rank in range(ranks)]
    return {name: stack_sources([part[name] for part in parts]) for name in ("x_TD", "g_TD", "map_TE", "probs_TE")}


def reference_of(case: Case) -> ReferenceLayer:
    values = layers.settle(case, 0)
    return ReferenceLayer(values["fc1"], values["fc2"], layers.ACTIVATIONS[case.activation])


def same(got: torch.Tensor, exact: torch.Tensor, tolerance: float = 1e-10) -> None:
    scale = exact.abs().max().clamp_min(1e-30)
    torch.testing.assert_close(got.double() / scale, exact / scale, rtol=0, atol=tolerance)


BASELINE_CASES = [
    replace(case, expert_parallel=ep, lrm={**BASELINE, **case.lrm, "scope": scope, "selection": selection})
    for case in (
        Case(),
        Case(workload="zipf", top_k=1),
        Case(num_tokens=12, num_experts=16, top_k=8, lrm={"retention": 0.8}),
        Case(workload="one_token"),
        Case(lrm={"retention": 0.01}),
    )
    for ep, scope, selection in itertools.product((1, 2), ("expert", "source"), ("unbiased", "topk"))
]


@pytest.mark.slow
def test_the_baseline_equals_the_reference_and_the_rest_stays_as_it_is(gloo2: Pool) -> None:
    ranks = gloo2(layers.run_all, BASELINE_CASES, limit_s=120)
    dropped_most = 0
    for i, case in enumerate(BASELINE_CASES):
        results = [rank[i] for rank in ranks][: case.expert_parallel]
        v = stacked(case, len(results))
        kept_TE = stack_sources([r.kept_TE for r in results])
        reference = reference_of(case)
        expected = reference.baseline_dprobs(v["x_TD"], v["probs_TE"], v["map_TE"], v["g_TD"], kept_TE > 0)
        same(stack_sources([r.dprobs_TE for r in results]), expected)
        grads = reference.backward(v["x_TD"], v["probs_TE"], v["g_TD"], kept_TE)
        same(stack_sources([r.dx_TD for r in results]), grads.dx_TD)
        for r in results:
            own = slice(r.experts.start, r.experts.stop)
            same(r.dfc1, grads.dfc1[own])
            same(r.dfc2, grads.dfc2[own])
        dropped_most = max(dropped_most, int((v["map_TE"] & (kept_TE == 0)).sum(1).max()))
    assert dropped_most > 2


ROUTERS = {
    "softmax of the chosen": {"moe_router_pre_softmax": False},
    "softmax of all": {"moe_router_pre_softmax": True},
    "softmax of all, scaled": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid, renormalised, scaled": {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "sigmoid with expert bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    },
    "softmax and shared experts": {
        "moe_router_pre_softmax": False,
        "moe_shared_expert_intermediate_size": layers.WIDTH,
    },
}


def stock_and_ours(cases: list[Case]) -> list[tuple[layers.Result, layers.Result]]:
    pairs = []
    for case in cases:
        stock, ours = layers.build(case, ours=False), layers.build(case)
        ours.load_state_dict(stock.state_dict())
        pairs.append((layers.forward_backward(stock, case), layers.forward_backward(ours, case)))
    return pairs


def test_megatrons_routers_get_their_exact_gradient_where_one_pair_of_a_token_is_dropped(gloo2: Pool) -> None:
    """Softmax, sigmoid, renormalised, scaled, with shared experts: all of it is before or after the combine weights."""
    lrm = {**BASELINE, "retention": 0.9}
    chosen = [
        Case(num_experts=4, top_k=3, num_tokens=40, megatron_router=True, config=router, lrm=lrm)
        for router in ROUTERS.values()
    ]
    per_rank = gloo2(stock_and_ours, chosen, limit_s=120)
    for i, name in enumerate(ROUTERS):
        checked = 0
        for stock, ours in (pairs[i] for pairs in per_rank):
            dropped_T = (ours.map_TE & (ours.kept_TE == 0)).sum(1)
            exact_T = dropped_T == 1
            checked += int(exact_T.sum())
            tolerance = 1e-6 if "fp32" in ROUTERS[name].values() else 1e-10
            same(ours.dprobs_TE[dropped_T <= 1], stock.dprobs_TE[dropped_T <= 1].double(), tolerance)
            if (dropped_T <= 1).all():
                same(ours.drouter, stock.drouter.double(), tolerance)
        assert checked > 4, name


def test_where_no_token_loses_more_than_one_pair_the_whole_router_gradient_is_exact(gloo2: Pool) -> None:
    """One row of 20 is dropped of each of 4 experts: in some draws of these, of 4 different tokens."""
    lrm = {**BASELINE, "retention": 0.95, "score": "random"}
    case = Case(num_experts=4, top_k=4, num_tokens=10, megatron_router=True, config=ROUTERS["sigmoid with expert bias"])
    chosen = [replace(case, lrm=lrm, iteration=iteration) for iteration in range(4)]
    exact = 0
    for pairs in zip(*gloo2(stock_and_ours, chosen), strict=True):
        dropped = [int((ours.map_TE & (ours.kept_TE == 0)).sum(1).max()) for _, ours in pairs]
        if max(dropped) <= 1:
            exact += sum(dropped)
            for stock, ours in pairs:
                same(ours.drouter, stock.drouter.double(), 1e-6)
    assert exact > 1


def test_recompute_changes_no_bit_of_the_baseline(gloo2: Pool) -> None:
    case = Case(num_experts=4, megatron_router=True, lrm=BASELINE)
    chosen = [case, replace(case, checkpoint=True)]
    for plain, recomputed in gloo2(layers.run_all, chosen):
        assert all(torch.equal(plain.gradients[name], value) for name, value in recomputed.gradients.items())


def test_in_bf16_the_baseline_is_near_the_exact_gradient_of_the_kept(gloo2: Pool) -> None:
    """Its weights are divided out again after the product with g was rounded."""
    case = Case(dtype=torch.bfloat16, lrm=BASELINE)
    results = gloo2(layers.run, case)
    v, reference = stacked(case, 2), reference_of(case)
    kept_TE = stack_sources([r.kept_TE for r in results])
    exact = reference.baseline_dprobs(v["x_TD"], v["probs_TE"], v["map_TE"], v["g_TD"], kept_TE > 0)
    same(stack_sources([r.dprobs_TE for r in results]), exact, 3e-2)


def test_nan_reaches_every_combine_weight_of_its_token(gloo2: Pool) -> None:
    for result in gloo2(layers.run, Case(nan_gradient=True, lrm=BASELINE)):
        routed = result.map_TE
        assert result.dprobs_TE[-1][routed[-1]].isnan().all()
        assert result.dprobs_TE[:-1].isfinite().all()


OTHERS = [
    Case(lrm={"scope": scope, "score": "alpha", "selection": selection})
    for scope, selection in itertools.product(("expert", "source"), ("unbiased", "topk"))
]
SHRUNK = [Case(lrm={"scope": scope, "shrink": shrink}) for scope in ("expert", "source") for shrink in (0.0, 0.5)]


def test_the_score_alpha_and_shrunk_weights_give_the_references_gradients(gloo2: Pool) -> None:
    check_all(gloo2, OTHERS + SHRUNK, 1e-10)


def test_topk_by_alpha_keeps_the_largest_combine_weights(gloo2: Pool) -> None:
    case = OTHERS[1]
    kept_TE = stack_sources([r.kept_TE for r in gloo2(layers.run, case)]) > 0
    v = stacked(case, 2)
    assert torch.equal(
        kept_TE, keep_best(v["probs_TE"].float(), v["map_TE"], LrmConfig(retention=0.5).retention_fraction)
    )


def test_shrink_zero_keeps_the_same_pairs_unweighted(gloo2: Pool) -> None:
    full, half, none = (
        stack_sources([r.kept_TE for r in gloo2(layers.run, Case(lrm={"shrink": s}))]) for s in (1.0, 0.5, 0.0)
    )
    assert full.max() > 1.5
    torch.testing.assert_close(half, (full + (full > 0)) / 2, rtol=1e-6, atol=0)
    assert torch.equal(none, (full > 0).double())


MEAN_CASES = {
    "alpha": Case(num_tokens=12, num_experts=4, workload="balanced", lrm={"score": "alpha"}),
    "alpha, scope source": Case(
        num_tokens=12, num_experts=4, workload="balanced", lrm={"score": "alpha", "scope": "source"}
    ),
    "baseline": Case(num_tokens=12, num_experts=4, workload="balanced", lrm={**BASELINE, "retention": 0.8}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEAN_CASES)
def test_the_mean_gradient_is_the_full_gradient(gloo2: Pool, name: str) -> None:
    """With the baseline all but the combine weights', whose error is smaller in return."""
    case = MEAN_CASES[name]
    ranks = gloo2(draw, case, DRAWS, limit_s=120)
    dprobs = torch.cat([dprobs_of(case, samples, rank) for rank, (_, samples, _) in enumerate(ranks)], dim=1)
    if name != "baseline":
        full_L, sample_nL = (torch.cat([rank[i] for rank in ranks], dim=-1) for i in (0, 1))
        assert problems(sample_nL, full_L) == []
        return
    for rank, (full_L, sample_nL, _) in enumerate(ranks):
        elsewhere = torch.ones_like(full_L, dtype=torch.bool)
        start = layers.settle(case, rank)["x_TD"].numel()
        elsewhere[start : start + layers.settle(case, rank)["map_TE"].numel()] = False
        assert problems(sample_nL[:, elsewhere], full_L[elsewhere]) == []
    kept_nTE = torch.cat([kept for _, _, kept in ranks], dim=1)
    map_TE = stacked(case, 2)["map_TE"]
    few_nT = (map_TE & (kept_nTE == 0)).sum(2) <= 1
    exact = full_dprobs(case).expand_as(dprobs)
    same(dprobs[few_nT], exact[few_nT])
    weighted = gloo2(draw, replace(case, lrm={"retention": 0.8}), 50, limit_s=120)
    dropped = torch.cat([dprobs_of(case, samples, rank) for rank, (_, samples, _) in enumerate(weighted)], dim=1)
    assert (dprobs - exact).square().mean() < (dropped - exact[:50]).square().mean() / 3


def probed(case: Case) -> tuple[layers.Result, dict[str, float], dict[str, float], list[bool]]:
    """A probing call: its gradients, what it recorded, its figures; and whether the next calls probed."""
    from megatron_lrmoe.mcore import metrics

    metrics.forget()
    layer = layers.build(case)
    result = layers.forward_backward(layer, case)
    recorded = dict(zip(PROBE_SUMS, metrics._costs[case.layer_number, "probe"].tolist(), strict=True))
    figures = metrics.collect(2, "cpu", per_layer=False)
    others = [layers.forward_backward(layer, case)]
    layers.at_iteration(case.iteration + 1)
    others.append(layers.forward_backward(layer, case))
    return result, recorded, figures, [bool((r.kept_TE[r.map_TE] > 0).all()) for r in others]


@pytest.mark.parametrize("scope", ["expert", "source"])
@pytest.mark.parametrize("selection", ["topk", "unbiased"])
def test_a_probe_is_megatrons_backward_and_reports_kappa(gloo2: Pool, scope: str, selection: str) -> None:
    lrm: dict[str, Any] = {"scope": scope, "selection": selection, "probe_interval": 2}
    case = Case(iteration=4, lrm=lrm)
    ranks = gloo2(probed, case)
    for (result, *_), stock in zip(ranks, gloo2(layers.run, case, False), strict=True):
        for name, gradient in stock.gradients.items():
            same(result.gradients[name], gradient)
    assert all(full == [False, False] for *_, full in ranks)
    v, reference = stacked(case, 2), reference_of(case)
    score_TE = reference.scores(v["x_TD"], v["probs_TE"], v["map_TE"], v["g_TD"])
    kept_TE = keep_best(score_TE, v["map_TE"], LrmConfig(retention=0.5).retention_fraction)
    dropped_TE = v["map_TE"] & ~kept_TE
    left_out = reference.backward(v["x_TD"], v["probs_TE"], v["g_TD"], dropped_TE.double()).dfc2.square().sum()
    kappa = (left_out / score_TE[dropped_TE].sum()).item()
    sums = {name: sum(recorded[name] for _, recorded, _, _ in ranks) for name in PROBE_SUMS}
    assert sums["bias"] == pytest.approx(left_out.item()) and sums["bias"] > 0
    assert sums["mass"] == pytest.approx(score_TE[v["map_TE"]].sum().item())
    for _, _, figures, _ in ranks:
        assert figures["moe-lrm/kappa"] == pytest.approx(kappa)
        assert figures["moe-lrm/kept_share"] == 1 and figures["moe-lrm/dropped_mass"] == pytest.approx(0, abs=1e-12)
        mass = score_TE[dropped_TE].sum() / score_TE[v["map_TE"]].sum()
        assert figures["moe-lrm/topk_dropped_mass"] == pytest.approx(mass.item())
        assert figures["moe-lrm/unbiased_variance"] > 0


def figures_of(case: Case) -> dict[str, float]:
    from megatron_lrmoe.mcore import metrics

    metrics.forget()
    layers.run(case)
    return metrics.collect(2, "cpu", per_layer=False)


def test_dropped_mass_is_over_all_ranks_and_a_draw_has_variance(gloo2: Pool) -> None:
    case = Case(lrm={"selection": "topk"})
    v = stacked(case, 2)
    score_TE = reference_of(case).scores(v["x_TD"], v["probs_TE"], v["map_TE"], v["g_TD"])
    kept_TE = keep_best(score_TE, v["map_TE"], LrmConfig(retention=0.5).retention_fraction)
    share = 1 - (score_TE[kept_TE].sum() / score_TE[v["map_TE"]].sum()).item()
    for figures in gloo2(figures_of, case):
        assert figures["moe-lrm/dropped_mass"] == pytest.approx(share)
        assert figures["moe-lrm/variance_ratio"] == 0 and "moe-lrm/cap_hits" not in figures
    for scope in ("expert", "source"):
        for figures in gloo2(figures_of, Case(lrm={"max_weight": 3.0, "scope": scope})):
            assert 0 < figures["moe-lrm/variance_ratio"] < 3
            assert 0 < figures["moe-lrm/cap_hits"] < 1
