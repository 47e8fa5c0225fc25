"""A KeepPlan's choice: scores, weights after shrinking and after a split over sources, probing calls."""

from fractions import Fraction
from typing import Any

import pytest
import torch

from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.pairs import DrawKey
from megatron_lrmoe.recalibration.draw import offsets
from megatron_lrmoe.recalibration.plan import KeepPlan, PairFacts
from megatron_lrmoe.recalibration.selection import select_topk, select_unbiased

LOADS = [[9, 3], [6, 1]]
ROWS = sum(map(sum, LOADS))


def plan(loads: list[list[int]] = LOADS, iteration: int = 0, microbatch: int = 0, **lrm: Any) -> KeepPlan:
    config = LrmConfig(**{"retention": 0.5, **lrm})
    key = DrawKey(seed=0, iteration=iteration, microbatch=microbatch, layer=1)
    return KeepPlan(config, key, config.retention_fraction, loads, rank=0)


def facts(rows: int, seed: int = 0) -> PairFacts:
    """Random numbers for every row; one rank holds them all."""
    grad_N, act_N, alpha_N = torch.rand(3, rows, generator=torch.Generator().manual_seed(seed)) + 0.01
    return PairFacts(grad_N, act_N, alpha_N)


ONE_RANK = [[15, 4]]


@pytest.mark.parametrize("selection", ["topk", "unbiased"])
def test_the_score_alpha_takes_the_combine_weights_as_they_are(selection):
    kp = plan(ONE_RANK, score="alpha", selection=selection)
    known = facts(19)
    got = kp.select_as_owner(known).kept
    if selection == "topk":
        expected = select_topk(known.alpha, [15, 4], kp.quota_E)
    else:
        expected = select_unbiased(known.alpha, [15, 4], kp.quota_E, offsets(kp.key, range(2)))
    assert torch.equal(got.rows_M, expected.rows_M)
    torch.testing.assert_close(got.weight_M, expected.weight_M)


@pytest.mark.parametrize("shrink", [0.0, 0.3, 1.0])
def test_shrink_pulls_weights_towards_one_and_leaves_the_draw_alone(shrink):
    full, shrunk = (plan(ONE_RANK, shrink=s).select_as_owner(facts(19)).kept for s in (1.0, shrink))
    assert torch.equal(full.rows_M, shrunk.rows_M)
    assert full.weight_M.max() > 1.2
    torch.testing.assert_close(shrunk.weight_M, 1 + shrink * (full.weight_M - 1))
    if shrink in (0.0, 1.0):
        assert torch.equal(shrunk.weight_M, torch.ones_like(full.weight_M) if shrink == 0 else full.weight_M)


def test_shrink_comes_after_the_cap():
    weight_M = plan(ONE_RANK, shrink=0.5, max_weight=2.5).select_as_owner(facts(19)).kept.weight_M
    free_M = plan(ONE_RANK, max_weight=2.5).select_as_owner(facts(19)).kept.weight_M
    assert free_M.max() == pytest.approx(2.5) and weight_M.max() == pytest.approx(1.75)


def test_shrink_covers_what_was_drawn_among_sources():
    """Two sources of one row each and a quota of 1: a source is drawn with probability 1/2, its row then surely."""
    loads = [[1], [1]]
    seen = set()
    for iteration in range(20):
        for shrink, expected in ((1.0, 2.0), (0.25, 1.25)):
            kept = plan(loads, iteration, scope="source", shrink=shrink).select_as_source(facts(1)).kept
            seen.add(len(kept.rows_M))
            assert kept.weight_M.tolist() == [expected] * len(kept.rows_M)
    assert seen == {0, 1}


def test_probability_over_sources_has_its_part_in_the_variance():
    kept = [plan([[1], [1]], i, scope="source").select_as_source(PairFacts(*torch.ones(2, 1))) for i in range(20)]
    # Kept: weight 2, probability 1/2, R = 1.
    assert {tuple(chosen.sums.tolist()) for chosen in kept} == {(1, 0, 2, 1, 0), (1, 1, 0, 0, 0)}


@pytest.mark.parametrize("scope", ["expert", "source"])
def test_costs_are_in_r_whatever_the_score_except_for_absolute_gradients(scope):
    known = facts(19)
    r_N = known.grad_stat * known.act_norm_sq
    for score in ("lrm", "grad-sq", "alpha", "random", "grad-abs"):
        for selection in ("topk", "unbiased"):
            kp = plan(ONE_RANK, score=score, selection=selection, scope=scope)
            chosen = kp.select_as_owner(known) if scope == "expert" else kp.select_as_source(known)
            mass, dropped, variance, kept, _ = chosen.sums.tolist()
            assert kept == len(chosen.kept.rows_M) == 9
            if score == "grad-abs":
                assert mass == dropped == variance == 0
                continue
            assert mass == pytest.approx(r_N.sum().item())
            assert dropped == pytest.approx(mass - r_N[chosen.kept.rows_M].sum().item())
            assert (variance > 0) is (selection == "unbiased")


def test_a_probe_keeps_everything_in_the_first_microbatch_of_every_so_many_iterations():
    for iteration, microbatch, probes in ((0, 0, True), (0, 1, False), (4, 0, False), (5, 0, True), (10, 2, False)):
        kp = plan(LOADS, iteration, microbatch, probe_interval=5)
        assert kp.probes is probes
        assert kp.quota_E == (kp.demand_E if probes else kp.policy_quota_E)
        assert kp.policy_quota_E == [7, 2]
    assert not plan(LOADS).probes
    in_probe = plan(ONE_RANK, probe_interval=1).select_as_owner(facts(19)).kept
    assert in_probe.rows_M.tolist() == list(range(19)) and in_probe.weight_M.eq(1).all()


def test_a_probe_is_the_retention_one_of_the_layer():
    assert plan(LOADS, probe_interval=1).retention == Fraction(1, 2)
    assert plan(LOADS, probe_interval=1).kept_R.tolist() == plan(LOADS).rows_R.tolist()
