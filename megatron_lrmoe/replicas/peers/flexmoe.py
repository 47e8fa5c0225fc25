"""FlexMoE: in rounds, the hottest expert expands and the coldest shrinks, while that helps.

Faithful to: the Expand and Shrink of "FlexMoE: Scaling Large-scale Sparse Pre-trained Model Training via Dynamic
Device Placement" (SIGMOD 2023), as re-implemented in LAER-MoE's repository (PKU-DAIR/Hetu-Galvatron, solver.py): in
each of at most 10 rounds the expert with the most load per copy gets a copy on each node, at the expense of the
expert with the least load per copy where no slot is free; a round is kept if the busiest rank's rows or max/min
falls, else the search ends. Rows are split equally over copies.

``slots`` is honoured. Simplified: masters stay with their owners, where FlexMoE also migrates experts; slots start
empty, where the re-implementation starts from equally many copies of each expert; the new copy goes to the node's
rank with the fewest rows, and no third expert is moved to make room on a rank that has one already. FlexMoE's loads
are of earlier steps; these are the loads themselves, which favours it. Not checked: the original code and cost model,
which were not found; the re-implementation's cost is the busiest rank's rows.
"""

from dataclasses import dataclass

import numpy as np

from megatron_lrmoe.replicas.peers.finish import Placed, check_option, even_split, rows_at
from megatron_lrmoe.replicas.plan import IntArray


@dataclass(frozen=True, kw_only=True)
class FlexMoeOptions:
    """Bounds of the search.

    Raises:
        ValueError: a value that is not allowed.
    """

    rounds: int = 10
    """Most rounds of expanding and shrinking."""
    node_ranks: int = 8
    """Neighbouring ranks that make up a node; each node gets one copy a round."""

    def __post_init__(self) -> None:
        check_option("rounds", self.rounds, "a whole number >= 0", self.rounds >= 0)
        check_option("node_ranks", self.node_ranks, "a whole number >= 1", self.node_ranks >= 1)


DEFAULTS = FlexMoeOptions()


def place(loads_SE: IntArray, owner_E: IntArray, slots: int, options: FlexMoeOptions = DEFAULTS) -> Placed:
    """Copies of hot experts, as far as rounds go.

    Args:
        loads_SE: (S, E) routed rows.
        owner_E: (E,) rank of each master.
        slots: replicas that a rank has room for.
        options: bounds of the search.
    """
    ranks = len(loads_SE)
    load_E = loads_SE.sum(axis=0)
    copies_ER = rows_at(owner_E, np.ones_like(load_E), ranks)
    rows_ER = even_split(load_E, copies_ER)
    for _ in range(options.rounds):
        new_ER = _round(load_E, copies_ER, rows_ER.sum(axis=0), owner_E, slots, options.node_ranks)
        new_rows_ER = even_split(load_E, new_ER)
        if not _better(new_rows_ER.sum(axis=0), rows_ER.sum(axis=0)):
            break
        copies_ER, rows_ER = new_ER, new_rows_ER
    return Placed(rows_ER, owner_E)


def _round(
    load_E: IntArray, copies_ER: IntArray, rows_R: IntArray, owner_E: IntArray, slots: int, node_ranks: int
) -> IntArray:
    """(E, R) copies after the hottest expert got one more on each node that can make room for it."""
    copies_ER = copies_ER.copy()
    each_E = load_E / copies_ER.sum(axis=1)
    hottest = int(each_E.argmax())
    for start in range(0, len(rows_R), node_ranks):
        ranks = [r for r in range(start, min(start + node_ranks, len(rows_R))) if not copies_ER[hottest, r]]
        replicas_R = copies_ER.sum(axis=0) - np.bincount(owner_E, minlength=len(rows_R))
        free = [r for r in ranks if replicas_R[r] < slots]
        if free:
            copies_ER[hottest, min(free, key=rows_R.__getitem__)] = 1
            continue
        cold = [(each_E[e], rows_R[r], e, r) for r in ranks for e in np.flatnonzero(copies_ER[:, r]) if owner_E[e] != r]
        if cold:
            _, _, coldest, rank = min(cold)
            copies_ER[coldest, rank] = 0
            copies_ER[hottest, rank] = 1
    return copies_ER


def _better(new_R: IntArray, old_R: IntArray) -> bool:
    """Whether the maximum or max/min over the ranks falls."""
    new_max, new_min, old_max, old_min = (int(v) for v in (new_R.max(), new_R.min(), old_R.max(), old_R.min()))
    return new_max < old_max or new_max * old_min < old_max * new_min
