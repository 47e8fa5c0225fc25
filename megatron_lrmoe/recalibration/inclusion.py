"""Inclusion probabilities of the unbiased draw: min(1, c * size) with a whole sum, in exact integers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from megatron_lrmoe.recalibration.draw import CERTAIN, PROBABILITY_BITS
from megatron_lrmoe.recalibration.segments import Segments, non_finite_largest, sum_before

MAX_SEGMENT_ROWS = 1 << 22
"""A segment has fewer rows than this: the sum of its probabilities in units of 2^-40 fits int64."""

# Each round solves with the rows found below the floor so far set to it, which pushes further rows below.
# What is still below after the last round is lifted to the floor at the expense of larger rows.
_FLOOR_ROUNDS = 6

# Sizes are cut to count * 2^16 of the unit they are summed in.
_CUT_BITS = 16


def inclusion_probabilities(
    size_N: torch.Tensor,
    counts: Sequence[int],
    quotas: Sequence[int],
    max_weight: float | None = None,
) -> torch.Tensor:
    """Probability of each row to be kept, proportional to its size up to certainty.

    A non-finite size is larger than any other. Where a segment has no more positive sizes than quota, those
    rows are certain, then rows of size zero by index; where it has at least as many non-finite sizes as
    quota, the first of those are certain and nothing else is kept. Otherwise every row of positive size has
    at least one unit.

    Args:
        size_N: (N,) floating, not negative.
        counts: rows of each segment.
        quotas: rows to keep of each segment.
        max_weight: largest 1/probability of a row of positive size, as far as the quota allows: where it is
            too small for all of them, they become equally likely. Rows of size zero stay at zero.

    Returns:
        (N,) int64 in units of 2^-40, at most 2^40, in each segment with the sum quota * 2^40.

    Raises:
        RuntimeError: a segment of 2^22 rows or more, or inputs that do not belong together.
    """
    segments = Segments.of(counts, quotas, size_N)
    if max(counts, default=0) >= MAX_SEGMENT_ROWS:
        raise RuntimeError(f"a segment must have fewer than 2^22 rows, found {max(counts)}")
    if max_weight is not None and max_weight < 1:
        raise RuntimeError(f"max_weight must be >= 1, found {max_weight}")
    if segments.rows == 0:
        return torch.zeros(0, dtype=torch.int64, device=size_N.device)
    value_N = non_finite_largest(size_N).double()
    order_N = segments.falling(value_N)
    units_N = _units_in_order(value_N[order_N], segments, max_weight)
    return torch.empty_like(units_N).scatter_(0, order_N, units_N)


def _units_in_order(value_N: torch.Tensor, segments: Segments, max_weight: float | None) -> torch.Tensor:
    """``inclusion_probabilities`` for sizes that fall within each segment and are finite or +inf."""
    last = segments.rows - 1
    at_quota_e = value_N[(segments.start_e + segments.quota_e - 1).clamp(0, last)]
    after_quota_e = value_N[(segments.start_e + segments.quota_e).clamp(0, last)]
    settled_e = (segments.quota_e == 0) | (segments.quota_e == segments.count_e)
    settled_e = settled_e | at_quota_e.isinf() | (after_quota_e == 0)
    certain_N = segments.rank() < segments.spread(segments.quota_e)
    drawn_N = _drawn_units(value_N, segments, max_weight)
    return torch.where(segments.spread(settled_e), certain_N * CERTAIN, drawn_N)


def _drawn_units(value_N: torch.Tensor, segments: Segments, max_weight: float | None) -> torch.Tensor:
    """Units of the segments in which there is something to draw; of the others, numbers without meaning."""
    positive_N = value_N > 0
    positive_e = segments.total(positive_N)
    least_e = torch.ones_like(positive_e)
    level = _water_level(value_N, segments, segments.quota_e.double(), positive_e)
    if max_weight is not None:
        # No floor can be above what the finite rows would get if they were equally likely.
        infinite_e = segments.total(value_N.isinf())
        even_e = (segments.quota_e - infinite_e) * CERTAIN // (positive_e - infinite_e).clamp_min(1)
        least_e = even_e.clamp(1, math.ceil(CERTAIN / Fraction(max_weight)))
        floor_e, above_e = least_e.double() / CERTAIN, positive_e
        for _ in range(_FLOOR_ROUNDS):
            below_e = segments.total(positive_N & (level.share < segments.spread(floor_e)))
            above_e = torch.minimum(above_e, positive_e - below_e)
            budget_e = segments.quota_e - floor_e * (positive_e - above_e)
            level = _water_level(value_N, segments, budget_e, above_e)
    least_N = torch.where(value_N.isinf(), CERTAIN, segments.spread(least_e) * positive_N)
    units_N = torch.maximum((level.share * CERTAIN).round().long(), least_N)
    return _repaired(units_N, least_N, positive_N, level.certain, segments)


@dataclass(frozen=True)
class _Level:
    """How a budget of probability is split.

    Args:
        share: (N,) probability of each row.
        certain: (e,) number of rows at the start of each segment that are certain.
    """

    share: torch.Tensor
    certain: torch.Tensor


def _water_level(value_N: torch.Tensor, segments: Segments, budget_e: torch.Tensor, above_e: torch.Tensor) -> _Level:
    """Split a budget of probability over the first rows of each segment as min(1, c * size).

    With z the sizes in any unit, the row of rank j is certain if z_j * (budget - j) >= the sum of z from it
    on; once a row is not, no later row is.

    The unit is the size in which the budget's last row falls, and larger sizes are cut, so that no sum over-
    or underflows whatever the range of the sizes. Where the budget is f more than a whole number (f = 1
    without a floor), rows that are not certain are below count / f units. So the cut changes nothing unless
    f < 2^-16, and then no probability by more than 2^-16.

    Args:
        value_N: (N,) fp64 sizes, falling within each segment.
        segments: of the rows.
        budget_e: sum of the probabilities, at most ``above_e``.
        above_e: number of rows that share the budget.
    """
    rank_N = segments.rank()
    unit_rank_e = torch.minimum(budget_e.ceil().long(), above_e).sub(1).clamp_min(0)
    unit_e = value_N[(segments.start_e + unit_rank_e).clamp_max(segments.rows - 1)]
    # NaN comes from inf/inf in rows that are certain whatever their share, and from 0/0 in settled segments.
    cut_N = segments.spread(segments.count_e) << _CUT_BITS
    z_N = torch.minimum(value_N / segments.spread(unit_e), cut_N).nan_to_num(0.0)
    bound = max(n * max(q, 1) for n, q in zip(segments.counts, segments.quotas, strict=True))
    sums = _RangeSums(z_N, bound << _CUT_BITS)

    end_e = segments.start_e + above_e
    from_here_N = sums.between(torch.arange(segments.rows, device=z_N.device), segments.spread(end_e))
    budget_N = segments.spread(budget_e)
    # The budget's last row is not asked: if it has the rest to itself, its share below is 1 anyway.
    certain_N = (rank_N < budget_N - 1) & (z_N * (budget_N - rank_N) >= from_here_N)
    certain_e = segments.total(certain_N)
    # The unit is among what is left, unless every row that shares is certain.
    left_e = sums.between(segments.start_e + certain_e, end_e).clamp_min(1.0)
    share_N = (z_N * segments.spread((budget_e - certain_e) / left_e)).clamp(0.0, 1.0)
    return _Level(share_N.masked_fill(rank_N < segments.spread(certain_e), 1.0), certain_e)


class _RangeSums:
    """Sums of z over any range of rows inside a segment, from exact fixed-point prefix sums.

    z = (coarse + fine * 2^-40) * 2^-coarse_bits, with as many coarse bits as leave a segment's sum in int64.

    Args:
        z_N: (N,) fp64, each at most the rows of its segment.
        bound: no segment's z sum to more than this.
    """

    def __init__(self, z_N: torch.Tensor, bound: int) -> None:
        self.coarse_bits = 62 - bound.bit_length()
        scaled_N = z_N * 2.0**self.coarse_bits
        coarse_N = scaled_N.floor()
        self.coarse_before = sum_before(coarse_N.long())
        self.fine_before = sum_before(((scaled_N - coarse_N) * 2.0**PROBABILITY_BITS).long())

    def between(self, first: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """Sum over rows first to end - 1, fp64."""
        coarse = (self.coarse_before[end] - self.coarse_before[first]).double()
        fine = (self.fine_before[end] - self.fine_before[first]).double()
        return (coarse + fine * 2.0**-PROBABILITY_BITS) * 2.0**-self.coarse_bits


def _repaired(
    units_N: torch.Tensor,
    least_N: torch.Tensor,
    positive_N: torch.Tensor,
    certain_e: torch.Tensor,
    segments: Segments,
) -> torch.Tensor:
    """Make every segment's units sum to quota * 2^40 exactly, within [least, 2^40] and on positive rows only.

    What is missing or too much is dealt out from the largest row that is not certain downwards, where it
    changes the probabilities by the smallest factor; certain rows come last.
    """
    missing_e = segments.quota_e * CERTAIN - segments.total(units_N)
    missing_N = segments.spread(missing_e)
    room_N = torch.where(missing_N > 0, (CERTAIN - units_N) * positive_N, units_N - least_N)
    before_N = sum_before(room_N)
    turn_N = before_N[:-1] - segments.spread(before_N[segments.start_e + certain_e])
    turn_N = torch.remainder(turn_N, segments.spread(segments.total(room_N).clamp_min(1)))
    dealt_N = torch.minimum((missing_N.abs() - turn_N).clamp_min(0), room_N)
    return units_N + missing_N.sign() * dealt_N
