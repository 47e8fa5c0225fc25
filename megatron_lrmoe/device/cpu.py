"""Megatron on CPU and gloo: what is replaced, and why.

Megatron-LM takes a CUDA device for granted. :func:`activate_if_needed` makes torch answer as if there were
one whose memory is the CPU's, so that the unmodified training loop runs on any machine. ``torch.cuda`` itself
is in ``torch_cuda.py``; here are tensors, loaders and the functions of Megatron that look at where a tensor
lies.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from megatron_lrmoe.device.torch_cuda import CPU, replace_torch_cuda

log = logging.getLogger(__name__)

_active = False


def activate_if_needed() -> bool:
    """Make Megatron run on CPU and gloo when torch finds no accelerator.

    Call it before anything imports megatron. With an accelerator it does nothing; a second call does nothing.

    Returns:
        Whether the CPU device is active.

    Raises:
        RuntimeError: there is no accelerator, and megatron.core was imported already.
    """
    global _active
    if _active:
        return True
    if torch.cuda.is_available() or torch.accelerator.is_available():
        return False
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron.core was imported before the CPU device was activated, and has captured types and "
            "functions of torch.cuda; call megatron_lrmoe.device.activate_if_needed() before the first "
            "import of megatron"
        )
    _active = True
    _set_environment()
    replace_torch_cuda()
    _replace_tensor_methods()
    _replace_data_loader()
    _CudaMeansCpu().__enter__()
    _replace_in_megatron()
    if os.environ.get("RANK", "0") == "0":
        log.warning("no accelerator found: Megatron runs on the CPU device (gloo)")
    return True


def _set_environment() -> None:
    # Megatron refuses some overlaps without it, whatever the device.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Compiling Megatron's fused functions for the CPU takes longer than a short run. torch reads this
    # whenever something is to be compiled, so it is early enough.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


class _CudaMeansCpu(TorchFunctionMode):
    """Factory calls and ``Tensor.to`` that name a CUDA device get the CPU; ``Tensor.type()`` names CUDA.

    The mixed-precision and distributed optimizers sort parameters by 'torch.cuda.BFloat16Tensor' and so on.

    The mode belongs to the thread that activated it, and stays. Autograd runs a backward over CPU tensors in
    the thread that called it, so backward functions are covered.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        elif func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _on_cpu(args[1]), *args[2:])
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _on_cpu(device: Any) -> Any:
    """The CPU for any way to name a CUDA device; anything else as it is."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, int) or (isinstance(device, str) and device.split(":")[0] == "cuda"):
        return CPU
    return device


def _replace_tensor_methods() -> None:
    def same_tensor(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor

    # The data is where it should be. Module.cuda goes through Tensor.cuda.
    torch.Tensor.cuda = same_tensor  # type: ignore[method-assign]
    # Page-locking memory needs the CUDA driver.
    torch.Tensor.pin_memory = same_tensor  # type: ignore[method-assign]
    # No stream can outlive a tensor's memory.
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]


def _replace_data_loader() -> None:
    original = DataLoader.__init__

    def with_own_generator_and_no_pinning(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # Megatron always asks for pinned batches, and torch now believes that it can: it would start a thread.
        self.pin_memory = False
        # A new iterator draws a seed from the CPU's generator, which is also the "GPU's" here: after a resume
        # dropout would see other numbers than in an uninterrupted run.
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(torch.initial_seed())

    DataLoader.__init__ = with_own_generator_and_no_pinning  # type: ignore[method-assign]


def _replace_in_megatron() -> None:
    from megatron.core import utils

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    applier, scale, norm = (
        utils.local_multi_tensor_applier,
        utils.local_multi_tensor_scale,
        utils.local_multi_tensor_l2_norm,
    )
    replacements: dict[str, dict[str, Any]] = {
        # Megatron makes numpy of split sizes only when they lie on a GPU; gloo's all-to-all rejects tensors.
        "megatron.core.transformer.moe.token_dispatcher": {"maybe_move_tensor_to_cpu": on_host},
        "megatron.core.transformer.moe.moe_utils": {
            "maybe_move_tensor_to_cpu": on_host,
            # Here and below: where Transformer Engine is installed, Megatron prefers its CUDA kernels.
            "te_general_gemm": None,
        },
        "megatron.core.optimizer.clip_grads": {
            "multi_tensor_applier": applier,
            "l2_norm_impl": norm,
            "multi_tensor_scale_impl": scale,
            "multi_tensor_scale_tensor_impl": None,
        },
        "megatron.core.optimizer.optimizer": {
            "multi_tensor_applier": applier,
            "multi_tensor_scale_impl": scale,
        },
        "megatron.training.utils.common_utils": {
            "multi_tensor_applier": applier,
            "multi_tensor_l2norm": norm,
        },
    }
    for module_name, names in replacements.items():
        module = importlib.import_module(module_name)
        for name, value in names.items():
            if not hasattr(module, name):
                raise ImportError(f"the CPU device replaces {module_name}.{name}, which this Megatron has not")
            setattr(module, name, value)
