"""The probe measures every MoE layer exactly once, and changes nothing."""

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_lrmoe.mcore import probe as probe_module
from megatron_lrmoe.mcore.probe import Probe, _measure_all_to_all, _measure_layer

WORLD, RANK = 2, 1


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A stock layer class and two subclasses, measured; the iteration is in a list."""
    monkeypatch.setattr(dist, "get_rank", lambda group=None: RANK)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: WORLD)
    iteration = [1]
    probe = Probe(tmp_path / "probe", lambda: iteration[0])
    exchange = _measure_all_to_all(lambda *args: None, probe)

    class Sends(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            exchange(x, x, None, [1, 3])
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            exchange(g, g, np.array([3, 1]), np.array([3, 1]))
            exchange(g, g)
            return 3 * g

    class Stock(torch.nn.Module):
        def forward(self, hidden_states, padding_mask=None):
            return Sends.apply(hidden_states), None

    class Calls(Stock):
        def forward(self, hidden_states, padding_mask=None):
            output, bias = super().forward(hidden_states)
            return output + 0, bias

    class Replaces(Stock):
        def forward(self, hidden_states, padding_mask=None):
            return Sends.apply(hidden_states), None

    _measure_layer(Stock, probe)
    return probe, iteration, [Stock, Calls, Replaces]


def read(probe: Probe) -> list[dict]:
    probe.flush()
    return [json.loads(line) for line in probe._path.read_text().splitlines()]


def step(layer: torch.nn.Module) -> torch.Tensor:
    x_TD = torch.ones(4, 5, requires_grad=True)
    output, bias = layer(x_TD * 1, padding_mask=None)
    assert bias is None
    output.sum().backward()
    assert x_TD.grad is not None
    return x_TD.grad


@pytest.mark.parametrize("which", range(3))
def test_stock_and_subclasses_are_measured_once_with_the_same_gradient(measured, which):
    probe, _, classes = measured
    assert torch.equal(step(classes[which]()), torch.full((4, 5), 3.0))
    (line,) = read(probe)
    assert (line["iteration"], line["layers"]) == (1, 1)
    assert line["backward_wall_ms"] > 0


def test_only_bytes_for_others_and_only_in_backward_count(measured):
    probe, _, classes = measured
    step(classes[0]())
    three_of_four_rows, half_the_rows = 3 * 5 * 4, 2 * 5 * 4
    assert read(probe)[0]["backward_bytes"] == three_of_four_rows + half_the_rows


def test_a_line_per_iteration_sums_its_layers(measured):
    probe, iteration, classes = measured
    step(classes[0]())
    step(classes[1]())
    iteration[0] = 2
    step(classes[0]())
    assert [(line["iteration"], line["layers"]) for line in read(probe)] == [(1, 2), (2, 1)]


def test_evaluation_and_inputs_without_gradient(measured, tmp_path):
    probe, _, classes = measured
    layer = classes[0]()
    layer(torch.ones(4, 5))
    assert [line["layers"] for line in read(probe)] == [0]
    (tmp_path / "probe").write_text("")
    layer.eval()(torch.ones(4, 5, requires_grad=True))
    assert read(probe) == []


def test_overlapping_backwards_are_refused(measured):
    probe, _, _ = measured
    probe.begin_backward()
    with pytest.raises(RuntimeError, match="overlap"):
        probe.begin_backward()


def test_nothing_is_touched_unless_asked(monkeypatch):
    monkeypatch.delenv(probe_module.PROBE_VARIABLE, raising=False)
    before = dist.all_to_all_single
    probe_module.install_if_asked()
    assert dist.all_to_all_single is before
