"""Fewest moves for few ranks: over all ways to part the ranks into groups that settle among themselves.

Moves join ranks into groups. Rows do not leave a group, so it needs room for all of its rows, and joining s ranks
takes s - 1 moves at least: the fewest moves are the most groups. All 2^R sets of ranks are looked at.
"""

from collections.abc import Sequence

from megatron_lrmoe.replicas.readable.settle import Settling, settle
from megatron_lrmoe.replicas.readable.state import Move, State

NEVER = 1 << 30
"""Cost of a set of ranks that cannot settle."""


def fewest_exports(rows_e: Sequence[int], need: int) -> int:
    """Experts that a donor has to give rows of, for ``need`` rows; ``rows_e`` is falling."""
    count = 0
    while need > 0 and count < len(rows_e):
        need -= rows_e[count]
        count += 1
    return count


def set_bounds(state: State) -> list[int]:
    """Lower bound on the moves of each set of ranks, which is a bit mask; NEVER without room or without a donor.

    A set of one rank costs nothing. Otherwise every rank but one takes a move, and every donor one for each
    expert it has to give rows of.
    """
    ranks = range(len(state.balance_R))
    exports_R = [fewest_exports([state.rows_E[e] for e in state.experts_of(r)], -state.balance_R[r]) for r in ranks]
    bounds = [0]
    for subset in range(1, 1 << len(ranks)):
        members = [r for r in ranks if subset >> r & 1]
        exports = sum(exports_R[r] for r in members)
        room = sum(state.balance_R[r] for r in members) - state.overhead * (len(members) - 1)
        if room < 0 or (len(members) > 1 and exports == 0):
            bounds.append(NEVER)
        else:
            bounds.append(max(len(members) - 1, exports))
    return bounds


def best_partition(cost: Sequence[int]) -> tuple[int, list[int]]:
    """Smallest total cost of a partition of all ranks, and its sets.

    Args:
        cost: of each set of ranks, by bit mask; the number of sets is a power of two.

    Returns:
        Cost (NEVER or more if there is none) and the sets, the one with the lowest rank first. On ties the set
        with the largest mask that holds the lowest rank wins.
    """
    total, choice = [0], [0]
    for ranks in range(1, len(cost)):
        lowest = ranks & -ranks
        rest = ranks ^ lowest
        best, best_set, others = NEVER, ranks, rest
        while True:
            one = others | lowest
            if cost[one] < NEVER and cost[one] + total[ranks ^ one] < best:
                best, best_set = cost[one] + total[ranks ^ one], one
            if others == 0:
                break
            others = (others - 1) & rest
        total.append(best)
        choice.append(best_set)
    sets, left = [], len(cost) - 1
    while left:
        sets.append(choice[left])
        left ^= choice[left]
    return total[-1], sets


def solve_small(state: State, budget: int, tries: int) -> tuple[list[Move] | None, int]:
    """Moves that bring every rank within its limit, or None, and a lower bound on their number.

    Costs start at their lower bounds. The best partition is tried; a set that does not settle at its cost gets a
    higher one, until a partition settles as a whole.

    Args:
        state: in canonical order.
        budget: steps of each search.
        tries: searches that may fail.
    """
    cost = set_bounds(state)
    bound, sets = best_partition(cost)
    moves_of: dict[int, list[Move]] = {}
    for _ in range(tries):
        if any(cost[one] >= NEVER for one in sets):
            return None, bound
        failed = next((one for one in sets if not _settled(state, one, cost, budget, moves_of)), None)
        if failed is None:
            return [move for one in sets for move in moves_of[one]], bound
        sets = best_partition(cost)[1]
    return None, bound


def _settled(state: State, one: int, cost: list[int], budget: int, moves_of: dict[int, list[Move]]) -> bool:
    """Whether a set of ranks settles at its cost; if so its moves are kept, if not its cost rises."""
    if one in moves_of:
        return True
    members = [r for r in range(len(state.balance_R)) if one >> r & 1]
    search = Settling(most=cost[one], budget=budget)
    if not settle(state, members, search):
        # More moves help only where the search was cut short.
        cost[one] = cost[one] + 1 if search.met_most or search.budget == 0 else NEVER
        return False
    for move in reversed(search.moves):
        state.take_back(move)
    moves_of[one] = search.moves
    return True
