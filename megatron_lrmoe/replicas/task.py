"""One planning task and its solver, readable or compiled, per domain."""

from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from megatron_lrmoe.recalibration.balance import per_rank
from megatron_lrmoe.replicas.cost import RowCost
from megatron_lrmoe.replicas.flow import route
from megatron_lrmoe.replicas.plan import IntArray
from megatron_lrmoe.replicas.readable import search

Backend = Literal["auto", "compiled", "readable"]


def solver_of(backend: Backend):
    """``solve`` of the compiled or of the readable form; auto: compiled where numba is installed.

    Raises:
        ValueError: compiled was asked for and numba is missing, or another name was given.
    """
    if backend not in ("auto", "compiled", "readable"):
        raise ValueError(f"backend: found {backend!r}, allowed are 'auto', 'compiled' and 'readable'")
    if backend == "readable":
        return _solve_readable
    try:
        from megatron_lrmoe.replicas import compiled
    except ImportError as error:
        if backend == "auto":
            return _solve_readable
        raise ValueError("backend: 'compiled' needs numba: pip install 'megatron-lrmoe[planner]'") from error
    return compiled.solve


def _solve_readable(load_E, owner_E, balance_R, free_R, held_N2, overhead, strong):
    lists = [array.tolist() for array in (load_E, owner_E, balance_R, free_R)]
    problem = search.Problem(*lists, held=[(e, r) for e, r in held_N2.tolist()], overhead=overhead)
    moves, above, bound = search.solve(problem, strong)
    return np.array(moves, np.int64).reshape(-1, 3), above, bound


class Layout(NamedTuple):
    """Instances (masters in expert order, then replicas by (expert, rank)), and rows of one kind in each."""

    expert_I: IntArray
    rank_I: IntArray
    rows_I: IntArray

    def rows_on(self, ranks: int) -> IntArray:
        """(R,) rows of each rank."""
        return per_rank(self.rows_I, self.rank_I, ranks)


class Solved(NamedTuple):
    """A layout, how far above its limits it is, and a lower bound on its replicas."""

    layout: Layout
    above: int
    bound: int


@dataclass(frozen=True, kw_only=True)
class Task:
    """What does not change while one plan is made."""

    owner_E: IntArray
    ranks: int
    slots: int
    domain_ranks: int
    cost: RowCost = field(default_factory=RowCost)
    strong: bool = False
    backend: Backend = "auto"
    resident_N2: IntArray = field(default_factory=lambda: np.empty((0, 2), np.int64))
    """(expert, rank) of replicas whose weights are in their slots already."""
    resident_cost: Fraction = Fraction(1, 4)
    """Cost of such a replica, where one that must be pushed costs 1."""

    @cached_property
    def solve_one(self):
        """The solver of the chosen back end."""
        return solver_of(self.backend)

    def cost_on(self, layout: Layout) -> IntArray:
        """(R,) cost of each rank's rows; just the rows, unless tiles or groups cost more."""
        return layout._replace(rows_I=self.cost.of(layout.rows_I)).rows_on(self.ranks)

    def place(self, rows_E: IntArray, limit_R: IntArray) -> Solved:
        """Replicas for these rows: from nothing, or beside resident ones if those make it cheaper."""
        start = masters(self.owner_E, rows_E)
        fresh = self.settle(start, rows_E, limit_R)
        if len(self.resident_N2) == 0:
            return fresh
        none = np.zeros(len(self.resident_N2), np.int64)
        there = Layout(*(np.concatenate(pair) for pair in zip(start, (*self.resident_N2.T, none), strict=True)))
        there = self.routed(there, rows_E[there.expert_I], limit_R)
        used_I = there.rows_I > 0
        used_I[: len(rows_E)] = True
        there = Layout(*(array[used_I] for array in there))
        free_R = self.slots - np.bincount(there.rank_I[len(rows_E) :], minlength=self.ranks)
        beside = self.settle(there, there.rows_I[: len(rows_E)], limit_R, free_R)
        return min((fresh, beside._replace(bound=fresh.bound)), key=lambda s: (s.above, self.push_cost(s.layout)))

    def push_cost(self, layout: Layout) -> Fraction:
        """Replicas, resident ones at their lower cost."""
        experts = len(self.owner_E)
        pairs = zip(layout.expert_I[experts:].tolist(), layout.rank_I[experts:].tolist(), strict=True)
        resident = {(expert, rank) for expert, rank in self.resident_N2.tolist()}
        return sum((self.resident_cost if pair in resident else Fraction(1) for pair in pairs), Fraction(0))

    def routed(self, layout: Layout, most_I: IntArray, limit_R: IntArray, least_I: IntArray | None = None) -> Layout:
        """Rows shifted among the instances, at least ``least_I`` and at most ``most_I`` of each, towards the limits."""
        least = np.zeros_like(layout.rows_I) if least_I is None else least_I
        balance_R = limit_R - self.cost_on(layout)
        if balance_R.min() >= 0:
            return layout
        shifted = route(
            (layout.rows_I - least).tolist(),
            (most_I - least).tolist(),
            layout.expert_I.tolist(),
            layout.rank_I.tolist(),
            balance_R.tolist(),
        )
        return layout._replace(rows_I=np.array(shifted, np.int64) + least)

    def settle(self, start: Layout, movable_E: IntArray, limit_R: IntArray, free_R: IntArray | None = None) -> Solved:
        """Add replicas to a layout until every rank is within its limit, or as near as the solver gets.

        Rows move from masters in whole tiles, so that a replica's cost is what its master's falls by.

        Args:
            start: the layout to begin with.
            movable_E: rows of each master that may move.
            limit_R: cost that each rank may have.
            free_R: slots of each rank; not given, the task's number on each.
        """
        tile, experts = self.cost.tile_rows, len(self.owner_E)
        free = np.full(self.ranks, self.slots, np.int64) if free_R is None else free_R
        balance_R = (limit_R - self.cost_on(start)) // tile
        held = np.stack([start.expert_I, start.rank_I], axis=1)[experts:]
        overhead = -(-self.cost.group_rows // tile)
        moves, above, bound = [np.empty((0, 3), np.int64)], 0, 0
        for first in range(0, self.ranks, self.domain_ranks):
            last = min(first + self.domain_ranks, self.ranks)
            own = np.flatnonzero((self.owner_E >= first) & (self.owner_E < last))
            number_E = np.full(experts, -1, np.int64)
            number_E[own] = np.arange(len(own))
            inside = held[number_E[held[:, 0]] >= 0] - [0, first]
            inside[:, 0] = number_E[inside[:, 0]]
            found, raised, fewest = self.solve_one(
                -(-movable_E[own] // tile),
                self.owner_E[own] - first,
                balance_R[first:last].copy(),
                free[first:last].copy(),
                inside,
                overhead,
                self.strong,
            )
            if self.cost.group_rows > 0:
                # A master that gives all its rows away costs no group, which the solver's bound does not know.
                fewest = int((balance_R[first:last] + raised < 0).sum())
            found[:, 0] = own[found[:, 0]]
            found[:, 1] += first
            moves.append(found)
            above, bound = max(above, raised * tile), bound + fewest
        return Solved(_with_moves(start, np.concatenate(moves), movable_E, tile), above, bound)


def masters(owner_E: IntArray, rows_E: IntArray) -> Layout:
    """The layout without replicas."""
    return Layout(np.arange(len(owner_E)), owner_E, rows_E.copy())


def _with_moves(start: Layout, moves: IntArray, movable_E: IntArray, tile: int) -> Layout:
    """A layout after moves in tiles; the last tile of an expert may be a part of one."""
    experts, left_E, rows_I = len(movable_E), movable_E.copy(), start.rows_I.copy()
    rows_n = moves[:, 2] * tile
    for n, expert in enumerate(moves[:, 0]):
        rows_n[n] = min(rows_n[n], left_E[expert])
        left_E[expert] -= rows_n[n]
    np.subtract.at(rows_I, moves[:, 0], rows_n)
    expert_I, rank_I = np.concatenate([start.expert_I, moves[:, 0]]), np.concatenate([start.rank_I, moves[:, 1]])
    rows_I = np.concatenate([rows_I, rows_n])
    order = np.lexsort((rank_I, expert_I))
    order = np.concatenate([np.arange(experts), order[order >= experts]])
    return Layout(expert_I[order], rank_I[order], rows_I[order])
