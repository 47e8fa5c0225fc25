"""Megatron's all-to-all dispatcher with a backward that moves kept rows only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_lrmoe.compute.reroute import Columns
from megatron_lrmoe.compute.stage import OutputStage, Stage
from megatron_lrmoe.mcore.call import GraphCall, LayerCall, ReplicaCall

_CHUNK_ORDERS = ("sort_input_by_local_experts", "restore_output_by_local_experts")


class LRMAlltoAllTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Every forward step is Megatron's own; while a call is open, its gradient is left to the PairFlow.

    An instance of Megatron's class becomes one by ``__class__`` assignment (see LRMoELayer), so there is no
    ``__init__``; outside a call every method is the parent's.

    Overlapped shared experts are computed by the parent's methods in between. Autograd does not record what runs inside
    a Stage, so in a call their steps are taken out of those methods and run beside the Stages, in the same order.
    """

    call: LayerCall | None = None
    _layouts: dict[int, dict[str, Any]] | None = None

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Count loads as Megatron does; in a call also gather every source's loads of every expert."""
        tokens_per_expert = super().preprocess(routing_map)
        if self.call is not None:
            self.call.gather_loads(routing_map, self.ep_group)
        return tokens_per_expert

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor:
        # The loads ride on the copy stream that Megatron waits for at its own sync point, so knowing them on the
        # host costs no further wait. The stream must first wait for the all-gather that writes them.
        if self.call is not None and point == self.cuda_dtoh_point:
            current, copying = torch.cuda.current_stream(), cast(torch.cuda.Stream, self.cuda_dtoh_stream)
            if current != copying:
                copying.wait_stream(current)
            with torch.cuda.stream(copying):
                self.call.copy_loads_to_host(record_stream=current != copying)
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)

    def dispatch_preprocess(self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor):
        """Permute the (T, D) tokens and (T, E) probabilities into wire order, of instances where there are replicas."""
        if self.call is None:
            self._lay_out(None)
            return super().dispatch_preprocess(hidden_states, routing_map, probs)
        rerouted = self.call.prepare(routing_map) if isinstance(self.call, ReplicaCall) else None
        self._lay_out(self.call.columns if isinstance(self.call, ReplicaCall) else None)
        if rerouted is not None:
            routing_map = rerouted.map_TC
        permute = super().dispatch_preprocess
        shape = hidden_states.shape
        with self._shared_experts_apart() as shared:
            if shared is not None:
                shared.pre_forward_comm(hidden_states)
            x_PD, alpha_P = Stage.apply(
                lambda x_TD, probs_TE: permute(
                    x_TD.view(shape), routing_map, probs_TE if rerouted is None else rerouted.probs(probs_TE)
                ),
                self.call.flow.permute_backward,
                hidden_states.view(-1, shape[-1]),
                probs,
            )
        if self.call.config.needs_alpha_at_source:
            self.call.flow.attach_alpha(alpha_P)
        return x_PD, alpha_P

    def token_dispatch(self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor):
        """Send rows to the owners of their experts."""
        if self.call is None:
            return super().token_dispatch(permutated_local_input_tokens, permuted_probs)
        run, back = super().token_dispatch, self.call.flow.dispatch_backward
        with self._shared_experts_apart() as shared:
            if shared is not None:
                shared.wait_current_stream()
            x_ND, alpha_N = Stage.apply(run, back, permutated_local_input_tokens, permuted_probs)
            if shared is not None:
                shared.linear_fc1_forward_and_act(x_ND)
        return x_ND, alpha_N

    def dispatch_postprocess(self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor):
        """Sort the received rows by expert, and fix this call's quotas: its loads are on the host now."""
        if self.call is None:
            return super().dispatch_postprocess(global_input_tokens, global_probs)
        sort = super().dispatch_postprocess
        counts: list[torch.Tensor] = []

        def run(x_ND: torch.Tensor, alpha_N: torch.Tensor) -> tuple[Any, Any]:
            sorted_ND, tokens_per_expert, sorted_N = sort(x_ND, alpha_N)
            counts.append(tokens_per_expert)
            return sorted_ND, sorted_N

        back = self.call.flow.sort_backward
        x_ND, alpha_N = Stage.apply(run, back, global_input_tokens, global_probs)
        self.call.settle(self.routing_map)
        return x_ND, counts[0], alpha_N

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Bring the experts' output rows from expert to wire order."""
        if self.call is None:
            return super().combine_preprocess(hidden_states)
        self.call.flow.share_norms()
        self.call.flow.share_choice()
        return Stage.apply(super().combine_preprocess, self.call.flow.unsort_backward, hidden_states)

    def token_combine(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Send output rows back to their sources."""
        if self.call is None:
            return super().token_combine(hidden_states, *args, **kwargs)
        combine = super().token_combine
        with self._shared_experts_apart() as shared:
            if shared is not None:
                shared.wait_current_stream()
            y_PD = Stage.apply(
                lambda y_ND: combine(y_ND, *args, **kwargs), self.call.flow.combine_backward, hidden_states
            )
            if shared is not None:
                shared.linear_fc2_forward(y_PD)
                shared.post_forward_comm()
        return y_PD

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """Sum each token's rows; in backward this is where the gradient arrives and pairs are chosen.

        Shared experts are added to a new tensor: the routed output alone is what the router's baseline keeps.
        """
        run, call = super().combine_postprocess, self.call
        self.call = None
        if call is None or isinstance(call, GraphCall):
            return run(permutated_local_input_tokens)
        stage = OutputStage if call.config.router_grad == "baseline" else Stage
        with self._shared_experts_apart() as shared:
            output = stage.apply(run, call.flow.unpermute_backward, permutated_local_input_tokens)
        self._lay_out(None)
        return output if shared is None else output + shared.get_output()

    def _lay_out(self, columns: Columns | None) -> None:
        """Let Megatron's steps sort rows by instance, or again by expert.

        What they need to know of experts they keep in these attributes (token_dispatcher.py:398-450).
        """
        if self._layouts is None:
            names = ("num_local_experts", "num_experts", "local_expert_indices", *_CHUNK_ORDERS)
            self._layouts = {0: {name: getattr(self, name) for name in names}}
        width = 0 if columns is None else columns.per_rank
        if width not in self._layouts:
            first = dist.get_rank(self.ep_group) * width
            chunks = torch.arange(width * self.ep_size * self.tp_size, device=self.permute_idx_device)
            self._layouts[width] = {
                "num_local_experts": width,
                "num_experts": width * self.ep_size,
                "local_expert_indices": list(range(first, first + width)),
                _CHUNK_ORDERS[0]: chunks.reshape(-1, width).T.ravel(),
                _CHUNK_ORDERS[1]: chunks.reshape(width, -1).T.ravel(),
            }
        vars(self).update(self._layouts[width])

    @contextmanager
    def _shared_experts_apart(self) -> Iterator[Any]:
        """Hide overlapped shared experts from the parent's methods; yields them, or None."""
        shared, self.shared_experts = self.shared_experts, None
        try:
            yield shared
        finally:
            self.shared_experts = shared
