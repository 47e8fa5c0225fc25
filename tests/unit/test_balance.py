"""Quotas that spare busy ranks: by hand, against slow plain references, and as properties."""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe.recalibration.balance import (
    IntArray,
    balanced_quota,
    capped_quota,
    floor_rows,
    joint_limit,
    joint_quotas,
    per_rank,
)
from megatron_lrmoe.recalibration.quota import proportional_quota


def ints(*values: int) -> IntArray:
    return np.array(values, np.int64)


@dataclass(frozen=True)
class Layer:
    """One layer call's loads, proportional quotas and floors, on ranks that own any experts in any order."""

    load_E: IntArray
    even_E: IntArray
    floor_E: IntArray
    owner_E: IntArray
    ranks: int

    def on_ranks(self, value_E: IntArray) -> IntArray:
        return per_rank(value_E, self.owner_E, self.ranks)

    @property
    def allowance(self) -> int:
        return int(self.load_E.sum() - self.even_E.sum())


def layer_of(loads: list[int], owners: list[int], ranks: int, retention: str, share: str, min_rows: int = 0) -> Layer:
    even_E = ints(*proportional_quota(loads, Fraction(retention), min_rows))
    floor_E = floor_rows(ints(*loads), even_E, Fraction(share), min_rows)
    return Layer(ints(*loads), even_E, floor_E, ints(*owners), ranks)


@st.composite
def settings(draw, most=10**6):
    """What a Layer is made of: loads with empty and tiny experts, owners in any order, some ranks without experts."""
    ranks = draw(st.integers(1, 6))
    load = st.one_of(st.just(0), st.integers(0, 5), st.integers(0, most))
    loads = draw(st.lists(load, min_size=1, max_size=16))
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=len(loads), max_size=len(loads)))
    retention, part = draw(st.integers(1, 20)), draw(st.integers(0, 20))
    share = Fraction(min(part, retention), 20)
    return loads, owners, ranks, str(Fraction(retention, 20)), str(share), draw(st.integers(0, 8))


def layers(most=10**6):
    return settings(most).map(lambda given: layer_of(*given))


def limits(layer: Layer):
    return st.lists(
        st.integers(0, int(layer.on_ranks(layer.load_E).max()) + 2), min_size=layer.ranks, max_size=layer.ranks
    ).map(lambda rows: ints(*rows))


# slow and plain


def shared_slowly(layer: Layer, quota_E: IntArray, rows_R: IntArray) -> list[int]:
    """Each rank's rows in proportion to ``quota_E``, exact fractions, largest remainder."""
    result = [0] * len(quota_E)
    for r in range(layer.ranks):
        rest, sharing = Fraction(int(rows_R[r])), [e for e in range(len(quota_E)) if layer.owner_E[e] == r]
        while True:
            rate = rest / (sum(int(quota_E[e]) for e in sharing) or 1)
            short = [e for e in sharing if rate * int(quota_E[e]) < int(layer.floor_E[e])]
            if not short:
                break
            for e in short:
                result[e] = int(layer.floor_E[e])
                rest -= result[e]
                sharing.remove(e)
        share = {e: rate * int(quota_E[e]) for e in sharing}
        for e in sharing:
            result[e] = int(share[e])
        left = int(rest) - sum(int(x) for x in share.values())
        for e in sorted(sharing, key=lambda e: (int(share[e]) - share[e], e))[:left]:
            result[e] += 1
    return result


def dropped_slowly(high_R: IntArray, low_R: IntArray, rows: int) -> IntArray:
    """Take one row after another from the fullest rank that may still give one; of equals from the highest."""
    kept_R = high_R.copy()
    for _ in range(rows):
        giving = [r for r in range(len(kept_R)) if kept_R[r] > low_R[r]]
        if not giving:
            break
        kept_R[max(giving, key=lambda r: (kept_R[r], r))] -= 1
    return kept_R


# floors


@pytest.mark.parametrize(
    "loads, retention, share, min_rows, floors",
    [
        ([4, 2, 3, 0], "0.8", "0.5", 0, [2, 1, 2, 0]),
        ([5, 100], "0.5", "0.5", 0, [2, 50]),  # ceil(2.5) is more than the proportional quota
        ([90], "0.8", "0.7", 0, [63]),
        ([91], "0.8", "0.7", 0, [64]),
        ([4, 5, 6], "0.5", "0.2", 5, [4, 5, 2]),
        ([1, 10], "0.8", "0", 0, [1, 1]),
        ([7, 9], "1", "1", 0, [7, 9]),
        ([10**9], "1", "0.900000000000000001", 0, [900000001]),  # a product past 64 bits
    ],
)
def test_golden_floors(loads, retention, share, min_rows, floors):
    even_E = ints(*proportional_quota(loads, Fraction(retention), min_rows))
    assert floor_rows(ints(*loads), even_E, Fraction(share), min_rows).tolist() == floors


def test_joint_limit_is_101_hundredths_of_the_mean_rounded_up():
    assert joint_limit(ints(100, 0)).tolist() == [51, 51]
    assert joint_limit(ints(200, 0)).tolist() == [101, 101]
    assert joint_limit(ints(4, 2, 3)).tolist() == [4, 4, 4]
    assert joint_limit(ints(0)).tolist() == [0]


# balanced


@pytest.mark.parametrize(
    "loads, owners, ranks, floors, total, quotas",
    [
        ([4, 2, 3], [0, 1, 2], 3, [2, 1, 2], 6, [2, 2, 2]),
        ([4, 2, 3], [0, 1, 2], 3, [2, 1, 2], 7, [3, 2, 2]),
        ([4, 2, 3], [0, 1, 2], 3, [2, 1, 2], 8, [3, 2, 3]),
        ([8, 4, 3, 3], [0, 0, 1, 1], 2, [4, 2, 2, 2], 12, [4, 2, 3, 3]),
        ([8, 4, 3, 3], [0, 0, 1, 1], 2, [4, 2, 2, 2], 13, [5, 2, 3, 3]),
        ([8, 3, 4, 3], [0, 1, 0, 1], 2, [4, 2, 2, 2], 13, [5, 3, 2, 3]),
        ([9, 1], [0, 0], 1, [1, 1], 5, [4, 1]),
        ([0, 0, 6], [0, 1, 1], 3, [0, 0, 3], 4, [0, 0, 4]),
        ([0], [0], 1, [0], 0, [0]),
        ([4, 4], [0, 1], 2, [3, 3], 2, [3, 3]),
        ([4, 4], [0, 1], 2, [3, 3], 99, [4, 4]),
    ],
)
def test_golden_balanced_quotas(loads, owners, ranks, floors, total, quotas):
    assert balanced_quota(ints(*loads), ints(*floors), ints(*owners), ranks, total).tolist() == quotas


def balanced(layer: Layer) -> IntArray:
    return balanced_quota(layer.load_E, layer.floor_E, layer.owner_E, layer.ranks, int(layer.even_E.sum()))


@given(layer=layers())
def test_balanced_keeps_as_many_rows_as_proportional_and_the_floors(layer):
    quota_E = balanced(layer)
    assert quota_E.sum() == layer.even_E.sum()
    assert (quota_E >= layer.floor_E).all() and (quota_E <= layer.load_E).all()
    assert (quota_E[layer.load_E > 0] >= 1).all()
    assert layer.on_ranks(quota_E).max() <= layer.on_ranks(layer.even_E).max()


@given(layer=layers(most=60))
def test_balanced_is_what_one_row_after_another_from_the_fullest_rank_leaves(layer):
    load_R, floor_R = layer.on_ranks(layer.load_E), layer.on_ranks(layer.floor_E)
    kept_R = dropped_slowly(load_R, floor_R, layer.allowance)
    assert balanced(layer).tolist() == shared_slowly(layer, layer.load_E, kept_R)


@given(given=settings(), lower=st.integers(0, 20))
def test_lower_retention_never_gives_a_rank_more_rows(given, lower):
    loads, owners, ranks, retention, share, min_rows = given
    less = max(Fraction(share), Fraction(lower, 20) * Fraction(retention), Fraction(1, 100))
    high = layer_of(loads, owners, ranks, retention, share, min_rows)
    low = layer_of(loads, owners, ranks, str(min(less, Fraction(retention))), share, min_rows)
    assert (low.on_ranks(balanced(low)) <= high.on_ranks(balanced(high))).all()


@given(layer=layers(), data=st.data())
def test_renumbered_ranks_keep_their_rows_but_for_one_left_over(layer, data):
    new_of_R = np.array(data.draw(st.permutations(range(layer.ranks))))
    moved = Layer(layer.load_E, layer.even_E, layer.floor_E, new_of_R[layer.owner_E], layer.ranks)
    before_R, after_R = layer.on_ranks(balanced(layer)), moved.on_ranks(balanced(moved))[new_of_R]
    assert np.abs(before_R - after_R).max() <= 1


def test_a_floor_at_the_retention_leaves_the_proportional_quotas():
    layer = layer_of([5, 7, 100, 1, 0, 33], [0, 0, 1, 1, 2, 2], 3, retention="0.3", share="0.3")
    assert balanced(layer).tolist() == layer.even_E.tolist() == [1, 2, 30, 1, 0, 9]


# a limit


@pytest.mark.parametrize(
    "quotas, floors, owners, limit, capped",
    [
        ([3, 1, 2], [2, 1, 2], [0, 1, 2], [2, 9, 9], [2, 1, 2]),
        ([30, 10, 5], [1, 1, 1], [0, 0, 1], [20, 20], [15, 5, 5]),
        ([30, 10, 5], [25, 1, 1], [0, 0, 1], [28, 20], [25, 3, 5]),
        ([30, 10, 5], [20, 5, 5], [0, 0, 1], [3, 3], [20, 5, 5]),
        ([30, 10, 5], [1, 1, 1], [0, 0, 1], [40, 5], [30, 10, 5]),
    ],
)
def test_golden_capped_quotas(quotas, floors, owners, limit, capped):
    assert capped_quota(ints(*quotas), ints(*floors), ints(*owners), ints(*limit)).tolist() == capped


@given(layer=layers(), data=st.data())
def test_capped_quotas_are_within_limits_or_at_the_floors_and_other_ranks_are_untouched(layer, data):
    limit_R = data.draw(limits(layer))
    for before_E in (layer.even_E, balanced(layer)):
        after_E = capped_quota(before_E, layer.floor_E, layer.owner_E, limit_R)
        assert (after_E >= layer.floor_E).all() and (after_E <= before_E).all()
        before_R, after_R = layer.on_ranks(before_E), layer.on_ranks(after_E)
        reachable_R = np.maximum(limit_R, layer.on_ranks(layer.floor_E))
        assert after_R.tolist() == np.minimum(before_R, reachable_R).tolist()
        untouched_E = (before_R <= limit_R)[layer.owner_E]
        assert (after_E == before_E)[untouched_E].all()
        assert after_E.tolist() == shared_slowly(layer, before_E, after_R)


# joint


@pytest.mark.parametrize(
    "loads, limit, allowance, k, quotas",
    [
        ([4, 2, 3], [4, 4, 4], 3, 0, [4, 2, 3]),
        ([4, 2, 3], [3, 3, 3], 3, 0, [3, 2, 3]),
        ([4, 2, 3], [2, 2, 2], 3, 0, [2, 2, 2]),
        ([10, 6, 5], [4, 4, 4], 4, 0, [6, 6, 5]),
        ([10, 6, 5], [4, 4, 4], 4, 1, [7, 6, 4]),
        ([10, 6, 5], [4, 4, 4], 4, 2, [9, 4, 4]),
        ([10, 6, 5], [4, 4, 4], 4, 3, [9, 4, 4]),
        ([10, 6, 5], [4, 4, 4], 0, 3, [10, 6, 5]),
        ([10, 6, 5], [4, 4, 4], 9, 1, [4, 4, 4]),
        ([10, 6, 5], [4, 4, 4], 99, 0, [4, 4, 4]),
        ([10, 6, 5], [9, 4, 5], 2, 1, [9, 5, 5]),
    ],
)
def test_golden_joint_quotas_of_one_expert_a_rank(loads, limit, allowance, k, quotas):
    owner_E, floor_E = np.arange(3), ints(1, 1, 1)
    assert joint_quotas(ints(*loads), floor_E, owner_E, ints(*limit), allowance, k).tolist() == quotas


def test_ranks_whose_floors_are_above_the_limit_come_last_among_those_brought_to_it():
    load_E, floor_E, limit_R = ints(10, 6), ints(5, 6), ints(5, 5)
    assert joint_quotas(load_E, floor_E, np.arange(2), limit_R, allowance=5, k=1).tolist() == [5, 6]
    assert joint_quotas(ints(10, 7), floor_E, np.arange(2), limit_R, allowance=5, k=1).tolist() == [5, 7]


@given(layer=layers(most=60), data=st.data())
def test_joint_quotas_drop_what_is_above_limits_in_their_order(layer, data):
    limit_R = data.draw(limits(layer))
    load_R, floor_R = layer.on_ranks(layer.load_E), layer.on_ranks(layer.floor_E)
    above = [r for r in range(layer.ranks) if load_R[r] > limit_R[r]]
    k = data.draw(st.integers(0, len(above)))
    quota_E = joint_quotas(layer.load_E, layer.floor_E, layer.owner_E, limit_R, layer.allowance, k)
    assert (quota_E >= layer.floor_E).all() and (quota_E <= layer.load_E).all()

    least_R = np.maximum(np.minimum(load_R, limit_R), floor_R)
    left, kept_R = layer.allowance, load_R.copy()
    rows_to_drop = load_R - least_R
    first = sorted(above, key=lambda r: (floor_R[r] > limit_R[r], rows_to_drop[r], r))[:k]
    for r in first:
        drop = min(left, int(rows_to_drop[r]))
        kept_R[r], left = kept_R[r] - drop, left - drop
        least_R[r] = kept_R[r]
    kept_R = dropped_slowly(kept_R, least_R, left)
    assert quota_E.tolist() == shared_slowly(layer, layer.load_E, kept_R)


@given(layer=layers())
def test_joint_drops_only_what_is_needed_and_is_balanced_where_the_allowance_is_short(layer):
    load_R, floor_R = layer.on_ranks(layer.load_E), layer.on_ranks(layer.floor_E)
    limit_R = joint_limit(load_R)
    quota_E = joint_quotas(layer.load_E, layer.floor_E, layer.owner_E, limit_R, layer.allowance)
    reached_R = np.maximum(np.minimum(load_R, limit_R), floor_R)
    if (load_R - reached_R).sum() <= layer.allowance:
        assert layer.on_ranks(quota_E).tolist() == reached_R.tolist()
    else:
        assert quota_E.tolist() == balanced(layer).tolist()


# what does not fit


def test_inputs_that_do_not_fit_are_refused_with_their_place():
    load_E, floor_E, owner_E = ints(4, 2), ints(1, 3), ints(0, 1)
    with pytest.raises(ValueError, match=r"floor_E\[1\]: found 3, allowed is 0 to 2"):
        balanced_quota(load_E, floor_E, owner_E, 2, 3)
    with pytest.raises(ValueError, match=r"owner_E\[1\]: found 1, allowed are ranks 0 to 0"):
        balanced_quota(load_E, ints(1, 1), owner_E, 1, 3)
    with pytest.raises(ValueError, match="found 2 rows, 1 floors and 2 owners"):
        capped_quota(load_E, ints(1), owner_E, ints(3, 3))
    with pytest.raises(ValueError, match="found k=2 and allowance=1, allowed are 0 to 1"):
        joint_quotas(load_E, ints(1, 1), owner_E, ints(3, 3), 1, k=2)
    with pytest.raises(ValueError, match="allowance=-1"):
        joint_quotas(load_E, ints(1, 1), owner_E, ints(3, 3), -1)


def test_counts_of_a_thousand_million_rows_stay_exact():
    loads, half = [10**9, 10**9 - 1, 7], 5 * 10**8
    layer = layer_of(loads, [0, 0, 1], 2, retention="0.8", share="0.5")
    quota_E = balanced(layer)
    total = sum(proportional_quota(loads, Fraction(4, 5)))
    assert quota_E.sum() == total and quota_E[2] == 7
    assert quota_E[0] >= half and quota_E[0] - quota_E[1] in (0, 1)
    assert quota_E[:2].sum() == total - 7 and quota_E[1] >= ceil(Fraction(loads[1], 2))
