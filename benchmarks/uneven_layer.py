"""Variants of an uneven MoE layer on four gloo ranks; the worker side of ``benchmarks.hot_rank``."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from tests import layers

RANKS = 4
REPLICAS = {"replica_min_rows": 0}
LRM = {"replica_policy": "lrm", **REPLICAS}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "0.8 proportional": {"retention": 0.8},
    "0.8 balanced": {"retention": 0.8, "quota": "balanced"},
    "0.8 joint": {"retention": 0.8, "quota": "joint"},
    "1.0 ultraep": {"retention": 1.0, "replica_policy": "ultraep", "replica_min_rows": 1},
    "1.0 lrm": {"retention": 1.0, **LRM},
    "0.8 joint, lrm backward": {"retention": 0.8, "quota": "joint", **LRM, "replica_limits": "backward"},
    "0.8 lrm": {"retention": 0.8, **LRM},
}


MEMORY_VARIANTS: dict[str, dict[str, Any] | None] = {
    "none, stock": None,
    "none, 0.8": {"retention": 0.8},
    "ultraep, 1.0": VARIANTS["1.0 ultraep"],
    "symi, 1.0": {"retention": 1.0, "replica_policy": "symi"},
    "lrm, 0.8": VARIANTS["0.8 lrm"],
    "lrm backward, 0.8 joint": VARIANTS["0.8 joint, lrm backward"],
    "lrm, 0.8, chosen in forward": {"retention": 0.8, **LRM, "when": "forward"},
}


@dataclass(frozen=True)
class Options:
    """Sizes and rounds, as the command line gives them."""

    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int
    rounds: int
    bias: float
    popularity_E: tuple[float, ...] | None


@dataclass(frozen=True)
class Measured:
    """One rank's CPU milliseconds of forward and backward by variant, and the rows of its own experts."""

    forward: dict[str, float]
    backward: dict[str, float]
    rows: int


class PopularRouter(torch.nn.Module):
    """Routes each token to ``top_k`` experts, drawn by popularity, with equal weights that take a gradient."""

    def __init__(self, options: Options, rank: int):
        super().__init__()
        draw = torch.Generator().manual_seed(rank)
        chances = torch.tensor(options.popularity_E).clamp_min(1e-9).expand(options.tokens, -1)
        chosen_TK = torch.multinomial(chances, options.top_k, generator=draw)
        self.map_TE = torch.zeros(chances.shape, dtype=torch.bool).scatter_(1, chosen_TK, True)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def set_layer_number(self, layer_number: int) -> None:
        """Part of the router's interface."""

    def forward(self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        """(T, E) probabilities and map."""
        return self.map_TE / self.map_TE.sum(1, keepdim=True) * self.scale, self.map_TE


def measure(options: Options) -> Measured:
    """All variants in turn, in one worker of four."""
    built = {name: _layer(lrm, options) for name, lrm in VARIANTS.items()}
    state = built["stock"].state_dict()
    for layer in built.values():
        layer.load_state_dict(state)
    draw = torch.Generator().manual_seed(torch.distributed.get_rank())
    x_TD, g_TD = (torch.randn(options.tokens, 1, options.hidden, generator=draw) for _ in range(2))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    names = list(VARIANTS)
    for number in range(options.rounds + 1):
        layers.at_iteration(number)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds = _once(built[name], x_TD, g_TD)
            if number:
                times[name].append(seconds)
    rows = int(sum(built["stock"].token_dispatcher.output_splits))
    columns = {name: [1e3 * statistics.median(column) for column in zip(*times[name], strict=True)] for name in times}
    return Measured(
        {name: column[0] for name, column in columns.items()},
        {name: column[1] for name, column in columns.items()},
        rows,
    )


def _once(layer: Any, x_TD: torch.Tensor, g_TD: torch.Tensor) -> tuple[float, float]:
    layer.zero_grad(set_to_none=True)
    x_TD = x_TD.detach().requires_grad_()
    torch.distributed.barrier()
    start = time.process_time()
    out = layer(x_TD)[0]
    middle = time.process_time()
    torch.distributed.barrier()
    again = time.process_time()
    out.backward(g_TD)
    end = time.process_time()
    return middle - start, end - again


def _layer(lrm: dict[str, Any] | None, options: Options) -> Any:
    import torch.nn.functional as F
    from megatron.core import tensor_parallel
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import moe_module_specs
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_lrmoe.megatron_adaptor  # noqa: F401
    from megatron_lrmoe.config import LrmConfig

    layers.parallel(RANKS)
    layers.at_iteration(0)
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=options.hidden,
        num_attention_heads=8,
        moe_ffn_hidden_size=options.width,
        num_moe_experts=options.experts,
        moe_router_topk=options.top_k,
        moe_router_load_balancing_type="none",
        moe_router_force_biased=options.bias if options.popularity_E is None else None,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=RANKS,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
    )
    if lrm is not None:
        config.moe_lrm = LrmConfig(**lrm)  # type: ignore[attr-defined]
    spec: Any = moe_module_specs.get_moe_module_spec_for_backend(LocalSpecProvider(), num_experts=options.experts)
    layer = spec(config=config, pg_collection=None, is_mtp_layer=False, name="mlp")
    layer.set_layer_number(1)
    if options.popularity_E is not None:
        layer.router = PopularRouter(options, torch.distributed.get_rank())
    return layer.train()


@dataclass(frozen=True)
class Memory:
    """One rank's bytes by variant.

    Args:
        experts: weights and fp32 gradients of its own experts.
        slots: replica slots in use, weights and fp32 gradients.
        saved: tensors that the layer's forward leaves for its backward.
        rows: that it computes.
    """

    experts: int
    slots: int
    saved: int
    rows: int


def memory(options: Options) -> dict[str, Memory]:
    """Bytes of every variant's third call, in one worker of four; SYMI goes by the call before."""
    return {name: _memory(_layer(lrm, options), options) for name, lrm in MEMORY_VARIANTS.items()}


def _memory(layer: Any, options: Options) -> Memory:
    draw = torch.Generator().manual_seed(torch.distributed.get_rank())
    x_TD, g_TD = (torch.randn(options.tokens, 1, options.hidden, generator=draw) for _ in range(2))
    saved: dict[int, int] = {}
    weights = {w.untyped_storage().data_ptr() for w in layer.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    rows: list[int] = []
    layer.experts.register_forward_hook(lambda _, args, __: rows.append(len(args[0])))
    for number in range(3):
        layers.at_iteration(number)
        saved.clear()
        x = x_TD.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = layer(x)[0]
        held = sum(saved.values())
        in_use = _slots_in_use(out)
        out.backward(g_TD)
    own = sum(w.nbytes + 4 * w.numel() for w in layer.experts.parameters())
    return Memory(own, own // len(layer.local_expert_indices) * in_use, held, rows[-1])


def _slots_in_use(out: torch.Tensor) -> int:
    """Slots of this rank with a replica in them, by the replication that the graph of the output holds."""
    nodes, seen = [out.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        replicas = getattr(getattr(getattr(node, "back", None), "__self__", None), "replicas", None)
        if replicas is not None:
            return sum(copy.holder == torch.distributed.get_rank() for copy in replicas._copies)
        nodes += [following for following, _ in node.next_functions]
    return 0
