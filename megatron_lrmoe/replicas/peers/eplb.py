"""EPLB: replicate the experts with the most load per copy, then pack equally many copies onto each rank.

Faithful to: DeepSeek's EPLB (repository deepseek-ai/EPLB), both modes. Replicate: each redundant slot goes to the
expert with the most load per copy. Pack: copies, heaviest first, go to the lightest rank with room, equally many to
each. All ties go to the lowest index, a redundant copy after all first ones. The hierarchical mode first packs groups
of experts onto nodes and then does both steps within each node; as in the repository, it applies where the nodes
divide the groups, and with one node it is the global mode.

Masters move: a master here is a copy at the expert's owner, or else on the lowest rank with one. Every slot is used.
Slots are honoured as E + R * slots instances in all, equally many on each rank; a replica is any copy but the
master, so a rank with few masters can have more replicas than ``slots``. An expert's rows are split equally over its
copies; copies on one rank are merged, and a copy without rows is no replica.

Simplified: EPLB places now and then, by a forecast; this uses the loads themselves, which favours it. It needs the
ranks to divide the slots; here the first ranks may have room for one more. Sums of parts of a row are exact, where
the repository's are fp32.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from megatron_lrmoe.replicas.peers.finish import (
    Placed,
    check_option,
    even_room,
    even_split,
    heaviest_copies,
    home_among,
)
from megatron_lrmoe.replicas.plan import IntArray


@dataclass(frozen=True, kw_only=True)
class EplbOptions:
    """Topology, for the hierarchical mode.

    Raises:
        ValueError: a value that is not allowed.
    """

    groups: int = 1
    """Groups of neighbouring experts; they must divide the experts."""
    nodes: int = 1
    """Nodes of neighbouring ranks; they must divide the ranks."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_option(name, value, "a whole number >= 1", value >= 1)


DEFAULTS = EplbOptions()


def place(loads_SE: IntArray, owner_E: IntArray, slots: int, options: EplbOptions = DEFAULTS) -> Placed:
    """Equally many copies on each rank, the hottest experts' ones in smaller parts.

    Args:
        loads_SE: (S, E) routed rows.
        owner_E: (E,) rank of each master.
        slots: replicas for each rank; the layer has E + R * slots instances.
        options: topology.
    """
    ranks, experts = loads_SE.shape
    load_E = loads_SE.sum(axis=0)
    copies_ER = place_copies(load_E.tolist(), even_room(experts, ranks, slots), options)
    return Placed(even_split(load_E, copies_ER), home_among(copies_ER, owner_E))


def place_copies(load_E: list[int], room_R: list[int], options: EplbOptions = DEFAULTS) -> IntArray:
    """(E, R) copies of each expert on each rank.

    Args:
        load_E: rows of each expert.
        room_R: copies that each rank holds; E or more in all, and equally many in each node.
        options: topology.

    Raises:
        ValueError: groups that do not divide the experts, or nodes that do not divide the ranks.
    """
    experts, ranks = len(load_E), len(room_R)
    check_option("groups", options.groups, f"a divisor of {experts} experts", experts % options.groups == 0)
    check_option("nodes", options.nodes, f"a divisor of {ranks} ranks", ranks % options.nodes == 0)
    hierarchical = options.groups % options.nodes == 0
    groups, nodes = (options.groups, options.nodes) if hierarchical else (1, 1)
    size, width = experts // groups, ranks // nodes
    weights = [(sum(load_E[g * size : (g + 1) * size]), g) for g in range(groups)]
    node_of_group = pack(sorted(weights, key=lambda weight: -weight[0]), [groups // nodes] * nodes)
    copies_ER = np.zeros((experts, ranks), np.int64)
    for node in range(nodes):
        members = [e for group, n in node_of_group if n == node for e in range(group * size, (group + 1) * size)]
        room = room_R[node * width : (node + 1) * width]
        member_loads = [load_E[e] for e in members]
        copies = heaviest_copies(member_loads, replicate(member_loads, sum(room)))
        for member, rank in pack(copies, room):
            copies_ER[members[member], node * width + rank] += 1
    return copies_ER


def replicate(load_E: list[int], total: int) -> list[int]:
    """Expert of each copy: each expert once, then, one after the other, where a copy has the most load.

    Args:
        load_E: rows of each expert.
        total: copies in all, E or more.
    """
    expert_n, count_E = list(range(len(load_E))), [1] * len(load_E)
    for _ in range(total - len(load_E)):
        hottest = max(range(len(load_E)), key=lambda e: (Fraction(load_E[e], count_E[e]), -e))
        expert_n.append(hottest)
        count_E[hottest] += 1
    return expert_n


def pack(items: list[tuple[int, int]], room: list[int]) -> list[tuple[int, int]]:
    """(item, pack) of each item: to the lightest pack with room, ties to the lowest.

    Args:
        items: (weight, item), heaviest first.
        room: items that each pack takes.
    """
    if set(room) == {1}:
        # Nothing to balance; the repository, too, leaves the items in their own order then.
        return [(item, place) for place, (_, item) in enumerate(sorted(items, key=lambda item: item[1]))]
    left, weights, placed = list(room), [0] * len(room), []
    for weight, item in items:
        lightest = min((p for p in range(len(room)) if left[p]), key=weights.__getitem__)
        left[lightest] -= 1
        weights[lightest] += weight
        placed.append((item, lightest))
    return placed
