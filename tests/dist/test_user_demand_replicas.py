"""What users of MoE training have run into, as in test_user_demand.py, with replicas; and a call without any."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_lrmoe.compute.replicas import Replication
from megatron_lrmoe.reference import stack_sources
from megatron_lrmoe.replicas.plan import Plan
from tests import layers
from tests.dist.test_replicas import POLICY, forcing, watching_plans
from tests.dist.test_router_grad import reference_of
from tests.dist.test_user_demand import even, routing
from tests.dist.test_user_demand_parallel import a09_case, averaged
from tests.gloo import Pool
from tests.layers import Case

pytestmark = [pytest.mark.dist, pytest.mark.slow]

A08 = Case(num_experts=4, workload="balanced", dtype=torch.float32, lrm={**POLICY, "retention": 1.0})
SEED = 0
"""Of the plan in which expert 0 has a replica on rank 1, where each rank has one slot."""
Pair = tuple[torch.Tensor, torch.Tensor]


@contextmanager
def watching_replications(record: list[Replication]) -> Iterator[None]:
    """Collect the replicas of each call that has some."""
    original = Replication.push

    def push(self: Replication) -> None:
        record.append(self)
        original(self)

    with mock.patch.object(Replication, "push", push):
        yield


def in_ddp(case: Case) -> tuple[Any, Any]:
    """A layer with gradient accumulation fusion, and itself in Megatron's DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    layer = layers.build(case)
    layer.config.gradient_accumulation_fusion = True
    model = DistributedDataParallel(layer.config, DistributedDataParallelConfig(), layer)
    model.zero_grad_buffer()
    return layer, model


def microbatch(model: Any, layer: Any, case: Case) -> None:
    x, g_TD = layers.leaves(layer, case)
    out = model(x)[0]
    out.backward(g_TD.view_as(out))


def weights_of(layer: Any) -> dict[int, Any]:
    """fc1 and fc2 weights of this rank's experts."""
    experts = zip(layer.local_expert_indices, layer.experts.local_experts, strict=True)
    return {index: (e.linear_fc1.weight, e.linear_fc2.weight) for index, e in experts}


def held_by(call: Replication, rank: int) -> dict[int, Pair]:
    """What lies in this rank's slots, by expert."""
    return {c.expert: (call._slots.fc1[c.slot], call._slots.fc2[c.slot]) for c in call._copies if c.holder == rank}


def copied(pairs: dict[int, Pair]) -> dict[int, Pair]:
    return {index: (fc1.detach().clone(), fc2.detach().clone()) for index, (fc1, fc2) in pairs.items()}


@dataclass(frozen=True)
class AddedUp:
    """What one rank has after two microbatches: main gradients, weights, slots, and the copies (expert, holder)."""

    main_grads: dict[int, list[torch.Tensor]]
    weights: dict[int, Pair]
    held: dict[int, Pair]
    copies: list[tuple[int, int]]


def add_up(case: Case) -> AddedUp:
    """Every instance's partial gradient is 1.0 on rank 0 and 2.0 on rank 1."""
    from megatron_lrmoe.compute import experts

    def partial(g: torch.Tensor, a: torch.Tensor, counts: Any, _: Any) -> list[torch.Tensor]:
        return [torch.full((g.shape[1], a.shape[1]), 1.0 + dist.get_rank()) for _ in counts]

    layer, model = in_ddp(case)
    calls: list[Replication] = []
    with (
        mock.patch.object(experts, "weight_grads", partial),
        forcing(SEED, every=True),
        watching_replications(calls),
        model.no_sync(),
    ):
        microbatch(model, layer, case)
        microbatch(model, layer, case)
    held, slots = held_by(calls[-1], dist.get_rank()), calls[-1]._slots
    assert not any(slot.requires_grad or slot.grad is not None for slot in (slots.fc1, slots.fc2))
    return AddedUp(
        {i: [w.main_grad.clone() for w in pair] for i, pair in weights_of(layer).items()},
        copied(weights_of(layer)),
        copied(held),
        [(copy.expert, copy.holder) for copy in calls[-1]._copies],
    )


def test_a08_the_owners_partial_and_the_replicas_are_added_exactly_once(gloo2: Pool) -> None:
    ranks = gloo2(add_up, replace(A08, lrm={**A08.lrm, "replica_slots": 1}))
    copies = ranks[0].copies
    assert (0, 1) in copies and len(copies) == 2 and copies == ranks[1].copies
    for rank, here in enumerate(ranks):
        assert here.main_grads.keys() == {2 * rank, 2 * rank + 1}
        for expert, main_grads in here.main_grads.items():
            once = 1.0 + rank + sum(1.0 + holder for e, holder in copies if e == expert)
            assert all((grad == 2 * once).all() for grad in main_grads), (expert, copies)
        # The slots still hold the owner's weights, and nothing of the gradient.
        for expert, slots in here.held.items():
            assert all(torch.equal(*pair) for pair in zip(slots, ranks[1 - rank].weights[expert], strict=True))
    assert sum(len(here.held) for here in ranks) == len(copies)


def six_steps(case: Case, forced: bool) -> tuple[dict[int, Pair], dict[int, Pair]]:
    """EP2 x DP2: weights of this rank's experts after six steps, and what is then brought to its slots."""
    layer, model = in_ddp(case)
    group = dist.get_rank() // 2
    calls: list[Replication] = []

    def run(number: int) -> None:
        with forcing(number, every=True), watching_replications(calls):
            microbatch(model, layer, replace(case, seed=number))

    for step in range(6):
        layers.at_iteration(step)
        model.zero_grad_buffer()
        with model.no_sync():
            run(4 * step + group)
        run(4 * step + 2 + group)
        model.finish_grad_sync()
        with torch.no_grad():
            for weight in layer.parameters():
                weight.sub_(weight.main_grad, alpha=0.01)
    run(30 + group)
    assert bool(calls) == forced
    held = held_by(calls[-1], dist.get_rank() % 2) if forced else {}
    return copied(weights_of(layer)), copied(held)


def test_a08_after_six_steps_peers_and_copies_are_bit_equal(gloo4: Pool) -> None:
    ranks = gloo4(six_steps, A08, True)
    plain = gloo4(six_steps, replace(A08, lrm={"retention": 1.0}, always_compact=True), False)
    for rank, (weights, held) in enumerate(ranks):
        assert held
        for expert, pair in held.items():
            owner, _ = ranks[rank // 2 * 2 + expert // 2]
            assert all(torch.equal(*both) for both in zip(pair, owner[expert], strict=True))
        for expert, pair in weights.items():
            for fc in (0, 1):
                assert torch.equal(pair[fc], ranks[(rank + 2) % 4][0][expert][fc])
                torch.testing.assert_close(pair[fc], plain[rank][0][expert][fc], rtol=1e-5, atol=1e-6)
                assert not torch.equal(pair[fc], layers.settle(A08, 0)[f"fc{fc + 1}"][expert].float())


def averaged_with_replicas(case: Case) -> tuple[Any, int]:
    plans: list[Plan] = []
    with forcing(1, every=True), watching_plans(plans):
        return averaged(case), plans[-1].replicas


@pytest.mark.parametrize("retention", [1.0, 0.8])
def test_a09_expert_gradients_do_not_depend_on_expert_parallelism(gloo2: Pool, retention: float) -> None:
    """DP2 with EP2 and replicas: the mean over ranks of the gradients of the kept pairs, as with EP1."""
    case = a09_case(retention, 2)
    found = gloo2(averaged_with_replicas, replace(case, lrm={**case.lrm, **POLICY}))
    assert found[0][1] == 4
    shared = [rank for rank, _ in found]
    v = {name: stack_sources([case.given[r][name] for r in range(2)]) for name in ("x_TD", "g_TD", "probs_TE")}
    kept_TE = stack_sources([kept for _, kept in shared])
    assert int(kept_TE.sum()) == int(40 * retention)
    exact = reference_of(case).backward(v["x_TD"], v["probs_TE"], v["g_TD"], kept_TE)
    alone = gloo2(averaged, a09_case(retention, 1))
    for index in range(4):
        owner = shared[index // 2][0]
        for fc, dense in enumerate((exact.dfc1[index] / 2, exact.dfc2[index] / 2)):
            scale = dense.abs().max()
            torch.testing.assert_close(owner[index][fc].double() / scale, dense / scale, rtol=1e-5, atol=1e-6)
            if retention == 1:
                ratio = float(owner[index][fc].norm() / alone[0][0][index][fc].norm())
                assert ratio == pytest.approx(1, rel=1e-5)


LOADS = routing([[0]] * 4 + [[1]] * 2 + [[2]] * 3 + [[3]] * 3, 4)
C8 = Case(
    num_tokens=3,
    num_experts=4,
    top_k=1,
    expert_parallel=4,
    given=[{"map_TE": part, "probs_TE": even(part)} for part in LOADS.split(3)],
)


def plan_of(case: Case) -> Plan:
    plans: list[Plan] = []
    with watching_plans(plans):
        layers.run(case)
    return plans[-1]


@pytest.mark.parametrize(
    ("lrm", "copies"),
    [
        ({"retention": 1.0, "replica_min_rows": 0}, [2, 1, 1, 1]),
        # Quotas of 3, 1, 2 and 2 rows.
        ({"retention": 0.8, "replica_min_rows": 0, "replica_limits": "backward", "rank_rows": 3}, [1, 1, 1, 1]),
        ({"retention": 1.0, "replica_limits": "backward", "rank_rows": 3}, [2, 1, 1, 1]),
        # One row off the busiest rank, for one copy.
        ({"retention": 1.0, "replica_min_rows": 1}, [2, 1, 1, 1]),
        ({"retention": 1.0, "replica_min_rows": 2}, [1, 1, 1, 1]),
    ],
)
def test_c08_ranks_agree_on_the_golden_plans(gloo4: Pool, lrm: dict[str, Any], copies: list[int]) -> None:
    """Loads of 4, 2, 3 and 3 rows, and room for 3 on each rank."""
    plans = gloo4(plan_of, replace(C8, lrm={"replica_policy": "lrm", "replica_tolerance": 1.0, **lrm}))
    assert [plan.expert_I.tolist() for plan in plans] == [plans[0].expert_I.tolist()] * 4
    assert [plan.rank_I.tolist() for plan in plans] == [plans[0].rank_I.tolist()] * 4
    assert plans[0].rows_SI.sum() == 12
    assert [plans[0].expert_I.tolist().count(e) for e in range(4)] == copies


LAYOUT = (
    "num_local_experts",
    "num_experts",
    "local_expert_indices",
    "sort_input_by_local_experts",
    "restore_output_by_local_experts",
)


def messages_and_layouts(case: Case) -> list[tuple[int, list[list[Any]]]]:
    """Of a call with replicas, two without and one in evaluation: messages sent or taken, and layouts.

    A layout is seen when rows are sent, when outputs are sent back, and after backward.
    """
    from megatron_lrmoe.mcore.dispatcher import LRMAlltoAllTokenDispatcher

    layer = layers.build(case)
    seen: list[list[Any]] = []
    messages: list[int] = []

    def see(*_: Any) -> None:
        values = [getattr(layer.token_dispatcher, name) for name in LAYOUT]
        seen.append([value.tolist() if isinstance(value, torch.Tensor) else value for value in values])

    def seeing(name: str) -> Any:
        original = getattr(LRMAlltoAllTokenDispatcher, name)
        return mock.patch.object(
            LRMAlltoAllTokenDispatcher, name, lambda self, *args, **kwargs: (see(), original(self, *args, **kwargs))[1]
        )

    batch = dist.batch_isend_irecv
    found = []
    see()
    stock = seen.copy()
    with (
        seeing("token_dispatch"),
        seeing("token_combine"),
        mock.patch.object(dist, "batch_isend_irecv", lambda ops: (messages.append(len(ops)), batch(ops))[1]),
    ):
        for kind in ("replicas", "none", "none", "evaluation"):
            seen.clear()
            messages.clear()
            layer.train(kind != "evaluation")
            if kind == "replicas":
                with forcing(0, every=True):
                    layers.forward_backward(layer, case)
            else:
                layers.forward_backward(layer, case)
            see()
            found.append((sum(messages), [*stock, *seen]))
    return found


def test_without_replicas_nothing_is_sent_and_the_layout_is_stock(gloo2: Pool) -> None:
    for rank, calls in enumerate(gloo2(messages_and_layouts, Case(lrm={**POLICY, "replica_min_rows": 10**6}))):
        (sent, layouts), *others = calls
        stock = layouts[0]
        assert stock[:3] == [4, 8, list(range(4 * rank, 4 * rank + 4))]
        assert sent > 0 and layouts[1][:2] == layouts[2][:2] == [6, 12]
        for messages, seen in others:
            assert messages == 0
            assert seen == [stock] * 4
