"""Replicas in a layer: gradients of every master against the reference, for plans of all kinds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_lrmoe.reference import stack_sources
from megatron_lrmoe.replicas.plan import Limits, Plan
from tests import layers
from tests.dist.test_router_grad import reference_of, same
from tests.dist.test_unbiased import DRAWS, draw, problems
from tests.gloo import Pool
from tests.layers import HIDDEN, Case

pytestmark = [pytest.mark.dist, pytest.mark.slow]

POLICY = {"replica_policy": "lrm", "replica_min_rows": 0}


def forced_plan(loads_SE: np.ndarray, quota_E: np.ndarray, slots: int, seed: int, every: bool) -> Plan:
    """Rows of random experts, or of every one, spread at random over its master and copies on other ranks."""
    from megatron_lrmoe.replicas.peers.finish import plan_from_rows
    from megatron_lrmoe.replicas.training import _repaired

    ranks, experts = loads_SE.shape
    draw = np.random.default_rng(seed)
    owner_E = np.repeat(np.arange(ranks), experts // ranks)
    free = [slots] * ranks
    rows_ER = np.zeros((experts, ranks), np.int64)
    for e in draw.permutation(experts):
        places = [owner_E[e]]
        for r in draw.permutation(ranks):
            if r != owner_E[e] and free[r] and (every or draw.random() < 0.5):
                free[r] -= 1
                places.append(r)
        share = draw.random(len(places)) + (0.5 if every else 0.1)
        rows = np.floor(share / share.sum() * loads_SE[:, e].sum()).astype(np.int64)
        rows[0] += loads_SE[:, e].sum() - rows.sum()
        rows_ER[e, places] = rows
    limits = Limits()
    plan = plan_from_rows(rows_ER, owner_E, loads_SE, quota_E, owner_E, limits)
    return _repaired(plan, loads_SE, False, limits)


@contextmanager
def forcing(seed: int, every: bool) -> Iterator[None]:
    """Let every call's plan be ``forced_plan``'s."""
    from megatron_lrmoe.mcore.replication import LayerReplicas

    def plan(self: Any, keep: Any) -> Plan:
        slots = self._config.replica_slots
        return forced_plan(np.array(keep.loads_SE), np.array(keep.policy_quota_E), slots, seed, every)

    with mock.patch.object(LayerReplicas, "plan", plan):
        yield


@contextmanager
def watching_plans(plans: list[Plan]) -> Iterator[None]:
    """Collect the plan of each call."""
    from megatron_lrmoe.mcore.replication import LayerReplicas

    original = LayerReplicas.timed_plan

    def timed_plan(self: Any, *args: Any, **kwargs: Any) -> tuple[Plan, float]:
        found = original(self, *args, **kwargs)
        plans.append(found[0])
        return found

    with mock.patch.object(LayerReplicas, "timed_plan", timed_plan):
        yield


@dataclass(frozen=True)
class Step:
    """One call on one rank: what it computed, by which plan."""

    result: layers.Result
    plan: Plan


def run_steps(case: Case, seeds: Sequence[int], every: bool | None = None) -> list[Step]:
    """One layer object through iterations that differ in tokens, routing, weights and plan.

    Args:
        case: its seed is replaced.
        seeds: of each iteration.
        every: of ``forced_plan``; None for the policy's own plans.
    """
    layer = layers.build(case)
    steps = []
    for iteration, seed in enumerate(seeds):
        layers.at_iteration(iteration)
        here, plans = replace(case, seed=seed), []
        layers.load_weights(layer, here)
        forced = nullcontext() if every is None else forcing(seed, every)
        with forced, watching_plans(plans):
            result = layers.forward_backward(layer, here)
        steps.append(Step(result, plans[-1]))
    return steps


def run_forced(cases: list[tuple[Case, int, bool]]) -> list[Step]:
    """Each case by its own layer and forced plan."""
    return [step for case, seed, every in cases for step in forced_once(case, seed, every)]


def forced_once(case: Case, seed: int, every: bool) -> list[Step]:
    plans: list[Plan] = []
    with forcing(seed, every), watching_plans(plans):
        return [Step(layers.run(case), plans[-1])]


def check(case: Case, results: list[layers.Result], tolerance: float) -> None:
    parts = [layers.settle(case, rank) for rank in range(len(results))]
    v = {name: stack_sources([part[name] for part in parts]) for name in ("x_TD", "g_TD", "map_TE", "probs_TE")}
    kept_TE = stack_sources([r.kept_TE for r in results if r.kept_TE is not None])
    assert not ((kept_TE > 0) & ~v["map_TE"]).any()
    reference = reference_of(case)
    same(
        stack_sources([r.out_TD for r in results]),
        reference.forward(v["x_TD"], v["probs_TE"], v["map_TE"]),
        tolerance,
    )
    exact = reference.backward(v["x_TD"], v["probs_TE"], v["g_TD"], kept_TE)
    same(stack_sources([r.dx_TD for r in results]), exact.dx_TD, tolerance)
    same(stack_sources([r.dprobs_TE for r in results]), exact.dprobs_TE, tolerance)
    for r in results:
        own = slice(r.experts.start, r.experts.stop)
        same(r.dfc1, exact.dfc1[own], tolerance)
        same(r.dfc2, exact.dfc2[own], tolerance)


FORCED = [
    (replace(case, lrm={**POLICY, "replica_slots": slots, **case.lrm}), seed, every)
    for seed, (case, slots, every) in enumerate(
        [
            (Case(), 2, False),
            (Case(), 4, True),
            (Case(lrm={"selection": "topk", "scope": "source"}), 4, True),
            (Case(lrm={"scope": "source"}), 2, False),
            (Case(lrm={"when": "forward"}), 3, True),
            (Case(lrm={"when": "forward", "scope": "source"}), 3, True),
            (Case(workload="hot_rank"), 2, True),
            (Case(workload="empty_rank"), 2, True),
            (Case(workload="one_token"), 2, True),
            (Case(lrm={"gemm": "grouped"}, dtype=torch.float32), 4, True),
            (Case(num_tokens=40, top_k=4, lrm={"retention": 0.8}), 1, False),
            (Case(lrm={"retention": 1.0}), 3, True),
        ]
    )
]


def check_all(cases: Sequence[Case], ranks: Sequence[Sequence[Step]]) -> None:
    """Every case's results against the reference; the ranks of a group make the same plan."""
    for i, case in enumerate(cases):
        results = [rank[i].result for rank in ranks]
        try:
            check(case, results, 1e-10 if case.dtype == torch.float64 else 1e-5)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
        plans = [rank[i].plan for rank in ranks]
        assert all(arrays_of(plan) == arrays_of(plans[0]) for plan in plans)


def arrays_of(plan: Plan) -> list[Any]:
    return [x.tolist() for x in (plan.expert_I, plan.rank_I, plan.rows_SI, plan.kept_I)]


def test_forced_plans_give_the_references_gradients(gloo2: Pool) -> None:
    ranks = gloo2(run_forced, FORCED, limit_s=120)
    check_all([case for case, _, _ in FORCED], ranks)
    assert sum(step.plan.replicas for step in ranks[0]) > 20


def without_tokens(experts: int) -> dict[str, torch.Tensor]:
    """A rank's share of a case in which it has no tokens."""
    none = {name: torch.zeros(0, HIDDEN, dtype=torch.float64) for name in ("x_TD", "g_TD")}
    none |= {"map_TE": torch.zeros(0, experts, dtype=torch.bool)}
    return none | {"probs_TE": torch.zeros(0, experts, dtype=torch.float64)}


BASE4 = Case(num_tokens=12, expert_parallel=4)
EVEN4 = Case(num_tokens=24, expert_parallel=4, workload="balanced")
FULL = 6
"""Slots with which each of 4 ranks holds all 8 experts."""
FORCED4 = [
    (replace(case, lrm={**POLICY, "replica_slots": slots, **case.lrm}), seed, every)
    for seed, (case, slots, every) in enumerate(
        [
            (BASE4, 2, False),
            (replace(BASE4, lrm={"scope": "source"}), 3, False),
            (replace(BASE4, workload="hot_rank", lrm={"when": "forward"}), 2, True),
            (replace(BASE4, given=[{}, {}, without_tokens(8), {}]), 3, True),
            (replace(BASE4, given=[{}, {}, without_tokens(8), {}], lrm={"scope": "source"}), 2, False),
            (replace(EVEN4, lrm={"retention": 0.8}), FULL, True),
            (replace(EVEN4, lrm={"retention": 0.8, "gemm": "grouped"}, dtype=torch.float32), FULL, True),
        ]
    )
]


def test_forced_plans_of_four_ranks_give_the_references_gradients(gloo4: Pool) -> None:
    ranks = gloo4(run_forced, FORCED4, limit_s=120)
    check_all([case for case, _, _ in FORCED4], ranks)
    plans = [step.plan for step in ranks[0]]
    assert min(plan.replicas for plan in plans) > 0 and sum(plan.replicas for plan in plans) > 60
    # In a full plan every expert has a replica on every rank but its owner's.
    full = [plan for (case, _, _), plan in zip(FORCED4, plans, strict=True) if case.lrm["replica_slots"] == FULL]
    assert [plan.slots_R.tolist() for plan in full] == [[FULL] * 4] * 2


@pytest.mark.parametrize("every", [False, True])
def test_one_layer_bears_another_plan_in_every_step(gloo4: Pool, every: bool) -> None:
    case = replace(BASE4, lrm={**POLICY, "replica_slots": 3})
    seeds = range(10, 14)
    ranks = gloo4(run_steps, case, seeds, every)
    check_all([replace(case, seed=seed) for seed in seeds], ranks)
    placed = [list(zip(*arrays_of(step.plan)[:2], strict=True)) for step in ranks[0]]
    assert all(one != other for i, one in enumerate(placed) for other in placed[:i])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("policy", ["lrm", "ultraep", "symi"])
def test_policies_give_the_references_gradients(gloo4: Pool, policy: str, dtype: torch.dtype) -> None:
    lrm = {"replica_policy": policy, "replica_min_rows": 0}
    case = replace(BASE4, workload="hot_rank", lrm=lrm, dtype=dtype)
    seeds = range(20, 23)
    ranks = gloo4(run_steps, case, seeds)
    check_all([replace(case, seed=seed) for seed in seeds], ranks)
    plans = [step.plan for step in ranks[0]]
    # SYMI goes by the iteration before.
    assert all(plan.replicas > 0 for plan in plans[policy == "symi" :])
    for plan in plans:
        assert (plan.kept_I[plan.rows_I > 0] > 0).all()


UNBIASED = {
    "hot rank": Case(num_tokens=12, num_experts=4, workload="hot_rank", lrm=POLICY),
    # One row goes to a replica, whose share of the quota of 2 is 0.
    "replica of one row": Case(
        num_tokens=11,
        num_experts=4,
        top_k=1,
        workload="balanced",
        seed=6,
        lrm={**POLICY, "replica_tolerance": 1.0, "retention": 0.4, "scope": "source"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNBIASED)
def test_mean_gradient_is_the_full_gradient(gloo2: Pool, name: str) -> None:
    case = UNBIASED[name]
    plan = gloo2(run_steps, case, [case.seed])[0][0].plan
    assert plan.replicas > 0 and (plan.kept_I[plan.rows_I > 0] > 0).all()
    if name == "replica of one row":
        assert plan.rows_I[plan.num_experts :].tolist() == [1]
    ranks = gloo2(draw, case, DRAWS, limit_s=120)
    full_L, sample_nL = (torch.cat([rank[i] for rank in ranks], dim=-1) for i in (0, 1))
    assert problems(sample_nL, full_L) == []
    # Every pair is kept at times.
    kept_nTE = torch.cat([kept for _, _, kept in ranks], dim=1)
    map_TE = stack_sources([layers.settle(case, rank)["map_TE"] for rank in range(2)])
    assert torch.equal(kept_nTE.amax(0) > 0, map_TE)
