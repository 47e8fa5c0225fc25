"""What a selection costs: the squared gradient norms that it drops, and the variance that a draw adds.

With R a pair's squared fc2 gradient norm, p the probability with which it was kept and w its weight then, independent
draws add the variance sum w^2 p (1 - p) R to the gradient; with w = 1/p that is sum (1/p - 1) R. A kept row stands
for 1/p rows like it, so the sum over kept rows of w^2 (1 - p) R has the same expectation.
"""

import torch

from megatron_lrmoe.pairs import KeptRows

SELECTION_SUMS = ("mass", "dropped", "variance", "kept", "capped")
"""Entries of ``selection_sums``: sum of R, of R of dropped rows, added variance, kept rows, and those of them whose
1/probability is at ``max_weight`` or above (above it where the quota or the split over sources leaves no choice)."""

# Weights are 1/probability in fp32; the probability at the cap was rounded up to a multiple of 2^-40.
_AT_CAP = 1 - 1e-6


def selection_sums(
    mass_N: torch.Tensor | None, kept: KeptRows, inverse_M: torch.Tensor | None, max_weight: float | None
) -> torch.Tensor:
    """Sums that say what one selection cost, on the device: nothing waits for them.

    Args:
        mass_N: (N,) R of every row; non-finite ones count as 0. None where it is not known, and sums of it are 0.
        kept: chosen among the rows.
        inverse_M: (M,) 1/probability of the kept rows; None where nothing was drawn.
        max_weight: largest 1/probability of the draw.

    Returns:
        (5,) fp64 in the order of ``SELECTION_SUMS``.
    """
    if mass_N is None:
        return sums_of_kept(torch.zeros_like(kept.weight_M), kept, inverse_M, max_weight)
    mass_N = _finite(mass_N)
    mass_M = mass_N[kept.rows_M]
    sums = sums_of_kept(mass_M, kept, inverse_M, max_weight)
    sums[0] = mass_N.sum()
    sums[1] = (sums[0] - mass_M.sum()).clamp_min(0)
    return sums


def sums_of_kept(
    mass_M: torch.Tensor, kept: KeptRows, inverse_M: torch.Tensor | None, max_weight: float | None
) -> torch.Tensor:
    """``selection_sums`` where only the kept rows' R is known: a kept row stands for 1/probability rows like it.

    Args:
        mass_M: (M,) R of the kept rows; non-finite ones count as 0.
        kept: rows and weights.
        inverse_M: (M,) 1/probability; None where nothing was drawn, and sums of R are then 0.
        max_weight: largest 1/probability of the draw.

    Returns:
        (5,) fp64; the first two are estimates.
    """
    sums = kept.weight_M.new_zeros(len(SELECTION_SUMS), dtype=torch.float64)
    sums[3] = kept.rows_M.shape[0]
    if inverse_M is None:
        return sums
    exact_M, mass_M = inverse_M.double(), _finite(mass_M)
    sums[0] = (exact_M * mass_M).sum()
    sums[1] = ((exact_M - 1) * mass_M).sum()
    sums[2] = (kept.weight_M.double().square() * (1 - 1 / exact_M) * mass_M).sum()
    if max_weight is not None:
        sums[4] = (inverse_M >= max_weight * _AT_CAP).sum()
    return sums


def _finite(mass: torch.Tensor) -> torch.Tensor:
    return torch.where(mass.isfinite(), mass, 0.0).double()
