"""Quotas of experts, and their split over sources."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe.recalibration.quota import proportional_quota
from megatron_lrmoe.recalibration.sources import split_over_sources

LOADS = st.lists(st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 5000)), min_size=1, max_size=9)
OFFSETS = st.one_of(st.just(0), st.just(2**40 - 1), st.integers(0, 2**40 - 1))


@pytest.mark.parametrize(
    "loads, retention, quotas",
    [
        ([4, 2, 3], "0.8", [3, 1, 2]),
        ([90], "0.7", [63]),
        ([100], "0.29", [29]),
        ([100], "0.57", [57]),
        ([5], "0.8", [4]),
        ([1, 0, 2], "0.3", [1, 0, 1]),
        ([7, 0], "1", [7, 0]),
    ],
)
def test_golden_quotas(loads, retention, quotas):
    assert proportional_quota(loads, Fraction(retention)) == quotas


def test_experts_with_few_rows_keep_all():
    assert proportional_quota([0, 3, 4, 5], Fraction(1, 2), min_rows=4) == [0, 3, 4, 2]


@given(
    loads=st.lists(st.integers(0, 10**12), max_size=20),
    retention=st.fractions(min_value=Fraction(1, 10**6), max_value=1),
    min_rows=st.integers(0, 50),
)
def test_quotas_are_exact(loads, retention, min_rows):
    for load, quota in zip(loads, proportional_quota(loads, retention, min_rows), strict=True):
        if load <= min_rows:
            assert quota == load
        else:
            assert quota == 1 or quota <= retention * load < quota + 1
            assert 1 <= quota <= load


@pytest.mark.parametrize("retention", [Fraction(0), Fraction(-1, 2), Fraction(11, 10)])
def test_retention_out_of_range_is_refused(retention):
    with pytest.raises(RuntimeError, match="retention"):
        proportional_quota([1], retention)


def test_negative_load_is_refused():
    with pytest.raises(RuntimeError, match="negative"):
        proportional_quota([3, -1], Fraction(1, 2))


@pytest.mark.parametrize(
    "quota, loads_S, rows_S",
    [
        (4, [1000, 1, 1, 1], (1, 1, 1, 1)),
        (5, [1000, 1, 1, 1], (2, 1, 1, 1)),
        (5, [4, 4, 4], (2, 2, 1)),
        (6, [4, 0, 8], (2, 0, 4)),
        (7, [3, 1, 6], (2, 1, 4)),
        (3, [3, 0], (3, 0)),
        (0, [0, 0], (0, 0)),
    ],
)
def test_golden_fixed_splits(quota, loads_S, rows_S):
    split = split_over_sources(quota, loads_S, offset=0)
    assert split.rows_S == rows_S
    assert split.probability_S == tuple(Fraction(load > 0) for load in loads_S)


@st.composite
def quota_and_loads(draw):
    loads_S = draw(LOADS)
    most = sum(loads_S)
    few = sum(load > 0 for load in loads_S)
    quota = draw(st.one_of(st.integers(min(1, most), few), st.integers(min(1, most), most)))
    return quota, loads_S


@st.composite
def few_rows_of_many_sources(draw):
    """A quota below the number of non-empty sources."""
    loads_S = draw(LOADS.filter(lambda loads_S: sum(load > 0 for load in loads_S) > 1))
    return draw(st.integers(1, sum(load > 0 for load in loads_S) - 1)), loads_S


@given(case=quota_and_loads(), offset=OFFSETS)
def test_splits_are_within_bounds(case, offset):
    quota, loads_S = case
    split = split_over_sources(quota, loads_S, offset)
    filled = [load > 0 for load in loads_S]
    assert sum(split.rows_S) == quota
    assert all(0 <= rows <= load for rows, load in zip(split.rows_S, loads_S, strict=True))
    assert [probability > 0 for probability in split.probability_S] == filled
    if quota >= sum(filled):
        assert all((rows >= 1) == full for rows, full in zip(split.rows_S, filled, strict=True))
    else:
        assert max(split.rows_S) == 1
        assert sum(split.probability_S) == quota


@given(loads_S=st.lists(st.integers(50, 500), min_size=1, max_size=5), share=st.floats(0.2, 1))
def test_fixed_splits_are_proportional_where_no_source_needs_help(loads_S, share):
    total = sum(loads_S)
    quota = math.ceil(share * total)
    split = split_over_sources(quota, loads_S, offset=0)
    for rows, load in zip(split.rows_S, loads_S, strict=True):
        assert abs(rows - Fraction(quota * load, total)) < 1


@given(case=few_rows_of_many_sources())
def test_probabilities_are_what_the_offsets_give(case):
    """The drawn set changes only at the ends of stretches; between those the set's measure is exact."""
    quota, loads_S = case
    whole = 2**40
    probability_S = split_over_sources(quota, loads_S, offset=0).probability_S
    ends = [int(sum(probability_S[:s]) * whole) % whole for s in range(len(loads_S))]
    edges = [*sorted({0, *ends}), whole]
    measure_S = [Fraction(0)] * len(loads_S)
    for low, high in pairwise(edges):
        first, last = (split_over_sources(quota, loads_S, offset).rows_S for offset in (low, high - 1))
        assert first == last
        measure_S = [m + rows * Fraction(high - low, whole) for m, rows in zip(measure_S, first, strict=True)]
    assert tuple(measure_S) == probability_S


@given(case=few_rows_of_many_sources())
def test_probabilities_are_proportional_to_loads_up_to_certainty(case):
    quota, loads_S = case
    probability_S = split_over_sources(quota, loads_S, offset=0).probability_S
    factors = [p / load for p, load in zip(probability_S, loads_S, strict=True) if load and p < 1]
    certain = [Fraction(1, load) for p, load in zip(probability_S, loads_S, strict=True) if p == 1]
    slack = Fraction(1, 2**40)
    assert max(factors) - min(factors) <= slack
    assert all(needed <= min(factors) + slack for needed in certain)


@pytest.mark.parametrize(
    "quota, loads_S, offset", [(4, [1, 2], 0), (1, [2, -1], 0), (-1, [1], 0), (1, [2], 2**40), (1, [2], -1)]
)
def test_what_does_not_fit_is_refused(quota, loads_S, offset):
    with pytest.raises(RuntimeError, match="found"):
        split_over_sources(quota, loads_S, offset)
