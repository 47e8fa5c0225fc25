"""The real layer with pairs chosen in forward: gradients, the forward itself, recompute, and the mean over draws."""

import itertools
from dataclasses import replace

import pytest
import torch

from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.reference import keep_best, stack_sources
from tests import layers
from tests.dist.test_layer_gradients import TOP_8, check_all
from tests.dist.test_router_grad import reference_of, same, stacked
from tests.dist.test_unbiased import DRAWS, draw, problems
from tests.gloo import Pool
from tests.layers import Case

pytestmark = pytest.mark.dist

FORWARD = {"when": "forward"}
BOTH = list(itertools.product(("expert", "source"), ("unbiased", "topk")))
CASES = [
    replace(case, expert_parallel=ep, lrm={**FORWARD, **case.lrm, "scope": scope, "selection": selection})
    for case in (Case(), TOP_8, Case(workload="one_token"), Case(workload="zipf", top_k=1, lrm={"retention": 0.05}))
    for ep, (scope, selection) in itertools.product((1, 2), BOTH)
    if ep == 2 or case.top_k < 8
]
MORE_CASES = [
    replace(case, lrm={**FORWARD, **case.lrm, "scope": scope})
    for scope in ("expert", "source")
    for case in (
        Case(workload="empty_rank"),
        Case(nan_gradient=True),
        Case(zero_gradient=True),
        Case(lrm={"score": "alpha"}),
        Case(lrm={"score": "random"}),
        Case(lrm={"max_weight": 2.0, "retention": 0.6}),
        Case(lrm={"shrink": 0.5, "min_rows": 5}),
        Case(activation="squared_relu"),
    )
]
GROUPED = [replace(case, dtype=torch.float32, lrm={**case.lrm, "gemm": "grouped"}) for case in CASES[:8:3]]


def test_every_gradient_equals_the_reference_for_the_kept_pairs(gloo2: Pool) -> None:
    check_all(gloo2, CASES + MORE_CASES, 1e-10)
    check_all(gloo2, GROUPED, 1e-5)


def test_the_forward_is_megatrons_bit_for_bit_and_recompute_changes_nothing(gloo2: Pool) -> None:
    cases = [Case(dtype=torch.float32, lrm={**FORWARD, "scope": scope}) for scope in ("expert", "source")]
    for case in cases:
        for stock, ours in gloo2(layers.run_both, case):
            assert torch.equal(stock.out_TD, ours.out_TD)
        for plain, again in gloo2(layers.run_all, [case, replace(case, checkpoint=True)]):
            assert torch.equal(plain.kept_TE, again.kept_TE)
            assert all(torch.equal(value, again.gradients[name]) for name, value in plain.gradients.items())


def test_topk_keeps_the_largest_over_all_sources(gloo2: Pool) -> None:
    case = Case(lrm={**FORWARD, "selection": "topk"})
    v = stacked(case, 2)
    score_TE = reference_of(case).forward_scores(v["x_TD"], v["probs_TE"], v["map_TE"])
    expected = keep_best(score_TE, v["map_TE"], LrmConfig(retention=0.5).retention_fraction)
    assert torch.equal(stack_sources([r.kept_TE for r in gloo2(layers.run, case)]) > 0, expected)


def test_the_baseline_goes_with_it(gloo2: Pool) -> None:
    chosen = [
        replace(case, expert_parallel=ep, lrm={**FORWARD, "router_grad": "baseline", "scope": scope})
        for case in (Case(), Case(num_tokens=12, num_experts=16, top_k=8))
        for ep, scope in itertools.product((1, 2), ("expert", "source"))
    ]
    ranks = gloo2(layers.run_all, chosen)
    for i, case in enumerate(chosen):
        results = [rank[i] for rank in ranks][: case.expert_parallel]
        v, kept_TE = stacked(case, len(results)), stack_sources([r.kept_TE for r in results])
        expected = reference_of(case).baseline_dprobs(v["x_TD"], v["probs_TE"], v["map_TE"], v["g_TD"], kept_TE > 0)
        same(stack_sources([r.dprobs_TE for r in results]), expected)


@pytest.mark.slow
@pytest.mark.parametrize("lrm", [{}, {"scope": "source"}, {"score": "alpha"}], ids=str)
def test_the_mean_gradient_is_the_full_gradient(gloo2: Pool, lrm: dict[str, str]) -> None:
    case = Case(num_tokens=12, num_experts=4, workload="balanced", lrm={**FORWARD, **lrm})
    ranks = gloo2(draw, case, DRAWS, limit_s=120)
    full_L, sample_nL = (torch.cat([rank[i] for rank in ranks], dim=-1) for i in (0, 1))
    assert problems(sample_nL, full_L) == []


def figures_of(case: Case) -> dict[str, float]:
    from megatron_lrmoe.mcore import metrics

    metrics.forget()
    layers.run(case)
    return metrics.collect(2, "cpu", per_layer=False)


def test_what_a_draw_cost_is_reported_and_of_topk_only_what_was_kept(gloo2: Pool) -> None:
    for figures in gloo2(figures_of, Case(lrm={**FORWARD, "max_weight": 3.0})):
        assert 0 < figures["moe-lrm/dropped_mass"] < 1 and 0 < figures["moe-lrm/variance_ratio"] < 3
        assert 0 < figures["moe-lrm/cap_hits"] < 1
    for figures in gloo2(figures_of, Case(lrm={**FORWARD, "selection": "topk"})):
        assert figures["moe-lrm/kept_share"] < 0.55
        assert "moe-lrm/dropped_mass" not in figures and "moe-lrm/variance_ratio" not in figures
