"""SmartMoE: move experts, never copy them.

Faithful to: "SmartMoE: Efficiently Training Sparsely-Activated Models through Combining Offline and Online
Parallelization" (USENIX ATC 2023), as far as described in public: experts from the largest on go to the least loaded
rank that has room, equally many on each rank; an expert stays where it was if that rank ties; the new placement is
taken only if the busiest rank's rows fall. Masters move, with their optimizer state. There are no replicas.

``slots`` is not used. Simplified: SmartMoE places every 10 iterations by the loads accumulated since; this uses the
loads themselves, which favours it. Where ranks own different numbers of experts, a new placement still has equal
ones. Not checked: its code (GPL) was not read.
"""

import numpy as np

from megatron_lrmoe.recalibration.balance import per_rank
from megatron_lrmoe.replicas.peers.finish import Placed, even_room, rows_at
from megatron_lrmoe.replicas.plan import IntArray


def place(loads_SE: IntArray, owner_E: IntArray, slots: int) -> Placed:
    """The better of a longest-first packing of whole experts and the owners.

    Args:
        loads_SE: (S, E) routed rows.
        owner_E: (E,) rank of each master.
        slots: not used.
    """
    ranks = len(loads_SE)
    load_E = loads_SE.sum(axis=0)
    packed_E = pack(load_E, owner_E, ranks)
    falls = per_rank(load_E, packed_E, ranks).max() < per_rank(load_E, owner_E, ranks).max()
    home_E = packed_E if falls else owner_E
    return Placed(rows_at(home_E, load_E, ranks), home_E)


def pack(load_E: IntArray, owner_E: IntArray, ranks: int) -> IntArray:
    """(E,) rank of each expert, heaviest first to the least loaded rank with room.

    Args:
        load_E: rows of each expert.
        owner_E: rank of each expert before; it wins ties, then the lowest rank.
        ranks: R.
    """
    room_R, load_R = even_room(len(load_E), ranks, 0), [0] * ranks
    home_E = np.empty_like(owner_E)
    for e in np.argsort(-load_E, kind="stable"):
        rank = min((r for r in range(ranks) if room_R[r]), key=lambda r: (load_R[r], r != owner_E[e], r))
        home_E[e] = rank
        room_R[rank] -= 1
        load_R[rank] += int(load_E[e])
    return home_E
