"""One forward call of a layer, from its routing to its settled quotas."""

from fractions import Fraction
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import token_dispatcher

from megatron_lrmoe.compute.exchange import HostCopy
from megatron_lrmoe.compute.flow import PairFlow
from megatron_lrmoe.compute.local_flow import LocalFlow
from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.mcore import adaptive, metrics
from megatron_lrmoe.pairs import DrawKey
from megatron_lrmoe.recalibration.balance import RowBytes
from megatron_lrmoe.recalibration.plan import KeepPlan


class _Call:
    """What the calls of all dispatchers share: with every source's loads, these make the KeepPlan.

    Args:
        config: the plugin's settings.
        key: of this call's random draws.
        retention: share kept at this iteration.
        group: the expert-parallel group.
        row_bytes: memory of a row of this layer.
    """

    def __init__(
        self, config: LrmConfig, key: DrawKey, retention: Fraction, group: dist.ProcessGroup, row_bytes: RowBytes
    ):
        self.config, self.key, self.retention, self.group, self.row_bytes = config, key, retention, group, row_bytes

    def _plan(self, loads_SE: list[list[int]]) -> KeepPlan:
        plan = KeepPlan(
            config=self.config,
            key=self.key,
            retention=self.retention,
            loads_SE=loads_SE,
            rank=dist.get_rank(self.group),
            row_bytes=self.row_bytes,
        )
        metrics.record(plan)
        return plan


class LayerCall(_Call):
    """Gathers loads while the all-to-all dispatcher runs, then settles the PairFlow."""

    loads_SE: torch.Tensor | None = None

    @cached_property
    def flow(self) -> PairFlow:
        """Of this call; its stages belong to the dispatcher."""
        return PairFlow(self.group)

    def gather_loads(self, routing_map_TE: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Gather each source's loads; Megatron gathers them too but keeps few columns."""
        self.loads_SE = _gathered(routing_map_TE.sum(dim=0), group)

    def copy_loads_to_host(self, record_stream: bool) -> None:
        """Start the copy; Megatron's own sync point, before the experts, ends it.

        Args:
            record_stream: the copy runs on another stream than the one that wrote the loads.
        """
        if self.loads_SE is not None:
            self.loads_SE = token_dispatcher.maybe_move_tensor_to_cpu(self.loads_SE, record_stream=record_stream)

    def settle(self, routing_map_TE: torch.Tensor) -> None:
        """Fix the quotas; everything about this call's backward but the choice itself is known from here on."""
        if self.loads_SE is None:
            raise RuntimeError("the dispatcher sorted rows before it counted them")
        plan = self._plan(self.loads_SE.tolist())
        # A function and not a method: a flow that held its call would be freed by the garbage collector only.
        self.flow.report = partial(_report, plan)
        self.flow.settle(plan, routing_map_TE)


class LocalCall(_Call):
    """A call of a dispatcher that is left as it is: loads are counted beside it, and the flow is the experts' own."""

    def count(self, load_E: torch.Tensor) -> None:
        """Gather each source's loads and start their copy to the host.

        Args:
            load_E: (E,) pairs that this source sends.
        """
        self._num_experts = load_E.shape[0]
        self._loads = HostCopy(_gathered(load_E, self.group).view(-1))

    def settled(self) -> LocalFlow:
        """Fix the quotas; waits for the loads, which were counted before the rows were sent."""
        loads, experts = self._loads.read(), self._num_experts
        plan = self._plan([loads[i : i + experts] for i in range(0, len(loads), experts)])
        return LocalFlow(plan, partial(_report, plan))


def loads_sent(dispatcher: Any, routing_map_TE: torch.Tensor) -> torch.Tensor:
    """(E,) pairs that this source is about to send.

    DeepEP is given the experts with the K largest probabilities instead of the map. Where a probability is 0 they can
    be others than the routed ones (token_dispatcher.py:1285-1295).

    Args:
        dispatcher: of Megatron, after its ``dispatch_preprocess``.
        routing_map_TE: (T, E) bool, this rank's routing.
    """
    index_TK = getattr(getattr(dispatcher, "_comm_manager", None), "token_indices", None)
    if index_TK is None:
        return routing_map_TE.sum(dim=0)
    # -1 stands for a pair that capacity has dropped.
    place_P = index_TK.flatten() + 1
    load_E = place_P.new_zeros(routing_map_TE.shape[1] + 1).scatter_add_(0, place_P, torch.ones_like(place_P))
    return load_E[1:].contiguous()


def _gathered(load_E: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(S, E) loads of every source: one all-gather of 8 E bytes a rank."""
    loads_SE = load_E.new_empty(group.size(), load_E.shape[0])
    if group.size() == 1:
        return loads_SE.copy_(load_E)
    dist.all_gather_into_tensor(loads_SE.view(-1), load_E, group=group)
    return loads_SE


def _report(plan: KeepPlan, kind: str, sums: torch.Tensor) -> None:
    layer, config = plan.key.layer, plan.config
    metrics.record_cost(layer, config.selection == "topk", kind, sums)
    # A call that probes drops nothing, which says nothing about dropping.
    if config.adaptive and kind == "selection" and not plan.probes:
        adaptive.observe(layer, sums)
