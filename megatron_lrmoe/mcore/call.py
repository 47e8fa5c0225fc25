"""One forward call of a layer, from its routing to its settled quotas."""

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import token_dispatcher

from megatron_lrmoe.compute.exchange import HostCopy
from megatron_lrmoe.compute.flow import PairFlow
from megatron_lrmoe.compute.local_flow import LocalFlow
from megatron_lrmoe.compute.reroute import Columns, Rerouted, reroute
from megatron_lrmoe.compute.wire_flow import WireFlow
from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.mcore import adaptive, metrics, trace
from megatron_lrmoe.mcore.replication import LayerReplicas, kept_of
from megatron_lrmoe.pairs import DrawKey
from megatron_lrmoe.recalibration.balance import RowBytes
from megatron_lrmoe.recalibration.draw import offsets
from megatron_lrmoe.recalibration.plan import KeepPlan
from megatron_lrmoe.replicas.plan import Plan


class _Call:
    """What the calls of all dispatchers share: with every source's loads, these make the KeepPlan.

    Args:
        config: the plugin's settings.
        key: of this call's random draws.
        retention: share kept at this iteration.
        group: the expert-parallel group.
        row_bytes: memory of a row of this layer.
        valid_T: (T,) bool, which tokens are not padding; None where nothing says so, on every rank alike.
    """

    def __init__(
        self,
        config: LrmConfig,
        key: DrawKey,
        retention: Fraction,
        group: dist.ProcessGroup,
        row_bytes: RowBytes,
        valid_T: torch.Tensor | None = None,
    ):
        self.config, self.key, self.retention, self.group, self.row_bytes = config, key, retention, group, row_bytes
        # What is chosen in forward is chosen without the gradient, which tells padding from other tokens.
        self._valid_T = valid_T if config.when == "backward" else None

    def _counts(self, map_TE: torch.Tensor) -> torch.Tensor:
        """(1, E) loads of this source, or (2, E) with those of its valid tokens."""
        loads = [map_TE.sum(dim=0)]
        if self._valid_T is not None:
            loads.append(map_TE[self._valid_T].sum(dim=0))
        return torch.stack(loads)

    def _plan(self, counts_S: Sequence[Sequence[Sequence[int]]]) -> KeepPlan:
        """Of ``_counts`` from every source."""
        plan = self._keep_plan(counts_S)
        metrics.record(plan)
        trace.record(plan)
        return plan

    def _keep_plan(self, counts_S: Sequence[Sequence[Sequence[int]]]) -> KeepPlan:
        loads_SE, *valid = zip(*counts_S, strict=True)
        return KeepPlan(
            config=self.config,
            key=self.key,
            retention=self.retention,
            loads_SE=loads_SE,
            rank=dist.get_rank(self.group),
            row_bytes=self.row_bytes,
            valid_SE=valid[0] if valid else None,
        )


class LayerCall(_Call):
    """Gathers loads while the all-to-all dispatcher runs, then settles the PairFlow."""

    _loads: torch.Tensor | None = None

    @cached_property
    def flow(self) -> PairFlow:
        """Of this call; its stages belong to the dispatcher."""
        return PairFlow(self.group)

    def gather_loads(self, routing_map_TE: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Gather each source's loads; Megatron gathers them too but keeps few columns."""
        self._loads = _gathered(self._counts(routing_map_TE), group)

    def copy_loads_to_host(self, record_stream: bool) -> None:
        """Start the copy; Megatron's own sync point, before the experts, ends it.

        Args:
            record_stream: the copy runs on another stream than the one that wrote the loads.
        """
        if self._loads is not None:
            self._loads = token_dispatcher.maybe_move_tensor_to_cpu(self._loads, record_stream=record_stream)

    def settle(self, routing_map_TE: torch.Tensor) -> None:
        """Fix the quotas; everything about this call's backward but the choice itself is known from here on."""
        plan = self._plan(self._loads_on_host())
        # A function and not a method: a flow that held its call would be freed by the garbage collector only.
        self.flow.report = partial(_report, plan)
        self.flow.settle(plan, routing_map_TE)

    def _loads_on_host(self) -> list[list[list[int]]]:
        if self._loads is None:
            raise RuntimeError("the dispatcher sorted rows before it counted them")
        return self._loads.tolist()


class GraphCall(LayerCall):
    """A LayerCall that is opened when rows are sent, because what comes before may be a CUDA graph's replay."""

    @cached_property
    def flow(self) -> WireFlow:
        """Of this call."""
        return WireFlow(self.group)

    def gather_loads(self, routing_map_TE: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Gather each source's loads and start their copy to the host: Megatron's own may be in the graph."""
        self._host_loads = HostCopy(_gathered(self._counts(routing_map_TE), group))

    def copy_loads_to_host(self, record_stream: bool) -> None:
        """Under way since the loads were gathered."""

    def _loads_on_host(self) -> list[list[list[int]]]:
        return self._host_loads.read()


class ReplicaCall(LayerCall):
    """A LayerCall whose experts may have replicas: it waits for the loads before rows are permuted, and plans.

    Recompute runs a forward without gradients first. Its rows go where those of the second will, so it is planned too;
    but nothing is chosen, and only what it moves is counted.

    Args:
        replicas: plans of the layer.
        common: as _Call's.
    """

    def __init__(self, replicas: LayerReplicas, *common: Any):
        super().__init__(*common)
        self._replicas = replicas
        self.flow.has_backward = torch.is_grad_enabled()
        self.columns: Columns | None = None
        self._keep: KeepPlan | None = None

    def prepare(self, routing_map_TE: torch.Tensor) -> Rerouted | None:
        """Plan, and start to bring weights to replicas.

        Returns:
            Where this source's pairs go; None where there are no replicas.
        """
        loads = HostCopy(_gathered(self._counts(routing_map_TE), self.group)).read()
        keep = self._keep_plan(loads)
        plan, seconds = self._replicas.timed_plan(keep, rehearses=not self.flow.has_backward)
        rerouted = None
        if plan.replicas:
            self.columns = self._replicas.columns(plan)
            # The key's own word for a draw over all sources; any number would do that is the same in recompute.
            shift = offsets(self.key, [0])[0]
            rerouted = reroute(routing_map_TE, self.columns, keep.rank, shift)
            self.flow.replicas = self._replicas.replication(plan, self.key.layer)
            self.flow.replicas.push()
            metrics.record_moved(self.key.layer, self.flow.replicas.moved)
        self._keep = kept_of(keep, plan, self.columns)
        if self.flow.has_backward:
            self._record(keep, plan, seconds)
        return rerouted

    def _record(self, keep: KeepPlan, plan: Plan, seconds: float) -> None:
        metrics.record(keep, self._keep)
        trace.record(keep, plan)
        spared = self._replicas.spared(keep, plan)
        planned = metrics.Planned(
            placed=int(plan.rows_R.max()),
            replicas=plan.replicas,
            forward_only=int(plan.forward_only_I.sum()),
            plan_seconds=seconds,
            compared=spared is not None,
            spared=spared or 0,
        )
        metrics.record_replicas(self.key.layer, planned)

    def gather_loads(self, routing_map_TE: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Known since ``prepare``."""

    def copy_loads_to_host(self, record_stream: bool) -> None:
        """Known since ``prepare``."""

    def settle(self, routing_map_TE: torch.Tensor) -> None:
        """Fix the quotas; with replicas, the map is that of instances."""
        if self._keep is None:
            raise RuntimeError("the dispatcher sorted rows before they were planned")
        self.flow.report = partial(_report, self._keep)
        self.flow.settle(self._keep, routing_map_TE, self.columns)


class LocalCall(_Call):
    """A call of a dispatcher that is left as it is: loads are counted beside it, and the flow is the experts' own."""

    def count(self, map_TE: torch.Tensor) -> None:
        """Gather each source's loads and start their copy to the host.

        Args:
            map_TE: (T, E) pairs that this source sends.
        """
        self._loads = HostCopy(_gathered(self._counts(map_TE), self.group))

    def settled(self) -> LocalFlow:
        """Fix the quotas; waits for the loads, which were counted before the rows were sent."""
        plan = self._plan(self._loads.read())
        return LocalFlow(plan, partial(_report, plan))


def pairs_sent(dispatcher: Any, routing_map_TE: torch.Tensor | None, num_experts: int) -> torch.Tensor:
    """(T, E) pairs that this source is about to send.

    DeepEP is given the experts with the K largest probabilities instead of the map. Where a probability is 0 they can
    be others than the routed ones (token_dispatcher.py:1285-1295).

    Args:
        dispatcher: of Megatron, after its ``dispatch_preprocess``.
        routing_map_TE: (T, E) bool, this rank's routing; None after a CUDA graph, where the dispatcher holds it.
        num_experts: E.
    """
    manager = getattr(dispatcher, "_comm_manager", dispatcher)
    index_TK = getattr(manager, "token_indices", None)
    if index_TK is None:
        return manager.routing_map if routing_map_TE is None else routing_map_TE
    # -1 stands for a pair that capacity has dropped.
    sent = index_TK.new_zeros(len(index_TK), num_experts + 1, dtype=torch.bool).scatter_(1, index_TK + 1, True)
    return sent[:, 1:]


def _gathered(counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(S, ...) counts of every source: one all-gather, of 8 bytes an expert and rank."""
    counts_S = counts.new_empty(group.size(), *counts.shape)
    if group.size() == 1:
        return counts_S.copy_(counts)
    dist.all_gather_into_tensor(counts_S.view(-1), counts.view(-1), group=group)
    return counts_S


def _report(plan: KeepPlan, kind: str, sums: torch.Tensor) -> None:
    layer, config = plan.key.layer, plan.config
    metrics.record_cost(layer, config.selection == "topk", kind, sums)
    # A call that probes drops nothing, which says nothing about dropping.
    if config.adaptive and kind == "selection" and not plan.probes:
        adaptive.observe(layer, sums)
