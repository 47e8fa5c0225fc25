"""What users of MoE training have run into, as in test_user_demand.py, with Megatron's own router."""

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lrmoe.compute.flow import PairFlow
from megatron_lrmoe.recalibration.quota import proportional_quota
from tests import layers
from tests.gloo import Pool
from tests.layers import HIDDEN, Case

pytestmark = pytest.mark.dist


def forced_router(columns: list[float], num_tokens: int) -> dict[str, torch.Tensor]:
    """A router weight and tokens for which the logits of every token are ``columns``."""
    router = torch.zeros(len(columns), HIDDEN, dtype=torch.float64)
    router[:, 0] = torch.tensor(columns)
    x_TD = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x_TD[:, 0] = 1
    return {"router": router, "x_TD": x_TD}


def empty_rank_recomputed(case: Case) -> tuple[layers.Result, list[dict[str, Any]]]:
    layer = layers.build(case)
    seen: list[Any] = []
    with layers.watching_experts(layer, seen):
        result = layers.forward_backward(layer, case)
    passes = [
        {
            "probs": probs_N.dtype,
            "out": tuple(y_ND.shape),
            "descends": y_ND.grad_fn is not None
            and x_ND.grad_fn is not None
            and any(node is x_ND.grad_fn for node, _ in y_ND.grad_fn.next_functions),
        }
        for x_ND, probs_N, y_ND in seen
    ]
    return result, passes


def test_a05_empty_result_stays_in_the_graph_under_recompute(gloo2: Pool) -> None:
    """Megatron's router, full recompute: two passes, probabilities in fp32 in both, output descends from dispatch."""
    plain = Case(
        num_tokens=6,
        num_experts=4,
        dtype=torch.bfloat16,
        megatron_router=True,
        config={"moe_router_dtype": "fp32"},
        given=[forced_router([4.0, 3.0, -4.0, -4.0], 6)],
    )
    ranks = gloo2(empty_rank_recomputed, replace(plain, checkpoint=True), limit_s=60)
    assert [passes[0]["out"] for _, passes in ranks] == [(24, HIDDEN), (0, HIDDEN)]
    for (recomputed, passes), (once, _) in zip(ranks, gloo2(empty_rank_recomputed, plain), strict=True):
        assert [p["probs"] for p in passes] == [torch.float32] * 2
        assert [p["descends"] for p in passes] == [False, True]  # the first pass has no graph
        assert all(torch.equal(once.gradients[k], v) for k, v in recomputed.gradients.items())


AUX = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": 0.001,
    "moe_router_pre_softmax": False,
}


def router_gradient(case: Case, ours: bool) -> torch.Tensor:
    """Of two microbatches."""
    layer = layers.build(case, ours)
    for seed in (0, 1):
        microbatch = replace(case, seed=seed)
        x, g_TD = layers.leaves(layer, microbatch)
        out = layers.forward(layer, microbatch, x)
        out.backward(g_TD.view_as(out))
    return layer.router.weight.grad


@pytest.mark.parametrize("scope", ["expert", "source"])
def test_a12_auxiliary_losses_keep_their_whole_gradient(gloo2: Pool, scope: str) -> None:
    case = Case(num_experts=4, megatron_router=True, config=AUX, lrm={"scope": scope})
    # A zero output gradient leaves the auxiliary losses alone: not one bit may differ.
    alone = replace(case, zero_gradient=True)
    for stock, ours in zip(gloo2(router_gradient, alone, False), gloo2(router_gradient, alone, True), strict=True):
        assert stock.abs().max() > 0 and torch.equal(stock, ours)
    # Beside a task gradient it is what the losses add.
    without = replace(case, config={"moe_router_pre_softmax": False})
    added = [
        [a - b for a, b in zip(gloo2(router_gradient, case, ours), gloo2(router_gradient, without, ours), strict=True)]
        for ours in (False, True)
    ]
    for stock, ours in zip(*added, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-12)


def train_with_ddp(case: Case, ours: bool) -> dict[str, str]:
    """Hashes of the weights after three steps of plain gradient descent under Megatron's DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    layer = layers.build(case, ours)
    before = layer.router.weight.detach().clone()
    model = DistributedDataParallel(layer.config, DistributedDataParallelConfig(), layer)
    layers.descend(model, layer, case, model.finish_grad_sync)
    assert not torch.equal(layer.router.weight, before)
    return {
        "router": hashlib.sha256(layer.router.weight.detach().numpy().tobytes()).hexdigest(),
        "fc1": hashlib.sha256(next(layer.experts.parameters()).detach().numpy().tobytes()).hexdigest(),
    }


@pytest.mark.parametrize("retention", [1.0, 0.8, 0.5])
def test_a13_replicated_router_stays_equal_on_all_ranks(gloo2: Pool, retention: float) -> None:
    """EP2; the gradients of a router copy cover the experts of every rank (see test_layer_gradients)."""
    case = Case(num_experts=4, dtype=torch.float32, megatron_router=True, lrm={"retention": retention})
    first, second = gloo2(train_with_ddp, case, retention < 1)
    assert first["router"] == second["router"]
    assert first["fc1"] != second["fc1"]


LOGITS = [2.0, 1.0, 0.0, -1.0]


def alpha_of(case: Case, expert_bias: list[float] | None = None) -> tuple[torch.Tensor, torch.Tensor, layers.Result]:
    """(N,) combine weights that reach the experts, and squared norms of fc2's input divided by those of phi."""
    layer = layers.build(case)
    if expert_bias is not None:
        layer.router.expert_bias.copy_(torch.tensor(expert_bias))
    seen: list[Any] = []
    norms: list[torch.Tensor] = []
    attach = PairFlow.attach_experts

    def attach_experts(flow: PairFlow, act_norm_sq_N: torch.Tensor, alpha_N: torch.Tensor) -> None:
        norms.append(act_norm_sq_N)
        attach(flow, act_norm_sq_N, alpha_N)

    PairFlow.attach_experts = attach_experts
    try:
        with layers.watching_experts(layer, seen):
            result = layers.forward_backward(layer, case)
    finally:
        PairFlow.attach_experts = attach
    ((x_ND, alpha_N, _),) = seen
    counts = result.map_TE.sum(0).tolist()
    phi = [
        layers.ACTIVATIONS[case.activation](x @ expert.linear_fc1.weight.t())
        for x, expert in zip(x_ND.split(counts), layer.experts.local_experts, strict=True)
    ]
    return alpha_N.detach(), norms[0] / torch.cat(phi).detach().square().sum(1), result


A16 = Case(
    num_tokens=1,
    num_experts=4,
    expert_parallel=1,
    megatron_router=True,
    config={"moe_router_pre_softmax": False, "moe_router_topk_scaling_factor": 2.5},
    given=[forced_router(LOGITS, 1)],
)


def test_a16_alpha_is_the_renormalised_and_scaled_weight(gloo2: Pool) -> None:
    alpha_N, alpha_sq_N, result = gloo2(alpha_of, A16)[0]
    golden = torch.tensor([1.827647, 0.672354], dtype=torch.float64)
    torch.testing.assert_close(alpha_N, golden, rtol=0, atol=1e-6)
    torch.testing.assert_close(alpha_sq_N, alpha_N.square(), rtol=1e-6, atol=0)
    assert result.map_TE.tolist() == [[True, True, False, False]] and result.dprobs_TE[0, :2].abs().min() > 0


def test_a16_expert_bias_moves_the_choice_and_never_alpha(gloo2: Pool) -> None:
    sigmoid = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp64",
    }
    case = replace(A16, config=A16.config | sigmoid)
    alpha_N, alpha_sq_N, result = gloo2(alpha_of, case, [0.0, -9.0, 0.0, 9.0])[0]
    assert result.map_TE.tolist() == [[True, False, False, True]]
    chosen = torch.tensor([LOGITS[0], LOGITS[3]]).sigmoid().double()
    expected = 2.5 * chosen / chosen.sum()
    torch.testing.assert_close(alpha_N, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(alpha_sq_N, expected.square(), rtol=1e-6, atol=0)


def error_of_config(case: Case) -> str:
    layers.parallel(case.expert_parallel)
    try:
        layers.transformer_config(case)
    except ValueError as error:
        return str(error)
    return ""


def test_a17_top_1_with_softmax_after_the_choice_is_refused_by_megatron(gloo2: Pool) -> None:
    """Megatron 0.19's TransformerConfig raises itself, so there is nothing to warn of; with pre-softmax it works."""
    case = Case(top_k=1, expert_parallel=1, megatron_router=True)
    after = replace(case, config={"moe_router_pre_softmax": False})
    assert gloo2(error_of_config, after) == ["Please use --moe-router-pre-softmax when topk is 1."] * 2
    result = gloo2(layers.run, case)[0]
    assert result.map_TE.sum(1).tolist() == [1] * case.num_tokens
    assert result.out_TD.shape == (case.num_tokens, HIDDEN)
    kept_TE = result.kept_TE > 0
    assert torch.equal(result.dprobs_TE != 0, kept_TE) and kept_TE.any()
    assert result.drouter.abs().max() > 0


def tied_router() -> dict[str, torch.Tensor]:
    """Experts 1 and 2 have equal weights, so they tie for every token."""
    router = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    router[2] = router[1]
    return {"router": router}


A30 = Case(
    num_tokens=8,
    num_experts=4,
    dtype=torch.float32,
    megatron_router=True,
    given=[tied_router()],
    config={"moe_router_pre_softmax": False},
)


RECOMPUTE = {
    "none": A30,
    "selective": replace(A30, config=A30.config | {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    "full": replace(A30, checkpoint=True),
}


def recomputed(times: int, scope: str) -> dict[str, list[tuple[list[torch.Tensor], layers.Result]]]:
    """For each way to recompute: the routing of every pass, and the results, iteration by iteration."""
    found = {}
    for how, case in RECOMPUTE.items():
        case = replace(case, lrm={"scope": scope})
        layer = layers.build(case)
        found[how] = []
        for iteration in range(times):
            layers.at_iteration(iteration)
            maps: list[torch.Tensor] = []
            hook = layer.router.register_forward_hook(lambda _, __, answer, maps=maps: maps.append(answer[1]))
            found[how].append((maps, layers.forward_backward(layer, replace(case, seed=iteration))))
            hook.remove()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("scope", "times"), [("expert", 100), ("source", 20)])
def test_a30_recompute_draws_what_the_first_forward_fixed(gloo2: Pool, scope: str, times: int) -> None:
    ranks = gloo2(recomputed, times, scope, limit_s=120)
    for how, passes in (("none", 1), ("selective", 2), ("full", 2)):
        for i in range(times):
            per_rank = [rank[how][i] for rank in ranks]
            assert [len(maps) for maps, _ in per_rank] == [passes] * 2
            first_E = sum(maps[0].sum(0) for maps, _ in per_rank).tolist()
            for rank, (_, result) in zip(ranks, per_rank, strict=True):
                _, once = rank["none"][i]
                assert result.plan.quota_E == proportional_quota(first_E, result.plan.retention)
                assert result.plan.key == once.plan.key
                assert torch.equal(result.kept_TE, once.kept_TE)
                for name, gradient in once.gradients.items():
                    assert torch.equal(result.gradients[name], gradient), (how, name)


def two_in_flight(how: str) -> list[torch.Tensor]:
    """Gradients of two microbatches whose forwards both run before the first backward, as in a pipeline."""
    case = RECOMPUTE[how]
    layer = layers.build(case)
    microbatches = []
    for seed in (0, 1):
        x, g_TD = layers.leaves(layer, replace(case, seed=seed))
        microbatches.append((x, g_TD, layers.forward(layer, case, x)))
    for _, g_TD, out in microbatches:
        out.backward(g_TD.view_as(out))
    return [x.grad for x, _, _ in microbatches] + [weight.grad for weight in layer.parameters()]


def test_a30_recompute_numbers_microbatches_in_flight_as_the_forwards_did(gloo2: Pool) -> None:
    once = gloo2(two_in_flight, "none")
    for how in ("selective", "full"):
        for rank, expected in zip(gloo2(two_in_flight, how), once, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(rank, expected, strict=True))
