"""What ``torch.cuda`` answers on the CPU device: one device, in order, with one RNG."""

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

CPU = torch.device("cpu")

LEGACY_TYPES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")


class Stream:
    """A queue that is always drained: work on the CPU is done when the call returns."""

    device = CPU
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """All work is done."""
        return True

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Event that holds the present time."""
        event = event or Event()
        event.record()
        return event


class Event:
    """A point in time on the host clock, so that elapsed times stay meaningful."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        """Take the present time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """The event has happened."""
        return True

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds between the two recorded times."""
        return (end_event._seconds - self._seconds) * 1000.0


class _OneGenerator:
    """``torch.cuda.default_generators``: every index is the CPU's generator."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


_STREAM = Stream()


def _returning(value: Any) -> Callable[..., Any]:
    """A function that takes anything; a new one for each name, since torch._dynamo has rules by function."""
    return lambda *_, **__: value


def _device_count() -> int:
    # Megatron and torch.distributed want a device for each local rank; torchrun says how many there are.
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"), _total_memory()


def _get_device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=_total_memory(), multi_processor_count=os.cpu_count() or 1
    )


def _seed(seed: int) -> None:
    # Not torch.manual_seed: that one calls torch.cuda.manual_seed_all, which is this function.
    torch.default_generator.manual_seed(int(seed))


def _get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    torch.default_generator.set_state(new_state)


DEVICE: dict[str, Any] = {
    # Megatron and torch's checkpointing ask before they do anything else.
    "is_available": _returning(True),
    "is_initialized": _returning(True),
    "device_count": _device_count,
    # A device and not an index: it is passed on as device= in some two hundred places.
    "current_device": _returning(CPU),
    "set_device": _returning(None),
    "device": lambda device=None: contextlib.nullcontext(),
    "get_device_name": _returning("cpu"),
    "get_device_properties": _get_device_properties,
    # The lowest capability at which Megatron accepts --moe-grouped-gemm; newer ones would offer fp8.
    "get_device_capability": _returning((8, 0)),
    # Megatron's straggler detector reports them.
    "utilization": _returning(0),
    "temperature": _returning(0),
    "power_draw": _returning(0),
    "clock_rate": _returning(0),
    # There is no driver to wake, and what waits for one may run now.
    "_lazy_init": _returning(None),
    "init": _returning(None),
    "_lazy_call": lambda call, **_: call(),
}

STREAMS: dict[str, Any] = {
    # Side streams, events and waits order work that on the CPU is in order anyway.
    "Stream": Stream,
    "Event": Event,
    "current_stream": _returning(_STREAM),
    "default_stream": _returning(_STREAM),
    "stream": lambda stream=None: contextlib.nullcontext(),
    "set_stream": _returning(None),
    "synchronize": _returning(None),
    "is_current_stream_capturing": _returning(False),
}

MEMORY: dict[str, Any] = {
    # Megatron prints and logs these; the CPU allocator keeps no statistics, so all of them are zero.
    "memory_stats": lambda device=None: defaultdict(int),
    "memory_allocated": _returning(0),
    "max_memory_allocated": _returning(0),
    "memory_reserved": _returning(0),
    "max_memory_reserved": _returning(0),
    "device_memory_used": _returning(0),
    "memory_snapshot": lambda *_, **__: [],
    "mem_get_info": _mem_get_info,
    "reset_peak_memory_stats": _returning(None),
    "reset_max_memory_allocated": _returning(None),
    "empty_cache": _returning(None),
    "ipc_collect": _returning(None),
}

RNG: dict[str, Any] = {
    # Megatron keeps its tensor-parallel RNG states on the device; tensors here come from the CPU's generator.
    "default_generators": _OneGenerator(),
    "manual_seed": lambda seed: _seed(seed),
    "manual_seed_all": lambda seed: _seed(seed),
    "initial_seed": lambda: torch.default_generator.initial_seed(),
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "get_rng_state_all": lambda: [_get_rng_state()],
    "set_rng_state_all": lambda new_states: _set_rng_state(new_states[0]),
}

NVTX: dict[str, Any] = {
    # Range markers need the CUDA tools library.
    "range_push": _returning(0),
    "range_pop": _returning(0),
    "mark": _returning(None),
}


def replace_torch_cuda() -> None:
    """Put the stand-ins of this module into ``torch.cuda``."""
    for name, value in {**DEVICE, **STREAMS, **MEMORY, **RNG}.items():
        setattr(torch.cuda, name, value)
    # torch.cuda re-exports the functions of these modules, and Megatron calls them by either name.
    for name, value in RNG.items():
        setattr(torch.cuda.random, name, value)
    for name, value in MEMORY.items():
        setattr(torch.cuda.memory, name, value)
    for name, value in NVTX.items():
        setattr(torch.cuda.nvtx, name, value)
    # Megatron's module.py captures these for isinstance, and their constructors need a GPU.
    for kind in LEGACY_TYPES:
        setattr(torch.cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
