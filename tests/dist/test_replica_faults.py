"""Replicas when something goes wrong: lost and silent peers, and slots that belong to another call."""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_lrmoe.compute.replicas import Copy, Replication, Slots
from megatron_lrmoe.compute.transfer import Message, TorchTransfer, Transfer
from tests import layers
from tests.dist.test_replicas import POLICY, forcing
from tests.gloo import Pool
from tests.layers import Case

pytestmark = [pytest.mark.dist, pytest.mark.slow]

TIMEOUT_S = 2.0


class Instant:
    """A transfer whose messages arrive at once, and which tells how many there were."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def start(self, messages: Sequence[Message], what: str) -> Callable[[], None]:
        """See Transfer."""
        self.counts.append(len(messages))
        return lambda: None


def replication(layer: int, rank: int, slots: Slots, transfer: Transfer, kept: int = 3) -> Replication:
    """Expert 0 of rank 0 with a replica in slot 0 of rank 1; two experts a rank."""
    copy = Copy(expert=0, local=0, owner=0, holder=1, slot=0, kept=kept)
    weights = [torch.full((4, 3), float(rank))] * 2, [torch.full((3, 2), float(rank))] * 2
    return Replication([copy], rank, slots, transfer, lambda: weights, f"layer {layer}")


def empty_slots() -> Slots:
    return Slots(2, torch.zeros(4, 3), torch.zeros(3, 2))


def test_slots_are_not_taken_while_their_weights_are_awaited() -> None:
    slots = empty_slots()
    first, second = (replication(layer, 1, slots, Instant()) for layer in (1, 2))
    first.push()
    with pytest.raises(RuntimeError, match="replica slots were taken before the experts that wait for them have run"):
        second.push()
    first.weights()
    second.push()
    with pytest.raises(RuntimeError, match="replica slots were taken"):
        first.restore()


def test_another_calls_weights_are_not_used() -> None:
    slots, transfer = empty_slots(), Instant()
    first, second = (replication(layer, 1, slots, transfer) for layer in (1, 2))
    first.push()
    first.weights()
    first.restore()
    assert transfer.counts == [2]
    second.push()
    second.weights()
    with pytest.raises(RuntimeError, match="layer 1: another call's weights are in the replica slots"):
        first.weights()
    first.restore()
    assert transfer.counts == [2, 2, 2]
    first.weights()
    with pytest.raises(RuntimeError, match="layer 2: another call's weights"):
        second.weights()


def test_a_replica_without_kept_rows_is_not_brought_again() -> None:
    slots, transfer = empty_slots(), Instant()
    first = replication(1, 1, slots, transfer, kept=0)
    first.push()
    first.weights()
    slots.occupy(second := object())
    slots.awaited = False
    assert slots.occupant is second
    first.restore()
    first.weights()
    first.send_home([torch.zeros(4, 3)] * 2, [torch.zeros(3, 2)] * 2)
    assert transfer.counts == [2, 0, 0]


def silent_peer(active: int, what: str) -> tuple[str, float] | None:
    """What the active rank is told, and after how many seconds, where the other one sends or takes nothing."""
    # The group's own start has no more time than its messages.
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    told = told_of(group, what) if dist.get_rank() == active else None
    dist.barrier()
    return told


def told_of(group: Any, what: str) -> tuple[str, float]:
    """The error of moving weights or gradients in this group, which has to fail, and after how many seconds."""
    rank = dist.get_rank(group)
    here = replication(3, rank, empty_slots(), TorchTransfer(group))
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        if what == "weights":
            here.push()
            here.weights()
        else:
            here.send_home([torch.zeros(4, 3)] * 2, [torch.zeros(3, 2)] * 2)
            here.arrived()
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("what", ["weights", "gradients"])
@pytest.mark.parametrize("active", [0, 1], ids=["owner", "holder"])
def test_a_silent_peer_is_named_within_the_groups_timeout(gloo2: Pool, active: int, what: str) -> None:
    told, seconds = gloo2(silent_peer, active, what)[active]
    assert told.startswith(f"layer 3: replica {what}: a transfer with ranks {1 - active} of the job has failed: ")
    assert seconds < 10 * TIMEOUT_S


def lose_a_peer() -> None:
    """EP2 x DP2: rank 1 dies before weights are brought, rank 3 before gradients are sent home."""
    at = "push" if dist.get_rank() < 2 else "send_home"
    original = getattr(Replication, at)

    def fault(self: Replication, *args: Any) -> Any:
        if dist.get_rank() % 2 == 1:
            os._exit(1)
        return original(self, *args)

    case = Case(num_tokens=12, workload="balanced", lrm={**POLICY, "retention": 0.8})
    # Once without a fault: a rank that still compiles the planner would notice nothing for half a minute.
    with forcing(0, every=True):
        layers.run(case)
    dist.barrier()
    with (
        mock.patch.object(Replication, at, fault),
        forcing(0, every=True),
    ):
        layers.run(case)


def test_a_lost_peer_ends_the_others_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loses a peer is told of the layer and the peer."""
    # As long as the survivors may take to notice.
    monkeypatch.setattr("tests.gloo.GRACE_S", 30.0)
    pool = Pool(4)
    try:
        with pytest.raises(RuntimeError) as caught:
            pool(lose_a_peer, limit_s=180)
    finally:
        pool.close()
    # Rank 0 hears of it when it sends weights, or in Megatron's own exchange after that.
    said = "\n".join(caught.value.__notes__)
    assert (
        "layer 1: replica weights were on their way among ranks [1] of the group" in said
        or "layer 1: replica weights: a transfer with ranks 1 of the job has failed" in said
    )
    notes = {note.partition(" failed:\n")[0]: note for note in caught.value.__notes__ if note.startswith("rank ")}
    assert notes.keys() == {f"rank {rank}" for rank in range(4)}
    assert all(f"rank {rank} ended with exit code 1" in notes[f"rank {rank}"] for rank in (1, 3))
    assert "\nRuntimeError: " in notes["rank 0"]
    assert (
        "\nRuntimeError: layer 1: replica gradients: a transfer with ranks 3 of the job has failed: " in notes["rank 2"]
    )
