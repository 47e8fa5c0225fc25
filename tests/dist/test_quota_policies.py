"""The real layer with quotas that spare the busy rank: what it keeps, its gradients, its metrics, and its learning."""

from dataclasses import replace

import pytest
import torch

from megatron_lrmoe.recalibration.balance import RowBytes
from megatron_lrmoe.reference import ReferenceLayer, stack_sources
from tests import layers
from tests.gloo import Pool
from tests.layers import HIDDEN, WIDTH, Case

pytestmark = pytest.mark.dist

HOT = Case(workload="hot_rank", num_tokens=48, num_experts=8, top_k=2)
LIMIT = 90
ROW = RowBytes.of(HIDDEN, WIDTH, gated=True, item=4)


def rows_of(case: Case) -> list[int]:
    """Routed rows of each rank's experts, in rising order."""
    map_TE = stack_sources([layers.settle(case, rank)["map_TE"] for rank in range(2)])
    half = case.num_experts // 2
    return sorted([int(map_TE[:, :half].sum()), int(map_TE[:, half:].sum())])


def same(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    scale = expected.abs().max().clamp_min(1e-30)
    torch.testing.assert_close(got / scale, expected / scale, rtol=0, atol=1e-10, msg=lambda m: f"{name}: {m}")


def check(case: Case, results: list[layers.Result]) -> None:
    """Both ranks planned the same; exactly the planned rows were kept; gradients are the reference's for them."""
    parts = [layers.settle(case, rank) for rank in range(2)]
    x_TD, g_TD, probs_TE = (stack_sources([part[n] for part in parts]) for n in ("x_TD", "g_TD", "probs_TE"))
    kept_TE = stack_sources([result.kept_TE for result in results])
    quota_E = results[0].plan.quota_E
    assert results[1].plan.quota_E == quota_E == (kept_TE > 0).sum(0).tolist()
    assert not (kept_TE[~stack_sources([part["map_TE"] for part in parts])] > 0).any()
    least = kept_TE[kept_TE > 0].min()
    assert least == 1 if case.lrm.get("selection") == "topk" else least >= 1
    reference = ReferenceLayer(parts[0]["fc1"], parts[0]["fc2"], layers.ACTIVATIONS[case.activation])
    grads = reference.backward(x_TD, probs_TE, g_TD, kept_TE)
    same("dX", stack_sources([r.dx_TD for r in results]), grads.dx_TD)
    same("dprobs", stack_sources([r.dprobs_TE for r in results]), grads.dprobs_TE)
    for result in results:
        own = slice(result.experts.start, result.experts.stop)
        same("dfc1", result.dfc1, grads.dfc1[own])
        same("dfc2", result.dfc2, grads.dfc2[own])


def results_of(gloo2: Pool, chosen: list[Case]) -> list[list[layers.Result]]:
    return [list(results) for results in zip(*gloo2(layers.run_all, chosen, limit_s=120), strict=True)]


def test_every_policy_keeps_what_it_plans_and_its_gradients_equal_the_reference(gloo2: Pool) -> None:
    policies = [
        {"quota": "balanced"},
        {"quota": "balanced", "rank_rows": LIMIT, "min_rows": 4},
        {"quota": "joint"},
        {"quota": "joint", "rank_rows": LIMIT},
        {"rank_rows": LIMIT},
        {"quota": "balanced", "rank_rows": 1},
        {"quota": "balanced", "retention": 0.3, "min_retention": 0.0},
    ]
    chosen = [
        replace(HOT, lrm={"retention": 0.75, **policy, "scope": scope, "selection": how})
        for policy in policies
        for scope, how in (("expert", "topk"), ("source", "unbiased"))
    ]
    for case, results in zip(chosen, results_of(gloo2, chosen), strict=True):
        try:
            check(case, results)
        except AssertionError as error:
            raise AssertionError(f"{case.lrm}: {error}") from error


def test_the_busy_rank_keeps_what_the_policy_allows_it(gloo2: Pool) -> None:
    few, many = rows_of(HOT)
    assert many > 1.5 * LIMIT and few < LIMIT
    budget = (many * ROW.saved + LIMIT * ROW.work + ROW.work // 2) / 2**30
    lrms = [
        {},
        {"quota": "balanced"},
        {"quota": "balanced", "rank_rows": LIMIT},
        {"quota": "balanced", "budget_gib": budget},
        {"quota": "joint", "rank_rows": many - 10},
    ]
    even, balanced, limited, in_bytes, joint = (
        sorted(results[0].plan.kept_R.tolist())
        for results in results_of(gloo2, [replace(HOT, lrm={"retention": 0.75, **lrm}) for lrm in lrms])
    )
    assert sum(balanced) == sum(even) and balanced == [few, sum(even) - few] and balanced[1] < even[1]
    assert limited == in_bytes == [few, LIMIT]
    assert joint == [few, many - 10]


def reported(case: Case) -> dict[str, float]:
    """Our figures after one call."""
    from megatron_lrmoe.mcore import metrics

    metrics.forget()  # what earlier cases in this worker have recorded
    layers.run(case)
    return metrics.collect(2, "cpu", per_layer=False)


def test_a_limit_out_of_reach_is_reported_and_no_error(gloo2: Pool) -> None:
    few, many = rows_of(HOT)
    for figures in gloo2(reported, replace(HOT, lrm={"retention": 0.75, "rank_rows": 10})):
        over = figures["moe-lrm/rows_over_limit"]
        assert many / 2 - 10 <= over < many / 2 - 10 + HOT.num_experts
        assert figures["moe-lrm/rows_kept"] >= (few + many) / 4
    for figures in gloo2(reported, replace(HOT, lrm={"retention": 0.75})):
        assert "moe-lrm/rows_over_limit" not in figures


def losses_while_learning(case: Case, steps: int) -> list[float]:
    """Mean squared distance to fixed targets, under plain gradient descent on the experts."""
    layer = layers.build(case)
    x, target_TD = layers.leaves(layer, case)
    optimizer = torch.optim.SGD(layer.experts.parameters(), lr=0.5)
    losses = []
    for iteration in range(steps):
        layers.at_iteration(iteration)
        loss = (layers.forward(layer, case, x).squeeze(1) - target_TD).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def test_a_balanced_and_limited_layer_learns(gloo2: Pool) -> None:
    lrm = {"retention": 0.75, "quota": "balanced", "rank_rows": LIMIT, "start_iter": 2, "ramp_iters": 4}
    for losses in gloo2(losses_while_learning, replace(HOT, lrm=lrm), 12):
        assert losses[-1] < 0.9 * losses[0]
