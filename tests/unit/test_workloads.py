"""Workloads: what every one of them keeps to, what each imitates, and how tokens draw experts."""

import tracemalloc
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe.replicas import sampling
from megatron_lrmoe.replicas.plan import IntArray, checked_inputs
from megatron_lrmoe.replicas.workloads import (
    WORKLOADS,
    Shape,
    balanced,
    burst,
    hot_experts,
    hot_rank,
    log_normal,
    log_normal_to,
    ragged,
    rotating,
    skew,
    spread_hot,
    zero_load,
    zipf,
)
from tests.loads import small_loads

MEDIUM = Shape(experts=64, ranks=16, tokens=2048, top_k=4)
# 1.0 is a ratio that every shape can have.
ANY_SHAPE = {"zipf": {"ratio": 1.0}, "log_normal_to": {"ratio": 1.0}}
SOME_TOKENS_ONLY = {"ragged", "zero_load"}
WITHOUT_SEED = {"balanced", "burst"}


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Shapes of 1 to 6 ranks and 0 to 40 tokens, with any top_k."""
    ranks = draw(st.integers(1, 6))
    experts = ranks * draw(st.integers(1, 4))
    return Shape(experts, ranks, draw(st.integers(0, 40)), draw(st.integers(1, experts)))


@pytest.mark.parametrize("name", WORKLOADS)
@given(shape=shapes(), seed=st.integers(0, 2**40))
def test_every_workload_has_what_its_tokens_can_draw(name: str, shape: Shape, seed: int) -> None:
    loads_SE = WORKLOADS[name](shape, seed=seed, **ANY_SHAPE.get(name, {}))
    assert loads_SE.shape == (shape.ranks, shape.experts)
    assert loads_SE.dtype == np.int64
    assert loads_SE.min() >= 0
    assert loads_SE.max() <= shape.tokens
    if name not in SOME_TOKENS_ONLY:
        assert (loads_SE.sum(axis=1) == shape.tokens * shape.top_k).all()


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_arguments_give_equal_loads_and_other_seeds_others(name: str) -> None:
    make = WORKLOADS[name]
    assert (make(MEDIUM, seed=3) == make(MEDIUM, seed=3)).all()
    assert (make(MEDIUM, seed=3) != make(MEDIUM, seed=4)).any() == (name not in WITHOUT_SEED)


@pytest.mark.parametrize("ratio", [1.2, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("make", [zipf, log_normal_to])
def test_a_ratio_is_reached_within_3_percent(make: Callable[..., IntArray], ratio: float) -> None:
    shape = Shape(experts=64, ranks=16, tokens=8192, top_k=4)
    for seed in (0, 1):
        assert float(skew(make(shape, ratio, seed), shape.owner_E)) == pytest.approx(ratio, rel=0.03)


@pytest.mark.parametrize("make", [zipf, log_normal_to])
def test_a_ratio_out_of_reach_is_refused(make: Callable[..., IntArray]) -> None:
    for ratio in (0.9, 17.0, float("nan")):
        with pytest.raises(ValueError, match=rf"ratio: found {ratio}, allowed is 1 to \d"):
            make(MEDIUM, ratio)
    with pytest.raises(ValueError, match=r"allowed is 1 to 1\.0"):
        make(Shape(8, 1, 16, 2), 1.5)
    with pytest.raises(ValueError, match=r"allowed is 1 to 1\.0"):
        make(Shape(8, 2, 16, 8), 1.5)


def test_zipf_has_sorted_ranks_and_one_hot_expert_on_each() -> None:
    load_RE = zipf(MEDIUM, 2.0, seed=5).sum(axis=0).reshape(MEDIUM.ranks, MEDIUM.experts_per_rank)
    assert (np.diff(load_RE.sum(axis=1)[:4]) < 0).all()
    assert (load_RE.argmax(axis=1) == 0).all()
    assert load_RE[:, 0].sum() > 0.8 * load_RE.sum()


def test_zipf_sources_draw_with_their_own_seeds() -> None:
    loads_SE = zipf(MEDIUM, 2.0, seed=5)
    assert (loads_SE[1] == zipf(MEDIUM, 2.0, seed=5 + 104729)[0]).all()
    assert (loads_SE[1] != loads_SE[0]).any()


def test_zipf_of_ratio_1_is_balanced() -> None:
    assert (zipf(MEDIUM, 1.0, seed=5) == balanced(MEDIUM)).all()


def test_popularity_is_the_same_on_all_sources_and_for_all_sigmas() -> None:
    loads_nE = np.concatenate([log_normal(MEDIUM, sigma, seed=1) for sigma in (0.8, 1.6)])
    assert np.corrcoef(np.log1p(loads_nE)).min() > 0.9
    assert np.corrcoef(np.log1p(loads_nE), np.log1p(log_normal(MEDIUM, 0.8, seed=2)))[-1, 0] < 0.5


def test_log_normal_grows_hotter_with_sigma() -> None:
    load_E = [log_normal(MEDIUM, sigma, seed=1).sum(axis=0) for sigma in (0.0, 0.7, 1.4)]
    spread = [float(np.std(np.log(load))) for load in load_E]
    assert spread[0] < 0.05 < 0.5 < spread[1] < spread[2]


@given(shape=shapes())
def test_balanced_loads_differ_by_at_most_one(shape: Shape) -> None:
    loads_SE = balanced(shape)
    assert np.ptp(loads_SE.sum(axis=0)) <= 1
    assert (np.ptp(loads_SE, axis=1) <= 1).all()


def test_balanced_pairs_are_dealt_in_turn() -> None:
    assert balanced(Shape(experts=4, ranks=2, tokens=1, top_k=3)).tolist() == [[1, 1, 1, 0], [1, 1, 0, 1]]


def test_hot_experts_are_a_rank_s_worth_together_or_apart() -> None:
    def hot(loads_SE: IntArray) -> IntArray:
        load_E = loads_SE.sum(axis=0)
        return np.flatnonzero(load_E > 3 * np.median(load_E))

    together, apart = hot(hot_rank(MEDIUM, seed=2)), hot(spread_hot(MEDIUM, seed=2))
    assert len(hot(hot_experts(MEDIUM, seed=2))) == len(together) == len(apart) == MEDIUM.experts_per_rank
    assert len(set(MEDIUM.owner_E[together])) == 1
    assert len(set(MEDIUM.owner_E[apart])) == MEDIUM.experts_per_rank
    everywhere = hot(spread_hot(MEDIUM, hot_count=MEDIUM.ranks, seed=2))
    assert sorted(MEDIUM.owner_E[everywhere]) == list(range(MEDIUM.ranks))
    assert len({int(hot_rank(MEDIUM, seed=seed).sum(axis=0).argmax()) // 4 for seed in range(8)}) > 1


def test_ragged_sources_have_different_token_counts_and_one_has_none() -> None:
    pairs_S = ragged(MEDIUM, seed=4).sum(axis=1)
    assert pairs_S.min() == 0
    assert len(set(pairs_S.tolist())) > MEDIUM.ranks // 2
    assert (pairs_S % MEDIUM.top_k == 0).all()
    assert pairs_S.max() <= MEDIUM.tokens * MEDIUM.top_k


@given(shape=shapes(), seed=st.integers(0, 1000))
def test_zero_load_has_an_empty_source_rank_and_expert(shape: Shape, seed: int) -> None:
    loads_SE = zero_load(shape, seed=seed)
    pairs_S, load_RE = loads_SE.sum(axis=1), loads_SE.sum(axis=0).reshape(shape.ranks, -1)
    left = shape.experts - shape.experts_per_rank if shape.ranks > 1 else shape.experts
    drawn = min(shape.top_k, left - left // 4)
    assert (load_RE == 0).sum() >= left // 4
    assert set(pairs_S.tolist()) <= {0, shape.tokens * drawn}
    if shape.ranks > 1:
        assert pairs_S.min() == 0
        assert load_RE.sum(axis=1).min() == 0
    assert not zero_load(shape, all_zero=True, seed=seed).any()


def test_the_hot_expert_moves_to_the_next_rank_each_step() -> None:
    hot = [int(rotating(MEDIUM, seed=6, step=step).sum(axis=0).argmax()) for step in range(MEDIUM.ranks + 1)]
    rank = [int(MEDIUM.owner_E[e]) for e in hot]
    steps = [(after - before) % MEDIUM.ranks for before, after in pairwise(rank)]
    assert steps == [1] * MEDIUM.ranks
    assert len({e % MEDIUM.experts_per_rank for e in hot}) == MEDIUM.experts_per_rank


def test_a_burst_comes_at_the_end_of_each_period() -> None:
    loads = [burst(MEDIUM, every=4, length=1, seed=6, step=step) for step in range(8)]
    bursts = [step for step, loads_SE in enumerate(loads) if (loads_SE != balanced(MEDIUM)).any()]
    assert bursts == [3, 7]
    assert loads[3].sum(axis=0).argmax() == loads[7].sum(axis=0).argmax()
    assert (loads[3] != loads[7]).any()
    assert skew(loads[3], MEDIUM.owner_E) > 3
    assert (burst(MEDIUM, every=4, length=0, step=3) == balanced(MEDIUM)).all()


def test_skew_is_exact() -> None:
    loads_SE = np.array([[1, 0, 2], [3, 1, 0]])
    assert skew(loads_SE, np.array([0, 0, 1])) == Fraction(10, 7)
    assert skew(loads_SE, np.array([1, 1, 1])) == 2
    assert skew(np.zeros((2, 3), np.int64), np.array([0, 0, 1])) == 1
    assert skew(np.zeros((1, 1), np.int64) + 4, np.array([0])) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((8, 0, 1, 1), "ranks: found 0, allowed is 1 or more"),
        ((8, 3, 1, 1), "experts: found 8, allowed is a multiple of ranks, 3"),
        ((0, 1, 1, 1), "experts: found 0"),
        ((8, 2, -1, 1), "tokens: found -1, allowed is 0 or more"),
        ((8, 2, 1, 0), "top_k: found 0, allowed is 1 to 8"),
        ((8, 2, 1, 9), "top_k: found 9, allowed is 1 to 8"),
    ],
)
def test_a_shape_that_is_not_allowed_is_refused(values: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shape(*values)


def test_owners_are_contiguous_blocks() -> None:
    assert Shape(6, 3, 1, 1).owner_E.tolist() == [0, 0, 1, 1, 2, 2]
    assert Shape(6, 3, 1, 1).owner_E.dtype == np.int64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: log_normal(MEDIUM, -0.1), r"sigma: found -0\.1, allowed is 0 to 8"),
        (lambda: ragged(MEDIUM, 8.1), r"sigma: found 8\.1, allowed is 0 to 8"),
        (lambda: hot_rank(MEDIUM, heat=0), "heat: found 0, allowed is a finite number > 0"),
        (lambda: spread_hot(MEDIUM, hot_count=65), "hot_count: found 65, allowed is 1 to 64"),
        (lambda: burst(MEDIUM, every=2, length=3), "every, length: found 2, 3"),
        (lambda: burst(MEDIUM, every=0, length=0), "every, length: found 0, 0"),
        (lambda: log_normal(MEDIUM, seed=-1), r"seed, step: found \(-1, 0, 1\), allowed are whole numbers >= 0"),
        (lambda: rotating(MEDIUM, step=-1), r"seed, step: found \(0, -1\)"),
    ],
)
def test_an_argument_that_is_not_allowed_is_refused(make: Callable[[], IntArray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_draws_are_one_after_the_other_without_replacement() -> None:
    tokens, weight_E = 200_000, np.array([5.0, 3.0, 1.0, 1.0, 0.0])
    first_E = weight_E / weight_E.sum()
    second_EE = first_E[:, None] * first_E[None, :] / (1 - first_E[:, None])
    np.fill_diagonal(second_EE, 0)
    exact_E = first_E + second_EE.sum(axis=0)
    found_E = sampling.draw(weight_E, np.array([tokens]), top_k=2, seed=0)[0] / tokens
    assert found_E == pytest.approx(exact_E, abs=5 * np.sqrt(0.25 / tokens))
    assert found_E[4] == 0


def test_tokens_draw_all_experts_with_a_weight_where_top_k_asks_for_more() -> None:
    loads_SE = sampling.draw(np.array([1e9, 0.0, 1e-200]), np.array([3, 0]), top_k=3, seed=0)
    assert loads_SE.tolist() == [[3, 0, 3], [0, 0, 0]]
    assert not sampling.draw(np.zeros(3), np.array([3, 0]), top_k=3, seed=0).any()


def test_a_draw_of_exactly_zero_does_not_choose_an_unlikely_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    class Zero:
        def standard_exponential(self, size: tuple[int, int], dtype: type) -> np.ndarray:
            assert size == (1, 2)
            return np.array([[1.0, 0.0]], dtype)

    monkeypatch.setattr(sampling, "generator", lambda *key: Zero())
    assert sampling.draw(np.array([1.0, 1e-12]), np.array([1]), top_k=1, seed=0).tolist() == [[1, 0]]


@pytest.mark.parametrize("top_k", [1, 8])
def test_expected_shares_sum_to_top_k_and_are_near_those_drawn(top_k: int) -> None:
    weight_E = np.exp(np.random.default_rng(2).standard_normal(64))
    share_E = sampling.expected_shares(weight_E, top_k)
    assert share_E.sum() == pytest.approx(top_k, rel=1e-6)
    tokens = 20_000
    found_E = sampling.draw(weight_E, np.array([tokens]), top_k, seed=0)[0] / tokens
    assert found_E == pytest.approx(share_E, rel=0.1, abs=0.01)


def test_expected_shares_are_certain_where_no_expert_is_left_over() -> None:
    assert sampling.expected_shares(np.array([1.0, 0.0, 1e-9]), 2).tolist() == [1, 0, 1]
    assert sampling.expected_shares(np.array([1.0, 1e-30, 1e-30]), 2) == pytest.approx([1, 0.5, 0.5])


def test_draws_do_not_depend_on_the_block_and_need_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(experts=256, ranks=2, tokens=16384, top_k=8)
    all_keys = 4 * shape.tokens * shape.experts
    tracemalloc.start()
    loads_SE = log_normal(shape, seed=1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < all_keys / 2
    monkeypatch.setattr(sampling, "_BLOCK_VALUES", 1000 * shape.experts)
    assert (loads_SE == log_normal(shape, seed=1)).all()


@given(case=small_loads())
def test_small_loads_are_valid_inputs_of_a_plan(case: tuple[IntArray, IntArray]) -> None:
    loads_SE, owner_E = case
    checked_inputs(loads_SE, None, owner_E, slots=1)
    assert loads_SE.dtype == owner_E.dtype == np.int64
    assert 1 <= skew(loads_SE, owner_E) <= len(loads_SE)
