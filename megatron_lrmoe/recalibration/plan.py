"""What one forward call has fixed before its experts run: loads, quotas, and how the quotas will be filled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
import torch

from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.pairs import DrawKey, KeptRows
from megatron_lrmoe.recalibration.balance import (
    IntArray,
    RowBytes,
    balanced_quota,
    capped_quota,
    floor_rows,
    joint_limit,
    joint_quotas,
    per_rank,
)
from megatron_lrmoe.recalibration.draw import CERTAIN, host_ints, offsets, row_seeds, uniform_N
from megatron_lrmoe.recalibration.quality import selection_sums
from megatron_lrmoe.recalibration.quota import proportional_quota
from megatron_lrmoe.recalibration.score import draw_size_N, pair_score
from megatron_lrmoe.recalibration.selection import select_topk, select_unbiased
from megatron_lrmoe.recalibration.sources import SourceSplit, split_over_sources


@dataclass(frozen=True)
class PairFacts:
    """What is known of each row when the quotas are filled; one number a row, in one order.

    Args:
        grad_stat: the score's statistic of ``g``.
        act_norm_sq: squared norm of the fc2 input.
        alpha: combine weight; needed for the score alpha only.
    """

    grad_stat: torch.Tensor
    act_norm_sq: torch.Tensor
    alpha: torch.Tensor | None = None


@dataclass(frozen=True)
class Chosen:
    """Kept rows, and what the choice cost.

    Args:
        kept: rows and weights.
        sums: (5,) fp64, see ``quality.SELECTION_SUMS``.
    """

    kept: KeptRows
    sums: torch.Tensor


@dataclass(frozen=True)
class _Share:
    """Part of a quota that is filled by itself: an expert's, over all sources (None) or of one."""

    expert: int
    source: int | None
    rows: int
    quota: int


@dataclass(frozen=True)
class KeepPlan:
    """Loads and quotas of one layer call; equal on every rank of the expert-parallel group but for ``rank``.

    Args:
        config: selection, score, scope and limits.
        key: of every random draw of this call.
        retention: share kept at this iteration.
        loads_SE: routed pairs from each source rank for each expert of the layer.
        rank: this rank's index among the sources, which are also the owners.
        row_bytes: memory of a row; needed for a limit in bytes only.
        valid_SE: of ``loads_SE``, the pairs of tokens that are not padding; None where all are. Padding gets no
            gradient, so a backward has no use for it: quotas are shares of the valid pairs.
        given_quota_E: quotas that were fixed together with replicas; then each instance counts as an expert.
    """

    config: LrmConfig
    key: DrawKey
    retention: Fraction
    loads_SE: Sequence[Sequence[int]]
    rank: int
    row_bytes: RowBytes | None = None
    valid_SE: Sequence[Sequence[int]] | None = None
    given_quota_E: Sequence[int] | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks of the expert-parallel group."""
        return len(self.loads_SE)

    @cached_property
    def demand_E(self) -> list[int]:
        """Pairs of each expert, over all sources."""
        return [sum(loads_S) for loads_S in zip(*self.loads_SE, strict=True)]

    @cached_property
    def valid_E(self) -> list[int]:
        """Pairs of each expert that quotas are shares of."""
        if self.valid_SE is None:
            return self.demand_E
        return [sum(valid_S) for valid_S in zip(*self.valid_SE, strict=True)]

    @cached_property
    def rows_R(self) -> IntArray:
        """Pairs of each owner's experts."""
        return per_rank(np.array(self.demand_E, np.int64), self._owner_E, self.num_ranks)

    @cached_property
    def kept_R(self) -> IntArray:
        """Pairs of each owner's experts that keep their backward."""
        return per_rank(np.array(self.quota_E, np.int64), self._owner_E, self.num_ranks)

    @cached_property
    def limit_R(self) -> IntArray | None:
        """Kept rows that each rank should not exceed: the flags', else what the joint policy aims at, else None."""
        config, limits = self.config, []
        if config.rank_rows is not None:
            limits.append(np.full(self.num_ranks, config.rank_rows, np.int64))
        if config.budget_bytes is not None:
            if self.row_bytes is None:
                raise RuntimeError("a limit in bytes needs row_bytes, found None")
            limits.append(self.row_bytes.row_limit(config.budget_bytes, self.rows_R))
        if config.quota == "joint" and not limits:
            limits.append(joint_limit(per_rank(np.array(self.valid_E, np.int64), self._owner_E, self.num_ranks)))
        return np.min(limits, axis=0) if limits else None

    @property
    def least_share(self) -> Fraction:
        """Share that every expert keeps at least: it ramps from 1 to its target as retention does."""
        if self.retention == 1:
            return Fraction(1)
        ramped = (1 - self.retention) / (1 - self.config.retention_fraction)
        return 1 - (1 - self.config.least_share) * ramped

    @property
    def probes(self) -> bool:
        """Whether this call runs the full backward to measure what dropping would have cost."""
        every = self.config.probe_interval
        return every > 0 and self.key.iteration % every == 0 and self.key.microbatch == 0

    @property
    def quota_E(self) -> list[int]:
        """Pairs of each expert that keep their backward."""
        return self.demand_E if self.probes else self.policy_quota_E

    @cached_property
    def policy_quota_E(self) -> list[int]:
        """``quota_E`` of a call that does not probe."""
        if self.given_quota_E is not None:
            return list(self.given_quota_E)
        policy, limit_R = self.config.quota, self.limit_R
        even_E = proportional_quota(self.valid_E, self.retention, self.config.min_rows)
        if policy == "proportional" and limit_R is None:
            return even_E
        load_E, quota_E = np.array(self.valid_E, np.int64), np.array(even_E, np.int64)
        owner_E, total = self._owner_E, sum(even_E)
        floor_E = floor_rows(load_E, quota_E, self.least_share, self.config.min_rows)
        if policy == "balanced":
            quota_E = balanced_quota(load_E, floor_E, owner_E, self.num_ranks, total)
        elif policy == "joint" and limit_R is not None:
            quota_E = joint_quotas(load_E, floor_E, owner_E, limit_R, allowance=sum(self.valid_E) - total)
        # What the joint policy aims at by itself is no limit: it is given up where retention does not allow it.
        if self.config.limits_rows and limit_R is not None:
            quota_E = capped_quota(quota_E, floor_E, owner_E, limit_R)
        return quota_E.tolist()

    @property
    def _owner_E(self) -> IntArray:
        return np.repeat(np.arange(self.num_ranks), len(self.demand_E) // self.num_ranks)

    @cached_property
    def splits_E(self) -> list[SourceSplit]:
        """Each expert's quota over the source ranks; only scope 'source' needs it."""
        where = offsets(self.key, range(len(self.quota_E)))
        # A call that probes keeps padding too.
        loads_SE = self.loads_SE if self.valid_SE is None or self.probes else self.valid_SE
        columns = list(zip(*loads_SE, strict=True))
        return [split_over_sources(q, n, o) for q, n, o in zip(self.quota_E, columns, where, strict=True)]

    @cached_property
    def kept_SE(self) -> list[list[int]]:
        """Kept pairs from each source for each expert, known before backward in scope 'source' only."""
        return [list(row) for row in zip(*(split.rows_S for split in self.splits_E), strict=True)]

    def kept_by_owner(self, source: int) -> list[int]:
        """Kept pairs of a source at each rank, known in scope 'source' only."""
        kept_E = self.kept_SE[source]
        return [sum(kept_E[e] for e in self.experts_of(r)) for r in range(self.num_ranks)]

    @property
    def kept_from_sources(self) -> list[int]:
        """Kept pairs of this rank's experts from each source, known in scope 'source' only."""
        return [self.kept_by_owner(source)[self.rank] for source in range(self.num_ranks)]

    def experts_of(self, rank: int) -> range:
        """Experts that a rank owns."""
        many = len(self.demand_E) // self.num_ranks
        return range(rank * many, (rank + 1) * many)

    @property
    def loads_Se(self) -> list[list[int]]:
        """Pairs from each source for each of this rank's own experts."""
        own = self.experts_of(self.rank)
        return [list(loads_E[own.start : own.stop]) for loads_E in self.loads_SE]

    @property
    def counts_e(self) -> list[int]:
        """Rows of each of this rank's own experts."""
        own = self.experts_of(self.rank)
        return self.demand_E[own.start : own.stop]

    def select_as_owner(self, facts: PairFacts) -> Chosen:
        """Fill the quotas of this rank's experts over the rows of all sources (scope 'expert').

        Args:
            facts: of each row, in expert order.

        Returns:
            Kept rows of expert order.
        """
        return self._choose(facts, self._own_shares)

    def select_as_source(self, facts: PairFacts) -> Chosen:
        """Fill this source's share of every expert's quota from its own rows (scope 'source').

        Args:
            facts: of each row, in wire order.

        Returns:
            Kept rows of wire order. Where the share itself was drawn, its probability is in the weights.
        """
        loads_E, kept_E = self.loads_SE[self.rank], self.kept_SE[self.rank]
        rows_and_quotas = enumerate(zip(loads_E, kept_E, strict=True))
        return self._choose(facts, [_Share(e, self.rank, rows, quota) for e, (rows, quota) in rows_and_quotas])

    def select_in_forward(
        self, act_norm_sq_N: torch.Tensor, alpha_N: torch.Tensor
    ) -> tuple[KeptRows, torch.Tensor | None]:
        """Fill the quotas of this rank's experts from what is known in forward, in either scope.

        The score lrm is then alpha^2 |phi|^2: what it is in backward, without the gradient.

        Args:
            act_norm_sq_N: (N,) squared norms of the fc2 input, in expert order.
            alpha_N: (N,) combine weights.

        Returns:
            Kept rows of expert order, with (e,) counts, and 1/probability of each; None with topk.
        """
        shares = self._own_shares if self.config.scope == "expert" else self._own_shares_by_source
        facts = PairFacts(torch.ones_like(act_norm_sq_N), act_norm_sq_N, alpha_N)
        kept, inverse_M = self._fill(facts, shares)
        return KeptRows(kept.rows_M, kept.weight_M, tuple(self.kept_e)), inverse_M

    @property
    def kept_e(self) -> list[int]:
        """Kept rows of each of this rank's own experts; with scope 'source', what its sources' shares sum to."""
        own = self.experts_of(self.rank)
        if self.config.scope == "expert":
            return self.quota_E[own.start : own.stop]
        return [sum(self.splits_E[e].rows_S) for e in own]

    @property
    def _own_shares(self) -> list[_Share]:
        return [_Share(e, None, self.demand_E[e], self.quota_E[e]) for e in self.experts_of(self.rank)]

    @property
    def _own_shares_by_source(self) -> list[_Share]:
        """Of the rows of this rank's experts, in expert order."""
        return [
            _Share(e, source, self.loads_SE[source][e], self.kept_SE[source][e])
            for e in self.experts_of(self.rank)
            for source in range(self.num_ranks)
        ]

    def _choose(self, facts: PairFacts, shares: Sequence[_Share]) -> Chosen:
        kept, inverse_M = self._fill(facts, shares)
        mass = None
        if self.config.score != "grad-abs":
            mass = pair_score("lrm", facts.grad_stat, facts.act_norm_sq)
        return Chosen(kept, selection_sums(mass, kept, inverse_M, self.config.max_weight))

    def _fill(self, facts: PairFacts, shares: Sequence[_Share]) -> tuple[KeptRows, torch.Tensor | None]:
        """Kept rows, and 1/probability of each where they are drawn."""
        kind = self.config.score
        counts, quotas = [share.rows for share in shares], [share.quota for share in shares]
        luck = None
        if kind == "random":
            luck = uniform_N(self._keyed(row_seeds, shares), counts, facts.grad_stat.device)
        score = pair_score(kind, facts.grad_stat, facts.act_norm_sq, luck, facts.alpha)
        if self.config.selection == "topk":
            return select_topk(score, counts, quotas), None
        where = self._keyed(offsets, shares)
        drawn = select_unbiased(draw_size_N(kind, score), counts, quotas, where, self.config.max_weight)
        inverse_M = drawn.weight_M
        if self.config.scope == "source":
            inverse_M = inverse_M * self._inverse_chance_M(shares, inverse_M)
        weight_M = torch.lerp(torch.ones_like(inverse_M), inverse_M, self.config.shrink)
        return KeptRows(drawn.rows_M, weight_M, drawn.counts_e), inverse_M

    def _keyed(self, make: Callable[..., list[int]], shares: Sequence[_Share]) -> list[int]:
        """What ``make`` gives the expert and source of each share; experts of a source are asked together."""
        experts_of: dict[int | None, list[int]] = {}
        for share in shares:
            experts_of.setdefault(share.source, []).append(share.expert)
        words = {
            (expert, source): word
            for source, experts in experts_of.items()
            for expert, word in zip(experts, make(self.key, experts, source), strict=True)
        }
        return [words[share.expert, share.source] for share in shares]

    def _inverse_chance_M(self, shares: Sequence[_Share], like_M: torch.Tensor) -> torch.Tensor:
        """1/probability that each kept row's expert gave its source any of its quota."""
        units = [int(self.splits_E[s.expert].probability_S[s.source or 0] * CERTAIN) for s in shares]
        table = host_ints([units, [s.quota for s in shares]], like_M.device)
        units_M = torch.repeat_interleave(table[0], table[1], output_size=sum(s.quota for s in shares))
        return (CERTAIN / units_M.double()).to(like_M)
