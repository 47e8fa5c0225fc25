"""A33 of the list in test_user_demand.py: a compiled layer whose row counts change from step to step.

Only the tracing of torch.compile runs, with back ends that compile no code.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F

from megatron_lrmoe.compute.activation import Activation
from megatron_lrmoe.compute.experts import ExpertWeights, expert_mlp
from megatron_lrmoe.compute.local_flow import LocalFlow
from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.pairs import DrawKey
from megatron_lrmoe.recalibration.plan import KeepPlan
from tests import layers
from tests.gloo import Pool
from tests.layers import HIDDEN, Case

pytestmark = [pytest.mark.dist, pytest.mark.slow]

STEPS = 20


@dataclass(frozen=True)
class Compiled:
    """What torch.compile has done.

    Args:
        graphs: traced until the end of each step.
        breaks: reasons of graph breaks, and how often each was met while tracing.
        same: whether the gradients of each step are those of the model as it is.
        rows: that this rank's experts had in each step.
    """

    graphs: list[int]
    breaks: dict[str, int]
    same: list[bool]
    rows: list[list[int]]


@contextmanager
def compiling() -> Iterator[Any]:
    """Let torch.compile run in a worker: it looks for streams and Triton below what the CPU device stands in for."""
    from torch.utils import _triton

    config: Any = torch._dynamo.config
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "0"}))
        stack.enter_context(mock.patch.object(torch.accelerator, "is_available", lambda: False))
        for module in (torch._dynamo.utils, _triton):
            stack.enter_context(mock.patch.object(module, "has_triton", lambda: False))
        stack.enter_context(config.patch(fail_on_recompile_limit_hit=True))
        _forget()
        try:
            yield torch._dynamo.utils.counters
        finally:
            _forget()


def _forget() -> None:
    # With a GPU it would import all of Inductor, to forget graphs that were never captured.
    with mock.patch.object(torch.cuda, "is_available", lambda: False):
        torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Model(torch.nn.Module):
    """The layer between two others, which are to stay compiled."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.before, self.after = (torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(T, 1, D) to the same."""
        return self.after(torch.tanh(self.layer(torch.tanh(self.before(x)))[0]))


def gradients(model: Model, run: Any, case: Case) -> list[Any]:
    """One step; which experts get how many rows depends on its seed."""
    x, g_TD = layers.leaves(model.layer, case)
    model.zero_grad(set_to_none=True)
    out = run(x)
    out.backward(g_TD.view_as(out))
    return [out.detach().clone(), x.grad, *(weight.grad for weight in model.parameters())]


def compiled(case: Case, backend: str) -> Compiled:
    """Train by the compiled model, and by the model as it is."""
    model = Model(layers.build(case))
    plain, graphs, same, rows = [], [], [], []
    seen: list[Any] = []
    steps = [(step, replace(case, seed=step)) for step in range(STEPS)]
    with layers.watching_flows(seen):
        for step, microbatch in steps:
            layers.at_iteration(step)
            plain.append(gradients(model, model, microbatch))
            rows.append(seen[-1][0].counts_e)
    with compiling() as counters:
        run = torch.compile(model, backend=backend)
        for step, microbatch in steps:
            layers.at_iteration(step)
            pairs = zip(gradients(model, run, microbatch), plain[step], strict=True)
            same.append(all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs))
            graphs.append(counters["stats"]["unique_graphs"])
        breaks = {reason.splitlines()[0]: count for reason, count in counters["graph_break"].items()}
    return Compiled(graphs, breaks, same, rows)


def check(rank: Compiled) -> None:
    """At most one break for the layer, and nothing traced anew after the third step, whatever the row counts."""
    assert len({tuple(counts_e) for counts_e in rank.rows}) > 5
    assert rank.same == [True] * STEPS
    assert rank.graphs[0] > 0 and rank.graphs[2:] == [rank.graphs[2]] * (STEPS - 2), rank
    assert sum(rank.breaks.values()) <= 1, rank.breaks


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("lrm", [{}, {"when": "forward"}, {"scope": "source"}], ids=str)
def test_a33_the_layer_breaks_the_graph_once(gloo2: Pool, backend: str, lrm: dict[str, Any]) -> None:
    case = Case(dtype=torch.float32, lrm={"retention": 0.8, **lrm})
    for rank in gloo2(compiled, case, backend, limit_s=300):
        check(rank)


def test_a33_the_experts_function_is_opaque_to_the_compiler() -> None:
    """Without Megatron and without the CPU device: as our expert layers call it."""
    counts_e, weight = [3, 2], torch.randn(2, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0))
    fc1, fc2 = ([torch.nn.Parameter(w.clone()) for w in weight] for _ in range(2))
    key, config = DrawKey(seed=0, iteration=0, microbatch=0, layer=1), LrmConfig(retention=0.5)

    def experts(x_ND: torch.Tensor, alpha_N: torch.Tensor, flow: LocalFlow) -> torch.Tensor:
        activation = Activation(F.relu, gated=False)
        return torch.tanh(expert_mlp(x_ND, alpha_N, ExpertWeights(fc1, fc2), activation, flow, "loop"))

    def gradient(run: Any) -> torch.Tensor:
        x_ND = torch.ones(5, HIDDEN, requires_grad=True)
        flow = LocalFlow(KeepPlan(config, key, Fraction(1, 2), [counts_e], 0))
        run(x_ND, torch.ones(5), flow).sum().backward()
        assert x_ND.grad is not None
        return x_ND.grad

    torch._dynamo.reset()
    torch.testing.assert_close(gradient(torch.compile(experts, backend="eager")), gradient(experts))
