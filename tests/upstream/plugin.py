"""A pytest plugin for Megatron's own tests: on the CPU device, with our layer where they build Megatron's.

Loaded by ``-p plugin`` in every rank, before pytest reads Megatron's conftest. Importing it activates the CPU device,
so no module of Megatron may be imported before. What it changes for the tests, and nothing else:

- ``MoELayer(...)`` gives an LRMoELayer that takes the compacted path at retention 1.0, where gradients must equal
  Megatron's. A setting that the plugin refuses (``mcore/support.py``) gives Megatron's layer, and the test counts as
  evidence only if a compacted backward ran in it too.
- The dispatcher tests drive a dispatcher without its layer. Their first step opens the call that the layer would.
- Grids of 8 GPUs shrink to the ranks there are; what does not fit is deselected, with its reason.
- Process groups are gloo's, and no test data is downloaded.

Each rank writes ``$LRMOE_UPSTREAM_REPORT/rank<RANK>.json``: see ``_Record``.
"""

import gc
import json
import os
import sys
import weakref
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_lrmoe.device import activate_if_needed

activate_if_needed()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402

import megatron_lrmoe.megatron_adaptor  # noqa: E402, F401
from megatron_lrmoe.compute.flow import PairFlow  # noqa: E402
from megatron_lrmoe.compute.local_flow import LocalFlow  # noqa: E402
from megatron_lrmoe.config import LrmConfig  # noqa: E402
from megatron_lrmoe.mcore import clock, support  # noqa: E402
from megatron_lrmoe.mcore.call import LayerCall  # noqa: E402
from megatron_lrmoe.mcore.dispatcher import LRMAlltoAllTokenDispatcher  # noqa: E402
from megatron_lrmoe.mcore.layer import LRMoELayer  # noqa: E402

WORLD_SIZE = int(os.environ["WORLD_SIZE"])
COLLECTIVE_LIMIT = timedelta(seconds=300)

SIZES = ("tp_size", "ep_size", "cp_size", "moe_tp_size")
"""Names under which Megatron's tests take the sizes of a process grid."""

DESELECTED = {
    "TestTEParallelSequentialMLP": "builds Transformer Engine linear layers in its setup",
    "TestParallelSequentialMLP::test_gpu_forward": "asserts that the output lies on a GPU",
}
"""Part of a test's id, and why it cannot run here. Other tests skip themselves where TE or a kernel is missing."""


@dataclass
class _Record:
    """What happened in one rank.

    Args:
        outcomes: 'passed', 'failed' or 'skipped' of each test, by id.
        reasons: why a test was skipped or deselected, by id.
        compacted: compacted backward passes in each test, by id.
        opened: calls of our layer by dispatcher type.
        refused: sentences of the plugin about settings for which Megatron's layer was built, and how many.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    compacted: Counter[str] = field(default_factory=Counter)
    opened: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)


_record = _Record()
_running = ""


def _no_download() -> None:
    # Megatron's conftest fetches data sets for other tests from the network when /opt/data is empty.
    name = "tests.test_utils.python_scripts.download_unit_tests_dataset"
    stand_in = ModuleType(name)
    stand_in.download_and_extract_asset = lambda assets_dir: False  # type: ignore[attr-defined]
    sys.modules[name] = stand_in


def _gloo_groups() -> None:
    """Process groups on gloo, and each set of ranks only once.

    Megatron's tests make their groups anew for every case and drop the old ones without ending them. A gloo group has
    a dozen threads, so that thousands would be left.
    """
    stock_init, stock_new = torch.distributed.init_process_group, torch.distributed.new_group
    stock_destroy = torch.distributed.destroy_process_group
    groups: dict[tuple[int, ...], Any] = {}

    @wraps(stock_init)
    def init_process_group(backend: Any = None, **kwargs: Any) -> None:
        stock_init("gloo", timeout=COLLECTIVE_LIMIT, **kwargs)

    @wraps(stock_new)
    def new_group(ranks: Any = None, **kwargs: Any) -> Any:
        key = tuple(range(WORLD_SIZE) if ranks is None else ranks)
        if key not in groups:
            groups[key] = stock_new(list(key), backend="gloo", timeout=COLLECTIVE_LIMIT)
        return groups[key]

    @wraps(stock_destroy)
    def destroy_process_group(group: Any = None) -> None:
        if group is None:
            groups.clear()
            stock_destroy()

    torch.distributed.init_process_group = init_process_group
    torch.distributed.new_group = new_group
    torch.distributed.destroy_process_group = destroy_process_group


def _ours_for_megatrons() -> None:
    """Make ``MoELayer(config, ...)`` give our subclass; ``isinstance`` and imports by name stay as they are."""
    clock.follow(lambda: 0, lambda: 1)
    LRMoELayer.always_compact = True
    LRMoELayer.__init__ = _told_to_its_dispatcher(LRMoELayer.__init__)

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        config = kwargs["config"] if "config" in kwargs else args[0]
        if cls is MoELayer and not _refusals(config):
            config.moe_lrm = LrmConfig(retention=1.0)
            cls = LRMoELayer
        return object.__new__(cls)

    MoELayer.__new__ = new  # type: ignore[method-assign, assignment]


def _refusals(config: Any) -> list[str]:
    # Some tests leave it out of their config and have it all the same, from the tensor-parallel size.
    split = {"expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size()}
    sentences = support.conflicts(Namespace(**{**vars(config), "num_experts": config.num_moe_experts, **split}))
    _record.refused.update(sentences)
    return sentences


def _told_to_its_dispatcher(stock_init: Any) -> Any:
    @wraps(stock_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        if isinstance(self.token_dispatcher, LRMAlltoAllTokenDispatcher):
            self.token_dispatcher.__class__ = _Driven
            self.token_dispatcher.its_layer = weakref.ref(self)

    return init


class _Driven(LRMAlltoAllTokenDispatcher):
    """Our dispatcher; where a test drives it without its layer, it opens the layer's call itself."""

    its_layer: Any

    def dispatch_preprocess(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.its_layer()
        if self.call is None and not layer.is_driving:
            self.call = layer._open_call(LayerCall)
        return super().dispatch_preprocess(*args, **kwargs)


def _counted() -> None:
    """Count the calls that are opened, and the compacted backward passes that reach their last step."""

    def opened(layer: Any, call: Any) -> None:
        if call is not None:
            _record.opened[layer.config.moe_token_dispatcher_type] += 1

    def finished(flow: Any, _: Any) -> None:
        _record.compacted[_running] += 1

    LRMoELayer._open_call = _watched(LRMoELayer._open_call, opened)
    PairFlow.permute_backward = _watched(PairFlow.permute_backward, finished)
    LocalFlow.give_row_gradients = _watched(LocalFlow.give_row_gradients, finished)
    LRMoELayer.is_driving, LRMoELayer.preprocess = False, _driving(LRMoELayer.preprocess)


def _watched(method: Any, tell: Any) -> Any:
    @wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        tell(self, result)
        return result

    return watched


def _driving(preprocess: Any) -> Any:
    @wraps(preprocess)
    def driving(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.is_driving = True
        try:
            return preprocess(self, *args, **kwargs)
        finally:
            self.is_driving = False

    return driving


_no_download()
_gloo_groups()
_ours_for_megatrons()
_counted()


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: Any) -> None:
    """Shrink the grids of a test's ``parametrize`` marks before pytest reads them."""
    for holder in metafunc.definition.listchain():
        holder.own_markers = [_shrunk(mark) for mark in holder.own_markers]


def _shrunk(mark: Any) -> Any:
    if mark.name != "parametrize" or len(mark.args) < 2 or not isinstance(mark.args[0], str):
        return mark
    names = [name.strip() for name in mark.args[0].split(",")]
    # A ParameterSet (pytest.param) has marks of its own, and given ids count the values: those stay as they are.
    if not set(names) & set(SIZES) or mark.kwargs or any(hasattr(values, "marks") for values in mark.args[1]):
        return mark
    grids = dict.fromkeys(_fit(names, values) for values in mark.args[1])
    return pytest.mark.parametrize(names, list(grids)).mark


def _fit(names: list[str], values: Any) -> tuple[Any, ...]:
    """A grid with one size above 1 gets that size lowered to the number of ranks; other grids stay."""
    row = tuple(values) if len(names) > 1 else (values,)
    large = [i for i, name in enumerate(names) if name in SIZES and (row[i] or 1) > 1]
    if len(large) != 1:
        return row
    return (*row[: large[0]], min(row[large[0]], WORLD_SIZE), *row[large[0] + 1 :])


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Take out what cannot run here, with the reason in the report."""
    kept = []
    for item in items:
        reason = _why_not(item)
        if reason is None:
            kept.append(item)
        else:
            _record.reasons[_id(item.nodeid)] = reason
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _why_not(item: Any) -> str | None:
    for part, reason in DESELECTED.items():
        if part in item.nodeid:
            return reason
    params = item.callspec.params if hasattr(item, "callspec") else {}
    size = {name: params.get(name) or 1 for name in SIZES}
    ranks = max(size["tp_size"] * size["cp_size"] * size["ep_size"], size["moe_tp_size"])
    return f"needs {ranks} ranks" if ranks > WORLD_SIZE else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Any:
    """Note which test runs, and free what it held at the same place in every rank.

    Megatron's test container ends model parallelism with a barrier when it is freed.
    """
    global _running
    _running = _id(item.nodeid)
    result = yield
    gc.collect()
    return result


def pytest_runtest_logreport(report: Any) -> None:
    """Keep a test's worst outcome over setup, call and teardown."""
    test = _id(report.nodeid)
    if report.failed or (report.skipped and _record.outcomes.get(test) != "failed"):
        _record.outcomes[test] = report.outcome
        if report.skipped:
            _record.reasons[test] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    elif report.when == "call":
        _record.outcomes.setdefault(test, report.outcome)


def pytest_sessionfinish() -> None:
    """Write this rank's record."""
    folder = Path(os.environ["LRMOE_UPSTREAM_REPORT"])
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(vars(_record), indent=1))


def _id(nodeid: str) -> str:
    return nodeid.rpartition("/")[2]
