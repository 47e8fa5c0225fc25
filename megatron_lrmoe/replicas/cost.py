"""What rows and replicas cost: in GEMM tiles, in bytes of memory, and in bytes pushed against rows saved."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lrmoe.replicas.plan import IntArray, Limits


@dataclass(frozen=True, kw_only=True)
class RowCost:
    """Rows that a group of a grouped GEMM costs: its own, rounded up to whole tiles, and a constant.

    The defaults count rows alone.
    """

    tile_rows: int = 1
    """Rows of a GEMM tile; a group is computed in whole tiles."""

    group_rows: int = 0
    """Rows whose time one more group takes (launch, tail, loading its weights)."""

    def __post_init__(self) -> None:
        for name, least in (("tile_rows", 1), ("group_rows", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: found {value!r}, allowed is a whole number >= {least}")

    def of(self, rows_I: IntArray) -> IntArray:
        """(I,) cost of each group; one without rows costs nothing."""
        tiles_I = -(-rows_I // self.tile_rows)
        return tiles_I * self.tile_rows + self.group_rows * (rows_I > 0)


@dataclass(frozen=True, kw_only=True)
class ByteBudget:
    """Memory of a rank for one layer call: slots x (weights + gradients) + rows x activation bytes."""

    total: int
    """Bytes."""
    saved: int
    """Bytes kept from forward to backward for each routed row."""
    work: int
    """Bytes of workspace in backward for each kept row."""
    slot: int
    """Bytes of a replica slot: 2 for each bf16 weight and, unless it is forward-only, 4 for each fp32 gradient."""

    def limits(self, loads_SE: IntArray, quota_E: IntArray, slots: int) -> Limits:
        """Row limits under which every rank stays within the budget.

        Forward and backward rows share the bytes that the slots leave in proportion to what they need on average,
        so both limits are the same multiple of their means.

        Raises:
            ValueError: the budget does not hold the slots and a row of either kind.
        """
        routed, kept = int(loads_SE.sum()), int(quota_E.sum())
        left = self.total - slots * self.slot
        if left < self.saved + self.work:
            least = slots * self.slot + self.saved + self.work
            raise ValueError(
                f"budget: found {self.total} bytes, allowed is {least} or more, for {slots} x {self.slot} of slots and "
                "one row"
            )
        needed = routed * self.saved + kept * self.work
        if needed == 0:
            return Limits(forward=left // max(1, self.saved), backward=left // max(1, self.work))
        # One row of each kind fits, whatever the proportion.
        most = (left - self.work) // max(1, self.saved)
        forward = max(1, min(left * routed // needed, most))
        return Limits(forward=forward, backward=max(1, (left - forward * self.saved) // max(1, self.work)))


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """Whether replicas earn what they cost: rows off the busiest rank against bytes over the busiest link.

    A push sends 2 bytes a parameter, restoring it in backward 2 more, and its gradient goes home in fp32: 8 bytes in
    all, 2 if it is forward-only. A row costs 2 FLOP a parameter in forward and 4 for a kept one in backward. So a
    replica has to take 4 F / (B (1 + 2 rho)) rows off the busiest rank, whatever the expert's size.
    """

    parameters: int
    """Of an expert."""
    flops: float
    """Sustained FLOP/s of the grouped GEMMs on one rank."""
    bytes_per_s: float
    """Of one rank's link, in each direction."""
    gradient_hidden: bool = False
    """Gradients travel beneath other work and cost no time."""

    def saved_seconds(self, before: "RankRows", after: "RankRows") -> float:
        """Fall of the busiest rank's time, from the (R,) forward and backward rows before and after."""
        return max(self._seconds(before)) - max(self._seconds(after))

    def _seconds(self, rows: "RankRows") -> NDArray[np.float64]:
        return self.parameters * (2.0 * rows.forward_R + 4.0 * rows.backward_R) / self.flops

    def push_seconds(
        self, sender_n: IntArray, rank_n: IntArray, forward_only_n: NDArray[np.bool_], ranks: int
    ) -> float:
        """Time over the busiest link, in either direction, of replicas that go from sender to rank."""
        full = 4 if self.gradient_hidden else 8
        bytes_n = self.parameters * np.where(forward_only_n, 2, full)
        sent_R = np.bincount(sender_n, bytes_n, minlength=ranks)
        received_R = np.bincount(rank_n, bytes_n, minlength=ranks)
        return float(max(sent_R.max(initial=0), received_R.max(initial=0))) / self.bytes_per_s

    def rows_to_earn(self, retention: float) -> float:
        """Rows that one replica must take off the busiest rank, if the share ``retention`` of them is kept."""
        bytes_each = 4 if self.gradient_hidden else 8
        return bytes_each * self.flops / (self.bytes_per_s * (2 + 4 * retention))


class RankRows(NamedTuple):
    """(R,) forward and backward rows of each rank."""

    forward_R: IntArray
    backward_R: IntArray
