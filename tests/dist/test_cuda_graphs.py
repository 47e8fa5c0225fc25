"""Layers whose routing Megatron captures in CUDA graphs (``--cuda-graph-modules moe_router moe_preprocess``).

There is no graph on a CPU. A FAKE stands in for it: what would be captured runs in Python, by the code that Megatron
captures, and the layer goes on from its outputs as after a replay (transformer_layer.py:1265-1317 and 1647-1719). Not
yet run on hardware.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch

from tests import fake_deep_ep, layers
from tests.dist.test_layer_gradients import check_kept
from tests.dist.test_other_dispatchers import ALLGATHER, DEEPEP, HYBRIDEP, kept_at_source, watching_local_flows
from tests.dist.test_router_grad import reference_of, same, stacked
from tests.gloo import Pool
from tests.layers import Case

pytestmark = [pytest.mark.dist, pytest.mark.slow]

TE, LOCAL = "transformer_engine", "local"
ROUTER, BOTH = ("moe_router",), ("moe_router", "moe_preprocess")


def run_captured(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """As TransformerLayer runs an MoE layer whose first steps Transformer Engine has captured."""
    from megatron.core.transformer.moe import moe_utils

    with mock.patch.object(moe_utils, "is_graph_capturing", lambda: True):
        outputs = layer(x)
    store, dispatcher = layer.cudagraph_tensor_store, layer.token_dispatcher
    if _names(layer) >= set(BOTH):
        (rows, probs), held = outputs[:2], outputs[2:]
        for name, value in zip(dispatcher.valid_cudagraph_attrs, held, strict=True):
            *path, last = name.split(".")
            owner = dispatcher
            for step in path:
                owner = getattr(owner, step)
            setattr(owner, last, value)
        store.set(hidden_states=rows, probs=probs)
    else:
        rows, probs, routing_map = outputs
        store.set(hidden_states=rows, probs=probs, routing_map=routing_map)
    out = layer(rows)[0]
    store.clear()
    return out


def run_partially(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """As MoETransformerLayer runs an MoE layer in three parts, of which Megatron captures the first and the last."""
    layer.fwd_execution_map = "route"
    rows, probs, shared = layer(x, intermediate_tensors=())
    layer.fwd_execution_map = "expert_compute"
    output, _ = layer(None, intermediate_tensors=(rows, probs))
    layer.fwd_execution_map = "postprocess"
    return layer(None, intermediate_tensors=(output, shared))


def run_as_it_is(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """As in the iterations before a graph is captured."""
    return layer(x)[0]


def _names(layer: Any) -> set[str]:
    return {module.name for module in layer.config.cuda_graph_modules}


@dataclass(frozen=True)
class Way:
    """How a layer is run.

    Args:
        implementation, modules: Megatron's cuda_graph_impl and cuda_graph_modules.
        run: gives the output for the tokens.
    """

    implementation: str
    modules: tuple[str, ...]
    run: Callable[[Any, torch.Tensor], torch.Tensor]

    def __str__(self) -> str:
        return f"{self.implementation}, {'+'.join(self.modules)}, {self.run.__name__}"


WAYS = [
    Way(TE, ROUTER, run_captured),
    Way(TE, BOTH, run_captured),
    Way(TE, BOTH, run_as_it_is),
    Way(LOCAL, ROUTER, run_partially),
    Way(LOCAL, BOTH, run_partially),
]


def gradients(case: Case, way: Way) -> list[layers.Result]:
    """Two steps of a layer, so that what one leaves behind would show in the other."""
    graphs = {"cuda_graph_impl": way.implementation, "cuda_graph_modules": list(way.modules)}
    with fake_deep_ep.installed():
        layer = layers.build(replace(case, config={**case.config, **graphs}))
        return [_step(layer, replace(case, seed=step), way) for step in range(2)]


def _step(layer: Any, case: Case, way: Way) -> layers.Result:
    flows: list[Any] = []
    local: list[Any] = []
    # layers.forward_backward calls the layer, which has another way of running here.
    with (
        mock.patch.object(layers, "forward", lambda layer, _, x: way.run(layer, x)),
        layers.watching_flows(flows),
        watching_local_flows(local),
    ):
        result = layers.forward_backward(layer, case)
    result = replace(result, dx_TD=result.dx_TD.clone())
    if local:
        return replace(result, plan=local[-1].plan, kept_TE=kept_at_source(local[-1], result))
    assert len(flows) == 1
    return result


CASES = {
    "unbiased": Case(),
    "topk, source": Case(lrm={"selection": "topk", "scope": "source"}),
    "forward": Case(lrm={"when": "forward"}),
    "grad-abs": Case(lrm={"score": "grad-abs"}),
    "one rank": Case(expert_parallel=1),
    "empty rank": Case(workload="empty_rank"),
    "fp32": Case(dtype=torch.float32),
    "allgather": Case(config=ALLGATHER),
    "deepep": Case(config=DEEPEP),
    "hybridep": Case(config=HYBRIDEP),
}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_references_for_the_kept_pairs(gloo2: Pool, name: str, way: Way) -> None:
    case = CASES[name]
    ranks = gloo2(gradients, case, way)[: case.expert_parallel]
    for step in range(2):
        results = [rank[step] for rank in ranks]
        at_step = replace(case, seed=step)
        values = stacked(at_step, case.expert_parallel)
        kept_TE = torch.cat([result.kept_TE for result in results])
        check_kept(at_step, kept_TE, values["map_TE"])
        # The weights stay those of the first step.
        exact = reference_of(case).backward(values["x_TD"], values["probs_TE"], values["g_TD"], kept_TE)
        usual = 1e-5 if case.dtype == torch.float32 else 1e-10
        for gradient, expected in (("dx_TD", exact.dx_TD), ("dfc1", exact.dfc1), ("dfc2", exact.dfc2)):
            same(torch.cat([getattr(result, gradient) for result in results]), expected, usual)
        # DeepEP brings probabilities' gradients in fp32.
        fp32 = 1e-6 if case.config in (DEEPEP, HYBRIDEP) else usual
        same(torch.cat([result.dprobs_TE for result in results]), exact.dprobs_TE, fp32)


def test_with_the_permutation_in_a_graph_rows_between_the_ranks_are_still_the_kept_ones_only(gloo2: Pool) -> None:
    case, way = Case(), Way(TE, BOTH, run_captured)
    for rank, steps in enumerate(gloo2(sent_rows, case, way)):
        plan, rows = steps
        assert rows == plan.kept_by_owner(rank), (rows, plan)


def sent_rows(case: Case, way: Way) -> tuple[Any, list[int]]:
    """The plan, and the rows that this rank's gradient was sent in, by owner."""
    case = replace(case, lrm={"scope": "source"})
    graphs = {"cuda_graph_impl": way.implementation, "cuda_graph_modules": list(way.modules)}
    layer = layers.build(replace(case, config={**case.config, **graphs}))
    from megatron_lrmoe.compute.exchange import Exchange

    sent: list[list[int]] = []
    original = Exchange.all_to_all

    def all_to_all(self: Exchange, rows: Any, send: Any, receive: Any) -> torch.Tensor:
        if rows is not None and rows.dim() == 2:
            sent.append(list(send))
        return original(self, rows, send, receive)

    with mock.patch.object(Exchange, "all_to_all", all_to_all):
        plan = _step(layer, case, way).plan
    return plan, sent[0]
