"""Segments: consecutive runs of rows, such as an expert's, or one source's rows of an expert.

Row counts are host integers and values are on the device, so everything here knows its sizes without asking
the device: no function waits for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn.functional import pad

from megatron_lrmoe.recalibration.draw import host_ints


@dataclass(frozen=True)
class Segments:
    """Where each segment lies and how many of its rows are kept. Here e counts segments.

    Args:
        counts: rows of each segment.
        quotas: rows to keep of each segment, at most its count.
        count_e, quota_e: the same on the device, (e,) int64.
        start_e: (e,) int64, first row of each segment.
        kept_start_e: (e,) int64, the first of each segment's places among the kept rows.
    """

    counts: tuple[int, ...]
    quotas: tuple[int, ...]
    count_e: torch.Tensor
    quota_e: torch.Tensor
    start_e: torch.Tensor
    kept_start_e: torch.Tensor

    @classmethod
    def of(cls, counts: Sequence[int], quotas: Sequence[int], values_N: torch.Tensor) -> "Segments":
        """Segments of ``values_N``, one value per row.

        Raises:
            RuntimeError: counts, quotas and values do not belong together.
        """
        if len(counts) != len(quotas) or any(not 0 <= q <= n for n, q in zip(counts, quotas, strict=True)):
            raise RuntimeError(f"quotas must be in [0, count], found {list(quotas)} of {list(counts)}")
        if values_N.shape != (sum(counts),):
            raise RuntimeError(f"need one value per row, found {tuple(values_N.shape)} for {sum(counts)} rows")
        starts = [0, *accumulate(counts)][:-1]
        kept_starts = [0, *accumulate(quotas)][:-1]
        table = host_ints([counts, quotas, starts, kept_starts], values_N.device)
        return cls(tuple(counts), tuple(quotas), *table)

    @property
    def rows(self) -> int:
        """Number of rows, N."""
        return sum(self.counts)

    @property
    def kept(self) -> int:
        """Number of kept rows, M."""
        return sum(self.quotas)

    def spread(self, value_e: torch.Tensor) -> torch.Tensor:
        """Each segment's value at each of its rows: (e,) to (N,)."""
        return torch.repeat_interleave(value_e, self.count_e, output_size=self.rows)

    def spread_kept(self, value_e: torch.Tensor) -> torch.Tensor:
        """Each segment's value at each of its kept places: (e,) to (M,)."""
        return torch.repeat_interleave(value_e, self.quota_e, output_size=self.kept)

    def rank(self) -> torch.Tensor:
        """Index of each row inside its segment, (N,) int64."""
        return torch.arange(self.rows, device=self.start_e.device) - self.spread(self.start_e)

    def total(self, value_N: torch.Tensor) -> torch.Tensor:
        """Sum over each segment of integers, (N,) to (e,); sums past the segment may overflow unharmed."""
        before = sum_before(value_N.long())
        return before[self.start_e + self.count_e] - before[self.start_e]

    def falling(self, value_N: torch.Tensor) -> torch.Tensor:
        """Row numbers, (N,) int64, segment by segment, in each by falling value, equal values by row."""
        segment_N = self.spread(torch.arange(len(self.counts), device=value_N.device))
        by_value = torch.argsort(value_N, descending=True, stable=True)
        return by_value[torch.argsort(segment_N[by_value], stable=True)]


def sum_before(value_N: torch.Tensor) -> torch.Tensor:
    """Sum of the integers before each row, and of all: (N,) int64 to (N + 1,).

    Only integers are summed this way: their sums are the same on every device and in every run, while a
    parallel prefix sum of floats is not even reproducible on one GPU.
    """
    return pad(value_N.cumsum(0), (1, 0))


def non_finite_largest(value_N: torch.Tensor) -> torch.Tensor:
    """The values with NaN and both infinities replaced by +inf."""
    return torch.where(value_N.isfinite(), value_N, torch.inf)
