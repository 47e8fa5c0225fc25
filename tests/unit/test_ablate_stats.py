"""Means, paired differences and their intervals, against scipy and against what pairing promises."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from megatron_lrmoe.report.ablate_stats import (
    Setting,
    interval,
    rows_to,
    running_means,
    settings,
    student_quantile,
    target_loss,
)
from tests.ablation import cells, result

LOSSES = st.lists(st.floats(0.5, 9), min_size=2, max_size=8)


@given(st.floats(0.51, 0.999), st.integers(1, 200))
def test_quantiles_of_student_are_scipys(p, freedom):
    assert student_quantile(p, freedom) == pytest.approx(stats.t.ppf(p, freedom), rel=1e-9)


@pytest.mark.parametrize(("p", "freedom"), [(0.5, 3), (1.0, 3), (math.nan, 3), (0.9, 0)])
def test_a_quantile_that_cannot_be(p, freedom):
    with pytest.raises(ValueError, match=f"found p {p} and {freedom} degrees"):
        student_quantile(p, freedom)


@given(LOSSES, st.floats(0.5, 0.99))
def test_the_interval_is_scipys(values, confidence):
    found = interval(values, confidence)
    assert found
    if max(values) == min(values):
        assert found.half == 0
        return
    low, high = stats.t.interval(confidence, len(values) - 1, np.mean(values), stats.sem(values))
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-9), pytest.approx(high, abs=1e-9))


def test_an_interval_of_no_and_of_one_value():
    assert interval([]) is None
    one = interval([0.25])
    assert one and (one.mean, one.half, one.low, one.high) == (0.25, None, None, None)


def setting(tmp_path, losses: dict[int, float], stock: dict[int, float]) -> Setting:
    found = cells(tmp_path, seeds=[1, 2, 3])
    make = {seed: result(found[f"scratch/topk@0.8/s{seed}"], (9.0, value)) for seed, value in losses.items()}
    base = {seed: result(found[f"scratch/stock/s{seed}"], (9.0, value)) for seed, value in stock.items()}
    return Setting("scratch", "topk", 0.8, make, base)


def test_what_seeds_share_is_no_part_of_the_difference(tmp_path):
    found = setting(tmp_path, {1: 2.1, 2: 4.1, 3: 6.1}, {1: 2.0, 2: 4.0, 3: 6.0})
    assert found.spread == pytest.approx(2.0)
    assert found.difference and found.difference.mean == pytest.approx(0.1)
    assert found.difference.half == pytest.approx(0.0, abs=1e-9)
    assert found.percent and found.percent.mean == pytest.approx(np.mean([5, 2.5, 100 / 60]))


def test_the_difference_is_that_of_a_paired_t_test(tmp_path):
    ours, stock = {1: 2.11, 2: 2.32, 3: 1.93}, {1: 2.0, 2: 2.25, 3: 1.95}
    found = setting(tmp_path, ours, stock).difference
    scipys = stats.ttest_rel(list(ours.values()), list(stock.values())).confidence_interval(0.9)
    assert found and (found.low, found.high) == (pytest.approx(scipys.low), pytest.approx(scipys.high))


def test_a_seed_without_its_stock_run_is_in_the_mean_and_not_in_the_difference(tmp_path):
    found = setting(tmp_path, {1: 2.1, 2: 4.0}, {1: 2.0, 3: 5.0})
    assert found.values == [2.1, 4.0]
    assert found.difference and (found.difference.mean, found.difference.half) == (pytest.approx(0.1), None)
    assert setting(tmp_path, {1: 2.1}, {}).difference is None


def test_a_run_without_validation_is_judged_by_its_mean_perplexity(tmp_path):
    found = cells(tmp_path)
    losses = tuple(2.0 - 0.05 * i for i in range(20))
    ours = {1: result(found["memorise/topk@0.8/s1"], losses)}
    made = Setting("memorise", "topk", 0.8, ours, {})
    assert made.metric == "training perplexity"
    assert made.values == [pytest.approx((math.exp(losses[18]) + math.exp(losses[19])) / 2)]


@given(LOSSES.map(lambda losses: losses * 7))
def test_running_means_are_those_of_numpy(losses):
    window = max(1, len(losses) // 10)
    expected = [np.mean(losses[max(0, i - window + 1) : i + 1]) for i in range(len(losses))]
    assert running_means(losses) == pytest.approx(expected)


def test_work_to_a_loss_counts_rows_that_were_kept(tmp_path):
    found = cells(tmp_path)
    stock_losses = tuple(4.0 - 0.1 * i for i in range(20))
    stock = result(found["scratch/stock/s1"], stock_losses)
    # Two of twenty are averaged; three quarters is iteration 15, and its mean 4.0 - 0.1 * 13.5.
    assert target_loss(stock) == pytest.approx(2.65)
    assert rows_to(stock, 2.65 + 1e-9) == 15 * 1000
    late = result(found["scratch/unbiased@0.5/s1"], tuple(x + 0.2 for x in stock_losses))
    # 0.2 behind is two iterations later, of half the rows each.
    made = Setting("scratch", "unbiased", 0.5, {1: late}, {1: stock})
    assert made.work == [pytest.approx(17 * 500 / 15_000)]
    assert made.kept_share == pytest.approx(0.5)
    never = result(found["scratch/unbiased@0.5/s1"], tuple(x + 5 for x in stock_losses))
    assert Setting("scratch", "unbiased", 0.5, {1: never}, {1: stock}).work == [None]


def test_a_lucky_first_iteration_is_not_yet_the_loss(tmp_path):
    losses = (0.1, *(3.0,) * 19)
    assert rows_to(result(cells(tmp_path)["scratch/stock/s1"], losses), 2.0) == 2 * 1000


def test_settings_come_with_stock_first_and_only_where_something_is_finished(tmp_path):
    found = cells(tmp_path)
    ids = [
        "warm/unbiased@0.5/s2",
        "scratch/unbiased@0.8/s1",
        "scratch/stock/s1",
        "scratch/stock/s2",
        "warm/topk@0.8/s1",
    ]
    made = settings(found.values(), {i: result(found[i]) for i in ids})
    assert [(s.regime, s.name, sorted(s.results), sorted(s.stock)) for s in made] == [
        ("scratch", "stock", [1, 2], [1, 2]),
        ("scratch", "unbiased@0.8", [1], [1, 2]),
        ("warm", "topk@0.8", [1], []),
        ("warm", "unbiased@0.5", [2], []),
    ]
