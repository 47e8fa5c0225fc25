"""What one layer call sends between the ranks of its expert-parallel group, with sizes that the host knows."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_lrmoe.compute.compaction import wire_of_expert_order
from megatron_lrmoe.recalibration.plan import KeepPlan


class Exchange:
    """The all-to-alls of one layer call; on a single rank nothing is sent.

    Args:
        group: the expert-parallel process group.
        plan: loads of the call.
        device: of its tensors.
    """

    def __init__(self, group: dist.ProcessGroup, plan: KeepPlan, device: torch.device):
        self.group = group
        sent_E = plan.loads_SE[plan.rank]
        self.sent_splits = [sum(sent_E[i] for i in plan.experts_of(r)) for r in range(plan.num_ranks)]
        self.received_splits = [sum(loads_e) for loads_e in plan.loads_Se]
        self.wire_of_N = None if plan.num_ranks == 1 else wire_of_expert_order(plan.loads_Se, device)

    def to_owners(self, value_P: torch.Tensor) -> torch.Tensor:
        """One scalar per pair, from the sources (wire order) to the owners (expert order)."""
        if self.wire_of_N is None:
            return value_P
        return self.all_to_all(value_P, self.sent_splits, self.received_splits)[self.wire_of_N]

    def to_sources(self, value_N: torch.Tensor) -> torch.Tensor:
        """One scalar per pair, from the owners (expert order) to the sources (wire order)."""
        if self.wire_of_N is None:
            return value_N
        wire = scattered(value_N, self.wire_of_N)
        return self.all_to_all(wire, self.received_splits, self.sent_splits)

    def all_to_all(self, rows: torch.Tensor | None, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Send the first ``send[0]`` rows to rank 0 and so on; as many come back as ``receive`` says."""
        rows = taken(rows)
        if self.wire_of_N is None:
            return rows
        arrived = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), list(receive), list(send), group=self.group)
        return arrived


class HostCopy:
    """Integers on their way from the device to the host, which waits for them only when they are read.

    Args:
        values: of any integer type.
    """

    def __init__(self, values: torch.Tensor):
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.device.type == "cuda":
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[Any]:
        """The integers, nested as the tensor was.

        No wait if the device has long passed the place where the copy was started.
        """
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


def scattered(value_M: torch.Tensor, index_M: torch.Tensor) -> torch.Tensor:
    """The inverse of ``value[index]`` for a permutation."""
    return torch.empty_like(value_M).index_copy_(0, index_M, value_M)


def taken[T](value: T | None) -> T:
    """A value that an earlier stage must have left here."""
    if value is None:
        raise RuntimeError("a backward stage of the MoE layer ran before the stage that feeds it")
    return value
