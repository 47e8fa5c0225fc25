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
from megatron_lrmoe.compute.replicas import Replication
from megatron_lrmoe.compute.stage import phantom
from megatron_lrmoe.pairs import KeptRows
from megatron_lrmoe.recalibration.score import row_norm_sq


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of this rank's experts, read live from their parameters.

    Args:
        fc1: one (G, D) parameter per expert.
        fc2: one (D, F) parameter per expert.
        replicas: other ranks' experts in this rank's slots; their rows come after those of its own.
        fuse_into_main_grad: add weight gradients to ``weight.main_grad`` where DDP has given the weight one
            (Megatron's gradient accumulation fusion) instead of handing them to autograd.
    """

    fc1: Sequence[torch.nn.Parameter]
    fc2: Sequence[torch.nn.Parameter]
    fuse_into_main_grad: bool = False
    replicas: Replication | None = None

    @property
    def own(self) -> int:
        """Experts of this rank."""
        return len(self.fc1)

    def fuses(self, param: torch.nn.Parameter) -> bool:
        """Whether this weight's gradient is added to its ``main_grad`` here."""
        return self.fuse_into_main_grad and getattr(param, "main_grad", None) is not None and param.requires_grad

    def of(self, some: slice) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """fc1 and fc2 of these experts or slots, which are not mixed; waits for a slot's weights."""
        if some.start < self.own or self.replicas is None:
            return self.fc1[some], self.fc2[some]
        slots = slice(some.start - self.own, some.stop - self.own)
        fc1, fc2 = self.replicas.weights()
        return fc1[slots], fc2[slots]


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
        for some, counts, rows in _expert_slices(flow.counts_e, backend, weights.own):
            fc1, fc2 = weights.of(some)
            z = rows_times_weights(x_ND[rows], fc1, counts, backend, transpose=True)
            phi = activation(z)
            a = (phi * alpha_N[rows].unsqueeze(-1)).to(phi.dtype)
            norms.append(row_norm_sq(a))
            rows_times_weights(a, fc2, counts, backend, transpose=True, out=y_ND[rows])
            z_parts.append(z)
        kept = flow.attach_experts(torch.cat(norms), alpha_N)
        ctx.args, ctx.saves_kept_only = args, kept is not None
        ctx.x_like, ctx.alpha_like = ((v.shape, v.dtype, v.device) for v in (x_ND, alpha_N))
        if kept is not None:
            slices = [_expert_slices(counts, backend, weights.own) for counts in (flow.counts_e, kept.counts_e)]
            x_ND, alpha_N, z_parts = _only_kept(kept, x_ND, alpha_N, z_parts, slices)
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
        dw1: dict[int, torch.Tensor] = {}
        dw2: dict[int, torch.Tensor] = {}
        all_slices = _expert_slices(flow.counts_e, backend, weights.own)
        kept_slices = _expert_slices(kept.counts_e, backend, weights.own)
        parts = list(zip(z_parts, all_slices, kept_slices, strict=True))
        # Replicas first: their gradients travel home while the masters' are computed.
        parts.sort(key=lambda of: of[1][0].start < weights.own)

        def kept_rows_of(saved: torch.Tensor, part: slice) -> torch.Tensor:
            # index_select, not [index]: advanced indexing takes twice as long to gather whole rows on a CPU.
            return saved[part] if ctx.saves_kept_only else saved.index_select(0, kept.rows_M[part])

        for z_saved, (some, _, rows), (_, counts, part) in parts:
            if some.start == 0 and any(wants_dw):
                _send_home(weights, dw1, dw2)
            g = g_MD[part]
            fc1, fc2 = weights.of(some)
            da = rows_times_weights(g, fc2, counts, backend, transpose=False)
            z = z_saved if ctx.saves_kept_only else z_saved.index_select(0, kept.rows_M[part] - rows.start)
            a, dz, dalpha_M[part] = activation.backward(z, kept_rows_of(alpha_saved, part), da)
            if any(wants_dw):
                x = kept_rows_of(x_saved, part)
                if probe is not None:
                    probe.add(weight_grads(probe.masked(g, part), a, counts, backend))
                which = range(some.start, some.stop)
                dw2 |= _delivered(weights.fc2, which, weight_grads(g, a, counts, backend), weights)
                dw1 |= _delivered(weights.fc1, which, weight_grads(dz, x, counts, backend), weights)
            if dx_MD is not None:
                rows_times_weights(dz, fc1, counts, backend, transpose=False, out=dx_MD[part])
        if probe is not None:
            flow.give_probe(probe)
        dx, dalpha = flow.give_row_gradients(dx_MD, dalpha_M)
        grads = _with_replicas(weights, dw1, dw2) if any(wants_dw) else [None] * len(wants_dw)
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
    slices: Sequence[Sequence[tuple[slice, Sequence[int], slice]]],
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Copies of the kept rows, so that the whole tensors can be freed; slices are those of all and of kept rows."""
    parts = zip(z_parts, *slices, strict=True)
    z_kept = [z.index_select(0, kept.rows_M[part] - rows.start) for z, (_, _, rows), (_, _, part) in parts]
    return x_ND.index_select(0, kept.rows_M), alpha_N.index_select(0, kept.rows_M), z_kept


def _expert_slices(counts: Sequence[int], backend: Backend, own: int) -> list[tuple[slice, Sequence[int], slice]]:
    """Experts to process at once, with their row counts and rows; a rank's own ones and slots are not mixed.

    One by one in the loop back end: an expert's rows then stay in cache, and no tensor is so large that the C
    allocator gives it back to the system every time (above 32 MiB, which cost 5 % of the forward).
    """
    step = 1 if backend == "loop" else max(own, len(counts) - own)
    firsts = [*range(0, own, step), *range(own, len(counts), step)]
    ends = [*firsts[1:], len(counts)]
    row_of = [0, *accumulate(counts)]
    return [(slice(a, b), counts[a:b], slice(row_of[a], row_of[b])) for a, b in zip(firsts, ends, strict=True)]


def _delivered(
    params: Sequence[torch.nn.Parameter], which: range, grads: list[torch.Tensor], weights: ExpertWeights
) -> dict[int, torch.Tensor]:
    """Weight gradients by expert or slot; with fusion, masters' go to main_grad and stand-ins take their place.

    Megatron's DDP hook asserts that ``param.grad`` is set (distributed_data_parallel.py:481-490) and leaves main_grad
    alone when ``grad_added_to_main_grad`` is true, so the stand-in's values are never read.
    """
    delivered = dict(zip(which, grads, strict=True))
    for i in which:
        if i < len(params) and weights.fuses(params[i]):
            params[i].main_grad.add_(delivered[i])  # type: ignore[attr-defined]
            params[i].grad_added_to_main_grad = True  # type: ignore[attr-defined]
            delivered[i] = torch.empty_like(params[i])
    return delivered


def _send_home(weights: ExpertWeights, dw1: dict[int, torch.Tensor], dw2: dict[int, torch.Tensor]) -> None:
    """Start the slots' gradients on their way to the masters."""
    if weights.replicas is not None:
        slots = range(weights.own, weights.own + weights.replicas.slots)
        weights.replicas.send_home([dw1[i] for i in slots], [dw2[i] for i in slots])


def _with_replicas(
    weights: ExpertWeights, dw1: dict[int, torch.Tensor], dw2: dict[int, torch.Tensor]
) -> list[torch.Tensor | None]:
    """fc1's and then fc2's gradients of this rank's experts, replicas' added in fp32 or wider, in the copies' order."""
    arrived = [] if weights.replicas is None else weights.replicas.arrived()
    total: list[torch.Tensor | None] = []
    for params, dw, home in (
        (weights.fc1, dw1, [(i, home1) for i, home1, _ in arrived]),
        (weights.fc2, dw2, [(i, home2) for i, _, home2 in arrived]),
    ):
        for i, param in enumerate(params):
            others = [grad for of, grad in home if of == i]
            total.append(_added(param, dw[i], others, weights.fuses(param)))
    return total


def _added(param: torch.nn.Parameter, grad: torch.Tensor, others: list[torch.Tensor], fused: bool) -> torch.Tensor:
    if not others:
        return grad
    if fused:
        for other in others:
            param.main_grad.add_(other)  # type: ignore[attr-defined]
        return grad
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    for other in others:
        wide = wide + other
    return wide.to(grad.dtype)
