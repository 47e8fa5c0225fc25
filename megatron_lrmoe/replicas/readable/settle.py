"""Depth-first search for the moves that bring a set of ranks within their limits."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_lrmoe.replicas.readable.state import Move, State


@dataclass
class Settling:
    """One search: its bounds, and what it met.

    Args:
        most: moves allowed.
        budget: steps left; the search gives up at none.
        met_most: whether a branch was cut because of ``most``; without that, more moves would not help.
    """

    most: int
    budget: int
    met_most: bool = False
    moves: list[Move] = field(default_factory=list)


def settle(state: State, ranks: Sequence[int], search: Settling) -> bool:
    """Find moves among ``ranks`` after which none of them is above its limit.

    The receiver with most room goes first, since it needs the largest expert. It is filled to the brim, even if
    the donor falls below its own limit: the donor then receives into its own slot, and no room is wasted. Else
    a donor is finished with it, or a whole expert goes there, or it is left out.

    Returns:
        Whether it succeeded. If so the moves are in ``search.moves`` and done in ``state``; else that is as before.
    """
    if search.budget <= 0:
        return False
    search.budget -= 1
    balance_R = state.balance_R
    donors = [r for r in ranks if balance_R[r] < 0]
    if not donors:
        return True
    receivers = [r for r in ranks if state.room(r) > 0]
    if sum(balance_R[r] for r in donors) + sum(state.room(r) for r in receivers) < 0:
        return False
    if len(search.moves) + len(donors) > search.most:
        search.met_most = True
        return False
    receiver = max(receivers, key=state.room)
    for kind in (_fill, _finish, _part):
        for donor in donors:
            move = kind(state, donor, receiver)
            if move is None:
                continue
            state.move(move)
            search.moves.append(move)
            if settle(state, ranks, search):
                return True
            search.moves.pop()
            state.take_back(move)
    free, state.free_R[receiver] = state.free_R[receiver], 0
    done = settle(state, ranks, search)
    state.free_R[receiver] = free
    return done


def _fill(state: State, donor: int, receiver: int) -> Move | None:
    rows = state.room(receiver)
    expert = state.smallest_with(rows, donor, receiver)
    return None if expert is None else Move(expert, receiver, rows)


def _finish(state: State, donor: int, receiver: int) -> Move | None:
    rows = -state.balance_R[donor]
    if rows >= state.room(receiver):
        return None
    expert = state.smallest_with(rows, donor, receiver)
    return None if expert is None else Move(expert, receiver, rows)


def _part(state: State, donor: int, receiver: int) -> Move | None:
    expert = state.largest(donor, receiver)
    if expert is None:
        return None
    rows = state.rows_E[expert]
    if rows >= state.room(receiver) or rows == -state.balance_R[donor]:
        return None
    return Move(expert, receiver, rows)
