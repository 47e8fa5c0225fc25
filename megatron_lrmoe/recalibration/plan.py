"""What one forward call has fixed before its experts run: loads, quotas, and how the quotas will be filled."""

from collections.abc import Sequence
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
from megatron_lrmoe.recalibration.draw import offsets, row_seeds, uniform_N
from megatron_lrmoe.recalibration.quota import proportional_quota
from megatron_lrmoe.recalibration.score import draw_size_N, pair_score
from megatron_lrmoe.recalibration.selection import select_topk, select_unbiased
from megatron_lrmoe.recalibration.sources import SourceSplit, split_over_sources


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
    """

    config: LrmConfig
    key: DrawKey
    retention: Fraction
    loads_SE: Sequence[Sequence[int]]
    rank: int
    row_bytes: RowBytes | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks of the expert-parallel group."""
        return len(self.loads_SE)

    @cached_property
    def demand_E(self) -> list[int]:
        """Pairs of each expert, over all sources."""
        return [sum(loads_S) for loads_S in zip(*self.loads_SE, strict=True)]

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
            limits.append(joint_limit(self.rows_R))
        return np.min(limits, axis=0) if limits else None

    @property
    def least_share(self) -> Fraction:
        """Share that every expert keeps at least: it ramps from 1 to its target as retention does."""
        if self.retention == 1:
            return Fraction(1)
        ramped = (1 - self.retention) / (1 - self.config.retention_fraction)
        return 1 - (1 - self.config.least_share) * ramped

    @cached_property
    def quota_E(self) -> list[int]:
        """Pairs of each expert that keep their backward."""
        policy, limit_R = self.config.quota, self.limit_R
        even_E = proportional_quota(self.demand_E, self.retention, self.config.min_rows)
        if policy == "proportional" and limit_R is None:
            return even_E
        load_E, quota_E = np.array(self.demand_E, np.int64), np.array(even_E, np.int64)
        owner_E, total = self._owner_E, sum(even_E)
        floor_E = floor_rows(load_E, quota_E, self.least_share, self.config.min_rows)
        if policy == "balanced":
            quota_E = balanced_quota(load_E, floor_E, owner_E, self.num_ranks, total)
        elif policy == "joint" and limit_R is not None:
            quota_E = joint_quotas(load_E, floor_E, owner_E, limit_R, allowance=sum(self.demand_E) - total)
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
        columns = list(zip(*self.loads_SE, strict=True))
        return [split_over_sources(q, n, o) for q, n, o in zip(self.quota_E, columns, where, strict=True)]

    @cached_property
    def kept_SE(self) -> list[list[int]]:
        """Kept pairs from each source for each expert, known before backward in scope 'source' only."""
        return [list(row) for row in zip(*(split.rows_S for split in self.splits_E), strict=True)]

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

    def select_as_owner(self, grad_stat_N: torch.Tensor, act_norm_sq_N: torch.Tensor) -> KeptRows:
        """Fill the quotas of this rank's experts over the rows of all sources (scope 'expert').

        Args:
            grad_stat_N: (N,) the score's statistic of each row's ``g``, in expert order.
            act_norm_sq_N: (N,) squared norm of each row's fc2 input, in expert order.

        Returns:
            Kept rows of expert order.
        """
        own = self.experts_of(self.rank)
        quotas = self.quota_E[own.start : own.stop]
        return self._select(grad_stat_N, act_norm_sq_N, self.counts_e, quotas, own, source=None)

    def select_as_source(self, grad_stat_P: torch.Tensor, act_norm_sq_P: torch.Tensor) -> KeptRows:
        """Fill this source's share of every expert's quota from its own rows (scope 'source').

        Args:
            grad_stat_P: (P,) the score's statistic of each row's ``g``, in wire order.
            act_norm_sq_P: (P,) squared norm of each row's fc2 input, in wire order.

        Returns:
            Kept rows of wire order. Where the share itself was drawn, its probability is in the weights.
        """
        counts, quotas = list(self.loads_SE[self.rank]), self.kept_SE[self.rank]
        experts = range(len(counts))
        kept = self._select(grad_stat_P, act_norm_sq_P, counts, quotas, experts, source=self.rank)
        chance_E = [float(split.probability_S[self.rank]) for split in self.splits_E]
        if self.config.selection == "topk" or all(c == 1 for c, q in zip(chance_E, quotas, strict=True) if q):
            return kept
        factor = torch.tensor([1 / c for c, q in zip(chance_E, quotas, strict=True) for _ in range(q)])
        weight_M = kept.weight_M * factor.to(kept.weight_M)
        return KeptRows(rows_M=kept.rows_M, weight_M=weight_M, counts_e=kept.counts_e)

    def _select(
        self,
        grad_stat: torch.Tensor,
        act_norm_sq: torch.Tensor,
        counts: Sequence[int],
        quotas: Sequence[int],
        experts: range,
        source: int | None,
    ) -> KeptRows:
        kind = self.config.score
        luck = None
        if kind == "random":
            luck = uniform_N(row_seeds(self.key, experts, source), counts, grad_stat.device)
        score = pair_score(kind, grad_stat, act_norm_sq, luck)
        if self.config.selection == "topk":
            return select_topk(score, counts, quotas)
        where = offsets(self.key, experts, source)
        return select_unbiased(draw_size_N(kind, score), counts, quotas, where, self.config.max_weight)
