"""CPU seconds that a training run spends in its MoE layers; the worker side of ``benchmarks.time_to_loss``."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tests import training


@dataclass(frozen=True)
class TimedRun:
    """One rank's view of a run.

    Args:
        losses: of each iteration.
        seconds: (iteration, phase) CPU seconds in MoE layers, of the busiest rank of each layer's forward or backward,
            which is what the other ranks wait for; phase 0 is forward, 1 is backward.
        console: the MoE part of each iteration's console line.
    """

    losses: list[float]
    seconds: list[tuple[float, float]]
    console: list[str]


def timed_run(flags: list[str], skew: float) -> TimedRun:
    """Train with Megatron's flags in this worker, and in all others of its pool.

    Args:
        flags: with ``--moe-router-enable-expert-bias`` and an update rate of 0.
        skew: bias of the first rank's experts in every router's choice; their weights in the sum do not have it.
    """
    spent: list[tuple[int, int, float]] = []
    with _timing(spent), _skewed(skew):
        run = training.run(flags)
    iterations = len(run.losses)
    per_call = torch.tensor([seconds for _, _, seconds in spent], dtype=torch.float64)
    torch.distributed.all_reduce(per_call, op=torch.distributed.ReduceOp.MAX)
    total = torch.zeros(iterations, 2, dtype=torch.float64)
    for (iteration, phase, _), seconds in zip(spent, per_call, strict=True):
        total[iteration, phase] += seconds
    return TimedRun([float(loss) for loss in run.losses], [tuple(row) for row in total.tolist()], run.console)


@contextmanager
def _skewed(skew: float) -> Iterator[None]:
    from megatron.core.transformer.moe.router import TopKRouter

    original = TopKRouter.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        bias_E: Any = self.expert_bias
        bias_E[: len(bias_E) // torch.distributed.get_world_size()] = skew

    TopKRouter.__init__ = init
    try:
        yield
    finally:
        TopKRouter.__init__ = original


@contextmanager
def _timing(spent: list[tuple[int, int, float]]) -> Iterator[None]:
    """Record (iteration, phase, seconds) of each MoE layer's forward and backward, in the same order on every rank."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.training import get_args

    import megatron_lrmoe.megatron_adaptor  # noqa: F401
    from megatron_lrmoe.mcore.layer import LRMoELayer

    def timed(cls: type, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if type(self) is not cls:
                return original(self, hidden, *args, **kwargs)
            run: Any = get_args()
            iteration, began = run.curr_iteration, [0.0]
            x = hidden.view_as(hidden)
            x.register_hook(lambda _: spent.append((iteration, 1, time.process_time() - began[0])))
            start = time.process_time()
            out, bias = original(self, x, *args, **kwargs)
            spent.append((iteration, 0, time.process_time() - start))
            out.register_hook(lambda _: began.__setitem__(0, time.process_time()))
            return out, bias

        return forward

    originals = {cls: cls.forward for cls in (MoELayer, LRMoELayer)}
    for cls, original in originals.items():
        cls.forward = timed(cls, original)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for cls, original in originals.items():
            cls.forward = original  # type: ignore[method-assign]
