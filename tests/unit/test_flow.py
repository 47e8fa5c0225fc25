"""Rows shifted between existing instances: by hand, and against the largest flow there is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from megatron_lrmoe.replicas.flow import route


@pytest.mark.parametrize(
    ("amount", "most", "expert", "rank", "balance", "after"),
    [
        # One expert on two ranks: as much as is too much, as there is room, or as the taking instance may have.
        ([9, 1], [10, 10], [0, 0], [0, 1], [-3, 5], [6, 4]),
        ([9, 1], [10, 10], [0, 0], [0, 1], [-3, 2], [7, 3]),
        ([9, 1], [10, 2], [0, 0], [0, 1], [-3, 5], [8, 2]),
        # Only what the giving instance has.
        ([1, 1], [9, 9], [0, 0], [0, 1], [-3, 5], [0, 2]),
        # Instances of different experts exchange nothing.
        ([9, 1], [10, 10], [0, 1], [0, 1], [-3, 5], [9, 1]),
        # A chain: expert 0 from rank 0 to 1, expert 1 from rank 1 to 2, whose sum is what changes.
        ([9, 0, 4, 0], [9, 9, 9, 9], [0, 0, 1, 1], [0, 1, 1, 2], [-3, 0, 3], [6, 3, 1, 3]),
        # Nothing to do.
        ([9, 1], [10, 10], [0, 0], [0, 1], [0, 5], [9, 1]),
    ],
)
def test_by_hand(amount, most, expert, rank, balance, after):
    assert route(amount, most, expert, rank, balance) == after


def test_the_shortest_chain_is_taken():
    """Expert 0 lies on ranks 0, 1 and 3, expert 1 on 1 and 2: ranks 2 and 3 have room, and 3 is one step away."""
    after = route([9, 0, 0, 4, 0], [9] * 5, [0, 0, 0, 1, 1], [0, 1, 3, 1, 2], [-3, 0, 3, 3])
    assert after == [6, 0, 3, 4, 0]


def test_earlier_shifts_are_taken_back_where_that_helps():
    """Rank 0 comes first and gives to rank 2, the only one that rank 1 can give to; so rank 0 turns to rank 3."""
    expert, rank = [0, 0, 1, 1, 2, 2], [0, 2, 0, 3, 1, 2]
    after = route([8, 0, 8, 0, 8, 0], [8] * 6, expert, rank, [-4, -4, 4, 4])
    totals = [sum(rows for rows, r in zip(after, rank, strict=True) if r == n) for n in range(4)]
    assert totals == [12, 4, 4, 4]


@st.composite
def networks(draw: st.DrawFn):
    """Amounts, most, experts, ranks and balances; an expert has at most one instance on a rank."""
    ranks = draw(st.integers(1, 5))
    places = [(e, r) for e in range(draw(st.integers(1, 5))) for r in range(ranks)]
    chosen = sorted(draw(st.lists(st.sampled_from(places), unique=True, min_size=1, max_size=12)))
    amount = draw(st.lists(st.integers(0, 20), min_size=len(chosen), max_size=len(chosen)))
    room = draw(st.lists(st.integers(0, 20), min_size=len(chosen), max_size=len(chosen)))
    balance = draw(st.lists(st.integers(-15, 15), min_size=ranks, max_size=ranks))
    most = [rows + more for rows, more in zip(amount, room, strict=True)]
    return amount, most, [e for e, _ in chosen], [r for _, r in chosen], balance


def least_excess(amount, most, expert, rank, balance) -> int:
    """Smallest sum of what ranks have too much, by linear programming: shifts change rank sums, not expert sums."""
    instances, ranks = len(amount), len(balance)
    limit_R = np.array(balance) + np.bincount(rank, amount, ranks)
    # Variables: rows of each instance, then the excess of each rank. Ranks below their limits stay there.
    on_rank = np.array([[rank[i] == r for i in range(instances)] for r in range(ranks)], float)
    of_expert = np.array([[expert[i] == e for i in range(instances)] for e in range(max(expert) + 1)], float)
    solved = linprog(
        np.concatenate([np.zeros(instances), np.ones(ranks)]),
        A_ub=np.hstack([on_rank, -np.eye(ranks)]),
        b_ub=limit_R,
        A_eq=np.hstack([of_expert, np.zeros((len(of_expert), ranks))]),
        b_eq=of_expert @ amount,
        bounds=[*((0, rows) for rows in most), *((0, max(0, -balance[r])) for r in range(ranks))],
    )
    return round(solved.fun)


@given(network=networks())
def test_sums_of_experts_stay_and_as_much_is_shifted_as_a_largest_flow_does(network):
    amount, most, expert, rank, balance = network
    before = [list(part) for part in network]
    after = route(*network)
    assert [list(part) for part in network] == before
    assert all(0 <= rows <= limit for rows, limit in zip(after, most, strict=True))
    assert np.bincount(expert, after).tolist() == np.bincount(expert, amount).tolist()
    left_R = np.array(balance) + np.bincount(rank, amount, len(balance)) - np.bincount(rank, after, len(balance))
    assert (left_R >= np.minimum(balance, 0)).all()
    assert -left_R[left_R < 0].sum() == least_excess(*network)
