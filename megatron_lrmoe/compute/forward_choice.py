"""Pairs chosen in forward, right after the activation, so that nothing of the others is saved.

The owner chooses, whatever the scope: it has every row of its experts. It tells each source which of its pairs are
kept, a byte a pair; the weights stay with the owner, which multiplies them into the gradient rows it receives.
"""

import torch

from megatron_lrmoe.compute.compaction import compact_positions, rows_where
from megatron_lrmoe.compute.exchange import Exchange, HostCopy, taken
from megatron_lrmoe.pairs import KeptRows
from megatron_lrmoe.recalibration.plan import KeepPlan
from megatron_lrmoe.recalibration.quality import sums_of_kept
from megatron_lrmoe.recalibration.score import row_norm_sq


class ForwardChoice:
    """What one call keeps, held from its forward on: numbers of kept rows, and a byte for each of the source's pairs.

    Args:
        plan: quotas of the call.
        exchange: of the call.
        act_norm_sq_N: (N,) squared row norms of fc2's input, in expert order.
        alpha_N: (N,) combine weights.
    """

    def __init__(self, plan: KeepPlan, exchange: Exchange, act_norm_sq_N: torch.Tensor, alpha_N: torch.Tensor):
        self._plan, self._exchange = plan, exchange
        self.kept, self._inverse_M = plan.select_in_forward(act_norm_sq_N, alpha_N)
        self.act_norm_sq_M = act_norm_sq_N[self.kept.rows_M]
        self.home_M: torch.Tensor | None = None
        self._mask_P: torch.Tensor | None = None
        self._counts: HostCopy | None = None

    def share(self) -> None:
        """In forward, tell each source which of its pairs are kept; how many, the host learns until backward."""
        exchange, wire_of_N = self._exchange, self._exchange.wire_of_N
        if wire_of_N is None:
            return
        rows_M = self.kept.rows_M
        mask_wire = rows_M.new_zeros(len(wire_of_N), dtype=torch.uint8).index_fill_(0, wire_of_N[rows_M], 1)
        self.home_M = compact_positions(mask_wire, wire_of_N[rows_M])
        self._mask_P = exchange.all_to_all(mask_wire, exchange.received_splits, exchange.sent_splits)
        if self._plan.config.scope == "expert":
            per_rank = [part.sum() for part in self._mask_P.split(exchange.sent_splits)]
            per_rank += [part.sum() for part in mask_wire.split(exchange.received_splits)]
            self._counts = HostCopy(torch.stack(per_rank))

    def route(self) -> tuple[KeptRows, list[int]]:
        """Kept rows of this source's wire order by owner, of weight 1; and how many come from each source."""
        rows_M = self.kept.rows_M
        if self._exchange.wire_of_N is None:
            counts, kept_from = [len(rows_M)], [len(rows_M)]
        else:
            counts, kept_from = self._kept_splits()
            rows_M = rows_where(taken(self._mask_P), sum(counts))
        return KeptRows(rows_M, torch.ones_like(rows_M, dtype=self.kept.weight_M.dtype), tuple(counts)), kept_from

    def _kept_splits(self) -> tuple[list[int], list[int]]:
        plan = self._plan
        if plan.config.scope == "source":
            return plan.kept_by_owner(plan.rank), plan.kept_from_sources
        counts = taken(self._counts).read()
        return counts[: plan.num_ranks], counts[plan.num_ranks :]

    def costs(self, g_MD: torch.Tensor) -> torch.Tensor:
        """``quality.SELECTION_SUMS``, estimated from the kept rows.

        Args:
            g_MD: (M, D) gradient of the kept rows, in expert order and unweighted.
        """
        mass_M = row_norm_sq(g_MD) * self.act_norm_sq_M
        return sums_of_kept(mass_M, self.kept, self._inverse_M, self._plan.config.max_weight)
