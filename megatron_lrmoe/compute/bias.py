"""What dropping would have cost a call that ran its full backward: the bias of top-k beside the noise of a draw."""

from collections.abc import Sequence

import torch

from megatron_lrmoe.recalibration.draw import CERTAIN
from megatron_lrmoe.recalibration.plan import KeepPlan
from megatron_lrmoe.recalibration.selection import inclusion_probabilities, select_topk

PROBE_SUMS = ("mass", "dropped", "bias", "variance")
"""Entries of ``BiasProbe.sums``: of R, of R of the pairs that top-k drops, of the squared norm of the sum of those
pairs' gradients of each expert, of the variance that an unbiased draw adds. R is a pair's squared fc2 gradient norm."""


class BiasProbe:
    """Top-k by R at the call's quotas over all sources, applied to fc2 gradients that were computed in full.

    kappa = bias / dropped compares the norm of what top-k leaves out with what it would be if the dropped pairs'
    gradients were orthogonal to each other. Letters as in ``pairs``.

    Args:
        plan: of a call that probes.
        mass_N: (N,) R of this rank's rows, in expert order.
    """

    def __init__(self, plan: KeepPlan, mass_N: torch.Tensor):
        own = plan.experts_of(plan.rank)
        quotas = plan.policy_quota_E[own.start : own.stop]
        best = select_topk(mass_N, plan.counts_e, quotas)
        self.dropped_N = torch.ones_like(mass_N, dtype=torch.bool).index_fill_(0, best.rows_M, False)
        units_N = inclusion_probabilities(mass_N.sqrt(), plan.counts_e, quotas, plan.config.max_weight)
        mass_N = torch.where(mass_N.isfinite(), mass_N, 0.0).double()
        added_N = torch.where(units_N > 0, (CERTAIN / units_N.double() - 1) * mass_N, 0.0)
        dropped_N = mass_N * self.dropped_N
        self.sums = torch.stack([mass_N.sum(), dropped_N.sum(), mass_N.new_zeros(()), added_N.sum()])

    def masked(self, g_ND: torch.Tensor, rows: slice) -> torch.Tensor:
        """The rows with those zeroed that top-k keeps."""
        return g_ND * self.dropped_N[rows].unsqueeze(1)

    def add(self, dropped_dw: Sequence[torch.Tensor]) -> None:
        """Count the fc2 gradients of dropped rows, one (D, F) matrix per expert."""
        for dw in dropped_dw:
            self.sums[2] += torch.linalg.vector_norm(dw, dtype=torch.promote_types(dw.dtype, torch.float32)).square()
