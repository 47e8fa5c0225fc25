"""Options of Megatron beside the plugin: replayed routing, overlapped shared experts, deterministic algorithms."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lrmoe.reference import stack_sources
from tests import layers
from tests.dist.test_layer_gradients import check_kept
from tests.dist.test_other_dispatchers import ALLGATHER, DEEPEP, HYBRIDEP, forward_backward, prepared
from tests.dist.test_router_grad import reference_of, same
from tests.gloo import Pool
from tests.layers import Case

pytestmark = [pytest.mark.dist, pytest.mark.slow]

ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
TYPES = (torch.float32, torch.bfloat16)


def check_with_router(case: Case, results: list[layers.Result], router_ED: torch.Tensor, tolerance: float) -> None:
    """Output and all gradients, the router's own among them, against the reference for the kept pairs.

    Args:
        case: whose router is a softmax over all experts, which Megatron takes in fp32.
        results: of each rank of the group.
        router_ED: (E, D) the router's weight.
        tolerance: relative to the largest element.
    """
    values = [layers.settle(case, rank) for rank in range(len(results))]
    leaves = [(v["x_TD"].requires_grad_(), router_ED.clone().requires_grad_()) for v in values]
    probs = [
        torch.softmax(x_TD @ weight_ED.t(), dim=1, dtype=torch.float32).double() * r.map_TE
        for (x_TD, weight_ED), r in zip(leaves, results, strict=True)
    ]
    kept_TE = stack_sources([r.kept_TE for r in results if r.kept_TE is not None])
    x_TD, probs_TE = stack_sources([x.detach() for x, _ in leaves]), stack_sources(probs).detach()
    map_TE = stack_sources([r.map_TE for r in results])
    reference = reference_of(case)
    same(stack_sources([r.out_TD for r in results]), reference.forward(x_TD, probs_TE, map_TE), tolerance)
    exact = reference.backward(x_TD, probs_TE, stack_sources([v["g_TD"] for v in values]), kept_TE)
    tokens = [len(r.map_TE) for r in results]
    parts = zip(results, leaves, probs, exact.dx_TD.split(tokens), exact.dprobs_TE.split(tokens), strict=True)
    for r, leaf, rank_TE, dx_TD, dprobs_TE in parts:
        through_TD, drouter_ED = torch.autograd.grad(rank_TE, leaf, dprobs_TE)
        same(r.dx_TD, dx_TD + through_TD, tolerance)
        same(r.gradients["drouter"], drouter_ED, tolerance)
        own = slice(r.experts.start, r.experts.stop)
        same(r.dfc1, exact.dfc1[own], tolerance)
        same(r.dfc2, exact.dfc2[own], tolerance)
    check_kept(case, kept_TE, map_TE)


def replayed(case: Case) -> tuple[layers.Result, int]:
    """The routing of a rollout is replayed in training, where the router's weight has another sign.

    Returns:
        The training step's result, and how many routings were left for a repeated forward.
    """
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    RouterReplay.clear_global_router_replay_instances()

    @contextmanager
    def replaying_in_backward() -> Iterator[None]:
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        yield

    try:
        with prepared(case):
            layer = layers.build(case).eval()
            RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
            with torch.no_grad():
                layer(layers.leaves(layer, case)[0])
                layer.router.weight.neg_()
            RouterReplay.set_replay_data(RouterReplay.get_recorded_data())
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            result = forward_backward(layer.train(), case, replaying_in_backward())
            return result, len(layer.router.router_replay.replay_backward_list)
    finally:
        RouterReplay.clear_global_router_replay_instances()


def all_replayed(cases: list[Case]) -> list[tuple[layers.Result, int]]:
    return [replayed(case) for case in cases]


REPLAYED = [
    Case(megatron_router=True, lrm=lrm, config={**config, "moe_enable_routing_replay": True})
    for config, lrm in (
        (ALLTOALL, {}),
        (ALLTOALL, {"scope": "source", "selection": "topk"}),
        (ALLTOALL, {"when": "forward"}),
        (ALLGATHER, {}),
        (DEEPEP, {"selection": "topk"}),
    )
]


def test_with_replayed_routing_every_gradient_equals_the_reference(gloo2: Pool) -> None:
    """So it is where a forward is repeated in backward, which takes its routing from a queue of its own."""
    again = [replace(case, config={**case.config, **RECOMPUTED}) for case in REPLAYED]
    ranks = gloo2(all_replayed, REPLAYED + again)
    for i, case in enumerate(REPLAYED):
        once, repeated = ([rank[j] for rank in ranks] for j in (i, i + len(REPLAYED)))
        check_with_router(case, [r for r, _ in once], -layers.settle(case, 0)["router"], 1e-6)
        for rank, ((result, left), (recomputed, nothing)) in enumerate(zip(once, repeated, strict=True)):
            assert (left, nothing) == (1, 0)
            v = layers.settle(case, rank)
            chosen_TK = (v["x_TD"] @ v["router"].t()).topk(case.top_k).indices
            recorded_TE = torch.zeros_like(result.map_TE).scatter(1, chosen_TK, True)
            assert torch.equal(result.map_TE, recorded_TE) and torch.equal(recomputed.map_TE, recorded_TE)
            assert torch.equal(result.kept_TE, recomputed.kept_TE)
            assert all(torch.equal(value, recomputed.gradients[name]) for name, value in result.gradients.items())


SHARED = {"moe_shared_expert_intermediate_size": layers.WIDTH, "moe_shared_expert_overlap": True}


def overlapped(case: Case) -> tuple[layers.Result, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """A step, and weight and gradient of each parameter of the shared experts."""
    with prepared(case):
        layer = layers.build(case)
        shared = dict(layer.shared_experts.named_parameters())
        with torch.no_grad():
            for weight in shared.values():
                weight.normal_(std=0.25)
        result = forward_backward(layer, case)
    assert layer.token_dispatcher.shared_experts is layer.shared_experts
    return result, {name: (weight.detach(), weight.grad) for name, weight in shared.items()}


def all_overlapped(cases: list[Case]) -> list[tuple[layers.Result, dict[str, tuple[torch.Tensor, torch.Tensor]]]]:
    return [overlapped(case) for case in cases]


def without_shared(
    case: Case, rank: int, result: layers.Result, shared: dict[str, tuple[torch.Tensor, torch.Tensor]], tolerance: float
) -> layers.Result:
    """The result less what the shared experts add, whose own gradients are compared with plain autograd's."""
    v = layers.settle(case, rank)
    x_TD = v["x_TD"].requires_grad_()
    weights = {name: weight.double().requires_grad_() for name, (weight, _) in shared.items()}
    out_TD = layers.ACTIVATIONS[case.activation](x_TD @ weights["linear_fc1.weight"].t())
    out_TD = out_TD @ weights["linear_fc2.weight"].t()
    if "gate_weight" in weights:
        out_TD = out_TD * torch.sigmoid(x_TD @ weights["gate_weight"].t())
    dx_TD, *exact = torch.autograd.grad(out_TD, [x_TD, *weights.values()], v["g_TD"])
    for (_, gradient), expected in zip(shared.values(), exact, strict=True):
        same(gradient, expected, tolerance)
    return replace(result, out_TD=result.out_TD - out_TD.detach(), dx_TD=result.dx_TD - dx_TD)


OVERLAPPED = [
    Case(megatron_router=True, lrm=lrm, config={**config, **SHARED, "moe_shared_expert_gate": gate}, checkpoint=again)
    for config in (ALLTOALL, DEEPEP, HYBRIDEP)
    for lrm, gate, again in (
        ({}, False, False),
        ({"selection": "topk"}, True, True),
        ({"when": "forward"}, True, False),
    )
]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)],
    ids=["fp64", "fp32", "bf16"],
)
def test_with_overlapped_shared_experts_every_gradient_equals_the_reference(
    gloo2: Pool, dtype: torch.dtype, tolerance: float
) -> None:
    """Flex over the FAKES of DeepEP and HybridEP. Megatron's softmax is in fp32, so fp64 is no exacter than that."""
    cases = [replace(case, dtype=dtype) for case in OVERLAPPED]
    ranks = gloo2(all_overlapped, cases)
    for i, case in enumerate(cases):
        parts = [rank[i] for rank in ranks]
        routed = [without_shared(case, n, result, shared, tolerance) for n, (result, shared) in enumerate(parts)]
        check_with_router(case, routed, layers.settle(case, 0)["router"], tolerance)


def same_step(a: layers.Result, b: layers.Result) -> bool:
    """Whether two results are equal to the last bit, with equal plans and kept pairs."""
    if a.plan is None or b.plan is None:
        return a.plan is b.plan and all(torch.equal(a.gradients[name], value) for name, value in b.gradients.items())
    assert a.kept_TE is not None and b.kept_TE is not None
    pairs = [(a.out_TD, b.out_TD), (a.kept_TE, b.kept_TE), *((a.gradients[n], v) for n, v in b.gradients.items())]
    return (a.plan.key, a.plan.quota_E) == (b.plan.key, b.plan.quota_E) and all(torch.equal(x, y) for x, y in pairs)


@contextmanager
def deterministic() -> Iterator[None]:
    """As Megatron's deterministic mode leaves torch, which then also fills new memory with NaN."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


def descended(case: Case, seed: int) -> list[layers.Result]:
    """Three steps of plain gradient descent, with torch's own generator at ``seed``."""
    torch.manual_seed(seed)
    with deterministic(), prepared(case):
        layer, results = layers.build(case), []
        for step in range(3):
            layers.at_iteration(step)
            results.append(forward_backward(layer, replace(case, seed=step)))
            with torch.no_grad():
                for weight in layer.parameters():
                    weight.sub_(weight.grad, alpha=0.1)
    return results


def all_descended(cases: list[Case], seed: int) -> list[list[layers.Result]]:
    return [descended(case, seed) for case in cases]


DETERMINISTIC = [
    Case(megatron_router=True, lrm={"scope": scope, "selection": selection, **lrm}, config=config, top_k=3)
    for config, scope, lrm in (
        (ALLTOALL, "expert", {}),
        (ALLTOALL, "source", {}),
        (ALLTOALL, "expert", {"when": "forward"}),
        (ALLTOALL, "expert", {"gemm": "grouped"}),
        (ALLGATHER, "expert", {}),
    )
    for selection in ("unbiased", "topk")
]


@pytest.mark.parametrize("dtype", TYPES, ids=["fp32", "bf16"])
def test_deterministic_runs_are_bit_equal_and_right(gloo2: Pool, dtype: torch.dtype) -> None:
    cases = [replace(case, dtype=dtype, config={**case.config, "deterministic_mode": True}) for case in DETERMINISTIC]
    first, second = (gloo2(all_descended, cases, seed, limit_s=120) for seed in range(2))
    for i, case in enumerate(cases):
        for once, again in zip(*([rank[i] for rank in run] for run in (first, second)), strict=True):
            assert all(same_step(a, b) for a, b in zip(once, again, strict=True)), case
        results = [rank[i][0] for rank in first]
        check_with_router(case, results, layers.settle(case, 0)["router"], 1e-5 if dtype == torch.float32 else 3e-2)


# What has no deterministic kernel on a GPU, by torch.use_deterministic_algorithms' own list; cumsum of floats only.
REFUSED_ON_GPU = {"put", "put_", "histc", "bincount", "median", "nanmedian", "kthvalue", "cumsum", "scatter_reduce"}


class _Operations(TorchDispatchMode):
    """Names of the operations that run, by the type of their first tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, bool]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        floating = bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_floating_point()
        self.seen.add((func.overloadpacket.__name__, floating))
        return func(*args, **(kwargs or {}))


def operations(cases: list[Case]) -> list[tuple[set[tuple[str, bool]], set[tuple[str, bool]]]]:
    """Of our layer under deterministic algorithms: all, and those in backward."""
    found = []
    for case in cases:
        with deterministic(), prepared(case), _Operations() as everything:
            forward_backward(layers.build(case), case, in_backward := _Operations())
        found.append((everything.seen, in_backward.seen))
    return found


def test_no_operation_is_one_that_torch_refuses_on_a_gpu_when_it_is_to_be_deterministic(gloo2: Pool) -> None:
    more = ({"router_grad": "baseline"}, {"score": "random"}, {"probe_interval": 1}, {"quota": "balanced"})
    cases = DETERMINISTIC + [replace(DETERMINISTIC[0], lrm=lrm) for lrm in more]
    cases = [replace(case, dtype=torch.float32) for case in cases]
    for case, (seen, in_backward) in zip(cases, gloo2(operations, cases)[0], strict=True):
        assert ("index_copy_", True) in in_backward or ("index_add_", True) in in_backward, (case, in_backward)
        assert not {name for name, floating in seen if name in REFUSED_ON_GPU and (floating or name != "cumsum")}, case
