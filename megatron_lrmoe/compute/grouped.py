"""Grouped GEMMs over the experts: variable-size row groups, one weight per group, no padding.

Two back ends behind the same two functions. ``loop`` is one matmul per expert: it is the reference, takes every
dtype, and gives Megatron's SequentialMLP results bit for bit. ``grouped`` is ``torch.nn.functional.grouped_mm``:
one kernel on a GPU, where row strides must be multiples of 16 bytes and fp64 is refused by torch.
"""

from collections.abc import Sequence
from typing import Literal

import torch

Backend = Literal["loop", "grouped"]


def rows_times_weights(
    x_MI: torch.Tensor,
    weights: Sequence[torch.Tensor],
    counts: Sequence[int],
    backend: Backend,
    *,
    transpose: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each group of rows by its expert's weight.

    Args:
        x_MI: (M, I) rows, grouped by expert.
        weights: one (O, I) matrix per expert if ``transpose``, else (I, O); any storage each.
        counts: rows per expert, 0 allowed; they sum to M.
        backend: see the module.
        transpose: multiply by the transposed weight (forward of a linear layer) or by the weight itself (dgrad).
        out: (M, O) buffer for the result, of the rows' dtype.

    Returns:
        (M, O), rows in the same order.
    """
    if backend == "grouped" and x_MI.shape[0] > 0:
        stacked = as_stacked(weights)
        right = stacked.transpose(1, 2) if transpose else stacked
        product = torch.nn.functional.grouped_mm(x_MI, right, offs=_ends(counts, x_MI.device))
        return product if out is None else out.copy_(product)
    width = weights[0].shape[0] if transpose else weights[0].shape[1]
    y_MO = x_MI.new_empty(x_MI.shape[0], width) if out is None else out
    for weight, x, y in zip(weights, x_MI.split(list(counts)), y_MO.split(list(counts)), strict=True):
        torch.matmul(x, weight.t() if transpose else weight, out=y)
    return y_MO


def weight_grads(g_MO: torch.Tensor, x_MI: torch.Tensor, counts: Sequence[int], backend: Backend) -> list[torch.Tensor]:
    """Weight gradient of each expert: its rows of ``g`` transposed times its rows of ``x``.

    Args:
        g_MO: (M, O) output gradient, grouped by expert.
        x_MI: (M, I) input, in the same order.
        counts: rows per expert. An expert without rows gets zeros, never what its memory held before.
        backend: see the module.

    Returns:
        One (O, I) matrix per expert, in the dtype of ``g``.
    """
    if backend == "grouped" and g_MO.shape[0] > 0:
        # The ragged dimension is contracted here. A transposed row-major view is the one layout for which the
        # CUDA kernel takes any count (GroupMMCommon.cuh), and CPU and CUDA both write zeros for empty groups.
        stacked = torch.nn.functional.grouped_mm(g_MO.t(), x_MI, offs=_ends(counts, g_MO.device))
        return list(stacked.unbind(0))
    pairs = zip(g_MO.split(list(counts)), x_MI.split(list(counts)), strict=True)
    return [g.t().matmul(x) for g, x in pairs]


def as_stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """(e, ...) tensor over equal-shaped weights: a view if they lie at equal steps in one storage, else a copy.

    Megatron's DDP lays the parameters of a layer out in one buffer, so the view is the usual case for a
    SequentialMLP's fc1 (or fc2) weights when their addresses rise; torch has no negative strides, so falling
    addresses are copied.
    """
    first = weights[0]
    if len(weights) == 1:
        return first.detach().unsqueeze(0)
    step = weights[1].storage_offset() - first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    evenly_spaced = step > 0 and all(
        w.untyped_storage().data_ptr() == storage
        and w.is_contiguous()
        and w.storage_offset() == first.storage_offset() + i * step
        for i, w in enumerate(weights)
    )
    if evenly_spaced:
        return first.detach().as_strided((len(weights), *first.shape), (step, *first.stride()))
    return torch.stack([w.detach() for w in weights])


def _ends(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """(e,) int32 end row of each group, as grouped_mm wants its offsets."""
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device, non_blocking=True)
