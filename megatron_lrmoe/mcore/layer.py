"""MoELayer whose backward keeps only the most valuable pairs."""

import logging
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from typing import cast

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
)

from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.mcore import adaptive, clock, metrics, trace
from megatron_lrmoe.mcore.call import GraphCall, LayerCall, LocalCall, ReplicaCall, pairs_sent
from megatron_lrmoe.mcore.cuda_graphs import may_capture_preprocess
from megatron_lrmoe.mcore.dispatcher import LRMAlltoAllTokenDispatcher
from megatron_lrmoe.mcore.experts import LRMSequentialMLP, LRMTEGroupedMLP
from megatron_lrmoe.mcore.replication import LayerReplicas
from megatron_lrmoe.pairs import DrawKey
from megatron_lrmoe.recalibration.balance import RowBytes
from megatron_lrmoe.recalibration.schedule import retention_at

logger = logging.getLogger(__name__)

# Most derived first: Megatron's inference-only subclass of TEGroupedMLP is not in it and is refused.
_OURS = {
    MoEAlltoAllTokenDispatcher: LRMAlltoAllTokenDispatcher,
    # They move every row in backward too and stay what they are.
    MoEAllGatherTokenDispatcher: MoEAllGatherTokenDispatcher,
    MoEFlexTokenDispatcher: MoEFlexTokenDispatcher,
    SequentialMLP: LRMSequentialMLP,
    TEGroupedMLP: LRMTEGroupedMLP,
}


class LRMoELayer(MoELayer):
    """Megatron's MoE layer; its dispatcher and experts are ours, and a call is opened when backward work is dropped.

    In evaluation, without gradients, before the start iteration and on layers that are not chosen, every step is the
    parent's own.
    """

    always_compact = False
    """Take the compacted path at retention 1.0 too. Tests use it to compare that path with Megatron's gradients."""

    def __init__(self, config, submodules=None, layer_number=None, pg_collection=None, **kwargs):
        groups = pg_collection if pg_collection is not None else get_default_pg_collection()
        super().__init__(config, submodules, layer_number, groups, **kwargs)
        settings = getattr(config, "moe_lrm", None)
        if not isinstance(settings, LrmConfig):
            raise RuntimeError("LRMoELayer needs config.moe_lrm; build the config with the plugin's adaptor")
        self._take(settings, groups)

    @classmethod
    def adopt(cls, layer: MoELayer, settings: LrmConfig, groups: ProcessGroupCollection) -> None:
        """Make a layer that Megatron has built one of ours; its parameters stay the very same tensors.

        Args:
            layer: exactly a MoELayer, in a run that the plugin supports.
            settings: taken as they are.
            groups: the layer's, of which ``expt_dp`` is read.
        """
        layer.__class__ = cls
        cast(LRMoELayer, layer)._take(settings, groups)

    def _take(self, settings: LrmConfig, groups: ProcessGroupCollection) -> None:
        config = self.config
        self.lrm_config = settings
        # Groups that average their gradients draw differently: their errors then average out too.
        self._data_parallel_index = torch.distributed.get_rank(groups.expt_dp)
        self._iteration, self._microbatch, self._rehearsal = -1, 0, 0
        adaptive.restart()
        trace.open_for(settings, groups.ep, self._data_parallel_index)
        width = config.moe_latent_size or config.hidden_size
        self._row_bytes = RowBytes.of(
            width,
            cast(int, config.moe_ffn_hidden_size),
            config.gated_linear_unit,
            config.params_dtype.itemsize,
            config.moe_router_topk if settings.router_grad == "baseline" else None,
            settings.when == "forward",
        )
        _become_ours(self.token_dispatcher)
        _become_ours(self.experts)
        self._our_experts.gemm = settings.gemm
        self._local_call: LocalCall | None = None
        self._valid_T: torch.Tensor | None = None
        self._opens_late = may_capture_preprocess(config)
        self._call_kind: Callable[..., LayerCall] = LayerCall
        if settings.replicates:
            self._call_kind = partial(ReplicaCall, self._layer_replicas())
        self._moves_every_row = not isinstance(self.token_dispatcher, LRMAlltoAllTokenDispatcher)
        if self._moves_every_row:
            # g and dX of every routed row are whole tensors in the experts' backward, and so is dalpha.
            whole = 2 * (config.moe_latent_size or config.hidden_size) * config.params_dtype.itemsize + 4
            self._row_bytes = replace(self._row_bytes, saved=self._row_bytes.saved + whole)
            _say_once(config.moe_token_dispatcher_type)

    @torch.compiler.disable
    def forward(self, hidden_states, intermediate_tensors=None, padding_mask=None):
        """Megatron's own; torch.compile leaves it as it is and compiles around it.

        Row counts change from call to call, and no compiler can see into our Functions.
        """
        try:
            return super().forward(hidden_states, intermediate_tensors, padding_mask)
        except RuntimeError as error:
            # A lost peer is first missed by Megatron's own exchanges, which say nothing of the layer.
            call = None if self._moves_every_row else self._our_dispatcher.call
            if call is not None and call.flow.replicas is not None:
                call.flow.replicas.note(error)
            raise

    def route(self, hidden_states, padding_mask=None):
        """Megatron's own; which tokens are padding is kept for this call's quotas.

        Its router takes True for padding (router.py:738), whatever its docstrings say.
        """
        self._valid_T = None if padding_mask is None else ~padding_mask.reshape(-1)
        return super().route(hidden_states, padding_mask)

    def preprocess(self, hidden_states, probs, routing_map):
        """Open a call if backward work is to be dropped, then permute as Megatron does."""
        if self._opens_late:
            return super().preprocess(hidden_states, probs, routing_map)
        self._our_experts.flow = None
        if self._moves_every_row:
            prepared = super().preprocess(hidden_states, probs, routing_map)
            self._open_local_call(routing_map)
            return prepared
        call = self._our_dispatcher.call = self._open_call(self._call_kind)
        if call is not None:
            self._our_experts.flow = call.flow
        return super().preprocess(hidden_states, probs, routing_map)

    def dispatch(self, hidden_states, probs):
        """Send rows as Megatron does; where the dispatcher moves every row, then fix the quotas of an open call.

        Not earlier, since that waits for the loads. What CUDA graphs may capture is over here, so with them a call is
        opened here too.
        """
        if self._opens_late:
            self._open_late()
        dispatched = super().dispatch(hidden_states, probs)
        call, self._local_call = self._local_call, None
        if call is not None:
            self._our_experts.flow = call.settled()
        return dispatched

    def _layer_replicas(self) -> LayerReplicas:
        experts = self._our_experts
        return LayerReplicas(
            self.lrm_config,
            self.ep_group,
            self.config.num_moe_experts or 0,
            live_weights=experts.weights_as_they_are,
            make_current=experts._live_weights,
        )

    def _open_local_call(self, routing_map_TE: torch.Tensor | None) -> None:
        call = self._local_call = self._open_call(LocalCall)
        if call is not None:
            call.count(pairs_sent(self.token_dispatcher, routing_map_TE, self.config.num_moe_experts or 0))

    def _open_late(self) -> None:
        """With the routing that the dispatcher holds, which a replay has put there (cudagraph_attrs)."""
        self._our_experts.flow = None
        if self._moves_every_row:
            self._open_local_call(None)
            return
        call = self._our_dispatcher.call = self._open_call(GraphCall)
        if call is not None:
            call.gather_loads(self._our_dispatcher.routing_map, self.ep_group)
            self._our_experts.flow = call.flow

    @property
    def _our_dispatcher(self) -> LRMAlltoAllTokenDispatcher:
        return cast(LRMAlltoAllTokenDispatcher, self.token_dispatcher)

    @property
    def _our_experts(self) -> LRMSequentialMLP | LRMTEGroupedMLP:
        return cast(LRMSequentialMLP, self.experts)

    @property
    def number_in_model(self) -> int:
        """Layer number from 1; layers of multi-token prediction count on after the decoder's (router.py:591-594)."""
        after = self.config.num_layers if self.is_mtp_layer else 0
        return after + (self.layer_number or 0)

    def _open_call[C](self, kind: Callable[..., C]) -> C | None:
        # Recompute runs a forward without gradients first and repeats it with them in backward. Only the second has
        # a backward of its own, so only it counts as a microbatch and records metrics. With replicas the first opens a
        # call too, since its rows are to go where those of the second will.
        has_backward = torch.is_grad_enabled()
        if not self.training or not (has_backward or self.lrm_config.replicates):
            return None
        iteration = clock.iteration()
        if iteration != self._iteration:
            self._iteration, self._microbatch, self._rehearsal = iteration, 0, 0
        layer = self.number_in_model
        key = DrawKey(
            seed=clock.seed(),
            iteration=iteration,
            microbatch=self._microbatch if has_backward else self._rehearsal,
            layer=layer,
            data_parallel=self._data_parallel_index,
        )
        if has_backward:
            self._microbatch += 1
        else:
            self._rehearsal += 1
        covered = self.lrm_config.covers_layer(layer)
        retention = self._retention(layer, iteration) if covered or self.always_compact else Fraction(1)
        if retention == 1 and not self.always_compact and not self.lrm_config.replicates:
            return None
        return kind(self.lrm_config, key, retention, self.ep_group, self._row_bytes, self._valid_T)

    def _retention(self, layer: int, iteration: int) -> Fraction:
        if not self.lrm_config.adaptive:
            return retention_at(self.lrm_config, iteration)
        retention = adaptive.retention_of(self.lrm_config, layer, iteration)
        if torch.is_grad_enabled():
            metrics.record_retention(layer, retention)
        return retention


def _become_ours(part) -> None:
    """Give a dispatcher or expert layer of Megatron our class; what it holds stays as it was built."""
    ours = _OURS.get(type(part))
    if ours is None:
        names = [cls.__name__ for cls in _OURS]
        raise RuntimeError(f"--moe-lrm-retention: found a {type(part).__name__}, allowed are {names}")
    part.__class__ = ours


@cache
def _say_once(dispatcher_type: str) -> None:
    if torch.distributed.get_rank() == 0:
        # A warning, because Megatron sets its own logging level only later.
        logger.warning(
            "--moe-token-dispatcher-type %s: dropped pairs save the GEMMs of their experts' backward only, their rows "
            "are still sent; with --moe-token-dispatcher-type alltoall they are not",
            dispatcher_type,
        )
