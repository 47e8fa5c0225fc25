"""The planner against the best there is: a mixed-integer program, and every plan of tiny cases."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from megatron_lrmoe.replicas.cost import RowCost
from megatron_lrmoe.replicas.plan import Certificate, Limits
from megatron_lrmoe.replicas.planner import Options, plan
from tests.milp import Case, fewest_replicas, fewest_rows
from tests.plans import IN_CI, loads_of

CASES = 60 if IN_CI else 12


def certificate(case: Case, limits: Limits) -> Certificate:
    return plan(loads_of(case.load_E.tolist(), case.ranks), None, case.owner_E, case.slots, limits).certificate


@dataclass(frozen=True)
class Compared:
    """What the program and the planner reach on one case; the limit is 1.01 x mean, or more where it has to be."""

    case: Case
    best_rows: int
    limit: int
    best_replicas: int
    finest: Certificate
    found: Certificate

    @classmethod
    def of(cls, seed: int) -> "Compared":
        """Log-normal loads of 2 to 6 ranks with 1 to 4 experts each."""
        random = np.random.default_rng(seed)
        ranks, experts_per_rank = int(random.integers(2, 7)), int(random.integers(1, 5))
        load_E = np.exp(random.normal(np.log(300), random.uniform(0.5, 1.3), ranks * experts_per_rank)).astype(np.int64)
        case = Case(load_E, np.repeat(np.arange(ranks), experts_per_rank), ranks, slots=1 + seed % 2)
        best_rows = fewest_rows(case)
        limit = max(best_rows, -(-int(load_E.sum()) * 101 // (100 * ranks)))
        finest, found = certificate(case, Limits(forward="finest")), certificate(case, Limits(forward=limit))
        return cls(case, best_rows, limit, fewest_replicas(case, limit), finest, found)


@pytest.fixture(scope="module")
def compared() -> list[Compared]:
    return [Compared.of(seed) for seed in range(CASES)]


class TestMixedIntegerProgram:
    def test_busiest_rank_is_within_one_percent(self, compared):
        for one in compared:
            assert one.best_rows <= one.finest.forward_rows <= one.best_rows * Fraction(101, 100), one

    def test_replicas_are_as_few_in_most_cases_and_one_more_at_most(self, compared):
        more = [one.found.replicas - one.best_replicas for one in compared if one.found.within_limits]
        assert len(more) == len(compared)
        assert min(more) >= 0 and max(more) <= 1
        assert more.count(0) >= len(compared) * 5 // 6
        assert max(one.best_replicas for one in compared) >= 4

    def test_bounds_and_proofs_are_true(self, compared):
        for one in compared:
            assert one.finest.forward_bound <= one.best_rows, one
            assert one.found.replica_bound <= one.best_replicas, one
            assert one.found.status != "proven" or one.found.replicas == one.best_replicas, one

    def test_limits_said_to_be_impossible_are(self, compared):
        seen = set()
        for one in compared:
            for limit in (one.case.mean - 1, one.case.mean, one.best_rows - 1, one.best_rows):
                status = certificate(one.case, Limits(forward=limit)).status
                seen.add(status)
                assert status != "impossible" or limit < one.best_rows, one
                assert status not in ("proven", "found") or limit >= one.best_rows, one
        assert {"proven", "impossible"} <= seen


def shares(rows: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """All ways to spread rows over ranks."""
    if ranks == 1:
        yield (rows,)
        return
    for first in range(rows + 1):
        for others in shares(rows - first, ranks - 1):
            yield (first, *others)


@dataclass(frozen=True)
class Tiny:
    """A case of which every plan can be looked at."""

    load_E: list[int]
    quota_E: list[int]
    owner_E: list[int]
    ranks: int
    slots: int
    cost: RowCost

    def certificate(self, limits: Limits) -> Certificate:
        loads_SE, options = loads_of(self.load_E, self.ranks), Options(row_cost=self.cost)
        return plan(loads_SE, self.quota_E, self.owner_E, self.slots, limits, options).certificate

    def reachable(self) -> set[tuple[int, int, int]]:
        """(forward cost, backward cost, replicas) of every plan, of the busiest rank each."""
        ways = [list(self._ways(e)) for e in range(len(self.load_E))]
        found = set()
        for chosen in product(*ways):
            held_R = [sum(columns) for columns in zip(*(way[2] for way in chosen), strict=True)]
            if max(held_R) <= self.slots:
                forward, backward = (max(map(sum, zip(*(way[k] for way in chosen), strict=True))) for k in (0, 1))
                found.add((forward, backward, sum(held_R)))
        return found

    def _ways(self, expert: int) -> Iterator[tuple[list[int], list[int], list[bool]]]:
        """Forward cost, backward cost, and whether there is a replica, on each rank."""
        for rows_R in shares(self.load_E[expert], self.ranks):
            away_R = [rows > 0 and r != self.owner_E[expert] for r, rows in enumerate(rows_R)]
            for kept_R in shares(self.quota_E[expert], self.ranks):
                if all(kept <= rows for kept, rows in zip(kept_R, rows_R, strict=True)):
                    yield self.costs(rows_R), self.costs(kept_R), away_R

    def costs(self, rows_R: tuple[int, ...]) -> list[int]:
        tile, group = self.cost.tile_rows, self.cost.group_rows
        return [-(-rows // tile) * tile + (group if rows > 0 else 0) for rows in rows_R]


def tiny(seed: int) -> Tiny:
    random = np.random.default_rng(seed)
    ranks = 2 + seed % 2
    load_E = random.integers(0, 7 if ranks == 2 else 4, int(random.integers(1, 4))).tolist()
    quota_E = [int(random.integers(0, load + 1)) for load in load_E]
    cost = RowCost(tile_rows=int(random.integers(1, 4)), group_rows=int(random.integers(0, 3)))
    return Tiny(
        load_E, quota_E, random.integers(0, ranks, len(load_E)).tolist(), ranks, int(random.integers(1, 3)), cost
    )


@pytest.mark.parametrize("seed", range(100 if IN_CI else 24))
def test_of_all_plans_of_a_tiny_case_none_beats_a_certificate(seed):
    case = tiny(seed)
    plans = case.reachable()
    best_forward, best_backward = min(plan[0] for plan in plans), min(plan[1] for plan in plans)
    for forward in (None, "finest", *range(max(1, best_forward - 1), best_forward + 3)):
        for backward in (None, "finest", *range(max(1, best_backward - 1), best_backward + 3)):
            found = case.certificate(Limits(forward=forward, backward=backward))
            most = [
                limit if isinstance(limit, int) else 10**9 if limit is None else rows
                for limit, rows in ((forward, found.forward_rows), (backward, found.backward_rows))
            ]
            within = [replicas for one, other, replicas in plans if one <= most[0] and other <= most[1]]
            assert found.forward_bound <= best_forward and found.backward_bound <= best_backward
            assert not found.within_limits or min(within) >= found.replica_bound
            assert found.status != "impossible" or not within


@pytest.mark.parametrize(
    ("load_E", "owner_E", "ranks", "limit"),
    [([4, 4], [1, 1], 3, 6), ([5, 5, 3, 1], [1, 1, 1, 0], 2, 14)],
)
def test_a_master_that_gives_all_its_rows_away_costs_no_group(load_E, owner_E, ranks, limit):
    """One whole expert moved is within the limit; a bound that counts a group for its master is no bound."""
    options = Options(row_cost=RowCost(group_rows=2 if ranks == 3 else 3, tile_rows=2 if ranks == 3 else 1))
    found = plan(loads_of(load_E, ranks), None, owner_E, 2, Limits(forward=limit), options).certificate
    assert found.replica_bound <= 1 and found.forward_bound <= limit and found.status != "impossible"
