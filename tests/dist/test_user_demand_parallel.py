"""What users of MoE training have run into, as in test_user_demand.py: gradient buffers and scale, padding.

A10 and A13 with tensor parallelism are in test_parallel_layouts.py, A20 to A24 in test_user_demand_dispatch.py, A33 in
test_user_demand_compile.py, A35 in test_host_syncs.py.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_lrmoe.recalibration.plan import KeepPlan
from megatron_lrmoe.recalibration.quota import proportional_quota
from megatron_lrmoe.reference import stack_sources
from tests import layers
from tests.dist.test_router_grad import reference_of, same
from tests.dist.test_user_demand import even, routing
from tests.dist.test_user_demand_router import forced_router
from tests.gloo import Pool
from tests.layers import HIDDEN, Case

pytestmark = pytest.mark.dist


def overlapped(case: Case, fused: bool) -> list[dict[str, Any]]:
    """Two steps of two microbatches under DDP; what it saw of each expert weight in each."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    layer = layers.build(case)
    layer.config.gradient_accumulation_fusion = fused
    overlap = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True)
    model = DistributedDataParallel(layer.config, overlap, layer)
    names = {weight: name for name, weight in layer.named_parameters()}
    shapes: dict[str, set[bool]] = {name: set() for name in names.values()}
    for weight, name in names.items():
        weight.register_hook(lambda grad, of=weight, seen=shapes[name]: seen.add(grad.shape == of.shape))
    groups = model.bucket_groups + model.expert_parallel_bucket_groups
    steps = []
    for step in range(2):
        layers.at_iteration(step)
        model.zero_grad_buffer()
        with model.no_sync():
            _microbatch(model, layer, replace(case, seed=2 * step))
        unready = [dict(group.per_param_grad_ready_counts) for group in groups]
        _microbatch(model, layer, replace(case, seed=2 * step + 1))
        ready = {names[w]: n for group in groups for w, n in group.per_param_grad_ready_counts.items()}
        model.finish_grad_sync()
        steps.append(
            {
                "ready early": any(unready),
                "ready": ready,
                "all": sorted(names.values()),
                "added": {name: weight.grad_added_to_main_grad for weight, name in names.items()},
                "grads": {name: weight.main_grad.clone() for weight, name in names.items()},
                "right shape": {name: seen == {True} for name, seen in shapes.items()},
            }
        )
    return steps


def _microbatch(model: Any, layer: Any, case: Case) -> None:
    x, g_TD = layers.leaves(layer, case)
    out = model(x)[0]
    out.backward(g_TD.view_as(out))


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused accumulation"])
@pytest.mark.parametrize("lrm", [{}, {"scope": "source"}, {"when": "forward"}], ids=str)
def test_a07_weights_whose_experts_keep_no_rows_are_ready_once(gloo2: Pool, lrm: dict[str, Any], fused: bool) -> None:
    """Rank 0's experts keep nothing, as nothing is routed to them: an expert with rows keeps one at least."""
    given = [forced_router([-4.0, -4.0, 4.0, 3.0], 6)]
    case = Case(num_tokens=6, num_experts=4, dtype=torch.float32, megatron_router=True, lrm=lrm, given=given)
    for rank, steps in enumerate(gloo2(overlapped, case, fused, limit_s=60)):
        for step in steps:
            assert not step["ready early"]
            assert step["ready"] == dict.fromkeys(step["all"], 1)
            experts = [name for name in step["all"] if "experts" in name]
            assert len(experts) == 4
            for name in experts:
                assert step["right shape"][name]
                assert step["added"][name] == fused
                assert bool(step["grads"][name].any()) == (rank == 1), name


def a09_case(retention: float, expert_parallel: int) -> Case:
    """Each expert has 5 pairs of each rank, of which one is of a token with a tiny gradient."""
    map_TE = routing([[0, 1], [2, 3]] * 5, 4)
    size_T = torch.tensor([1e-3, 1e-3, *(1.0,) * 8], dtype=torch.float64)
    generator = torch.Generator().manual_seed(9)
    given = []
    for _ in range(2):
        x_TD, g_TD = (torch.randn(10, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
        given.append({"map_TE": map_TE, "probs_TE": even(map_TE), "x_TD": x_TD, "g_TD": g_TD * size_T[:, None]})
    return Case(
        num_tokens=10,
        num_experts=4,
        expert_parallel=expert_parallel,
        dtype=torch.float32,
        lrm={"selection": "topk", "retention": retention},
        always_compact=True,
        given=given,
    )


def averaged(case: Case) -> tuple[dict[int, list[torch.Tensor]], torch.Tensor]:
    """(fc1, fc2) gradients by expert after DDP's reduction, and (T, E) which of this rank's pairs were kept."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    layer = layers.build(case)
    model = DistributedDataParallel(layer.config, DistributedDataParallelConfig(), layer)
    # Without expert parallelism both ranks have number 0 in their group; each is to have its own tokens.
    case = replace(case, given=[case.given[dist.get_rank()]])
    model.zero_grad_buffer()
    flows: list[Any] = []
    with layers.watching_flows(flows):
        _microbatch(model, layer, case)
    model.finish_grad_sync()
    ((flow, sent),) = flows
    kept_TE = torch.zeros(case.num_tokens, case.num_experts, dtype=torch.float64)
    kept_TE[flow.token_P[sent.rows_M], flow.expert_P[sent.rows_M]] = 1
    return {
        index: [expert.linear_fc1.weight.main_grad.clone(), expert.linear_fc2.weight.main_grad.clone()]
        for index, expert in zip(layer.local_expert_indices, layer.experts.local_experts, strict=True)
    }, kept_TE


@pytest.mark.parametrize(("retention", "kept"), [(1.0, 20), (0.8, 16)])
def test_a09_expert_gradients_do_not_depend_on_expert_parallelism(gloo2: Pool, retention: float, kept: int) -> None:
    """DP2 with EP1 against DP2 with EP2, and both against the mean over ranks: no factor is left over."""
    alone, shared = (gloo2(averaged, a09_case(retention, ep)) for ep in (1, 2))
    for (_, one_TE), (_, other_TE) in zip(alone, shared, strict=True):
        assert torch.equal(one_TE, other_TE) and int(one_TE.sum()) == kept
    case = a09_case(retention, 2)
    v = {name: stack_sources([case.given[r][name] for r in range(2)]) for name in ("x_TD", "g_TD", "probs_TE")}
    exact = reference_of(case).backward(v["x_TD"], v["probs_TE"], v["g_TD"], stack_sources([k for _, k in shared]))
    for index in range(4):
        owner = shared[index // 2][0]
        for fc, expected in enumerate((exact.dfc1[index] / 2, exact.dfc2[index] / 2)):
            scale = expected.abs().max()
            for found in (alone[0][0][index][fc], alone[1][0][index][fc], owner[index][fc]):
                torch.testing.assert_close(found.double() / scale, expected / scale, rtol=1e-5, atol=1e-6)
            ratio = float(owner[index][fc].norm() / alone[0][0][index][fc].norm())
            assert ratio == pytest.approx(1, rel=1e-5)


PADDED, VALID = 64, 48
A29 = Case(
    num_tokens=PADDED,
    num_experts=8,
    dtype=torch.float32,
    megatron_router=True,
    config={"moe_router_pre_softmax": False},
)


@dataclass(frozen=True)
class Padded:
    """What one rank saw of a call whose last tokens are padding.

    Args:
        plan: of the call.
        map_TE, probs_TE: its routing.
        kept_TE: weights of its kept pairs.
        dx_TD: gradient of its tokens.
        fc: weight gradients of its experts, fc1 and fc2.
    """

    plan: KeepPlan
    map_TE: torch.Tensor
    probs_TE: torch.Tensor
    kept_TE: torch.Tensor
    dx_TD: torch.Tensor
    fc: list[torch.Tensor]


def with_padding(case: Case) -> Padded:
    """One step; no loss is taken of padding, so no gradient comes back to it."""
    layer = layers.build(case)
    x, g_TD = layers.leaves(layer, case)
    g_TD[VALID:] = 0
    routed: list[tuple[torch.Tensor, torch.Tensor]] = []
    layer.router.register_forward_hook(lambda _, __, answer: routed.append(answer))
    # True is padding: so Megatron's router reads it (router.py:738), whatever its docstrings say.
    padding = torch.arange(PADDED)[None] >= VALID
    flows: list[Any] = []
    with layers.watching_flows(flows):
        out = layer(x, padding_mask=padding)[0]
        out.backward(g_TD.view_as(out))
    ((flow, sent),) = flows
    kept_TE = torch.zeros(PADDED, case.num_experts, dtype=torch.float64)
    kept_TE[flow.token_P[sent.rows_M], flow.expert_P[sent.rows_M]] = layers.weights_of(flow, sent).double()
    probs_TE, map_TE = routed[0]
    fc = [layers._expert_gradients(layer, name) for name in ("linear_fc1", "linear_fc2")]
    return Padded(flow.plan, map_TE, probs_TE.detach(), kept_TE, x.grad.squeeze(1), fc)


@pytest.mark.parametrize("retention", [0.5, 0.9])
@pytest.mark.parametrize("scope", ["expert", "source"])
@pytest.mark.parametrize("selection", ["topk", "unbiased"])
def test_a29_quotas_come_from_valid_pairs_and_keep_no_others(
    gloo2: Pool, retention: float, scope: str, selection: str
) -> None:
    case = replace(A29, lrm={"scope": scope, "selection": selection, "retention": retention})
    ranks = gloo2(with_padding, case)
    valid_E = sum(rank.map_TE[:VALID].sum(0) for rank in ranks)
    assert int(valid_E.sum()) == 2 * 2 * VALID
    quota_E = proportional_quota(valid_E.tolist(), Fraction(str(retention)), 0)
    for rank in ranks:
        assert rank.plan.quota_E == quota_E
        assert not (rank.kept_TE[VALID:] > 0).any()
    assert sum((rank.kept_TE > 0).sum(0) for rank in ranks).tolist() == quota_E


def test_a29_gradients_are_the_references_for_the_kept_pairs(gloo2: Pool) -> None:
    ranks = gloo2(with_padding, A29)
    values = [layers.settle(A29, rank) for rank in range(2)]
    g_TD = torch.cat([part["g_TD"].index_fill(0, torch.arange(VALID, PADDED), 0) for part in values])
    x_TD, probs_TE = (torch.cat(parts) for parts in ([v["x_TD"] for v in values], [r.probs_TE for r in ranks]))
    kept_TE = torch.cat([rank.kept_TE for rank in ranks])
    exact = reference_of(A29).backward(x_TD, probs_TE.double(), g_TD, kept_TE)
    for fc, expected in enumerate((exact.dfc1, exact.dfc2)):
        same(torch.cat([rank.fc[fc] for rank in ranks]), expected, 1e-5)
