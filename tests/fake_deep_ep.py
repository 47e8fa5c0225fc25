"""FAKES of DeepEP's two buffers, on gloo, for Megatron's flex dispatcher: the real ones need several GPUs.

Megatron's own autograd Functions (fused_a2a.py) and managers (token_dispatcher.py) run on top of them, unchanged. What
is imitated is what those rely on: arguments and results of the methods that they call, one row for each (token, rank)
that has any of the token's experts, opaque handles that repeat a dispatch, fp32 probabilities. Rows arrive by source,
then token. What is not: kernels, streams and events, low-precision sums, how much is sent.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

REBOUND = ("fused_combine", "fused_dispatch", "hybrid_ep_combine", "hybrid_ep_dispatch", "set_deepep_num_sms")


class EventHandle:
    """A point in a stream that is always over."""


@dataclass(frozen=True)
class EventOverlap:
    """Waits for nothing."""

    event: EventHandle | None = None

    def current_stream_wait(self) -> None:
        """Return at once."""


class _Hints:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


@dataclass(frozen=True)
class _Handle:
    """One dispatch: tokens in the order sent, rows by rank; for HybridEP also where each expert's rows lie.

    ``row_N`` and ``expert_N``: arrived row and local expert of each of the experts' rows.
    """

    group: Any
    num_tokens: int
    token_M: torch.Tensor
    sent: list[int]
    received: list[int]
    row_N: torch.Tensor | None = None
    expert_N: torch.Tensor | None = None

    def there(self, rows_M: torch.Tensor) -> torch.Tensor:
        return _exchange(rows_M, self.sent, self.received, self.group)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        return _exchange(rows, self.received, self.sent, self.group)

    def summed(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows back at their sources, where each token's are summed."""
        rows_M = self.back(rows)
        return rows_M.new_zeros(self.num_tokens, *rows_M.shape[1:]).index_add_(0, self.token_M, rows_M)


def _exchange(rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Any) -> torch.Tensor:
    if len(send) == 1:
        return rows.clone()
    arrived = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), list(receive), list(send), group=group)
    return arrived


def _handle(wanted_TR: torch.Tensor, group: Any) -> _Handle:
    token_M = wanted_TR.t().nonzero()[:, 1]
    sent_R = wanted_TR.sum(0)
    received_R = _exchange(sent_R, [1] * len(sent_R), [1] * len(sent_R), group)
    return _Handle(group, wanted_TR.shape[0], token_M, sent_R.tolist(), received_R.tolist())


def _require_fp32(probs: torch.Tensor) -> None:
    if probs.dtype != torch.float32:
        raise TypeError(f"probabilities: found {probs.dtype}, allowed is torch.float32")


class Buffer:
    """FAKE of ``deep_ep.Buffer``, its high-throughput half."""

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(num_sms: int) -> None:
        """There are none."""

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> _Hints:
        """Buffer sizes."""
        return _Hints()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        """Counts and the (T, R) map of which rank has any of a token's experts; -1 stands for no expert."""
        ranks = self.group.size()
        map_TE = torch.zeros(topk_idx.shape[0], num_experts + 1, dtype=torch.bool).scatter_(1, topk_idx + 1, True)
        wanted_TR = map_TE[:, 1:].view(-1, ranks, num_experts // ranks).any(2)
        return wanted_TR.sum(0), None, map_TE[:, 1:].sum(0), wanted_TR, EventOverlap()

    def dispatch(
        self,
        x: torch.Tensor,
        handle: _Handle | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Rows, and of each its K local experts (-1: not here) and weights; with a handle, rows alone."""
        if handle is not None:
            return handle.there(x[handle.token_M]), None, None, None, None, EventOverlap()
        if is_token_in_rank is None or num_tokens_per_expert is None or topk_idx is None or topk_weights is None:
            raise TypeError("a dispatch without a handle needs its layout, experts and weights")
        _require_fp32(topk_weights)
        handle = _handle(is_token_in_rank, self.group)
        own = num_tokens_per_expert.shape[0] // self.group.size()
        local_MK = handle.there(topk_idx[handle.token_M]) - own * dist.get_rank(self.group)
        here_MK = (local_MK >= 0) & (local_MK < own)
        local_MK = local_MK.masked_fill(~here_MK, -1)
        weight_MK = handle.there(topk_weights[handle.token_M]).masked_fill(~here_MK, 0)
        counts = [int((local_MK == expert).sum()) for expert in range(own)]
        return handle.there(x[handle.token_M]), local_MK, weight_MK, counts, handle, EventOverlap()

    def combine(
        self, x: torch.Tensor, handle: _Handle, topk_weights: torch.Tensor | None = None, **_: Any
    ) -> tuple[Any, ...]:
        """Each token's rows summed over the ranks it was sent to; so are (T, K) weights."""
        if topk_weights is not None:
            _require_fp32(topk_weights)
            topk_weights = handle.summed(topk_weights)
        return handle.summed(x), topk_weights, EventOverlap()


class HybridEPBuffer:
    """FAKE of ``deep_ep.HybridEPBuffer``: dispatch brings rows in the experts' order."""

    def __init__(self, group: Any, num_local_experts: int, **_: Any) -> None:
        self.group, self.num_local_experts = group, num_local_experts

    def dispatch_with_permute(
        self,
        hidden: torch.Tensor,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        handle: _Handle | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        """(N, D) rows by expert, (N,) probabilities, no scales, (e,) counts, handle; with a handle, rows alone."""
        if handle is not None:
            return handle.there(hidden[handle.token_M])[handle.row_N], None, None, None, handle
        if routing_map is None or probs is None:
            raise TypeError("a dispatch without a handle needs a routing map and probabilities")
        _require_fp32(probs)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.group.size())]
        dist.all_gather(sizes, torch.tensor([hidden.shape[0]]), group=self.group)
        if len({int(size) for size in sizes}) > 1:
            raise ValueError(f"tokens of the ranks: found {[int(size) for size in sizes]}, allowed are equal numbers")
        own = self.num_local_experts
        wanted_TR = routing_map.view(routing_map.shape[0], self.group.size(), own).any(2)
        handle = _handle(wanted_TR, self.group)
        first = own * dist.get_rank(self.group)
        map_Me = handle.there(routing_map[handle.token_M].to(torch.uint8))[:, first : first + own].bool()
        probs_Me = handle.there(probs[handle.token_M])[:, first : first + own]
        expert_N, row_N = map_Me.t().nonzero().unbind(1)
        handle = replace(handle, row_N=row_N, expert_N=expert_N)
        rows_ND = handle.there(hidden[handle.token_M])[row_N]
        return rows_ND, probs_Me[row_N, expert_N], None, map_Me.sum(0, dtype=torch.int32), handle

    def combine_with_unpermute(
        self, hidden: torch.Tensor, handle: _Handle, probs: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Each token's rows summed over its experts; (T, E) of what belongs to its probabilities."""
        assert handle.row_N is not None and handle.expert_N is not None
        rows = hidden.new_zeros(sum(handle.received), hidden.shape[1]).index_add_(0, handle.row_N, hidden)
        if probs is None:
            return handle.summed(rows), None
        own, first = self.num_local_experts, self.num_local_experts * dist.get_rank(self.group)
        table = probs.new_zeros(rows.shape[0], own * self.group.size())
        table[handle.row_N, first + handle.expert_N] = probs
        return handle.summed(rows), handle.summed(table)


@contextmanager
def installed() -> Iterator[None]:
    """Megatron as it is where a package ``deep_ep`` can be imported, with these fakes in it."""
    package, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    vars(package).update(Buffer=Buffer, HybridEPBuffer=HybridEPBuffer, utils=utils)
    vars(utils).update(EventHandle=EventHandle, EventOverlap=EventOverlap)
    modules = {"deep_ep": package, "deep_ep.utils": utils}
    sys.modules.update(modules)
    try:
        _reload()
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        _reload()


def _reload() -> None:
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    importlib.reload(fused_a2a)
    for name in REBOUND:
        setattr(token_dispatcher, name, getattr(fused_a2a, name))
