"""SYMI: replicas in proportion to popularity, in a fixed number of slots.

Faithful to: "Symi: Efficient Mixture-of-Experts Training via Model and Optimizer State Decoupling"
(arXiv 2504.19925). Copies of an expert: its share of the slots rounded down, at least one; then, while there are
too many, one less where the count is furthest above the share, and, while there are too few, one more where it is
furthest below. Copies lie contiguously in expert order, and an expert's rows are split equally over its copies.

Masters move: SYMI cuts the optimizer state over all ranks, so no rank owns an expert, and weights go wherever the
next step wants them. A master here is a copy at the expert's owner, or else the first copy. Slots are honoured as
E + R * slots instances in all, equally many on each rank; a replica is any copy but the master, so a rank with few
masters can have more replicas than ``slots``.

Simplified: SYMI places once an iteration, by the loads of the one before; this uses the loads themselves, which
favours it. It drops rows above an expert's capacity; this drops none. Copies of an expert on one rank are merged.
Not checked: no code was found; the rounding is from third-party accounts of the paper's Algorithm 1, and its
ties are ours (lowest expert).
"""

import numpy as np

from megatron_lrmoe.replicas.peers.finish import Placed, even_room, even_split, home_among
from megatron_lrmoe.replicas.plan import IntArray


def place(loads_SE: IntArray, owner_E: IntArray, slots: int) -> Placed:
    """Popular experts get more of the slots.

    Args:
        loads_SE: (S, E) routed rows.
        owner_E: (E,) rank of each master.
        slots: replicas for each rank; the layer has E + R * slots instances.
    """
    ranks, experts = loads_SE.shape
    load_E = loads_SE.sum(axis=0)
    room_R = even_room(experts, ranks, slots)
    copy_expert = np.repeat(np.arange(experts), popular_counts(load_E, sum(room_R)))
    copies_ER = np.zeros((experts, ranks), np.int64)
    np.add.at(copies_ER, (copy_expert, np.repeat(np.arange(ranks), room_R)), 1)
    return Placed(even_split(load_E, copies_ER), home_among(copies_ER, owner_E))


def popular_counts(load_E: IntArray, total: int) -> IntArray:
    """(E,) copies of each expert: in proportion to its load, at least one, ``total`` in all.

    Args:
        load_E: rows of each expert; without any row, all experts are equally popular.
        total: copies in all, E or more.
    """
    popularity_E = load_E if load_E.any() else np.ones_like(load_E)
    rows = int(popularity_E.sum())
    share_E = popularity_E * total
    count_E = np.maximum(share_E // rows, 1)
    while count_E.sum() > total:
        over_E = np.where(count_E > 1, count_E * rows - share_E, np.iinfo(np.int64).min)
        count_E[over_E.argmax()] -= 1
    while count_E.sum() < total:
        count_E[(count_E * rows - share_E).argmin()] += 1
    return count_E
