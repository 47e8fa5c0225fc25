"""UltraEP's solver, compiled: the same replicas and rows as ``ultraep.solve``, in microseconds.

Read ``ultraep`` first; this says only what differs. Integers throughout. All memory is taken before the first
attempt. Numba compiles at the first call, a few seconds, and keeps the result on disk. Source: as ``ultraep``.
"""

import numpy as np
from numba import njit

from megatron_lrmoe.replicas.peers.ultraep import Replicas
from megatron_lrmoe.replicas.plan import IntArray

# As in ultraep, but not imported: what Numba keeps on disk is renewed when this file changes, and only then.
_FAST_ATTEMPTS = 3
_SECTIONS = 5
_FAST = -1


def solve(
    load_E: IntArray,
    owner_E: IntArray,
    ranks: int,
    slots: int,
    lowest: int,
    fast: int,
    min_rows: int,
    master_rows: int,
) -> Replicas:
    """Replicas and their rows; arguments and result as ``ultraep.solve``. For timing, call ``solve_kernel``."""
    return Replicas(*solve_kernel(load_E, owner_E, ranks, slots, lowest, fast, min_rows, master_rows))


@njit(cache=True)
def solve_kernel(load_E, owner_E, ranks, slots, lowest, fast, min_rows, master_rows):
    """Tuple of expert_n, rank_n and rows_n, all int64; arguments as ``ultraep.solve``, arrays contiguous int64."""
    rows_R = np.zeros(ranks, np.int64)
    for e in range(len(load_E)):
        rows_R[owner_E[e]] += load_E[e]
    sources = np.empty(ranks, np.int64)
    order = np.empty(len(load_E), np.int64)
    start_R = np.empty(ranks + 1, np.int64)
    _sort(load_E, owner_E, rows_R, sources, order, start_R)
    slack_R = np.empty(ranks, np.int64)
    free_R = np.empty(ranks, np.int64)
    expert_n = np.empty(ranks * slots, np.int64)
    rank_n = np.empty(ranks * slots, np.int64)
    rows_n = np.empty(ranks * slots, np.int64)
    state = (load_E, rows_R, sources, order, start_R, slots, master_rows, slack_R, free_R, expert_n, rank_n, rows_n)
    count = 0
    if slots > 0 and ranks > 1:
        count = _find(state, lowest, fast, min_rows)
    return expert_n[:count], rank_n[:count], rows_n[:count]


@njit(cache=True)
def _sort(load_E, owner_E, rows_R, sources, order, start_R):
    """Ranks, fullest first, and each rank's experts, largest first, from ``start_R`` on; by insertion."""
    for rank in range(len(rows_R)):
        place = rank
        while place > 0 and rows_R[sources[place - 1]] < rows_R[rank]:
            sources[place] = sources[place - 1]
            place -= 1
        sources[place] = rank
    start_R[:] = 0
    for e in range(len(load_E)):
        start_R[owner_E[e] + 1] += 1
    for rank in range(len(rows_R)):
        start_R[rank + 1] += start_R[rank]
    filled_R = start_R[:-1].copy()
    for e in range(len(load_E)):
        place = filled_R[owner_E[e]]
        filled_R[owner_E[e]] += 1
        while place > start_R[owner_E[e]] and load_E[order[place - 1]] < load_E[e]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = e


@njit(cache=True)
def _find(state, lowest, fast, min_rows):
    """Number of replicas, which are left in the state's arrays."""
    highest = max(lowest, state[1].max())
    step = max(1, (highest + 99) // 100)
    for _ in range(_FAST_ATTEMPTS):
        count = _attempt(state, fast, _FAST)
        if count >= 0:
            return count
        fast = min(highest, fast + step)
    count = _attempt(state, lowest, min_rows)
    if count < 0:
        count = _attempt(state, _search(state, min(lowest + 1, highest), highest, min_rows), min_rows)
    return max(count, 0)


@njit(cache=True)
def _search(state, low, high, min_rows):
    """A threshold in [low, high] that works; ``high`` does."""
    while low < high:
        width = high - low
        if width < _SECTIONS:
            for threshold in range(low, high):
                if _attempt(state, threshold, min_rows) >= 0:
                    return threshold
            return high
        below = low - 1
        for n in range(1, _SECTIONS):
            probe = low + width * n // _SECTIONS
            if _attempt(state, probe, min_rows) >= 0:
                high = probe
                break
            below = probe
        low = below + 1
    return low


@njit(cache=True)
def _attempt(state, threshold, min_rows):
    """Number of replicas with which no rank is above the threshold, or -1; ``min_rows`` may be ``_FAST``."""
    load_E, rows_R, sources, order, start_R, slots, master_rows, slack_R, free_R, expert_n, rank_n, rows_n = state
    for rank in range(len(rows_R)):
        slack_R[rank] = max(0, threshold - rows_R[rank])
        free_R[rank] = slots
    count = 0
    for source in sources:
        need = rows_R[source] - threshold
        if need <= 0:
            break
        for place in range(start_R[source], start_R[source + 1]):
            e = order[place]
            left = load_E[e] - master_rows
            while need > 0 and left > 0:
                target, able = _most_slack(slack_R, free_R)
                if able == 0:
                    return -1
                take = min(need, slack_R[target], left)
                if take < ((need + able - 1) // able if min_rows == _FAST else min_rows):
                    break
                expert_n[count], rank_n[count], rows_n[count] = e, target, take
                count += 1
                slack_R[target] -= take
                free_R[target] -= 1
                need -= take
                left -= take
            if need <= 0:
                break
        if need > 0:
            return -1
    return count


@njit(cache=True)
def _most_slack(slack_R, free_R):
    """The rank with the most slack among those with some and a free slot, and how many those are."""
    target, able, most = -1, 0, 0
    for rank in range(len(slack_R)):
        if slack_R[rank] > 0 and free_R[rank] > 0:
            able += 1
            if slack_R[rank] > most:
                most, target = slack_R[rank], rank
    return target, able
