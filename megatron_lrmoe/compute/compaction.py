"""Index maps between the orders that a pair's row passes through, and packing by them.

Expert order (N) sorts an owner's rows by expert, then source. Wire order is how rows arrive from and return to the
all-to-all: by source, then expert. Both keep a source's tokens ascending within an expert.
"""

from collections.abc import Sequence

import torch


def wire_of_expert_order(loads_Se: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Wire position of each row of an owner, rows taken in expert order.

    Args:
        loads_Se: pairs from each source for each of the owner's experts.
        device: of the result.

    Returns:
        (N,) int64 permutation.
    """
    loads = torch.tensor(loads_Se, dtype=torch.int64)
    wire_start_Se = _starts(loads)
    expert_start_eS = _starts(loads.t())
    shift_eS = wire_start_Se.t() - expert_start_eS
    total = int(loads.sum())
    shift_N = torch.repeat_interleave(shift_eS.reshape(-1), loads.t().reshape(-1), output_size=total)
    return (shift_N + torch.arange(total)).to(device, non_blocking=True)


def rows_where(mask: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Ascending row numbers of a mask whose number of true entries the host knows already.

    ``torch.nonzero`` would ask the device for that number and wait.

    Args:
        mask: (N,) bool.
        num_rows: how many of them are true.

    Returns:
        (num_rows,) int64.
    """
    return torch.nonzero_static(mask, size=num_rows).squeeze(1)


def compact_positions(mask_N: torch.Tensor, rows_M: torch.Tensor) -> torch.Tensor:
    """Where each of some kept rows lies among all kept rows.

    Args:
        mask_N: (N,) bool, true for kept.
        rows_M: (M,) kept rows in any order.

    Returns:
        (M,) int64 positions in [0, M).
    """
    return (mask_N.cumsum(0) - 1)[rows_M]


def pack_rows(rows_of: torch.Tensor, index_M: torch.Tensor, weight_M: torch.Tensor | None) -> torch.Tensor:
    """Gather rows into a buffer of exactly as many rows, each times its weight.

    Args:
        rows_of: (T, D) rows to take from.
        index_M: (M,) which.
        weight_M: (M,) factors, or None for 1. The product is rounded once to the rows' dtype.

    Returns:
        (M, D) in the rows' dtype.
    """
    packed_MD = rows_of.index_select(0, index_M)
    return packed_MD if weight_M is None else weigh_rows(packed_MD, weight_M)


def weigh_rows(rows_MD: torch.Tensor, weight_M: torch.Tensor) -> torch.Tensor:
    """Each row times its weight, rounded once to the rows' dtype; in place where the weights are of that dtype.

    Args:
        rows_MD: (M, D), given up by the caller.
        weight_M: (M,).
    """
    if rows_MD.dtype == weight_M.dtype:
        return rows_MD.mul_(weight_M.unsqueeze(1))
    return (rows_MD * weight_M.unsqueeze(1)).to(rows_MD.dtype)


def add_rows(rows_MD: torch.Tensor, index_M: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Sum rows into their tokens: the transpose of packing, for any number of rows per token, 0 included.

    Args:
        rows_MD: (M, D).
        index_M: (M,) token of each row.
        num_tokens: T.

    Returns:
        (T, D).
    """
    return rows_MD.new_zeros(num_tokens, rows_MD.shape[1]).index_add_(0, index_M, rows_MD)


def spread_rows(value_M: torch.Tensor, index_M: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Rows back in the places they were packed from, zeros elsewhere.

    Args:
        value_M: (M, ...).
        index_M: (M,) place of each row.
        num_rows: N.

    Returns:
        (N, ...).
    """
    return value_M.new_zeros(num_rows, *value_M.shape[1:]).index_copy_(0, index_M, value_M)


def _starts(counts: torch.Tensor) -> torch.Tensor:
    """Exclusive prefix sum over all entries in row-major order, in the counts' shape."""
    flat = counts.reshape(-1)
    return (flat.cumsum(0) - flat).reshape(counts.shape)
