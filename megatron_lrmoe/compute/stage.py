"""Autograd Functions around the dispatcher's steps: the forward is Megatron's own, the backward is ours.

Autograd takes no gradient with fewer rows than its tensor. So it is handed a phantom, a stride-0 zero of the right
shape that nobody reads, while the rows themselves travel in a PairFlow.
"""

from typing import Any

import torch


def phantom(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A gradient for autograd to carry that occupies one element and that nobody reads."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


class Stage(torch.autograd.Function):
    """One step of the dispatcher: Megatron's own forward, our backward.

    ``Stage.apply(run, back, *inputs)``: ``run(*inputs)`` gives the outputs without recording them, and
    ``back(*grads)`` one gradient per input, where None stands for a phantom. ``back`` belongs to the PairFlow of the
    call, so whatever it needs lives exactly as long as the graph does, however many microbatches are in flight.
    """

    @staticmethod
    def forward(ctx: Any, run: Any, back: Any, *inputs: torch.Tensor) -> Any:
        """Run Megatron's step; autograd does not record inside a Function."""
        ctx.back = back
        ctx.like = [(x.shape, x.dtype, x.device) for x in inputs]
        ctx.set_materialize_grads(False)
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Hand over to the flow."""
        given = zip(ctx.back(*grads), ctx.like, ctx.needs_input_grad[2:], strict=True)
        passed_on = [(phantom(*like) if g is None else g) if needed else None for g, like, needed in given]
        return None, None, *passed_on


class OutputStage(Stage):
    """A Stage that keeps its output for ``back``, which gets it after the gradients.

    Autograd holds the output and refuses to go on if a later operation has changed it in place.
    """

    @staticmethod
    def forward(ctx: Any, run: Any, back: Any, *inputs: torch.Tensor) -> torch.Tensor:
        """Run Megatron's step and save what it returned."""
        output = Stage.forward(ctx, run, back, *inputs)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Hand over to the flow."""
        return Stage.backward(ctx, *grads, *ctx.saved_tensors)
