"""Ranks as debtors: what each has too much of, what it could still take, and which rows can move."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Move(NamedTuple):
    """Rows of an expert computed by a replica instead of the master."""

    expert: int
    rank: int
    rows: int


@dataclass
class State:
    """A partly settled problem; ``settle`` changes it and takes changes back.

    Args:
        balance_R: rows that a rank may still take; negative = rows it must give away (then it is a donor).
        rows_E: rows of each expert still at its master.
        owner_E: rank of each master.
        free_R: replica slots that are left.
        held_R: experts that the slots of each rank hold.
        overhead: rows that a replica costs its rank beside its own.
    """

    balance_R: list[int]
    rows_E: list[int]
    owner_E: list[int]
    free_R: list[int]
    held_R: list[list[int]]
    overhead: int = 0

    def room(self, rank: int) -> int:
        """Rows that one more replica on this rank can have."""
        return self.balance_R[rank] - self.overhead if self.free_R[rank] > 0 else 0

    def experts_of(self, rank: int) -> list[int]:
        """Experts whose master is on a rank."""
        return [e for e, owner in enumerate(self.owner_E) if owner == rank]

    def move(self, move: Move) -> None:
        """Put a replica into a slot."""
        self._shift(move, move.rows, self.overhead)
        self.free_R[move.rank] -= 1
        self.held_R[move.rank].append(move.expert)

    def take_back(self, move: Move) -> None:
        """Undo the last move to a rank."""
        self._shift(move, -move.rows, -self.overhead)
        self.free_R[move.rank] += 1
        self.held_R[move.rank].pop()

    def _shift(self, move: Move, rows: int, overhead: int) -> None:
        self.balance_R[move.rank] -= rows + overhead
        self.balance_R[self.owner_E[move.expert]] += rows
        self.rows_E[move.expert] -= rows

    def smallest_with(self, rows: int, donor: int, rank: int) -> int | None:
        """Expert of ``donor`` with the fewest rows that are enough, and not on ``rank`` yet; ties: the first."""
        fits = [e for e in self.experts_of(donor) if self.rows_E[e] >= rows and e not in self.held_R[rank]]
        return min(fits, key=lambda e: self.rows_E[e], default=None)

    def largest(self, donor: int, rank: int) -> int | None:
        """Expert of ``donor`` with most rows, and not on ``rank`` yet; ties: the first."""
        rest = [e for e in self.experts_of(donor) if self.rows_E[e] > 0 and e not in self.held_R[rank]]
        return max(rest, key=lambda e: self.rows_E[e], default=None)


class Names(NamedTuple):
    """What canonical numbers stand for."""

    rank_R: list[int]
    expert_E: list[int]


class Problem(NamedTuple):
    """What the solver is asked.

    Args:
        load_E: rows of each expert at its master that may move.
        owner_E: rank of each master.
        balance_R: rows that each rank may still take; negative = rows it must give away.
        free_R: replica slots of each rank.
        held: (expert, rank) of replicas that are there already, which no slot may repeat.
        overhead: rows that a replica costs its rank beside its own.
    """

    load_E: Sequence[int]
    owner_E: Sequence[int]
    balance_R: Sequence[int]
    free_R: Sequence[int]
    held: Sequence[tuple[int, int]] = ()
    overhead: int = 0


def canonical_state(problem: Problem) -> tuple[State, Names]:
    """Number ranks by rising balance, and experts by rank and falling load, so that names decide nothing.

    Ranks of equal balance are ordered by free slots, most first, then by their experts' loads: of the first expert
    in which they differ, the one with more rows goes first, and a rank that runs out of experts goes before.
    """
    load_E, owner_E, balance_R, free_R, held, overhead = problem
    experts_R: list[list[int]] = [[] for _ in balance_R]
    for e in sorted(range(len(load_E)), key=lambda e: -load_E[e]):
        experts_R[owner_E[e]].append(e)
    rank_R = sorted(range(len(balance_R)), key=lambda r: (balance_R[r], -free_R[r], [-load_E[e] for e in experts_R[r]]))
    expert_E = [e for r in rank_R for e in experts_R[r]]
    number_R = {old: new for new, old in enumerate(rank_R)}
    number_E = {old: new for new, old in enumerate(expert_E)}
    held_R: list[list[int]] = [[] for _ in rank_R]
    for expert, rank in held:
        held_R[number_R[rank]].append(number_E[expert])
    state = State(
        balance_R=[balance_R[r] for r in rank_R],
        rows_E=[load_E[e] for e in expert_E],
        owner_E=[number_R[owner_E[e]] for e in expert_E],
        free_R=[free_R[r] for r in rank_R],
        held_R=held_R,
        overhead=overhead,
    )
    return state, Names(rank_R, expert_E)
