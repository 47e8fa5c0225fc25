"""UltraEP: overloaded ranks' largest experts go to the ranks with the most slack, at the first threshold that works.

Faithful to: the quota solver of "UltraEP" (arXiv 2606.04101 v3; repository Dots-Infra/UltraEP 1.0.0,
``quota_placement_solve_kernel``), with its defaults. ``T`` is a threshold of rows for each rank.

- Greedy at T: ranks above T, fullest first (ties: lowest), each give their experts, largest first (ties: lowest), to
  the rank with the most slack below T (ties: lowest) that has a free slot; a piece is what is needed, what fits, or
  all of the expert but one row, which stays with the master. T fails if a rank stays above it.
- Fast path: T = 1.01 x the mean, rounded up, then twice more, each time 1 % of the busiest rank's rows higher. A piece
  here has at least (rows still needed) / (ranks that could take some) rows.
- Fallback: T = the mean, then a search in five sections up to the busiest rank's rows, as if every T above one that
  works would work. A piece here has at least 1,024 rows. The end of the search, at worst, is no replica at all.

``slots`` is honoured, masters do not move, and replicas are not minimised.

Simplified: the kernel bisects, before the fallback, on whether all excess fits all slack; every T from the mean on
passes, so that step is left out. It has 512 replicas at most in a domain, and rounds thresholds in fp32; this has no
such bound, and is exact. It splits each source's rows by itself, so an instance can miss its quota by some rows; our
split meets it. One NVLink domain. ``ultraep_compiled`` has the same solver, compiled.
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_lrmoe.replicas.peers.finish import Placed, check_option, rows_at
from megatron_lrmoe.replicas.plan import IntArray

_FAST_ATTEMPTS = 3
_SECTIONS = 5


@dataclass(frozen=True, kw_only=True)
class UltraepOptions:
    """Constants of UltraEP; in brackets the names of its environment variables.

    Raises:
        ValueError: a value that is not allowed.
    """

    threshold: Fraction = Fraction(1)
    """Lowest threshold, times the mean (BALANCE_THRESHOLD)."""
    eps: Fraction = Fraction(1, 100)
    """How far above that the fast path starts (QUOTA_ORACLE_EPS)."""
    min_rows: int = 1024
    """Fewest rows of a replica in the fallback (QUOTA_MIN_TOKENS_PER_REPLICA)."""
    master_rows: int = 1
    """Rows that a master with any keeps: 1, or 0 (QUOTA_ALLOW_ZERO_MASTER_QUOTA)."""

    def __post_init__(self) -> None:
        check_option("threshold", self.threshold, "a number >= 1", self.threshold >= 1)
        check_option("eps", self.eps, "a number >= 0", self.eps >= 0)
        check_option("min_rows", self.min_rows, "a whole number >= 0", self.min_rows >= 0)
        check_option("master_rows", self.master_rows, "0 or 1", self.master_rows in (0, 1))

    def thresholds(self, total: int, ranks: int) -> tuple[int, int]:
        """Rows at which the fallback and the fast path start.

        Args:
            total: rows of the layer.
            ranks: R.
        """
        lowest = -(-total * self.threshold.numerator // (ranks * self.threshold.denominator))
        above = 1 + Fraction(self.eps)
        return lowest, -(-lowest * above.numerator // above.denominator)


DEFAULTS = UltraepOptions()


class Replicas(NamedTuple):
    """Replicas in the order they were found; n of them."""

    expert_n: IntArray
    rank_n: IntArray
    rows_n: IntArray
    """Rows that moved from the expert's master to the replica."""


def place(loads_SE: IntArray, owner_E: IntArray, slots: int, options: UltraepOptions = DEFAULTS) -> Placed:
    """Rows of overloaded ranks move to replicas.

    Args:
        loads_SE: (S, E) routed rows.
        owner_E: (E,) rank of each master.
        slots: replicas that a rank has room for.
        options: constants.
    """
    ranks, load_E = len(loads_SE), loads_SE.sum(axis=0)
    lowest, fast = options.thresholds(int(load_E.sum()), ranks)
    found = solve(load_E, owner_E, ranks, slots, lowest, fast, options.min_rows, options.master_rows)
    rows_ER = rows_at(owner_E, load_E, ranks)
    rows_ER[found.expert_n, found.rank_n] += found.rows_n
    np.subtract.at(rows_ER, (found.expert_n, owner_E[found.expert_n]), found.rows_n)
    return Placed(rows_ER, owner_E)


def solve(
    load_E: IntArray,
    owner_E: IntArray,
    ranks: int,
    slots: int,
    lowest: int,
    fast: int,
    min_rows: int,
    master_rows: int,
) -> Replicas:
    """Replicas and their rows. ``ultraep_compiled.solve`` gives the same.

    Args:
        load_E: rows of each expert.
        owner_E: rank of each master.
        ranks: R.
        slots: replicas that a rank has room for.
        lowest: threshold at which the fallback starts, at least the mean; with ``fast`` from ``UltraepOptions``.
        fast: threshold at which the fast path starts, at least ``lowest``.
        min_rows: fewest rows of a replica in the fallback.
        master_rows: rows that a master with any keeps.
    """
    attempt = _Attempt.of(load_E, owner_E, ranks, slots, master_rows)
    if slots == 0 or ranks == 1:
        return _replicas([])
    highest = max(lowest, max(attempt.rows_R))
    step = max(1, -(-highest // 100))
    for _ in range(_FAST_ATTEMPTS):
        found = attempt.at(fast, None)
        if found is not None:
            return _replicas(found)
        fast = min(highest, fast + step)
    found = attempt.at(lowest, min_rows)
    if found is None:
        threshold = _search(attempt, min(lowest + 1, highest), highest, min_rows)
        found = attempt.at(threshold, min_rows)
    return _replicas(found or [])


def _search(attempt: "_Attempt", low: int, high: int, min_rows: int) -> int:
    """A threshold in [low, high] that works; ``high`` does."""
    while low < high:
        width = high - low
        if width < _SECTIONS:
            return next((t for t in range(low, high) if attempt.at(t, min_rows) is not None), high)
        probes = [low + width * n // _SECTIONS for n in range(1, _SECTIONS)]
        for below, probe in pairwise([low - 1, *probes]):
            if attempt.at(probe, min_rows) is not None:
                low, high = below + 1, probe
                break
        else:
            low = probes[-1] + 1
    return low


class _Attempt(NamedTuple):
    """The greedy, ready to be tried at any threshold."""

    load_E: list[int]
    rows_R: list[int]
    sources: list[int]
    """Ranks, fullest first."""
    experts_R: list[list[int]]
    """Experts of each rank, largest first."""
    slots: int
    master_rows: int

    @classmethod
    def of(cls, load_E: IntArray, owner_E: IntArray, ranks: int, slots: int, master_rows: int) -> "_Attempt":
        loads, rows_R, experts_R = load_E.tolist(), [0] * ranks, [[] for _ in range(ranks)]
        for e in np.argsort(-load_E, kind="stable"):
            rows_R[owner_E[e]] += loads[e]
            experts_R[owner_E[e]].append(int(e))
        sources = sorted(range(ranks), key=lambda r: -rows_R[r])
        return cls(loads, rows_R, sources, experts_R, slots, master_rows)

    def at(self, threshold: int, min_rows: int | None) -> list[tuple[int, int, int]] | None:
        """(expert, rank, rows) of each replica, or None where the threshold fails.

        Args:
            threshold: rows that every rank shall have at most.
            min_rows: fewest rows of a replica; None for what the fast path asks.
        """
        slack_R = [max(0, threshold - rows) for rows in self.rows_R]
        free_R = [self.slots] * len(slack_R)
        found: list[tuple[int, int, int]] = []
        for source in self.sources:
            need = max(0, self.rows_R[source] - threshold)
            for e in self.experts_R[source]:
                need = self._export(e, need, min_rows, slack_R, free_R, found)
            if need:
                return None
        return found

    def _export(
        self,
        e: int,
        need: int,
        min_rows: int | None,
        slack_R: list[int],
        free_R: list[int],
        found: list[tuple[int, int, int]],
    ) -> int:
        """Rows still needed after an expert has given what it can.

        No rank gets a second replica of an expert: the first one ends the need, the expert, or the rank's slack.
        """
        left = self.load_E[e] - self.master_rows
        while need > 0 and left > 0:
            able = [r for r, slack in enumerate(slack_R) if slack and free_R[r]]
            if not able:
                break
            target = max(able, key=slack_R.__getitem__)
            take = min(need, slack_R[target], left)
            if take < (-(-need // len(able)) if min_rows is None else min_rows):
                break
            found.append((e, target, take))
            slack_R[target] -= take
            free_R[target] -= 1
            need -= take
            left -= take
        return need


def _replicas(found: list[tuple[int, int, int]]) -> Replicas:
    columns = np.array(found, np.int64).reshape(-1, 3).T
    return Replicas(*columns)
