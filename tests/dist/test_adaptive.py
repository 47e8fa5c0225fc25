"""Adaptive retention on the real layer: equal on all ranks and in recompute, from the costs of all ranks."""

from argparse import Namespace
from typing import Any

import pytest

from tests import layers
from tests.gloo import Pool
from tests.layers import Case

pytestmark = pytest.mark.dist

LRM = {"adaptive": True, "retention": 0.9, "start_iter": 2}
CASE = Case(num_tokens=300, num_experts=4, lrm=LRM)


def step_by_step(case: Case, iterations: int, microbatches: int = 2) -> list[Any]:
    """Of each iteration: retention of every call that dropped, figures, and steps after it."""
    from megatron_lrmoe.mcore import adaptive, metrics

    layer = layers.build(case)
    metrics.forget()
    seen = []
    for iteration in range(iterations):
        layers.at_iteration(iteration)
        plans = [layers.forward_backward(layer, case).plan for _ in range(microbatches)]
        adaptive.end_iteration(layer.lrm_config, 2, "cpu")
        figures = metrics.collect(2, "cpu", per_layer=True)
        seen.append(([plan and float(plan.retention) for plan in plans], figures, dict(adaptive._steps)))
    return seen


@pytest.mark.parametrize("when", ["backward", "forward"])
def test_ranks_microbatches_and_recompute_have_one_retention(gloo2: Pool, when: str) -> None:
    lrm = {**LRM, "when": when, "adaptive_tau": 0.03}
    chosen = [Case(num_tokens=300, num_experts=4, lrm=lrm, checkpoint=checkpoint) for checkpoint in (False, True)]
    plain, recomputed = (gloo2(step_by_step, case, 12, limit_s=120) for case in chosen)
    assert plain[0] == plain[1] == recomputed[0] == recomputed[1]
    calls = [retentions for retentions, _, _ in plain[0]]
    # At 1.0 no call is opened; from then on it goes down by a hundredth, and here not to the target.
    assert calls[:3] == [[None, None]] * 3 and calls[3:5] == [[0.99, 0.99], [0.98, 0.98]]
    assert all(one == other for one, other in calls)
    assert 0.9 < min(one for one, _ in calls[3:]) < 0.99
    for retentions, figures, _ in plain[0][3:]:
        assert figures["moe-lrm/retention"] == figures["moe-lrm/retention_layer_1"] == pytest.approx(retentions[0])
    # Every step is what the reported ratio says.
    for (_, _, before), (_, figures, after) in zip(plain[0][3:], plain[0][4:], strict=False):
        if before[1] > 0:
            assert after[1] - before[1] == (1 if figures["moe-lrm/variance_ratio"] < 0.03 else -1)


def test_a_higher_tau_reaches_the_target_and_a_tiny_one_does_not_leave_the_top(gloo2: Pool) -> None:
    for tau, steps in ((9.0, [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10]), (1e-9, [0, 0, 1, 0, 1, 0])):
        case = Case(num_tokens=300, num_experts=4, lrm={**LRM, "adaptive_tau": tau})
        for seen in gloo2(step_by_step, case, len(steps)):
            assert [after.get(1, 0) for _, _, after in seen] == steps


def test_a_probing_call_says_nothing_of_dropping(gloo2: Pool) -> None:
    """Its draw has no variance; with it the ratio would be half of what it is."""
    case = Case(num_tokens=300, num_experts=4, lrm={**LRM, "probe_interval": 1})
    alone = gloo2(step_by_step, case, 6, 1)
    assert [after.get(1, 0) for _, _, after in alone[0]] == [0, 0, 1, 1, 1, 1]


def unended(case: Case) -> str:
    layer = layers.build(case)
    for iteration in (2, 3):
        layers.at_iteration(iteration)
        try:
            layers.forward_backward(layer, case)
        except RuntimeError as error:
            return str(error)
    return ""


def restored(case: Case) -> list[Any]:
    from megatron_lrmoe.mcore import adaptive

    layer = layers.build(case)
    adaptive.restore(Namespace(moe_lrm_adaptive_state={1: 7}))
    layers.at_iteration(5)
    retention = float(layers.forward_backward(layer, case).plan.retention)
    adaptive.restore(Namespace())
    again = layers.forward_backward(layer, case).plan
    try:
        adaptive.end_iteration(layer.lrm_config, 0, "cpu")
    except RuntimeError as error:
        message = str(error)
    adaptive.restart()
    return [retention, again, message]


def test_a_loop_that_never_ends_an_iteration_is_told_so(gloo2: Pool) -> None:
    for message in gloo2(unended, CASE):
        assert message.startswith("--moe-lrm-adaptive: iteration 3 began before iteration 2 was ended")


def test_a_checkpoint_brings_steps_back_or_none(gloo2: Pool) -> None:
    for retention, again, message in gloo2(restored, CASE):
        assert retention == 0.93 and again is None
        assert message == "found MoE layers [1], allowed are numbers up to 0"
