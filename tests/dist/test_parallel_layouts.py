"""The layer where attention's groups are not the experts': context, or tensor with sequence parallelism, beside EP.

Whole models cannot run so on the CPU: Megatron's local attention refuses context parallelism, and its norms without
Apex or Transformer Engine refuse sequence parallelism. For the layer both mean that each rank has tokens of its own.
"""

import hashlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import layers
from tests.dist import test_other_dispatchers as other_dispatchers
from tests.dist.test_layer_gradients import check
from tests.gloo import Pool
from tests.layers import Case

pytestmark = pytest.mark.dist

LAYOUTS: dict[str, dict[str, int]] = {
    "CP2 x EP2": {"context_parallel_size": 2},
    "TP2+SP x EP2, ETP1": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
}


@contextmanager
def laid_out(layout: str) -> Iterator[None]:
    """Layers are built in the layout's process groups."""
    original = layers.parallel

    def parallel(expert_parallel: int, **sizes: int) -> None:
        original(expert_parallel, **sizes, **LAYOUTS[layout])

    layers.parallel = parallel
    try:
        yield
    finally:
        layers.parallel = original


def in_layout(case: Case, layout: str) -> Case:
    """The case with Megatron's config for the layout."""
    sequence = {"sequence_parallel": True} if "SP" in layout else {}
    return replace(case, config={**case.config, **LAYOUTS[layout], **sequence})


def group_sizes(layout: str) -> dict[str, Any]:
    from megatron.core import parallel_state

    with laid_out(layout):
        layers.parallel(2)
        return {
            "tp": parallel_state.get_tensor_model_parallel_world_size(),
            "cp": parallel_state.get_context_parallel_world_size(),
            "dp": parallel_state.get_data_parallel_world_size(),
            "ep": parallel_state.get_expert_model_parallel_world_size(),
            "etp": parallel_state.get_expert_tensor_parallel_world_size(),
        }


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ("CP2 x EP2", {"tp": 1, "cp": 2, "dp": 1, "ep": 2, "etp": 1}),
        ("TP2+SP x EP2, ETP1", {"tp": 2, "cp": 1, "dp": 1, "ep": 2, "etp": 1}),
    ],
)
def test_the_groups_are_what_the_layout_says(gloo2: Pool, layout: str, sizes: dict[str, int]) -> None:
    assert gloo2(group_sizes, layout) == [sizes, sizes]


def run_all(cases: list[Case], layout: str) -> list[layers.Result]:
    found = []
    with laid_out(layout):
        for case in cases:
            on_other = case.config.get("moe_token_dispatcher_type") == "allgather"
            found.append((other_dispatchers.run if on_other else layers.run)(in_layout(case, layout)))
    return found


CASES = [
    Case(workload=workload, lrm={"scope": scope, "selection": selection, "when": when})
    for workload, scope, selection, when in itertools.product(
        ("ragged", "empty_rank"), ("expert", "source"), ("unbiased", "topk"), ("backward", "forward")
    )
]
CASES += [
    Case(workload="one_token"),
    Case(num_tokens=12, num_experts=16, top_k=8, lrm={"scope": "source"}),
    Case(config=other_dispatchers.ALLGATHER),
    Case(config=other_dispatchers.ALLGATHER, lrm={"when": "forward"}),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gradient_equals_the_reference_for_the_kept_pairs(gloo2: Pool, layout: str) -> None:
    ranks = gloo2(run_all, CASES, layout)
    for i, case in enumerate(CASES):
        try:
            check(case, [rank[i] for rank in ranks], 1e-10)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def run_pairs(cases: list[Case], layout: str) -> list[tuple[layers.Result, layers.Result]]:
    with laid_out(layout):
        return [layers.run_both(in_layout(case, layout)) for case in cases]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_at_retention_one_gradients_are_megatrons_with_its_own_router(gloo2: Pool, layout: str) -> None:
    """Also those of the auxiliary losses, whose groups are the layout's."""
    aux = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001}
    cases = [
        Case(megatron_router=True, always_compact=True, config=aux, lrm={"retention": 1.0, "scope": scope})
        for scope in ("expert", "source")
    ]
    for rank in gloo2(run_pairs, cases, layout):
        for case, (stock, ours) in zip(cases, rank, strict=True):
            assert torch.equal(ours.out_TD, stock.out_TD), case
            assert torch.equal(ours.kept_TE > 0, ours.map_TE)
            for name, gradient in stock.gradients.items():
                torch.testing.assert_close(ours.gradients[name], gradient, rtol=1e-10, atol=1e-12)


def weights_after_three_steps(case: Case, layout: str, ours: bool) -> tuple[str, str, torch.Tensor]:
    """Hashes of the router's and of a local expert's weight, and how far the router has moved.

    Gradients are summed as in training: DDP, then what Megatron's finalize_model_grads does over tensor-parallel ranks.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    def hashed(weight: torch.Tensor) -> str:
        return hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest()

    with laid_out(layout):
        case = in_layout(case, layout)
        layer = layers.build(case, ours)
        before = layer.router.weight.detach().clone()
        model = DistributedDataParallel(layer.config, DistributedDataParallelConfig(), layer)
        layers.descend(model, layer, case, lambda: finalize_model_grads([model]))
    moved = (layer.router.weight - before).detach()
    return hashed(layer.router.weight), hashed(next(layer.experts.parameters())), moved


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("retention", [1.0, 0.8, 0.5])
def test_a13_replicated_router_stays_equal_on_all_ranks(gloo2: Pool, layout: str, retention: float) -> None:
    """The list of reports asks for TP2 or EP2; EP2 alone is in test_user_demand_router.py."""
    case = Case(num_experts=4, dtype=torch.float32, megatron_router=True, lrm={"retention": retention})
    first, second = gloo2(weights_after_three_steps, case, layout, retention < 1)
    assert first[0] == second[0] and first[1] != second[1]
    assert first[2].abs().max() > 0


ATTRIBUTES = ("allreduce", "tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel", "shared")


def norm_and_zeros(case: Case, layout: str, ours: bool) -> dict[str, Any]:
    """Of gradients that are 1 in one dense and in one expert scalar of each rank and 0 elsewhere."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    with laid_out(layout):
        layer = layers.build(in_layout(case, layout), ours)
        model = DistributedDataParallel(layer.config, DistributedDataParallelConfig(), layer)
        settings = OptimizerConfig(optimizer="sgd", lr=0.1, log_num_zeros_in_grad=True)
        optimizer = get_megatron_optimizer(settings, [model])
        expert = next(layer.experts.parameters())
        attributes = {
            name: {key: getattr(weight, key, None) for key in ATTRIBUTES} for name, weight in layer.named_parameters()
        }
        model.zero_grad_buffer()
        optimizer.prepare_grads()
        zeros = optimizer.count_zeros()
        for weight in (layer.router.weight, expert):
            weight.main_grad.view(-1)[0] = 1
        optimizer.prepare_grads()
        norm = optimizer.get_grad_norm()
    sizes = {name: weight.numel() for name, weight in layer.named_parameters()}
    return {"attributes": attributes, "sizes": sizes, "zeros": int(zeros), "norm": float(norm)}


def test_a10_norm_and_zeros_count_each_scalar_of_dense_and_expert_weights_once(gloo2: Pool) -> None:
    """TP2, EP2, ETP1: one dense scalar, the same on both ranks, and one expert scalar on each."""
    case = Case(num_experts=4, dtype=torch.float32, megatron_router=True)
    layout = "TP2+SP x EP2, ETP1"
    stock, ours = gloo2(norm_and_zeros, case, layout, False), gloo2(norm_and_zeros, case, layout, True)
    for theirs, found in zip(stock, ours, strict=True):
        assert found["attributes"] == theirs["attributes"]
        experts = [name for name in found["sizes"] if "experts" in name]
        assert len(experts) == 4 and all(found["attributes"][name]["allreduce"] is False for name in experts)
        assert found["norm"] == pytest.approx(3**0.5, rel=1e-6)
        dense = found["sizes"]["router.weight"]
        assert found["zeros"] == dense + 2 * sum(found["sizes"][name] for name in experts)
