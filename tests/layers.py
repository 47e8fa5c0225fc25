"""Real Megatron MoE layers in gloo workers, with the routing given by the test or by Megatron's own router.

Functions that build or run a layer work inside the workers of ``tests.gloo``. Megatron is imported by them, not at the
top: the CPU device has to be active first.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from megatron_lrmoe.recalibration.plan import KeepPlan
from tests import cases

# In bf16 the rows of every matrix are multiples of 16 bytes, as grouped_mm wants them.
HIDDEN, WIDTH = 16, 24
CLAMP, LINEAR_OFFSET = 1.0, 0.5


def _gated(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def activation(z: torch.Tensor) -> torch.Tensor:
        gate, linear = z.chunk(2, dim=-1)
        return function(gate) * linear

    return activation


def _clamped_quick_geglu(z: torch.Tensor) -> torch.Tensor:
    gate, linear = z.chunk(2, dim=-1)
    gate, linear = gate.clamp(max=CLAMP), linear.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(1.702 * gate) * (linear + LINEAR_OFFSET)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": _gated(F.silu),
    "geglu": _gated(F.gelu),
    "clamped_quick_geglu": _clamped_quick_geglu,
    "gelu": F.gelu,
    "relu": F.relu,
    "squared_relu": lambda z: F.relu(z).square(),
}
"""What a reference computes for ``Case.activation``, apart from the plugin and from Megatron."""


@dataclass(frozen=True)
class Case:
    """One layer call on every rank. Data-parallel peers get equal tokens, so only their draws may differ.

    Args:
        workload, num_tokens, num_experts, top_k, seed: of ``tests.cases.route``; tokens are per rank.
        expert_parallel: ranks that share the experts.
        lrm: fields of LrmConfig.
        dtype: of weights and tokens; probabilities stay fp32 unless it is fp64.
        activation: a name in ``ACTIVATIONS``.
        config: further fields of TransformerConfig.
        iteration: what the clock says.
        layer_number: from 1.
        always_compact: take our path at retention 1.0 too.
        megatron_router: route by Megatron's TopKRouter instead of the workload.
        checkpoint: recompute the layer in backward, as ``--recompute-granularity full`` does.
        zero_gradient, nan_gradient: the output's gradient is zero, or NaN for the last token of each rank.
        given: values that replace those of ``settle``, one dict for each rank of the group or one for all.
    """

    workload: str = "ragged"
    num_tokens: int = 24
    num_experts: int = 8
    top_k: int = 2
    seed: int = 0
    expert_parallel: int = 2
    lrm: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    activation: str = "swiglu"
    config: dict[str, Any] = field(default_factory=dict)
    iteration: int = 0
    layer_number: int = 1
    always_compact: bool = False
    megatron_router: bool = False
    checkpoint: bool = False
    zero_gradient: bool = False
    nan_gradient: bool = False
    given: Sequence[dict[str, torch.Tensor]] = ()


@dataclass(frozen=True)
class Result:
    """What one rank computed.

    Args:
        out_TD, dx_TD, dprobs_TE: output, and gradients of its tokens and combine weights.
        dfc1, dfc2: weight gradients of its experts.
        drouter: weight gradient of Megatron's router, where that routes.
        map_TE: (T, E) bool, its routing.
        kept_TE: the weight of each of its own pairs, 0 for dropped ones; None where nothing was dropped by us.
        plan: loads, quotas and key of the call; None where nothing was dropped by us.
        experts: numbers of its experts.
    """

    out_TD: torch.Tensor
    dx_TD: torch.Tensor
    dprobs_TE: torch.Tensor
    dfc1: torch.Tensor
    dfc2: torch.Tensor
    drouter: torch.Tensor | None
    map_TE: torch.Tensor
    kept_TE: torch.Tensor | None
    plan: KeepPlan | None
    experts: range

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """Every gradient by name."""
        named = {"dX": self.dx_TD, "dprobs": self.dprobs_TE, "dfc1": self.dfc1, "dfc2": self.dfc2}
        return named if self.drouter is None else named | {"drouter": self.drouter}


def settle(case: Case, rank: int) -> dict[str, torch.Tensor]:
    """A rank's tokens, routing and output gradient, and all weights; equal wherever it is called."""
    route_seed = case.seed * 1000 + (0 if case.workload in ("hot_rank", "empty_rank") else rank)
    routing = cases.route(
        case.workload, case.num_tokens, case.num_experts, case.top_k, case.expert_parallel, route_seed
    )
    generator = torch.Generator().manual_seed(case.seed * 1000 + rank + 500)
    tokens = routing.map_TE.shape[0]
    draw = torch.Generator().manual_seed(case.seed)
    g_TD = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    g_TD *= torch.rand(tokens, 1, generator=generator, dtype=torch.float64) * 3
    if case.zero_gradient:
        g_TD.zero_()
    if case.nan_gradient:
        g_TD[-1] = torch.nan
    fc1_width = WIDTH * (2 if case.activation.endswith("glu") else 1)
    values = {
        "x_TD": torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64),
        "g_TD": g_TD,
        "map_TE": routing.map_TE,
        "probs_TE": routing.probs_TE.double(),
        "fc1": torch.randn(case.num_experts, fc1_width, HIDDEN, generator=draw, dtype=torch.float64) / 4,
        "fc2": torch.randn(case.num_experts, HIDDEN, WIDTH, generator=draw, dtype=torch.float64) / 4,
        "router": torch.randn(case.num_experts, HIDDEN, generator=draw, dtype=torch.float64) / 4,
    }
    return values | (dict(case.given[rank % len(case.given)]) if case.given else {})


class FixedRouter(torch.nn.Module):
    """Stands in for Megatron's router: the test's own probabilities and map."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: tuple[torch.Tensor, torch.Tensor] | None = None

    def set_layer_number(self, layer_number: int) -> None:
        """Part of the router's interface."""

    def forward(self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        """(T, E) probabilities and map, whatever the tokens are."""
        return self.answer


_groups: dict[tuple[Any, ...], dict[str, Any]] = {}
_current: tuple[Any, ...] = ()


def parallel(expert_parallel: int, **sizes: int) -> None:
    """Megatron's process groups for these sizes, made once per worker and sizes.

    Megatron drops groups without ending them, and each keeps a dozen gloo threads: made anew for every other case they
    are thousands before long, which no machine bears.

    Args:
        expert_parallel: ranks that share the experts.
        sizes: further arguments of Megatron's initialize_model_parallel.
    """
    from megatron.core import parallel_state

    global _current
    wanted = (expert_parallel, *sorted(sizes.items()))
    if parallel_state.model_parallel_is_initialized():
        if wanted == _current:
            return
        parallel_state.destroy_model_parallel()
    _current = wanted
    if wanted in _groups:
        vars(parallel_state).update(_groups[wanted])
        return
    parallel_state.initialize_model_parallel(expert_model_parallel_size=expert_parallel, **sizes)
    _groups[wanted] = {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and not name.startswith("__") and not callable(value)
    }


def at_iteration(iteration: int) -> None:
    """Let the plugin's clock say this iteration."""
    from megatron_lrmoe.mcore import clock

    clock.follow(lambda: iteration, lambda: 1234)


def transformer_config(case: Case) -> Any:
    """Megatron's config of a case's layer."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = {
        "bias_activation_fusion": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": True,  # Megatron asks for it at top-1
        **_activation_settings(case.activation),
        **case.config,
    }
    return TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        ffn_hidden_size=WIDTH,
        moe_ffn_hidden_size=WIDTH,
        num_moe_experts=case.num_experts,
        moe_router_topk=case.top_k,
        expert_model_parallel_size=case.expert_parallel,
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        **settings,
    )


def _activation_settings(name: str) -> dict[str, Any]:
    from megatron.core.activations import quick_gelu, squared_relu

    function = {
        "swiglu": F.silu,
        "geglu": F.gelu,
        "clamped_quick_geglu": quick_gelu,
        "gelu": F.gelu,
        "relu": F.relu,
        "squared_relu": squared_relu,
    }[name]
    settings = {"activation_func": function, "gated_linear_unit": name.endswith("glu")}
    if name.startswith("clamped"):
        settings |= {"activation_func_clamp_value": CLAMP, "glu_linear_offset": LINEAR_OFFSET}
    return settings


def build(case: Case, ours: bool = True) -> Any:
    """An MoE layer as the adaptor's spec builds it (``ours``) or Megatron's own."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import moe_module_specs

    import megatron_lrmoe.megatron_adaptor  # noqa: F401
    from megatron_lrmoe.config import LrmConfig

    parallel(case.expert_parallel)
    at_iteration(case.iteration)
    config = transformer_config(case)
    if ours:
        config.moe_lrm = LrmConfig(**{"retention": 0.5, **case.lrm})
    spec = moe_module_specs.get_moe_module_spec_for_backend(
        LocalSpecProvider(), num_experts=case.num_experts, moe_grouped_gemm=False
    )
    layer = spec(config=config, pg_collection=None, is_mtp_layer=False, name="mlp")
    layer.set_layer_number(case.layer_number)
    if not case.megatron_router:
        layer.router = FixedRouter()
    layer.to(case.dtype).train()
    if ours and case.always_compact:
        layer.always_compact = True
    load_weights(layer, case)
    return layer


def load_weights(layer: Any, case: Case) -> None:
    """Give the layer's experts their share of the case's weights, and the router its own."""
    values = settle(case, 0)
    with torch.no_grad():
        for expert, index in zip(layer.experts.local_experts, layer.local_expert_indices, strict=True):
            expert.linear_fc1.weight.copy_(values["fc1"][index])
            expert.linear_fc2.weight.copy_(values["fc2"][index])
        if case.megatron_router:
            layer.router.weight.copy_(values["router"])


@contextmanager
def watching_flows(record: list[Any]) -> Iterator[None]:
    """Collect, in backward, each flow of this rank right after it has chosen its pairs."""
    from megatron_lrmoe.compute.flow import PairFlow

    original = PairFlow._take_up

    def take_up(self: PairFlow, g: torch.Tensor, row_P: torch.Tensor | None) -> None:
        original(self, g, row_P)
        record.append((self, self.sent))

    PairFlow._take_up = take_up
    try:
        yield
    finally:
        PairFlow._take_up = original


@contextmanager
def watching_experts(layer: Any, record: list[Any]) -> Iterator[None]:
    """Collect the input, combine weights and output of the layer's experts in every forward."""
    hook = layer.experts.register_forward_hook(lambda _, args, out: record.append((args[0], args[2], out[0])))
    try:
        yield
    finally:
        hook.remove()


def leaves(layer: Any, case: Case, *, needs_grad: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's (T, 1, D) tokens and (T, D) output gradient; the router is told its answer.

    The probabilities keep their own dtype, as Megatron's router's do under ``--moe-router-dtype``.
    """
    from megatron.core import parallel_state

    values = settle(case, parallel_state.get_expert_model_parallel_rank())
    if not case.megatron_router:
        probs_TE = values["probs_TE"].to(torch.promote_types(case.dtype, torch.float32))
        layer.router.answer = probs_TE.requires_grad_(needs_grad), values["map_TE"]
    return values["x_TD"].to(case.dtype).unsqueeze(1).requires_grad_(needs_grad), values["g_TD"].to(case.dtype)


def descend(model: Any, layer: Any, case: Case, finish: Callable[[], None]) -> None:
    """Three steps of plain gradient descent.

    Args:
        model: the layer in Megatron's DDP.
        layer: whose weights move, by ``main_grad``.
        case: its seed is the step's number.
        finish: brings the gradients of all ranks together.
    """
    for step in range(3):
        at_iteration(step)
        model.zero_grad_buffer()
        x, g_TD = leaves(layer, replace(case, seed=step))
        out = model(x)[0]
        out.backward(g_TD.view_as(out))
        finish()
        with torch.no_grad():
            for weight in layer.parameters():
                weight.sub_(weight.main_grad, alpha=0.1)


def forward(layer: Any, case: Case, x: torch.Tensor) -> torch.Tensor:
    """The layer's output, its activations dropped until backward where the case says so."""
    from megatron.core import tensor_parallel

    if case.checkpoint:
        return tensor_parallel.checkpoint(lambda x: layer(x)[0], False, x)
    return layer(x)[0]


def forward_backward(layer: Any, case: Case, around_backward: AbstractContextManager[Any] | None = None) -> Result:
    """One forward and backward of a built layer on this rank's share of the case."""
    x, g_TD = leaves(layer, case)
    layer.zero_grad(set_to_none=True)
    flows: list[Any] = []
    routed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep_routing(_: Any, __: Any, answer: tuple[torch.Tensor, torch.Tensor]) -> None:
        if answer[0].requires_grad:
            answer[0].retain_grad()
        routed.append(answer)

    hook = layer.router.register_forward_hook(keep_routing)
    with watching_flows(flows):
        out = forward(layer, case, x)
        with around_backward or nullcontext():
            out.backward(g_TD.view_as(out))
    hook.remove()
    probs_TE, map_TE = routed[-1]
    plan, kept_TE = None, None
    if flows:
        flow, sent = flows[-1]
        plan = flow.plan
        kept_TE = torch.zeros(map_TE.shape, dtype=torch.float64)
        kept_TE[flow.token_P[sent.rows_M], flow.expert_P[sent.rows_M]] = weights_of(flow, sent).double()
    first = layer.local_expert_indices[0]
    return Result(
        out_TD=out.detach().squeeze(1),
        dx_TD=x.grad.squeeze(1),
        dprobs_TE=probs_TE.grad,
        dfc1=_expert_gradients(layer, "linear_fc1"),
        dfc2=_expert_gradients(layer, "linear_fc2"),
        drouter=layer.router.weight.grad if case.megatron_router else None,
        map_TE=map_TE,
        kept_TE=kept_TE,
        plan=plan,
        experts=range(first, first + len(layer.local_expert_indices)),
    )


def weights_of(flow: Any, sent: Any) -> torch.Tensor:
    """(M,) weights of a source's kept pairs, which are the owners' where pairs are chosen in forward: one exchange."""
    if flow.early is None:
        return sent.weight_M
    kept = flow.early.kept
    weight_N = kept.weight_M.new_zeros(sum(flow.counts_e)).index_copy_(0, kept.rows_M, kept.weight_M)
    return flow.exchange.to_sources(weight_N)[sent.rows_M]


def _expert_gradients(layer: Any, name: str) -> torch.Tensor:
    return torch.stack([getattr(expert, name).weight.grad for expert in layer.experts.local_experts])


def run(case: Case, ours: bool = True) -> Result:
    """Build a layer and run it once."""
    return forward_backward(build(case, ours), case)


def run_all(chosen: Sequence[Case], ours: bool = True) -> list[Result]:
    """``run`` for each case."""
    return [run(case, ours) for case in chosen]


def run_both(case: Case) -> tuple[Result, Result]:
    """Megatron's layer and ours on the same case."""
    return run(case, ours=False), run(case)
