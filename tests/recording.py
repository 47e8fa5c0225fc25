"""What goes in and out of each MoE layer call of a training run, in gloo workers, whatever else the run does.

Recorded around Megatron's dispatcher: tokens and combine weights as they enter it, the gradient of what it returns, and
their gradients; the weight gradients as the experts' Function hands them on; and which pairs were kept.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tests import layers, training


@dataclass
class Call:
    """One layer call on one rank, with gradients.

    Args:
        layer: number from 1.
        values: ``x_TD``, ``probs_TE``, ``map_TE`` and, after backward, ``g_TD``, ``dx_TD``, ``dprobs_TE``.
        weights, grads: (fc1, fc2) of the rank's experts, stacked, and their gradients.
        kept: (token, expert, weight) of this source's kept pairs, or with ``by_owner`` (row among the expert's rows,
            local expert, weight).
        by_owner: the owner of the experts chose among rows whose tokens it does not know.
        replicas: of the whole call, all ranks together.
    """

    layer: int
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: tuple[torch.Tensor, torch.Tensor] | None = None
    grads: tuple[torch.Tensor, torch.Tensor] | None = None
    kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    by_owner: bool = False
    replicas: int = 0


@dataclass(frozen=True)
class RecordedRun:
    """One rank's view.

    Args:
        run: losses and classes.
        calls: of the recorded iteration, in the order of their forwards.
        group: global ranks that share this rank's experts.
        rank_in_group: of this rank.
    """

    run: training.TrainingRun
    calls: list[Call]
    group: list[int]
    rank_in_group: int


def run_recorded(flags: list[str], iteration: int) -> RecordedRun:
    """Train with Megatron's flags and record one iteration (from 0)."""
    import megatron_lrmoe.megatron_adaptor  # noqa: F401

    calls: list[Call] = []
    with recording(calls, iteration), _stand_ins():
        run = training.run(flags)
    from megatron.core import parallel_state

    group = parallel_state.get_expert_model_parallel_group()
    ranks = torch.distributed.get_process_group_ranks(group)
    return RecordedRun(run, calls, ranks, torch.distributed.get_rank(group))


@contextmanager
def recording(calls: list[Call], iteration: int) -> Iterator[None]:
    """Patch layer, flows and the experts' Function for the time of a run."""
    from megatron_lrmoe.compute import experts
    from megatron_lrmoe.mcore import clock
    from megatron_lrmoe.mcore.layer import LRMoELayer

    by_flow: dict[int, Call] = {}
    preprocess, forward = LRMoELayer.preprocess, experts._ExpertMLP.forward
    postprocess, backward = LRMoELayer.postprocess, experts._ExpertMLP.backward
    running: list[Call] = []

    def entering(layer: Any, hidden: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> Any:
        running.clear()
        if not (layer.training and torch.is_grad_enabled() and clock.iteration() == iteration):
            return preprocess(layer, hidden, probs, routing_map)
        call = Call(layer.number_in_model)
        calls.append(call)
        running.append(call)

        def watched(dispatch: Any, x: torch.Tensor, map_TE: torch.Tensor, probs_TE: torch.Tensor) -> Any:
            call.values["map_TE"] = map_TE.clone()
            shared = layer.token_dispatcher.shared_experts
            # Overlapped shared experts take the same tokens: without the watch, which is for the routed ones alone.
            with nullcontext() if shared is None else _wrapped(shared, "pre_forward_comm", lambda run, _: run(x)):
                return dispatch(_watched(call, "x_TD", x), map_TE, _watched(call, "probs_TE", probs_TE))

        with _wrapped(layer.token_dispatcher, "dispatch_preprocess", watched):
            return preprocess(layer, hidden, probs, routing_map)

    def leaving(layer: Any, output: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
        if not running:
            return postprocess(layer, output, shared)
        call = running[0]

        def watched(combine: Any, rows: torch.Tensor) -> torch.Tensor:
            summed = combine(rows)
            summed.register_hook(lambda g: call.values.update(g_TD=_rows(g)))
            return summed

        with _wrapped(layer.token_dispatcher, "combine_postprocess", watched):
            return postprocess(layer, output, shared)

    def experts_forward(ctx: Any, args: tuple, *tensors: torch.Tensor) -> torch.Tensor:
        if running:
            by_flow[id(args[2])] = running[0]
            running[0].weights = _stacked(args[0].fc1, args[0].fc2)
        return forward(ctx, args, *tensors)

    def experts_backward(ctx: Any, g_ND: torch.Tensor) -> Any:
        flow, found = ctx.args[2], backward(ctx, g_ND)
        if (call := by_flow.pop(id(flow), None)) is not None:
            dw, count = found[3:], len(found[3:]) // 2
            call.grads = _stacked(dw[:count], dw[count:])
            call.kept, call.by_owner = _kept(flow)
            replication = getattr(flow, "replicas", None)
            call.replicas = 0 if replication is None else len(replication._copies)
        return found

    LRMoELayer.preprocess, LRMoELayer.postprocess = entering, leaving
    experts._ExpertMLP.forward, experts._ExpertMLP.backward = map(staticmethod, (experts_forward, experts_backward))
    try:
        yield
    finally:
        LRMoELayer.preprocess, LRMoELayer.postprocess = preprocess, postprocess
        experts._ExpertMLP.forward, experts._ExpertMLP.backward = map(staticmethod, (forward, backward))


class LocalProjection(torch.nn.Linear):
    """Stands in for Transformer Engine's TELinear in latent experts, which Megatron builds with nothing else."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, init_method: Any, **_: Any) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        init_method(self.weight)

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Output and, as TELinear returns it, no bias."""
        return super().forward(input), None


class NoFp8:
    """Stands in for Transformer Engine's FP8GlobalStateManager, which Megatron asks in recompute without having it."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """As without fp8."""
        return False


@contextmanager
def _stand_ins() -> Iterator[None]:
    """What Megatron takes from Transformer Engine alone, where that is absent."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_layer

    if moe_layer.HAVE_TE:
        yield
        return
    moe_layer.HAVE_TE, moe_layer.TELinear = True, LocalProjection  # type: ignore[attr-defined]
    random.FP8GlobalStateManager = NoFp8  # type: ignore[attr-defined]
    random.activation_recompute_forward = random.fp8_autocast = lambda **_: nullcontext()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        moe_layer.HAVE_TE = False
        del moe_layer.TELinear  # type: ignore[attr-defined]
        del random.FP8GlobalStateManager, random.activation_recompute_forward, random.fp8_autocast  # type: ignore[attr-defined]


@contextmanager
def _wrapped(owner: Any, name: str, wrapper: Any) -> Iterator[None]:
    """Let ``owner.name`` go through ``wrapper(original, ...)``."""
    setattr(owner, name, partial(wrapper, getattr(owner, name)))
    try:
        yield
    finally:
        delattr(owner, name)


def _watched(call: Call, name: str, x: torch.Tensor) -> torch.Tensor:
    """A view of x whose gradient is that of the dispatcher alone."""
    call.values[name] = _rows(x)
    view = x.view_as(x)
    view.register_hook(lambda g: call.values.update({"d" + name: _rows(g)}))
    return view


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.detach().reshape(-1, x.shape[-1]).clone()


def _stacked(fc1: Any, fc2: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([w.detach().clone() for w in fc1]), torch.stack([w.detach().clone() for w in fc2])


def _kept(flow: Any) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], bool]:
    from megatron_lrmoe.compute.local_flow import LocalFlow

    if not isinstance(flow, LocalFlow):
        rows_M = flow.sent.rows_M
        return (flow.token_P[rows_M], flow.expert_P[rows_M], layers.weights_of(flow, flow.sent).clone()), False
    chosen_by_owner = flow.kept
    counts = torch.tensor(flow.counts_e)
    expert_M = torch.repeat_interleave(torch.arange(len(counts)), counts)[chosen_by_owner.rows_M]
    first_e = counts.cumsum(0) - counts
    return (chosen_by_owner.rows_M - first_e[expert_M], expert_M, chosen_by_owner.weight_M.clone()), True
