"""Rows shifted between instances that exist already, until no rank has more than it may."""

from collections import deque
from collections.abc import Sequence


def route(
    amount_I: Sequence[int],
    cap_I: Sequence[int],
    expert_I: Sequence[int],
    rank_I: Sequence[int],
    balance_R: Sequence[int],
) -> list[int]:
    """Amounts after shifting rows from ranks with too many to ranks with room, as far as that goes.

    Each round looks for the shortest chain of shifts, each between two instances of one expert, that leads from a
    rank above its limit to one below (a maximum flow along shortest augmenting paths). The ranks in between keep their
    sums.

    Args:
        amount_I: rows of each instance.
        cap_I: most rows of each instance.
        expert_I: expert of each instance.
        rank_I: rank of each instance; an expert has at most one on a rank.
        balance_R: rows that each rank may still take; negative = it has too many.
    """
    amount, balance = list(amount_I), list(balance_R)
    of_rank: list[list[int]] = [[] for _ in balance]
    of_expert: dict[int, list[int]] = {}
    for i, (expert, rank) in enumerate(zip(expert_I, rank_I, strict=True)):
        of_expert.setdefault(expert, []).append(i)
        of_rank[rank].append(i)
    several = [[i for i in of_rank[r] if len(of_expert[expert_I[i]]) > 1] for r in range(len(balance))]

    def chain_from(start: int) -> list[tuple[int, int]] | None:
        """Pairs (giving instance, taking instance) from ``start`` to the nearest rank with room."""
        came: dict[int, tuple[int, int]] = {}
        seen, queue = {start}, deque([start])
        while queue:
            rank = queue.popleft()
            if balance[rank] > 0:
                return _back(came, rank, start, rank_I)
            for giving in several[rank]:
                for taking in of_expert[expert_I[giving]] if amount[giving] > 0 else ():
                    if rank_I[taking] not in seen and amount[taking] < cap_I[taking]:
                        seen.add(rank_I[taking])
                        came[rank_I[taking]] = (giving, taking)
                        queue.append(rank_I[taking])
        return None

    for start in sorted(range(len(balance)), key=lambda r: balance[r]):
        while balance[start] < 0 and (chain := chain_from(start)) is not None:
            rows = min(min(amount[giving], cap_I[taking] - amount[taking]) for giving, taking in chain)
            end = rank_I[chain[-1][1]]
            rows = min(rows, -balance[start], balance[end])
            for giving, taking in chain:
                amount[giving] -= rows
                amount[taking] += rows
            balance[start] += rows
            balance[end] -= rows
    return amount


def _back(came: dict[int, tuple[int, int]], end: int, start: int, rank_I: Sequence[int]) -> list[tuple[int, int]]:
    chain = []
    while end != start:
        chain.append(came[end])
        end = rank_I[came[end][0]]
    return chain[::-1]
