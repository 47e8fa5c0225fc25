"""Megatron's whole training loop inside a gloo worker, once per case: start-up costs seconds, a case does not.

What a run leaves in Megatron's globals is taken down before the next one.
"""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests import layers

PARALLEL_FLAGS = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "context_parallel_size": "--context-parallel-size",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
}


@dataclass(frozen=True)
class TrainingRun:
    """One rank's view of a finished run, to the last bit.

    Args:
        losses: of each iteration, fp32 (only the last pipeline stage has them).
        weights: SHA-256 of every parameter after the last step.
        classes: names of the classes of the first MoE layer, its dispatcher and its experts.
        console: the MoE part of each iteration's console line.
    """

    losses: list[torch.Tensor]
    weights: dict[str, str]
    classes: list[str]
    console: list[str]


def run(flags: list[str], plugin: bool = True) -> TrainingRun:
    """Train with Megatron's flags in this worker, with the adaptor imported or, in a fresh worker, without it."""
    from megatron_lrmoe.device import with_cpu_flags

    reset(flags)
    if plugin:
        import megatron_lrmoe.megatron_adaptor  # noqa: F401
    elif "megatron_lrmoe.mcore.adaptor" in sys.modules:
        raise RuntimeError("the adaptor is installed in this worker already; a stock run needs a fresh one")
    from megatron.training import training

    from megatron_lrmoe.mcore import gpt_training

    losses: list[torch.Tensor] = []
    console: list[str] = []
    models: list[Any] = []

    def recording_step(step: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(forward_step: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            result = step(forward_step, data_iterator, model, *args, **kwargs)
            models[:] = model
            losses.extend(value.detach().clone() for name, value in result[0].items() if name == "lm loss")
            return result

        return train_step

    argv, step = sys.argv, training.train_step
    sys.argv = ["train", *with_cpu_flags(flags)]
    training.train_step = recording_step(step)
    get_tracker = training.get_moe_metrics_tracker
    training.get_moe_metrics_tracker = lambda: _Recorded(get_tracker(), console)
    try:
        gpt_training.train()
    finally:
        sys.argv, training.train_step = argv, step
        training.get_moe_metrics_tracker = get_tracker
    return TrainingRun(losses, weight_hashes(models), moe_classes(models), console)


class _Recorded:
    """The metrics tracker with its console lines written down."""

    def __init__(self, tracker: Any, console: list[str]) -> None:
        self._tracker, self._console = tracker, console

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tracker, name)

    def report(self, *args: Any, **kwargs: Any) -> str:
        """As the tracker's own."""
        line = self._tracker.report(*args, **kwargs)
        self._console.append(line)
        return line


def weight_hashes(models: list[Any]) -> dict[str, str]:
    """SHA-256 of each parameter's bytes."""
    return {
        name: hashlib.sha256(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for model in models
        for name, parameter in model.named_parameters()
    }


def moe_classes(models: list[Any]) -> list[str]:
    """Class names of the first MoE layer, its dispatcher and its experts."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    for model in models:
        for module in model.modules():
            if isinstance(module, MoELayer):
                return [type(part).__name__ for part in (module, module.token_dispatcher, module.experts)]
    return []


def reset(flags: list[str]) -> None:
    """Take down what an earlier run left in Megatron's globals.

    Process groups of the flags' sizes stay, or are made: Megatron uses those that it finds.
    """
    from megatron_lrmoe.mcore import ablate_worker

    def size(flag: str) -> int | None:
        return int(flags[flags.index(flag) + 1]) if flag in flags else None

    ablate_worker.reset()
    sizes = {name: size(flag) for name, flag in PARALLEL_FLAGS.items()}
    layers.parallel(size("--expert-model-parallel-size") or 1, **{name: n for name, n in sizes.items() if n})
