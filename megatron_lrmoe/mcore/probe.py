"""Time and traffic of the MoE layers, for stock and plugin runs alike, if ``LRMOE_PROBE=FILE`` asks for it.

Every rank appends one JSON line per training iteration to ``FILE.rank{r}``: CPU time is that of the whole
process with all its threads, summed over MoE layers and microbatches. On a GPU the times are those of
launching the work, not of doing it.
"""

import atexit
import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PROBE_VARIABLE = "LRMOE_PROBE"


@dataclass
class IterationTotals:
    """What the MoE layers of one rank took in one iteration.

    Args:
        iteration: as Megatron's log numbers it, from 1.
        layers: backward passes measured: MoE layers times microbatches.
        forward_cpu_ms: CPU time in the forward, recomputed forwards of the whole layer included.
        backward_cpu_ms: CPU time between the arrival of a layer's output gradient and its input gradient.
        backward_wall_ms: the same by the clock on the wall; it includes waiting for other ranks.
        backward_bytes: bytes sent to other ranks in that time.
    """

    iteration: int
    layers: int = 0
    forward_cpu_ms: float = 0.0
    backward_cpu_ms: float = 0.0
    backward_wall_ms: float = 0.0
    backward_bytes: int = 0


class Probe:
    """Sums what is measured in an iteration, and writes it when the next one begins."""

    def __init__(self, path: Path, iteration: Callable[[], int]) -> None:
        self._path = path
        self._iteration = iteration
        self._totals: IterationTotals | None = None
        self._began: tuple[float, float] | None = None

    @property
    def in_backward(self) -> bool:
        """Whether the backward of an MoE layer is under way."""
        return self._began is not None

    def totals(self) -> IterationTotals:
        """The sums of the iteration under way."""
        now = self._iteration()
        if self._totals is None or self._totals.iteration != now:
            self.flush()
            self._totals = IterationTotals(now)
        return self._totals

    def flush(self) -> None:
        """Write the sums so far as one line."""
        if self._totals is not None:
            with self._path.open("a") as out:
                out.write(json.dumps(asdict(self._totals)) + "\n")
        self._totals = None

    def begin_backward(self) -> None:
        """The output gradient of a layer has arrived.

        Raises:
            RuntimeError: another layer's backward has not ended.
        """
        if self._began is not None:
            raise RuntimeError(f"{PROBE_VARIABLE}: the backwards of two MoE layers overlap; they cannot be told apart")
        self._began = (time.process_time(), time.perf_counter())

    def end_backward(self) -> None:
        """The input gradient of the same layer is complete."""
        if self._began is None:
            raise RuntimeError(f"{PROBE_VARIABLE}: an MoE layer's backward ended that never began")
        cpu, wall = self._began
        self._began = None
        totals = self.totals()
        totals.backward_cpu_ms += 1e3 * (time.process_time() - cpu)
        totals.backward_wall_ms += 1e3 * (time.perf_counter() - wall)
        totals.layers += 1


def install_if_asked() -> None:
    """Measure this process if ``LRMOE_PROBE`` names a file; without it nothing is touched."""
    if not (target := os.environ.get(PROBE_VARIABLE)):
        return
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.training import get_args

    path = Path(f"{target}.rank{os.environ.get('RANK', '0')}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # While iteration n + 1 runs, curr_iteration is n, and the log will say n + 1.
    probe = Probe(path, lambda: vars(get_args())["curr_iteration"] + 1)
    atexit.register(probe.flush)
    _measure_layer(MoELayer, probe)
    dist.all_to_all_single = _measure_all_to_all(dist.all_to_all_single, probe)


class _Mark(torch.autograd.Function):
    """Identity that says when a gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, passes: Callable[[], None]) -> torch.Tensor:
        ctx.passes = passes
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.passes()
        return grads[0], None


def _measure_layer(layer_class: type[torch.nn.Module], probe: Probe) -> None:
    # __call__ and not forward: whether or not a subclass overrides forward and calls its parent's, a layer is
    # entered through one __call__.
    call = layer_class.__call__

    @functools.wraps(call)
    def measured(self: torch.nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return call(self, hidden_states, *args, **kwargs)
        # Without an input gradient the layer's backward would have no end to measure.
        mark = torch.is_grad_enabled() and hidden_states.requires_grad
        if mark:
            hidden_states = _Mark.apply(hidden_states, probe.end_backward)
        began = time.process_time()
        output, *rest = call(self, hidden_states, *args, **kwargs)
        probe.totals().forward_cpu_ms += 1e3 * (time.process_time() - began)
        if mark:
            output = _Mark.apply(output, probe.begin_backward)
        return output, *rest

    layer_class.__call__ = measured  # type: ignore[method-assign]


def _measure_all_to_all(all_to_all: Callable[..., Any], probe: Probe) -> Callable[..., Any]:
    @functools.wraps(all_to_all)
    def measured(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if probe.in_backward:
            probe.totals().backward_bytes += _bytes_to_others(input, input_split_sizes, group)
        return all_to_all(output, input, output_split_sizes, input_split_sizes, group, async_op)

    return measured


def _bytes_to_others(x: torch.Tensor, splits: Sequence[int] | None, group: dist.ProcessGroup | None) -> int:
    """Bytes of ``x`` that leave this rank, given the rows for each rank (None: equal shares).

    Megatron hands the splits over as a numpy array, which has no truth value.
    """
    rows = x.size(0)
    own = rows // dist.get_world_size(group) if splits is None else int(splits[dist.get_rank(group)])
    return (rows - own) * x[:1].numel() * x.element_size()
