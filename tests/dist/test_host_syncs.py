"""How often the host waits for the device in one layer call (A35 of the list in test_user_demand.py).

On the CPU device nothing waits, so what would is counted: every value of a device tensor that Python asks for. Where a
tensor would lie is followed through the operations. The layer's tokens, weights, routing and gradients, all that is
computed from them and what is sent there by ``to`` are on the device; what else is made from Python numbers is on the
host, and so is what Megatron's ``maybe_move_tensor_to_cpu`` has copied, which it does without waiting. Not counted:
HostCopy's own read in backward. It waits for an event that was recorded in forward, long before.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests import layers
from tests.gloo import Pool
from tests.layers import Case

pytestmark = pytest.mark.dist

# Operations whose result, or its shape, the host has to know: item, int, float and bool; and shapes made of values.
WAITING = {
    "_local_scalar_dense",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
    "_unique",
    "_unique2",
}


class Waits(TorchDispatchMode):
    """Counts, by name, what makes the host wait while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._reading = False
        # By address of the storage's owner; the storages stay alive, so that no address is used twice.
        self._on_device: dict[int, torch.UntypedStorage] = {}

    def put_on_device(self, *tensors: torch.Tensor) -> None:
        """From now on these and what is computed from them lie on the device."""
        for x in tensors:
            storage = x.untyped_storage()
            self._on_device[storage._cdata] = storage

    def is_on_device(self, x: Any) -> bool:
        """Whether reading it would make the host wait."""
        return isinstance(x, torch.Tensor) and x.untyped_storage()._cdata in self._on_device

    @contextmanager
    def read(self, name: str, x: torch.Tensor) -> Iterator[None]:
        """Python reads x. A mode over torch's functions calls the same method a second time, within the first."""
        self.counts[name] += not self._reading and self.is_on_device(x)
        before, self._reading = self._reading, True
        try:
            yield
        finally:
            self._reading = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        result = func(*args, **kwargs)
        if any(map(self.is_on_device, inputs)):
            name = func.overloadpacket._qualified_op_name
            if self._waits(name.removeprefix("aten::"), args, kwargs):
                self.counts[name] += 1
            # An exchange writes to tensors that it was given.
            written = inputs if name.startswith("c10d::") else []
            self.put_on_device(*written, *(x for x in tree_leaves(result) if isinstance(x, torch.Tensor)))
        return result

    def _waits(self, name: str, args: Any, kwargs: Any) -> bool:
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        return name in WAITING


@contextmanager
def reads_counted(waits: Waits) -> Iterator[None]:
    """Also count what no operation shows: lists, arrays and copies of tensors, and waits for streams and events."""
    from megatron.core.transformer.moe import token_dispatcher

    from megatron_lrmoe.compute.exchange import HostCopy
    from megatron_lrmoe.device import torch_cuda

    move, keep = token_dispatcher.maybe_move_tensor_to_cpu, HostCopy.__init__

    def counting_read(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def read(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with waits.read(name, x):
                return original(x, *args, **kwargs)

        return mock.patch.object(torch.Tensor, name, read)

    to = torch.Tensor.to

    def sent(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = to(x, *args, **kwargs)
        if args and isinstance(args[0], torch.device):
            waits.put_on_device(result)
        return result

    def counting_wait(owner: Any, name: str) -> Any:
        def wait(*_: Any, **__: Any) -> None:
            waits.counts[name] += 1

        return mock.patch.object(owner, name, wait)

    def moved(x: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return move(on_host(x) if isinstance(x, torch.Tensor) else x, as_numpy, record_stream)

    def kept(copy: HostCopy, values: torch.Tensor) -> None:
        keep(copy, on_host(values))

    with (
        counting_read("tolist"),
        counting_read("numpy"),
        counting_read("cpu"),
        mock.patch.object(torch.Tensor, "to", sent),
        counting_wait(torch_cuda.Stream, "synchronize"),
        counting_wait(torch_cuda.Event, "synchronize"),
        counting_wait(torch.cuda, "synchronize"),
        mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", moved),
        mock.patch.object(HostCopy, "__init__", kept),
    ):
        yield


def on_host(x: torch.Tensor) -> torch.Tensor:
    """A copy that the modes do not see: it comes from no device tensor."""
    with _disable_current_modes():
        return x.detach().clone()


def waits_of(case: Case, ours: bool = True) -> tuple[Counter[str], Counter[str]]:
    """What the host waited for in the forward and in the backward of one layer."""
    layer = layers.build(case, ours)
    x, g_TD = layers.leaves(layer, case)
    forward, backward = Waits(), Waits()
    routing = layer.router.answer or ()
    forward.put_on_device(x, g_TD, *routing, *layer.parameters(), *layer.buffers())
    with reads_counted(forward), forward:
        out = layers.forward(layer, case, x)
    backward._on_device = forward._on_device
    with reads_counted(backward), backward:
        out.backward(g_TD.view_as(out))
    return +forward.counts, +backward.counts


def waits_of_all(cases: list[Case], ours: bool = True) -> list[tuple[Counter[str], Counter[str]]]:
    return [waits_of(case, ours) for case in cases]


SETTINGS = [
    {"scope": scope, "selection": selection, "when": when}
    for scope, selection, when in itertools.product(("expert", "source"), ("unbiased", "topk"), ("backward", "forward"))
]
SETTINGS += [
    {"scope": scope, **settings}
    for scope in ("expert", "source")
    for settings in (
        {"score": "random"},
        {"score": "alpha"},
        {"score": "grad-abs"},
        {"quota": "balanced"},
        {"quota": "joint"},
        {"gemm": "grouped"},
        {"router_grad": "baseline"},
        {"when": "forward", "router_grad": "baseline"},
        {"probe_interval": 1},
    )
]


def allowed_in_backward(lrm: dict[str, Any]) -> int:
    """One wait for the number of kept rows from each rank, where it is not known when backward starts."""
    return int(lrm["scope"] == "expert" and lrm.get("when") != "forward")


@pytest.mark.parametrize("expert_parallel", [1, 2])
def test_a35_forward_waits_no_more_than_megatrons_and_backward_once_or_never(gloo2: Pool, expert_parallel: int) -> None:
    stock = Case(dtype=torch.float32, expert_parallel=expert_parallel)
    ((megatrons, none), *_) = gloo2(waits_of_all, [stock], False)[0]
    assert megatrons.total() >= 1 and none.total() == 0
    cases = [replace(stock, lrm=lrm) for lrm in SETTINGS]
    for rank in gloo2(waits_of_all, cases):
        for case, (forward, backward) in zip(cases, rank, strict=True):
            assert forward == megatrons, (case.lrm, forward, megatrons)
            allowed = allowed_in_backward(case.lrm) if expert_parallel == 2 else 0
            assert backward.total() == allowed, (case.lrm, backward)


def test_a35_megatrons_allgather_waits_as_often_in_backward_with_us(gloo2: Pool) -> None:
    case = Case(dtype=torch.float32, config={"moe_token_dispatcher_type": "allgather"})
    cases = [replace(case, lrm={"when": when}) for when in ("backward", "forward")]
    for megatrons, ours in zip(gloo2(waits_of_all, cases, False), gloo2(waits_of_all, cases), strict=True):
        for (_, stock), (_, backward) in zip(megatrons, ours, strict=True):
            assert backward == stock


def waits_with_a_stray_read(case: Case, name: str, read: str) -> Counter[str]:
    """Of both directions together, when one step of the way back reads a value that it was given or has made."""
    from megatron_lrmoe.compute.flow import PairFlow

    original = getattr(PairFlow, name)

    def reading(flow: Any, *args: Any) -> Any:
        result = original(flow, *args)
        (value, *_) = (x for x in (*(result if isinstance(result, tuple) else ()), *args) if x is not None)
        {
            "item": lambda: value.sum().item(),
            "bool": lambda: bool(value.sum() > 0),
            "tolist": value.tolist,
            "mask": lambda: value[value > 0],
        }[read]()
        return result

    with mock.patch.object(PairFlow, name, reading):
        forward, backward = waits_of(case)
    return forward + backward


@pytest.mark.parametrize("read", ["item", "bool", "tolist", "mask"])
@pytest.mark.parametrize("name", ["attach_experts", "unpermute_backward", "permute_backward"])
def test_a35_one_stray_read_is_counted(gloo2: Pool, name: str, read: str) -> None:
    case = Case(dtype=torch.float32, lrm={"scope": "source"})
    for clean, stray in zip(gloo2(waits_of, case), gloo2(waits_with_a_stray_read, case, name, read), strict=True):
        assert stray.total() == (clean[0] + clean[1]).total() + 1
