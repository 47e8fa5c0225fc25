"""Which rows of each segment keep their backward: the largest, or an unbiased draw of exactly the quota."""

from collections.abc import Sequence

import torch

from megatron_lrmoe.pairs import KeptRows
from megatron_lrmoe.recalibration.draw import CERTAIN, host_ints
from megatron_lrmoe.recalibration.inclusion import inclusion_probabilities
from megatron_lrmoe.recalibration.segments import Segments, non_finite_largest

__all__ = ["inclusion_probabilities", "keep_all", "select_topk", "select_unbiased"]

MAX_KEPT_ROWS = 1 << 23
"""Fewer rows than this are kept in one draw: the sum of all probabilities in units of 2^-40 fits int64."""


def keep_all(counts: Sequence[int], device: torch.device, dtype: torch.dtype) -> KeptRows:
    """Every row with weight 1.

    Args:
        counts: rows of each segment.
        device: of the result.
        dtype: of the weights.
    """
    rows = sum(counts)
    return KeptRows(
        rows_M=torch.arange(rows, device=device),
        weight_M=torch.ones(rows, dtype=dtype, device=device),
        counts_e=tuple(counts),
    )


def select_topk(score_N: torch.Tensor, counts: Sequence[int], quotas: Sequence[int]) -> KeptRows:
    """The rows of largest score of each segment with weight 1, equal scores by row, on any device the same.

    Args:
        score_N: (N,) floating; a non-finite score counts as larger than any other.
        counts: rows of each segment.
        quotas: rows to keep of each segment.
    """
    segments = Segments.of(counts, quotas, score_N)
    if segments.quotas == segments.counts:
        return keep_all(counts, score_N.device, score_N.dtype)
    # Sorted and not torch.topk, which does not say which of equal values it returns.
    order_N = segments.falling(non_finite_largest(score_N))
    place_M = torch.arange(segments.kept, device=score_N.device)
    place_M = place_M + segments.spread_kept(segments.start_e - segments.kept_start_e)
    rows_M = order_N[place_M].sort().values
    return KeptRows(rows_M, torch.ones_like(rows_M, dtype=score_N.dtype), segments.quotas)


def select_unbiased(
    size_N: torch.Tensor,
    counts: Sequence[int],
    quotas: Sequence[int],
    offsets: Sequence[int],
    max_weight: float | None = None,
) -> KeptRows:
    """A systematic draw of exactly the quota of each segment, each kept row weighted by 1/probability.

    The rows of a segment are laid on a line, each as long as its probability; those are kept that hold one of
    the points offset, offset + 1, ... Over all offsets each row is kept as often as its probability says.

    Args:
        size_N: (N,) floating, not negative: what the probability is proportional to.
        counts: rows of each segment.
        quotas: rows to keep of each segment.
        offsets: of each segment, in [0, 2^40), in units of 2^-40.
        max_weight: as in ``inclusion_probabilities``.

    Raises:
        RuntimeError: sizes past what int64 holds, or inputs that do not belong together.
    """
    segments = Segments.of(counts, quotas, size_N)
    if len(offsets) != len(counts) or any(not 0 <= offset < CERTAIN for offset in offsets):
        raise RuntimeError(f"need one offset in [0, 2^40) for each of {len(counts)} segments, found {list(offsets)}")
    if segments.kept >= MAX_KEPT_ROWS:
        raise RuntimeError(f"fewer than 2^23 rows can be kept in one draw, found {segments.kept}")
    if segments.quotas == segments.counts:
        return keep_all(counts, size_N.device, size_N.dtype)
    units_N = inclusion_probabilities(size_N, counts, quotas, max_weight)
    # Each segment's line is a whole number of units of probability long, so the lines join into one.
    line_N = units_N.cumsum(0)
    offset_M = segments.spread_kept(host_ints([offsets], size_N.device)[0])
    point_M = torch.arange(segments.kept, device=size_N.device) * CERTAIN + offset_M
    rows_M = torch.searchsorted(line_N, point_M, right=True)
    weight_M = (CERTAIN / units_N[rows_M].double()).to(size_N.dtype)
    return KeptRows(rows_M, weight_M, segments.quotas)
