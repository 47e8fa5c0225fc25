"""Few moves for many ranks: each donor gets receivers that cover its excess almost exactly.

As in ``small``, moves = ranks that take part - groups. With D donors, M receivers and G groups that is D + M - G: a
donor with receivers of its own costs as many moves as it has receivers, and room that is covered but not needed is
wasted. All room but a little is needed, so the fewest moves waste least. Donors are served one after the other, and
a local search over their order, over how much waste is allowed and over the receivers left out finds the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lrmoe.replicas.readable.settle import Settling, settle
from megatron_lrmoe.replicas.readable.small import NEVER, fewest_exports
from megatron_lrmoe.replicas.readable.state import Move, State

PATIENCE = (100, 200, 400, 50)
"""Percent of the spare room per remaining donor that one group may waste."""


@dataclass(frozen=True)
class Choice:
    """What the local search varies: order of the donors, smallest receivers left out, index into PATIENCE."""

    order: tuple[int, ...]
    left_out: int
    patience: int


@dataclass(frozen=True)
class Parting:
    """Groups of one donor with its receivers, the donors in no group, and the moves if every group settles."""

    groups: list[list[int]]
    pool: list[int]
    moves: int


def cover(need: int, room: Sequence[int], allowed: int) -> tuple[list[int], int | None]:
    """Receivers with room for ``need`` and little more: one, else two, else three beside the largest ones.

    Args:
        need: rows.
        room: rows that each receiver can take, rising.
        allowed: waste that is small enough to look no further.

    Returns:
        Places in ``room``, and what they waste; None if they do not suffice.
    """
    chosen, waste = _one(need, room)
    if waste is None or waste > allowed:
        two, waste_of_two = _two(need, room)
        if waste_of_two is not None and (waste is None or waste_of_two < waste):
            chosen, waste = two, waste_of_two
    if waste is None or waste > allowed:
        last = len(room)
        while last >= 3 and need > sum(room[last - 3 : last]):
            last -= 1
            need -= room[last]
        three, waste_of_three = _three(need, room[:last], allowed // 4)
        if waste_of_three is not None and (waste is None or waste_of_three < waste):
            chosen, waste = [*three, *range(last, len(room))], waste_of_three
    return chosen, waste


def _one(need: int, room: Sequence[int]) -> tuple[list[int], int | None]:
    for place, rows in enumerate(room):
        if rows >= need:
            return [place], rows - need
    return [], None


def _two(need: int, room: Sequence[int]) -> tuple[list[int], int | None]:
    chosen, waste = [], None
    low, high = 0, len(room) - 1
    while low < high:
        over = room[low] + room[high] - need
        if over < 0:
            low += 1
            continue
        if waste is None or over < waste:
            chosen, waste = [low, high], over
        high -= 1
    return chosen, waste


def _three(need: int, room: Sequence[int], allowed: int) -> tuple[list[int], int | None]:
    chosen, waste = [], None
    for top in range(len(room) - 1, 1, -1):
        two, waste_of_two = _two(need - room[top], room[:top])
        if waste_of_two is not None and (waste is None or waste_of_two < waste):
            chosen, waste = [*two, top], waste_of_two
        if waste is not None and waste <= allowed:
            break
    return chosen, waste


def part(state: State, choice: Choice) -> Parting | None:
    """Give receivers to one donor after the other; a donor that would waste too much goes to the pool.

    Returns:
        None where the room that is left does not suffice for the pool.
    """
    donors, receivers = donors_and_receivers(state)
    room_R = {r: max(0, state.balance_R[r] - state.overhead) for r in receivers}
    available = receivers[choice.left_out :]
    spare = sum(room_R[r] for r in available) + sum(state.balance_R[r] for r in donors)
    groups, pool = [], []
    for done, place in enumerate(choice.order):
        donor = donors[place]
        allowed = PATIENCE[choice.patience] * spare // (100 * (len(donors) - done))
        chosen, waste = cover(-state.balance_R[donor], [room_R[r] for r in available], allowed)
        if waste is None or waste > allowed:
            pool.append(donor)
            continue
        groups.append([donor, *(available[c] for c in chosen)])
        available = [r for c, r in enumerate(available) if c not in chosen]
        spare -= waste
    need = -sum(state.balance_R[r] for r in pool)
    of_pool = 0
    for r in reversed(receivers[: choice.left_out] + available):
        if need > 0:
            need -= room_R[r]
            of_pool += 1
    if need > 0:
        return None
    in_groups = sum(len(group) - 1 for group in groups)
    return Parting(groups, pool, in_groups + (len(pool) + of_pool - 1 if pool else 0))


def donors_and_receivers(state: State) -> tuple[list[int], list[int]]:
    """Donors by rising excess and receivers by rising room, of a state in canonical order."""
    ranks = range(len(state.balance_R))
    return [r for r in reversed(ranks) if state.balance_R[r] < 0], [r for r in ranks if state.balance_R[r] >= 0]


def settle_parting(state: State, parting: Parting, budget: int, most: int) -> list[Move] | None:
    """Moves of all groups, then of the pool with the receivers that no group has used.

    A group that its donor's experts do not allow joins the pool.

    Args:
        state: as it was parted; left as it was.
        parting: of all donors.
        budget: steps of each search.
        most: moves allowed.
    """
    moves: list[Move] = []
    pool = set(range(len(state.balance_R)))
    for group in parting.groups:
        search = Settling(most=len(group) - 1, budget=budget)
        if settle(state, group, search):
            moves += search.moves
            pool -= set(group)
    # A pool that settles does so within as many steps as it has ranks; a longer search is mostly in vain.
    search = Settling(most=most - len(moves), budget=budget // 4)
    settled = settle(state, sorted(pool), search)
    moves += search.moves
    for move in reversed(moves):
        state.take_back(move)
    return moves if settled else None


def bound_large(state: State) -> int:
    """Lower bound on the moves: what donors have to give, and receivers that are needed to take it."""
    donors, receivers = donors_and_receivers(state)
    given = sum(fewest_exports([state.rows_E[e] for e in state.experts_of(r)], -state.balance_R[r]) for r in donors)
    room = [max(0, state.balance_R[r] - state.overhead) for r in reversed(receivers)]
    return max(given, fewest_exports(room, -sum(state.balance_R[r] for r in donors)))


def solve_large(state: State, budget: int, attempts: int) -> tuple[list[Move] | None, int]:
    """Moves that bring every rank within its limit, or None, and a lower bound on their number.

    Args:
        state: in canonical order.
        budget: steps of each search for the moves of a group.
        attempts: partings to look at.
    """
    bound = bound_large(state)
    climb = _Climb(state)
    best: list[Move] | None = None
    for attempt in range(attempts):
        choice = climb.first(attempt) or climb.next()
        parting = part(state, choice)
        if parting is None or parting.moves > climb.moves:
            continue
        climb.choice, climb.moves = choice, parting.moves
        if best is None or parting.moves < len(best):
            best = settle_parting(state, parting, budget, NEVER if best is None else len(best) - 1) or best
        if best is not None and len(best) == bound:
            break
    return best, bound


class _Climb:
    """Where the local search stands, and its next steps; pseudo-random, and the same for the same numbers."""

    def __init__(self, state: State):
        donors, receivers = donors_and_receivers(state)
        room = [max(0, state.balance_R[r] - state.overhead) for r in receivers]
        spare = sum(room) + sum(state.balance_R[r] for r in donors)
        self.most_left_out = 0
        while self.most_left_out < len(room) and sum(room[: self.most_left_out + 1]) <= spare:
            self.most_left_out += 1
        self.choice = Choice(tuple(range(len(donors))), self.most_left_out, 0)
        self.moves = NEVER
        self._random = 1

    def first(self, attempt: int) -> Choice | None:
        """Attempts 0 to 5: fewer and fewer receivers left out, with less and more patience."""
        left_out = self.most_left_out - attempt // 2
        if attempt >= 6 or left_out < 0:
            return None
        return Choice(tuple(range(len(self.choice.order))), left_out, attempt % 2)

    def next(self) -> Choice:
        """One or two donors swapped, and at times another patience or number of receivers left out."""
        order = list(self.choice.order)
        for _ in range(1 + self._draw(2)):
            a, b = self._draw(len(order)), self._draw(len(order))
            order[a], order[b] = order[b], order[a]
        left_out, patience = self.choice.left_out, self.choice.patience
        what = self._draw(5)
        if what == 0:
            patience = self._draw(len(PATIENCE))
        elif what == 1:
            left_out = max(0, self.most_left_out - self._draw(4))
        return Choice(tuple(order), left_out, patience)

    def _draw(self, below: int) -> int:
        # Knuth's MMIX generator; its high bits, since the low ones have short periods.
        self._random = (self._random * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._random >> 33) % below
