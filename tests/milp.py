"""The replica problem as a mixed-integer program: what no planner can beat. Small cases only."""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

SECONDS = 30.0


@dataclass(frozen=True)
class Case:
    """Loads (E,), owners (E,), ranks and slots per rank."""

    load_E: np.ndarray
    owner_E: np.ndarray
    ranks: int
    slots: int

    @property
    def mean(self) -> int:
        """Mean rows of a rank, rounded up."""
        return -(-int(self.load_E.sum()) // self.ranks)


def fewest_rows(case: Case) -> int:
    """Smallest possible rows of the busiest rank.

    Given which replicas exist, the rest is a flow with whole capacities, so whole rows lose nothing.
    """
    solved = _solve(case, limit=None)
    return int(np.ceil(solved.fun - 1e-6))


def fewest_replicas(case: Case, limit: int) -> int:
    """Fewest replicas with which no rank has more than ``limit`` rows."""
    return round(_solve(case, limit=limit).fun)


def _solve(case: Case, limit: int | None):
    # Variables: rows of each (expert, rank), whether a replica is there, and the busiest rank's rows.
    experts, ranks = len(case.load_E), case.ranks
    cells = experts * ranks
    expert_c, rank_c = np.divmod(np.arange(cells), ranks)
    away_c = rank_c != case.owner_E[expert_c]
    top = 2 * cells
    rows, columns, values, low, high = [], [], [], [], []

    def constrain(terms, lower, upper):
        for column, value in terms:
            rows.append(len(low))
            columns.append(column)
            values.append(value)
        low.append(lower)
        high.append(upper)

    for e in range(experts):
        constrain([(c, 1) for c in np.flatnonzero(expert_c == e)], case.load_E[e], case.load_E[e])
    for r in range(ranks):
        constrain([*((c, 1) for c in np.flatnonzero(rank_c == r)), (top, -1)], -np.inf, 0)
        constrain([(cells + c, 1) for c in np.flatnonzero((rank_c == r) & away_c)], 0, case.slots)
    for c in np.flatnonzero(away_c):
        constrain([(c, 1), (cells + c, -case.load_E[expert_c[c]])], -np.inf, 0)
    cost = np.zeros(top + 1)
    cost[top if limit is None else slice(cells, 2 * cells)] = 1
    upper = np.full(top + 1, np.inf)
    upper[cells:top] = away_c
    upper[top] = np.inf if limit is None else limit
    matrix = csr_array((values, (rows, columns)), shape=(len(low), top + 1))
    whole = np.zeros(top + 1)
    whole[cells:top] = 1
    solved = milp(
        cost,
        constraints=LinearConstraint(matrix, low, high),
        bounds=Bounds(0, upper),
        integrality=whole,
        options={"time_limit": SECONDS, "mip_rel_gap": 0.0},
    )
    if solved.status != 0:
        raise RuntimeError(f"the mixed-integer program did not finish: {solved.message}")
    return solved
