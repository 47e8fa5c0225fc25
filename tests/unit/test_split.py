"""Exact splits over sources and instances: by hand, and as properties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe.replicas.plan import IntArray
from megatron_lrmoe.replicas.split import instances_of, share_quota, split_sources
from tests.loads import small_loads


@st.composite
def splits(draw: st.DrawFn) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(loads_SE, expert_I, rank_I, rows_I) with up to all ranks holding an expert."""
    loads_SE, owner_E = draw(small_loads())
    ranks, load_E = len(loads_SE), loads_SE.sum(axis=0)
    rows_ER = np.zeros((len(owner_E), ranks), np.int64)
    for e, load in enumerate(load_E.tolist()):
        cuts = sorted(draw(st.lists(st.integers(0, load), min_size=ranks - 1, max_size=ranks - 1)))
        rows_ER[e] = np.diff([0, *cuts, load]) if draw(st.booleans()) else load * (np.arange(ranks) == owner_E[e])
    return loads_SE, *instances_of(rows_ER, owner_E)


class TestSources:
    @pytest.mark.parametrize(
        ("loads_SE", "rank_I", "rows_I", "rows_SI"),
        [
            # All of rank 1's rows stay there; of rank 0's the rest goes.
            ([[6], [3]], [0, 1], [4, 5], [[4, 2], [0, 3]]),
            # Rank 1's instance has less room than rank 1 has rows.
            ([[2], [7]], [0, 1], [4, 5], [[2, 0], [2, 5]]),
            # Source 2 has no instance: it fills what is left, in rising order.
            ([[1], [1], [6]], [0, 1], [4, 4], [[1, 0], [0, 1], [3, 3]]),
            ([[0], [5], [4]], [0, 2], [5, 4], [[0, 0], [5, 0], [0, 4]]),
            ([[3], [4], [5]], [0, 1], [2, 10], [[2, 1], [0, 4], [0, 5]]),
            # A master that has given all its rows away.
            ([[5], [2]], [0, 1], [0, 7], [[0, 5], [0, 2]]),
        ],
    )
    def test_by_hand(self, loads_SE, rank_I, rows_I, rows_SI):
        expert_I = np.zeros(len(rank_I), np.int64)
        found = split_sources(np.array(loads_SE), expert_I, np.array(rank_I), np.array(rows_I))
        assert found.tolist() == rows_SI

    @given(split=splits())
    def test_both_sums_are_exact_and_rows_stay_at_home_where_they_can(self, split):
        loads_SE, expert_I, rank_I, rows_I = split
        rows_SI = split_sources(*split)
        assert rows_SI.min(initial=0) >= 0 and rows_SI.sum(axis=0).tolist() == rows_I.tolist()
        for e in range(loads_SE.shape[1]):
            assert rows_SI[:, expert_I == e].sum(axis=1).tolist() == loads_SE[:, e].tolist()
        for i, (e, r) in enumerate(zip(expert_I, rank_I, strict=True)):
            assert rows_SI[r, i] == min(loads_SE[r, e], rows_I[i])

    @given(split=splits())
    def test_few_pairs_exchange_anything(self, split):
        """An expert with i instances and s sources has at most s + i pairs that do, and each rank's own."""
        loads_SE, expert_I, rank_I, _ = split
        rows_SI = split_sources(*split)
        for e in range(loads_SE.shape[1]):
            of_expert = np.flatnonzero(expert_I == e)
            away_Si = rows_SI[:, of_expert] > 0
            away_Si[rank_I[of_expert], np.arange(len(of_expert))] = False
            assert away_Si.sum() < max(1, len(loads_SE) + len(of_expert))


class TestQuotas:
    @pytest.mark.parametrize(
        ("quota", "rows_I", "kept_I"),
        [
            (5, [6, 4], [3, 2]),
            (5, [4, 4], [3, 2]),  # equal remainders: the first
            (5, [3, 7], [2, 3]),  # 1.5 and 3.5
            (7, [5, 3, 2], [4, 2, 1]),  # 3.5, 2.1 and 1.4
            (4, [1, 1, 9], [1, 0, 3]),  # 0.36, 0.36 and 3.27
            (2, [1, 1, 1], [1, 1, 0]),
            (0, [4, 4], [0, 0]),
            (8, [4, 4], [4, 4]),
            (0, [0], [0]),
        ],
    )
    def test_by_hand(self, quota, rows_I, kept_I):
        expert_I = np.zeros(len(rows_I), np.int64)
        assert share_quota(np.array([quota]), expert_I, np.array(rows_I)).tolist() == kept_I

    def test_experts_are_apart(self):
        expert_I, rows_I = np.array([0, 1, 2, 0, 2]), np.array([6, 5, 0, 4, 9])
        assert share_quota(np.array([5, 3, 4]), expert_I, rows_I).tolist() == [3, 3, 0, 2, 4]

    @given(split=splits(), data=st.data())
    def test_sums_are_exact_and_each_is_within_one_of_its_share(self, split, data):
        loads_SE, expert_I, _, rows_I = split
        load_E = loads_SE.sum(axis=0)
        quota_E = np.array([data.draw(st.integers(0, load)) for load in load_E.tolist()], np.int64)
        kept_I = share_quota(quota_E, expert_I, rows_I)
        sum_E = np.zeros_like(load_E)
        np.add.at(sum_E, expert_I, kept_I)
        assert sum_E.tolist() == quota_E.tolist()
        assert (kept_I >= 0).all() and (kept_I <= rows_I).all()
        assert (np.abs(kept_I * load_E[expert_I] - quota_E[expert_I] * rows_I) < np.maximum(load_E, 1)[expert_I]).all()

    def test_a_thousand_million_rows_are_exact(self):
        rows_I = np.array([10**9 - 1, 10**9 + 1])
        kept_I = share_quota(np.array([2 * 10**9 - 1]), np.zeros(2, np.int64), rows_I)
        assert kept_I.tolist() == [10**9 - 1, 10**9]


def test_instances_are_masters_then_replicas_wherever_rows_are():
    rows_ER = np.array([[0, 3, 1], [2, 0, 0], [0, 0, 0]])
    expert_I, rank_I, rows_I = instances_of(rows_ER, np.array([0, 0, 2]))
    assert expert_I.tolist() == [0, 1, 2, 0, 0]
    assert rank_I.tolist() == [0, 0, 2, 1, 2]
    assert rows_I.tolist() == [0, 2, 0, 3, 1]
