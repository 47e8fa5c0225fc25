"""Fixtures and hypothesis settings of all tests."""

import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from tests.gloo import Pool

# No deadline: the first call of an operation is slow on a busy machine. CI runs more cases than a developer
# waits for.
hypothesis.settings.register_profile("developer", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=300, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") == "true" else "developer")


@pytest.fixture(scope="session")
def gloo2() -> Iterator[Pool]:
    """``gloo2(function, *args, limit_s=60.0)``: results of a module-level function on 2 gloo ranks."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def gloo4() -> Iterator[Pool]:
    """``gloo4(function, *args, limit_s=60.0)``: results of a module-level function on 4 gloo ranks."""
    pool = Pool(4)
    yield pool
    pool.close()


class _MadeOn(TorchFunctionMode):
    """Tensors are made on a device unless the call names one; random ones are drawn by the CPU's generator.

    So a test reads the same for every device and sees the same numbers.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            on_cpu = [arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args]
            return func(*on_cpu, **kwargs).to(self.device)
        if func not in _device_constructors() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "device": self.device})


@pytest.fixture(scope="module")
def on_device() -> Iterator[str]:
    """Device of the environment variable LRMOE_TEST_DEVICE, the CPU by default; the test's tensors are made there."""
    device = os.environ.get("LRMOE_TEST_DEVICE", "cpu")
    if device == "cpu":
        yield device
        return
    if device != "cuda":
        raise ValueError(f"LRMOE_TEST_DEVICE: found {device!r}, allowed are 'cpu' and 'cuda'")
    if not torch.cuda.is_available():
        raise RuntimeError("LRMOE_TEST_DEVICE=cuda: torch finds no GPU")
    with _MadeOn(device):
        yield device
