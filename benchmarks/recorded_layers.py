"""What the MoE layers of a tiny model see while Megatron's own loop trains it: tokens, routing, output gradients.

    batches = record(flags, steps=[40, 300], batches=16)

runs in a gloo worker. At each of the steps training pauses, and some microbatches go forward and backward through the
stock layers without an optimizer step; hooks on the layers write down what passes.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests import training


@dataclass(frozen=True)
class LayerBatch:
    """One MoE layer on one microbatch.

    Args:
        layer: number from 1.
        x_TD, probs_TE, map_TE: input and routing.
        g_TD: gradient of the layer's output, all of it from the routed experts.
        fc1: (E, G, D), fc2: (E, D, F) weights.
    """

    layer: int
    x_TD: torch.Tensor
    probs_TE: torch.Tensor
    map_TE: torch.Tensor
    g_TD: torch.Tensor
    fc1: torch.Tensor
    fc2: torch.Tensor


class _RecordedError(Exception):
    """Everything is recorded; training may end."""


def record(flags: Sequence[str], steps: Sequence[int], batches: int) -> list[list[list[LayerBatch]]]:
    """Train, and record so many microbatches after each number of steps.

    Args:
        flags: of Megatron, without the plugin's; one microbatch an iteration, one rank.
        steps: rising.
        batches: microbatches at each.

    Returns:
        By step, microbatch and layer.
    """
    from megatron.training import training as megatron_training

    found: list[list[list[LayerBatch]]] = []
    stock = megatron_training.train_step
    done = 0

    def train_step(forward_step: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        if done == steps[len(found)]:
            found.append([_one_microbatch(forward_step, data, model[0]) for _ in range(batches)])
            if len(found) == len(steps):
                raise _RecordedError
        done += 1
        return stock(forward_step, data, model, *args, **kwargs)

    megatron_training.train_step = train_step
    try:
        with _standard_output_to_error():
            training.run(list(flags))
    except _RecordedError:
        return found
    finally:
        megatron_training.train_step = stock
    raise RuntimeError(f"training ended before step {steps[len(found)]}")


@contextlib.contextmanager
def _standard_output_to_error() -> Iterator[None]:
    """What Megatron prints and logs is progress; standard output is for tables."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _one_microbatch(forward_step: Any, data: Any, model: Any) -> list[LayerBatch]:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    moe_layers: list[Any] = [module for module in model.modules() if isinstance(module, MoELayer)]
    seen: dict[int, dict[str, torch.Tensor]] = {i: {} for i in range(len(moe_layers))}
    hooks = []
    for i, layer in enumerate(moe_layers):
        note = seen[i]
        hooks.append(layer.router.register_forward_hook(lambda _, __, out, note=note: _note_routing(note, out)))
        hooks.append(layer.register_forward_hook(lambda _, args, out, note=note: _note_rows(note, args[0], out[0])))
    model.zero_grad_buffer()
    with model.no_sync():
        # Every token counts here, so this mean is the loss; Megatron's own function wants its scheduler around it.
        token_losses, _ = forward_step(data, model)
        token_losses.float().mean().backward()
    model.zero_grad_buffer()
    for hook in hooks:
        hook.remove()
    return [LayerBatch(i + 1, **seen[i], **_weights(layer)) for i, layer in enumerate(moe_layers)]


def _note_routing(note: dict[str, torch.Tensor], routing: tuple[torch.Tensor, torch.Tensor]) -> None:
    note["probs_TE"], note["map_TE"] = (x.detach().clone() for x in routing)


def _note_rows(note: dict[str, torch.Tensor], x: torch.Tensor, out: torch.Tensor) -> None:
    note["x_TD"] = x.detach().reshape(-1, x.shape[-1]).clone()

    def note_gradient(g: torch.Tensor) -> None:
        note["g_TD"] = g.reshape(-1, g.shape[-1]).clone()

    out.register_hook(note_gradient)


def _weights(layer: Any) -> dict[str, torch.Tensor]:
    experts = layer.experts.local_experts
    return {
        "fc1": torch.stack([expert.linear_fc1.weight.detach() for expert in experts]),
        "fc2": torch.stack([expert.linear_fc2.weight.detach() for expert in experts]),
    }
