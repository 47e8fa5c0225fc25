"""ECHO: one-shot greedy matching of what spills over with what is free.

Faithful to: the "one_shot_greedy" planner of NVIDIA's ECHO (Megatron-LM pull request 2368). On each rank, experts
from the smallest on stay home until the mean, rounded down, is full; what exceeds it spills. Spills and free rooms
are sorted, largest first, and laid end to end on one line each; where a spill overlaps a room, the overlap moves
there. A rank keeps its ``slots`` largest overlaps; all other rows stay home. Masters do not move.

``slots`` is honoured. Simplified: no reclaiming of small replicas (its threshold is 0 unless set). ECHO's default
planner is another one, an approximate bin packing for one slot, which is not written here. Its split over sources
is proportional; ours keeps rows local.
Not checked: order of equal spills, rooms and overlaps (here lowest expert and rank first).
"""

import numpy as np

from megatron_lrmoe.recalibration.balance import per_rank
from megatron_lrmoe.replicas.peers.finish import Placed, rows_at
from megatron_lrmoe.replicas.plan import IntArray


def place(loads_SE: IntArray, owner_E: IntArray, slots: int) -> Placed:
    """Spills move to free rooms, as far as slots allow.

    Args:
        loads_SE: (S, E) routed rows.
        owner_E: (E,) rank of each master.
        slots: replicas that a rank has room for.
    """
    ranks = len(loads_SE)
    load_E = loads_SE.sum(axis=0)
    mean = int(load_E.sum()) // ranks
    spill_E = spills(load_E, owner_E, mean, ranks)
    free_R = np.maximum(mean - per_rank(load_E, owner_E, ranks), 0)
    by_spill, by_free = np.argsort(-spill_E, kind="stable"), np.argsort(-free_R, kind="stable")
    moved_ER = np.zeros((len(load_E), ranks), np.int64)
    moved_ER[np.ix_(by_spill, by_free)] = _largest(_overlaps(spill_E[by_spill], free_R[by_free]), slots)
    rows_ER = rows_at(owner_E, load_E - moved_ER.sum(axis=1), ranks)
    return Placed(rows_ER + moved_ER, owner_E)


def spills(load_E: IntArray, owner_E: IntArray, mean: int, ranks: int) -> IntArray:
    """(E,) rows of each expert above ``mean`` when the experts of a rank are stacked from the smallest on.

    Args:
        load_E: rows of each expert.
        owner_E: rank of each expert.
        mean: rows that a rank keeps.
        ranks: R.
    """
    spill_E = np.zeros_like(load_E)
    for rank in range(ranks):
        experts = np.flatnonzero(owner_E == rank)
        experts = experts[np.argsort(load_E[experts], kind="stable")]
        above_e = np.maximum(np.cumsum(load_E[experts]) - mean, 0)
        spill_E[experts] = np.diff(above_e, prepend=0)
    return spill_E


def _overlaps(spill_n: IntArray, free_R: IntArray) -> IntArray:
    """(n, R) rows common to the intervals that spills and rooms take on one line each."""
    spill_end, free_end = np.cumsum(spill_n)[:, None], np.cumsum(free_R)[None, :]
    start = np.maximum(spill_end - spill_n[:, None], free_end - free_R)
    return np.maximum(np.minimum(spill_end, free_end) - start, 0)


def _largest(overlap_nR: IntArray, slots: int) -> IntArray:
    """The ``slots`` largest values of each column, and zero elsewhere."""
    kept = np.argsort(-overlap_nR, axis=0, kind="stable")[:slots]
    kept_nR = np.zeros_like(overlap_nR)
    np.put_along_axis(kept_nR, kept, np.take_along_axis(overlap_nR, kept, axis=0), axis=0)
    return kept_nR
