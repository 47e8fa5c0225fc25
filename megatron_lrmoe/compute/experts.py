"""The expert MLP as one autograd Function: full forward, backward over the kept rows only."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from megatron_lrmoe.compute.activation import Activation
from megatron_lrmoe.compute.flow import PairFlow
from megatron_lrmoe.compute.grouped import Backend, rows_times_weights, weight_grads
from megatron_lrmoe.compute.local_flow import LocalFlow
from megatron_lrmoe.compute.stage import phantom
from megatron_lrmoe.pairs import KeptRows
from megatron_lrmoe.recalibration.score import row_norm_sq


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of this rank's experts, read live from their parameters.

    Args:
        fc1: one (G, D) parameter per expert.
        fc2: one (D, F) parameter per expert.
        fuse_into_main_grad: add weight gradients to ``weight.main_grad`` where DDP has given the weight one
            (Megatron's gradient accumulation fusion) instead of handing them to autograd.
    """

    fc1: Sequence[torch.nn.Parameter]
    fc2: Sequence[torch.nn.Parameter]
    fuse_into_main_grad: bool = False


def expert_mlp(
    x_ND: torch.Tensor,
    alpha_N: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
    flow: PairFlow | LocalFlow,
    backend: Backend,
) -> torch.Tensor:
    """Run this rank's experts on every row, and later their backward on the rows that ``flow`` has kept.

    ``y = (alpha * act(x @ fc1^T)) @ fc2^T`` per expert: alpha is applied where Megatron applies it, before fc2.

    Args:
        x_ND: (N, D) rows in expert order; N may be 0, and the result still descends from it, so that the other
            ranks' collectives find this rank in backward.
        alpha_N: (N,) combine weights, usually fp32.
        weights: see ExpertWeights.
        activation: what lies between fc1 and fc2.
        flow: of this forward call; it is told the row norms of fc2's input, may then name the rows that alone are to
            be saved, and in backward gives the kept gradient rows and takes their dx and dalpha. A PairFlow's rows
            come and go on the flow itself, a LocalFlow's are chosen from autograd's gradient and handed back to it.
        backend: of the grouped GEMMs.

    Returns:
        (N, D) in x's dtype.
    """
    args = (weights, activation, flow, backend)
    return _run_opaquely(args, x_ND, alpha_N, *weights.fc1, *weights.fc2)


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, args: tuple, x_ND: torch.Tensor, alpha_N: torch.Tensor, *_: torch.Tensor):
        weights, activation, flow, backend = args
        y_ND = x_ND.new_empty(x_ND.shape[0], weights.fc2[0].shape[0])
        z_parts: list[torch.Tensor] = []
        norms: list[torch.Tensor] = []
        for some, counts, rows in _expert_slices(flow.counts_e, backend):
            z = rows_times_weights(x_ND[rows], weights.fc1[some], counts, backend, transpose=True)
            phi = activation(z)
            a = (phi * alpha_N[rows].unsqueeze(-1)).to(phi.dtype)
            norms.append(row_norm_sq(a))
            rows_times_weights(a, weights.fc2[some], counts, backend, transpose=True, out=y_ND[rows])
            z_parts.append(z)
        kept = flow.attach_experts(torch.cat(norms), alpha_N)
        ctx.args, ctx.saves_kept_only = args, kept is not None
        ctx.x_like, ctx.alpha_like = ((v.shape, v.dtype, v.device) for v in (x_ND, alpha_N))
        if kept is not None:
            x_ND, alpha_N, z_parts = _only_kept(kept, x_ND, alpha_N, z_parts, backend, flow.counts_e)
        ctx.save_for_backward(x_ND, alpha_N, *z_parts)
        return y_ND

    @staticmethod
    def backward(ctx: Any, g_ND: torch.Tensor):
        weights, activation, flow, backend = ctx.args
        x_saved, alpha_saved, *z_parts = ctx.saved_tensors
        kept, g_MD = flow.take_kept_gradient(g_ND)
        wants_dx, wants_dalpha, *wants_dw = ctx.needs_input_grad[1:]
        dx_MD = torch.empty_like(g_MD) if wants_dx else None
        dalpha_M = alpha_saved.new_empty(g_MD.shape[0])
        probe = flow.bias_probe(g_MD) if any(wants_dw) else None
        dw1: list[torch.Tensor | None] = []
        dw2: list[torch.Tensor | None] = []
        all_slices = _expert_slices(flow.counts_e, backend)
        kept_slices = _expert_slices(kept.counts_e, backend)

        def kept_rows_of(saved: torch.Tensor, part: slice) -> torch.Tensor:
            # index_select, not [index]: advanced indexing takes twice as long to gather whole rows on a CPU.
            return saved[part] if ctx.saves_kept_only else saved.index_select(0, kept.rows_M[part])

        for z_saved, (some, _, rows), (_, counts, part) in zip(z_parts, all_slices, kept_slices, strict=True):
            g = g_MD[part]
            da = rows_times_weights(g, weights.fc2[some], counts, backend, transpose=False)
            z = z_saved if ctx.saves_kept_only else z_saved.index_select(0, kept.rows_M[part] - rows.start)
            a, dz, dalpha_M[part] = activation.backward(z, kept_rows_of(alpha_saved, part), da)
            if any(wants_dw):
                x = kept_rows_of(x_saved, part)
                if probe is not None:
                    probe.add(weight_grads(probe.masked(g, part), a, counts, backend))
                dw2 += _deliver(weights, weights.fc2[some], weight_grads(g, a, counts, backend))
                dw1 += _deliver(weights, weights.fc1[some], weight_grads(dz, x, counts, backend))
            if dx_MD is not None:
                rows_times_weights(dz, weights.fc1[some], counts, backend, transpose=False, out=dx_MD[part])
        if probe is not None:
            flow.give_probe(probe)
        dx, dalpha = flow.give_row_gradients(dx_MD, dalpha_M)
        grads = (dw1 + dw2) or [None] * len(wants_dw)
        grads = [grad if wanted else None for grad, wanted in zip(grads, wants_dw, strict=True)]
        dx = phantom(*ctx.x_like) if dx is None else dx
        dalpha = phantom(*ctx.alpha_like) if dalpha is None else dalpha
        return None, dx if wants_dx else None, dalpha if wants_dalpha else None, *grads


# torch.compile would trace into it and fail; in pieces of it there is nothing to compile anyway.
_run_opaquely: Any = torch.compiler.disable(_ExpertMLP.apply)


def _only_kept(
    kept: KeptRows,
    x_ND: torch.Tensor,
    alpha_N: torch.Tensor,
    z_parts: Sequence[torch.Tensor],
    backend: Backend,
    counts_e: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Copies of the kept rows, so that the whole tensors can be freed."""
    slices = zip(z_parts, _expert_slices(counts_e, backend), _expert_slices(kept.counts_e, backend), strict=True)
    z_kept = [z.index_select(0, kept.rows_M[part] - rows.start) for z, (_, _, rows), (_, _, part) in slices]
    return x_ND.index_select(0, kept.rows_M), alpha_N.index_select(0, kept.rows_M), z_kept


def _expert_slices(counts: Sequence[int], backend: Backend) -> list[tuple[slice, Sequence[int], slice]]:
    """Experts to process at once, with their row counts and rows.

    One by one in the loop back end: an expert's rows then stay in cache, and no tensor is so large that the C
    allocator gives it back to the system every time (above 32 MiB, which cost 5 % of the forward).
    """
    if backend == "grouped":
        return [(slice(0, len(counts)), counts, slice(0, sum(counts)))]
    ends = list(accumulate(counts))
    return [(slice(i, i + 1), [n], slice(end - n, end)) for i, (n, end) in enumerate(zip(counts, ends, strict=True))]


def _deliver(
    weights: ExpertWeights, params: Sequence[torch.nn.Parameter], grads: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Weight gradients as autograd wants them; with fusion they go to main_grad and a stand-in is returned.

    Megatron's DDP hook asserts that ``param.grad`` is set (distributed_data_parallel.py:481-490) and leaves
    main_grad alone when ``grad_added_to_main_grad`` is true, so the stand-in's values are never read.
    """
    delivered: list[torch.Tensor | None] = []
    for param, grad in zip(params, grads, strict=True):
        main_grad = getattr(param, "main_grad", None)
        if weights.fuse_into_main_grad and main_grad is not None and param.requires_grad:
            main_grad.add_(grad)
            param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
            delivered.append(torch.empty_like(param))
        else:
            delivered.append(grad)
    return delivered
