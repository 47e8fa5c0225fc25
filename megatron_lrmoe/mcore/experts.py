"""Megatron's expert layers with the recalibrated, compacted backward."""

from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

from megatron_lrmoe.compute.activation import Activation
from megatron_lrmoe.compute.experts import ExpertWeights, expert_mlp
from megatron_lrmoe.compute.flow import PairFlow
from megatron_lrmoe.compute.grouped import Backend
from megatron_lrmoe.compute.local_flow import LocalFlow


class _LRMExperts(torch.nn.Module):
    """What both expert layers share: run our Function while a call is open, the parent's forward otherwise.

    No ``__init__``: instances of Megatron's classes become ours by ``__class__`` assignment, so parameters, their
    names, their attributes (``allreduce``, partition dimensions) and sharded checkpoint keys stay what they are.
    """

    config: Any
    flow: PairFlow | LocalFlow | None = None
    gemm: str = "auto"

    def forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs, **kwargs):
        """Experts on (N, D) rows in expert order with (N,) weights; returns ((N, D), None)."""
        flow, self.flow = self.flow, None
        if flow is None:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs, **kwargs)
        if given := [name for name, value in kwargs.items() if value is not None]:
            raise RuntimeError(f"{type(self).__name__} does not know the expert arguments {given}")
        _check_counts(flow.counts_e, permuted_local_hidden_states, tokens_per_expert)
        replicas = flow.replicas if isinstance(flow, PairFlow) else None
        weights = ExpertWeights(*self._live_weights(), self.config.gradient_accumulation_fusion, replicas)
        backend = self._backend(permuted_local_hidden_states)
        activation = _activation_of(self.config)
        y_ND = expert_mlp(permuted_local_hidden_states, permuted_probs, weights, activation, flow, backend)
        return y_ND, None

    def _linear_layers(self) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
        raise NotImplementedError

    def _live_weights(self) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
        """fc1 and fc2 weights, after the hooks that make them current have run.

        DDP's overlapped parameter gather waits in a forward pre-hook of each module
        (distributed_data_parallel.py:432-462). We do not call the linear modules, so their hooks are run here.
        """
        fc1, fc2 = self._linear_layers()
        for layer in [*fc1, *fc2]:
            for number, hook in layer._forward_pre_hooks.items():
                hook(layer, (), *([{}] if number in layer._forward_pre_hooks_with_kwargs else []))
        return self.weights_as_they_are()

    def weights_as_they_are(self) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
        """fc1 and fc2 weights, for those who know that they are current."""
        fc1, fc2 = self._linear_layers()
        return [w for layer in fc1 for w in _weights_of(layer)], [w for layer in fc2 for w in _weights_of(layer)]

    def _backend(self, x_ND: torch.Tensor) -> Backend:
        if self.gemm == "auto":
            half = x_ND.dtype in (torch.bfloat16, torch.float16)
            return "grouped" if half and x_ND.device.type == "cuda" else "loop"
        return "grouped" if self.gemm == "grouped" else "loop"


class LRMSequentialMLP(_LRMExperts, SequentialMLP):
    """SequentialMLP whose backward runs over kept rows only."""

    def _linear_layers(self):
        return (
            [expert.linear_fc1 for expert in self.local_experts],
            [expert.linear_fc2 for expert in self.local_experts],
        )


class LRMTEGroupedMLP(_LRMExperts, TEGroupedMLP):
    """TEGroupedMLP whose weights stay Transformer Engine's and whose backward runs over kept rows only.

    Other code asks whether 'TEGroupedMLP' is in the class name, so it is.
    """

    def _linear_layers(self):
        return [self.linear_fc1], [self.linear_fc2]


def _check_counts(counts_e: list[int], x_ND: torch.Tensor, tokens_per_expert: torch.Tensor) -> None:
    """Raise if the rows are not those that the quotas were fixed for; counts on a device are not waited for."""
    found: Any = tokens_per_expert.tolist() if tokens_per_expert.device.type == "cpu" else counts_e
    if found != counts_e or x_ND.shape[0] != sum(counts_e):
        raise RuntimeError(
            f"the dispatcher brought {x_ND.shape[0]} rows, {found} by expert, allowed are the {counts_e} that were "
            "routed: rows must not be dropped, added or padded on the way"
        )


def _weights_of(layer: Any) -> list[torch.nn.Parameter]:
    """``weight`` of a linear layer, or ``weight0`` .. of TE's GroupedLinear, in expert order."""
    if hasattr(layer, "num_gemms"):
        return [getattr(layer, f"weight{i}") for i in range(layer.num_gemms)]
    return [layer.weight]


def _activation_of(config) -> Activation:
    return Activation(
        function=config.activation_func,
        gated=config.gated_linear_unit,
        clamp=config.activation_func_clamp_value if config.gated_linear_unit else None,
        linear_offset=config.glu_linear_offset,
    )
