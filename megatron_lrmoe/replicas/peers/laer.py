"""LAER-MoE: two ways to count copies, one packing, and a cost model that chooses.

Faithful to: "LAER-MoE" (arXiv 2602.11686; repository PKU-DAIR/Hetu-Galvatron, greedy_balancer.cpp). Candidate counts
of copies: equally many for each expert, where that uses every slot; and, from one copy on each node if that fits (one
at all if not), one more for the expert with the most load per copy, in steps of whole nodes once it has one on each.
Packing: copies, heaviest first, go to the ranks with room on the nodes with fewest copies of the expert, there to the
one with the fewest rows. Routing: a source's rows go in equal parts to the copies in its node, if there are any, else
to all. Cost: 4 x the time to send all rows + 4 x the time to compute the busiest rank's (with recompute).

Masters move: experts are fully sharded in LAER-MoE and rebuilt where wanted, so no rank owns one. A master here is a
copy at the expert's owner, or else on the lowest rank with one. Slots are honoured as E + R * slots instances in all,
equally many on each rank; a replica is any copy but the master, so a rank with few masters can have more than
``slots``.

Simplified: LAER-MoE places by the loads of the iteration before; this uses the loads themselves, which favours it.
The repository divides the ranks by 8 and needs 8 at least; here the last node may be smaller. Rows of the sources of
a node are split together, so that remainders do not add up. Where steps of whole nodes leave slots over, they stay
empty. No random changes of the candidates (0 in the repository's own call). Copies on one rank are merged.
"""

import heapq
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
class LaerOptions:
    """Topology and cost model; times and rates as in the repository (A100, 8 to a node).

    Raises:
        ValueError: a value that is not above 0.
    """

    node_ranks: int = 8
    """Neighbouring ranks that make up a node."""
    token_bytes: int = 8192
    """Bytes of a row that is sent: 4,096 values in bf16."""
    row_seconds: float = 0.001484375e-3
    """Time to compute a row."""
    inside_bandwidth: float = 216.269e9
    """Bytes per second to another rank of the node."""
    outside_bandwidth: float = 88.9539e9
    """Bytes per second to another node."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_option(name, value, "a number > 0", value > 0)


DEFAULTS = LaerOptions()


def place(loads_SE: IntArray, owner_E: IntArray, slots: int, options: LaerOptions = DEFAULTS) -> Placed:
    """The cheaper of the two candidates.

    Args:
        loads_SE: (S, E) routed rows.
        owner_E: (E,) rank of each master.
        slots: replicas for each rank; the layer has at most E + R * slots instances.
        options: topology and cost model.
    """
    ranks, experts = loads_SE.shape
    load_E = loads_SE.sum(axis=0).tolist()
    room_R = even_room(experts, ranks, slots)
    node_R = np.arange(ranks) // options.node_ranks
    counts = [hot_counts(load_E, sum(room_R), int(node_R[-1]) + 1)]
    if sum(room_R) % experts == 0:
        counts.insert(0, [sum(room_R) // experts] * experts)
    candidates = [_pack(load_E, count_E, room_R, node_R.tolist()) for count_E in counts]
    copies_ER = min(candidates, key=lambda copies_ER: _seconds(loads_SE, copies_ER, node_R, options))
    return Placed(_route(loads_SE, copies_ER, node_R), home_among(copies_ER, owner_E))


def hot_counts(load_E: list[int], total: int, nodes: int) -> list[int]:
    """Copies of each expert, at most ``total`` in all.

    Args:
        load_E: rows of each expert.
        total: slots of all ranks, E or more.
        nodes: nodes of the layer; an expert with a copy on each gets more of them a whole round at a time.
    """
    first = nodes if nodes * len(load_E) <= total else 1
    count_E, left = [first] * len(load_E), total - first * len(load_E)
    heap = [(-Fraction(load, first), e) for e, load in enumerate(load_E)]
    heapq.heapify(heap)
    while left and heap:
        _, e = heapq.heappop(heap)
        step = nodes if count_E[e] >= nodes else 1
        if step <= left:
            count_E[e] += step
            left -= step
            heapq.heappush(heap, (-Fraction(load_E[e], count_E[e]), e))
    return count_E


def _pack(load_E: list[int], count_E: list[int], room_R: list[int], node_R: list[int]) -> IntArray:
    """(E, R) copies: spread over nodes first, then to the rank with the fewest rows."""
    left_R, load_R = list(room_R), [0] * len(room_R)
    copies_ER = np.zeros((len(load_E), len(room_R)), np.int64)
    on_node_EN = [[0] * (node_R[-1] + 1) for _ in load_E]
    for weight, e in heaviest_copies(load_E, np.repeat(np.arange(len(load_E)), count_E).tolist()):
        free = [r for r in range(len(room_R)) if left_R[r]]
        fewest = min(on_node_EN[e])
        rank = min([r for r in free if on_node_EN[e][node_R[r]] == fewest] or free, key=load_R.__getitem__)
        copies_ER[e, rank] += 1
        on_node_EN[e][node_R[rank]] += 1
        left_R[rank] -= 1
        load_R[rank] += weight
    return copies_ER


def _targets(copies_ER: IntArray, node_R: IntArray, node: int) -> IntArray:
    """(E, R) copies that sources of a node send to: those in the node, or all if there are none."""
    inside_ER = copies_ER * (node_R == node)
    return np.where(inside_ER.any(axis=1, keepdims=True), inside_ER, copies_ER)


def _route(loads_SE: IntArray, copies_ER: IntArray, node_R: IntArray) -> IntArray:
    """(E, R) rows of each expert on each rank."""
    rows_ER = np.zeros_like(copies_ER)
    for node in range(int(node_R[-1]) + 1):
        rows_ER += even_split(loads_SE[node_R == node].sum(axis=0), _targets(copies_ER, node_R, node))
    return rows_ER


def _seconds(loads_SE: IntArray, copies_ER: IntArray, node_R: IntArray, options: LaerOptions) -> float:
    """Cost of a layer."""
    send = 0.0
    for node in range(int(node_R[-1]) + 1):
        here = node_R == node
        targets_ER = _targets(copies_ER, node_R, node)
        inside_E = (targets_ER * here).any(axis=1)
        own_SE = loads_SE[here] * targets_ER[:, here].T / targets_ER.sum(axis=1)
        inside_rows = loads_SE[here][:, inside_E].sum() - own_SE[:, inside_E].sum()
        outside_rows = loads_SE[here][:, ~inside_E].sum()
        send += float(inside_rows / options.inside_bandwidth + outside_rows / options.outside_bandwidth)
    busiest = int(_route(loads_SE, copies_ER, node_R).sum(axis=0).max())
    return 4 * send * options.token_bytes + 4 * busiest * options.row_seconds
