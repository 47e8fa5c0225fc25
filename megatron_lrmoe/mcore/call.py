"""One forward call of a layer, from its routing to its settled quotas."""

from fractions import Fraction
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import token_dispatcher

from megatron_lrmoe.compute.flow import PairFlow
from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.mcore import adaptive, metrics
from megatron_lrmoe.pairs import DrawKey
from megatron_lrmoe.recalibration.balance import RowBytes
from megatron_lrmoe.recalibration.plan import KeepPlan


class LayerCall:
    """Gathers what a KeepPlan needs while Megatron's dispatcher runs, then settles the PairFlow.

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
        self.config, self.key, self.retention, self.row_bytes = config, key, retention, row_bytes
        self.flow = PairFlow(group)
        self.loads_SE: torch.Tensor | None = None

    def gather_loads(self, routing_map_TE: torch.Tensor, group: dist.ProcessGroup) -> None:
        """All-gather each source's (E,) loads, 8 E bytes a rank; Megatron gathers them too but keeps few columns."""
        load_E = routing_map_TE.sum(dim=0)
        ranks = group.size()
        self.loads_SE = load_E.new_empty(ranks, load_E.shape[0])
        if ranks == 1:
            self.loads_SE.copy_(load_E)
        else:
            dist.all_gather_into_tensor(self.loads_SE.view(-1), load_E, group=group)

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
        plan = KeepPlan(
            config=self.config,
            key=self.key,
            retention=self.retention,
            loads_SE=self.loads_SE.tolist(),
            rank=dist.get_rank(self.flow.group),
            row_bytes=self.row_bytes,
        )
        # A function and not a method: a flow that held its call would be freed by the garbage collector only.
        self.flow.report = partial(_report, plan)
        self.flow.settle(plan, routing_map_TE)
        metrics.record(plan)


def _report(plan: KeepPlan, kind: str, sums: torch.Tensor) -> None:
    layer, config = plan.key.layer, plan.config
    metrics.record_cost(layer, config.selection == "topk", kind, sums)
    # A call that probes drops nothing, which says nothing about dropping.
    if config.adaptive and kind == "selection" and not plan.probes:
        adaptive.observe(layer, sums)
