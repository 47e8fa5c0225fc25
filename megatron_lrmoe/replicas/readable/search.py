"""The solver: moves that bring all ranks within limits, with few replicas, or as near to the limits as it can."""

from typing import NamedTuple

from megatron_lrmoe.replicas.effort import FAST, FINE, SMALL_RANKS, STRONG, Effort
from megatron_lrmoe.replicas.readable.large import solve_large
from megatron_lrmoe.replicas.readable.small import NEVER, solve_small
from megatron_lrmoe.replicas.readable.state import Move, Problem, canonical_state


class Solution(NamedTuple):
    """Moves by (expert, rank), in rows; ``above`` is how far every balance had to be raised.

    ``bound``: no solution within the raised limits has fewer moves.
    """

    moves: list[Move]
    above: int
    bound: int


def solve(problem: Problem, strong: bool) -> Solution:
    """Fewest replicas within the limits that the search finds; else limits raised by as little as it finds.

    Args:
        problem: in any numbering; the result does not depend on names.
        strong: look longer from the start, not only where the fast search ends above the limits.
    """
    moves, bound = _within(problem, 0, strong)
    if moves is not None:
        return Solution(moves, 0, bound)
    best, best_bound = [], 0
    low, high = 0, -min(problem.balance_R)
    resolution = max(1, sum(problem.load_E) // len(problem.balance_R) // FINE)
    while max(problem.free_R) > 0 and high - low > resolution:
        middle = (low + high) // 2
        moves, bound = _within(problem, middle, strong=True)
        if moves is None:
            low = middle
        else:
            best, best_bound, high = moves, bound, middle
    return Solution(best, high, best_bound)


def _within(problem: Problem, above: int, strong: bool) -> tuple[list[Move] | None, int]:
    """Fewest moves found within the limits plus ``above``, and the bound.

    Every number of slots up to the given one is tried, so that more slots never cost more replicas. The strong
    search runs where the fast one found nothing, for that reason even where it did find something with more slots.
    """
    best: list[Move] | None = None
    bound, failed = 0, list(range(1, max(problem.free_R) + 1)) or [0]
    for effort in (STRONG,) if strong else (FAST, STRONG):
        for slots in tuple(failed):
            moves, bound = _solve_once(problem, above, slots, effort)
            if moves is not None:
                failed.remove(slots)
                best = moves if best is None or len(moves) < len(best) else best
            if best is not None and (len(best) == bound or len(problem.balance_R) > SMALL_RANKS):
                return best, bound
    return best, bound


def _solve_once(problem: Problem, above: int, slots: int, effort: Effort) -> tuple[list[Move] | None, int]:
    balance_R = [balance + above for balance in problem.balance_R]
    if min(balance_R) >= 0:
        return [], 0
    if sum(balance_R) < 0:
        return None, NEVER
    free_R = [min(free, slots) for free in problem.free_R]
    state, names = canonical_state(problem._replace(balance_R=balance_R, free_R=free_R))
    if len(balance_R) <= SMALL_RANKS:
        moves, bound = solve_small(state, effort.budget, effort.tries)
    else:
        moves, bound = solve_large(state, effort.budget, effort.attempts)
    if moves is None:
        return None, bound
    named = [Move(names.expert_E[expert], names.rank_R[rank], rows) for expert, rank, rows in moves]
    return sorted(named), bound
