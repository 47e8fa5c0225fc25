"""Exact integer splits: an expert's rows over (source, instance), and its quota over instances."""

import numpy as np
from numpy.typing import NDArray

from megatron_lrmoe.replicas.plan import IntArray


def split_sources(loads_SE: IntArray, expert_I: IntArray, rank_I: IntArray, rows_I: IntArray) -> IntArray:
    """(S, I) rows that each source sends to each instance; both sums are exact.

    A source's rows stay on its own rank as far as an instance there has room. What is left goes from sources to
    instances in rising order of both, so few (source, instance) pairs exchange anything.

    Args:
        loads_SE: routed rows of each source for each expert.
        expert_I: expert of each instance.
        rank_I: rank of each instance.
        rows_I: rows of each instance; those of an expert sum to its load.
    """
    rows_SI = np.zeros((len(loads_SE), len(expert_I)), np.int64)
    copies_E = np.bincount(expert_I, minlength=loads_SE.shape[1])
    alone = np.flatnonzero(copies_E[expert_I] == 1)
    rows_SI[:, alone] = loads_SE[:, expert_I[alone]]
    for e in np.flatnonzero(copies_E > 1):
        instances = np.flatnonzero(expert_I == e)
        left_S, room = loads_SE[:, e].copy(), rows_I[instances].copy()
        at_home = np.minimum(left_S[rank_I[instances]], room)
        rows_SI[rank_I[instances], instances] = at_home
        left_S[rank_I[instances]] -= at_home
        room -= at_home
        rows_SI[:, instances] += _corner_to_corner(left_S, room)
    return rows_SI


def _corner_to_corner(supply_S: IntArray, room_i: IntArray) -> IntArray:
    """(S, i) overlaps of the intervals that supplies and rooms cut from one line; both sum to the same."""
    ends_S, ends_i = np.cumsum(supply_S), np.cumsum(room_i)
    low = np.maximum((ends_S - supply_S)[:, None], (ends_i - room_i)[None, :])
    high = np.minimum(ends_S[:, None], ends_i[None, :])
    return np.maximum(high - low, 0)


def share_quota(quota_E: IntArray, expert_I: IntArray, rows_I: IntArray) -> IntArray:
    """(I,) each expert's quota in proportion to its instances' rows; remainders to the largest, then lowest.

    Args:
        quota_E: rows of each expert to keep, at most its load.
        expert_I: expert of each instance.
        rows_I: forward rows of each instance.
    """
    load_E = np.zeros(len(quota_E), np.int64)
    np.add.at(load_E, expert_I, rows_I)
    kept_I, rest_I = np.divmod(quota_E[expert_I] * rows_I, np.maximum(load_E, 1)[expert_I])
    short_E = quota_E.copy()
    np.subtract.at(short_E, expert_I, kept_I)
    order = np.lexsort((np.arange(len(expert_I)), -rest_I, expert_I))
    first_E = np.searchsorted(expert_I[order], np.arange(len(quota_E)))
    place = np.arange(len(order)) - first_E[expert_I[order]]
    kept_I[order[place < short_E[expert_I[order]]]] += 1
    return kept_I


def instances_of(rows_ER: IntArray, home_E: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Expert, rank and rows of each instance: masters at home, then replicas, wherever rows are.

    Args:
        rows_ER: (E, R) forward rows of each expert on each rank.
        home_E: rank of each master, an instance even without rows.
    """
    experts = np.arange(len(home_E))
    away: NDArray[np.bool_] = rows_ER > 0
    away[experts, home_E] = False
    expert_n, rank_n = np.nonzero(away)
    expert_I, rank_I = np.concatenate([experts, expert_n]), np.concatenate([home_E, rank_n])
    return expert_I, rank_I, rows_ER[expert_I, rank_I]
