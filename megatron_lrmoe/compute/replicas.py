"""Replicas of one layer call: weights from the owners into slots, gradients from the slots back to the owners."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from megatron_lrmoe.compute.transfer import Message, Transfer


@dataclass(frozen=True)
class Copy:
    """A replica.

    Args:
        expert: of the layer.
        local: its number among the owner's experts.
        owner, holder: ranks of the group.
        slot: of the holder.
        kept: rows that keep their backward there; 0 for a forward-only replica.
    """

    expert: int
    local: int
    owner: int
    holder: int
    slot: int
    kept: int


class Slots:
    """Room for the weights of other ranks' experts, shared by all layers of one shape.

    Plain tensors and no Parameters: DDP, optimizers and checkpoints never see them. What lies in them belongs to one
    layer call at a time; a later call of any layer takes its place.

    Args:
        many: slots of this rank.
        fc1, fc2: weights of one expert, which give shapes, dtype and device.
    """

    def __init__(self, many: int, fc1: torch.Tensor, fc2: torch.Tensor):
        self.fc1, self.fc2 = (torch.empty(many, *w.shape, dtype=w.dtype, device=w.device) for w in (fc1, fc2))
        self.occupant: object | None = None
        self.awaited = False

    def occupy(self, occupant: object) -> None:
        """Let the slots belong to another call.

        Raises:
            RuntimeError: weights are on their way that nobody has waited for.
        """
        if self.awaited:
            raise RuntimeError("replica slots were taken before the experts that wait for them have run")
        self.occupant, self.awaited = occupant, True


@dataclass
class Moved:
    """What a call has moved on this rank, for the log: bytes sent, and seconds that the host waited."""

    pushed: int = 0
    returned: int = 0
    waited: float = 0.0


class Replication:
    """The replicas of one layer call, as its experts see them, in forward and in backward.

    Args:
        copies: of all ranks, in one order on all of them.
        rank: this rank's number in the group.
        slots: of this rank, at least as many as it holds copies.
        transfer: back end.
        live_weights: gives this rank's fc1 and fc2 weights as they are now; the distributed optimizer puts them
            elsewhere now and then.
        what: the layer, for errors.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        rank: int,
        slots: Slots,
        transfer: Transfer,
        live_weights: Callable[[], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
        what: str,
    ):
        self._copies, self._rank, self._slots, self._transfer, self._what = copies, rank, slots, transfer, what
        self._live_weights = live_weights
        self._wait: Callable[[], None] | None = None
        self._home: list[tuple[Copy, torch.Tensor, torch.Tensor]] = []
        self.moved = Moved()

    @property
    def slots(self) -> int:
        """Slots of this rank, empty ones among them."""
        return len(self._slots.fc1)

    def push(self) -> None:
        """Begin to bring the copies' weights into the slots."""
        self._bring(self._copies)

    def restore(self) -> None:
        """In backward, bring those that are needed again, unless they still lie in the slots."""
        if self._slots.occupant is not self:
            self._bring([copy for copy in self._copies if copy.kept])

    def _bring(self, copies: Sequence[Copy]) -> None:
        self._slots.occupy(self)
        fc1, fc2 = self._live_weights()
        messages: list[Message] = []
        for copy in copies:
            if copy.owner == self._rank:
                pair = [fc1[copy.local].detach(), fc2[copy.local].detach()]
                messages += [Message(copy.holder, weight, sends=True) for weight in pair]
                self.moved.pushed += sum(weight.nbytes for weight in pair)
            elif copy.holder == self._rank:
                pair = [self._slots.fc1[copy.slot], self._slots.fc2[copy.slot]]
                messages += [Message(copy.owner, weight, sends=False) for weight in pair]
        self._wait = self._transfer.start(messages, f"{self._what}: replica weights")

    def note(self, error: BaseException) -> None:
        """Tell an error of another transfer that weights were on their way too, and with which ranks of the group."""
        if self._wait is not None:
            ranks = {rank for copy in self._copies for rank in (copy.owner, copy.holder)} - {self._rank}
            error.add_note(f"{self._what}: replica weights were on their way among ranks {sorted(ranks)} of the group")

    def weights(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """fc1 and fc2 of every slot; waits for those on their way."""
        if self._wait is not None:
            self._waiting(self._wait)
            self._wait, self._slots.awaited = None, False
        if self._slots.occupant is not self:
            raise RuntimeError(f"{self._what}: another call's weights are in the replica slots")
        return list(self._slots.fc1.unbind()), list(self._slots.fc2.unbind())

    def send_home(self, dfc1: Sequence[torch.Tensor], dfc2: Sequence[torch.Tensor]) -> None:
        """Begin to send the weight gradients of this rank's slots to the masters, in fp32 or wider.

        Args:
            dfc1: of each slot's fc1; those of slots without kept rows stay here.
            dfc2: of each slot's fc2.
        """
        messages: list[Message] = []
        for copy in self._copies:
            if not copy.kept:
                continue
            if copy.holder == self._rank:
                pair = [_wide(grads[copy.slot]) for grads in (dfc1, dfc2)]
                messages += [Message(copy.owner, grad, sends=True) for grad in pair]
                self.moved.returned += sum(grad.nbytes for grad in pair)
            elif copy.owner == self._rank:
                like = [w[copy.local] for w in self._live_weights()]
                home1, home2 = (torch.empty_like(w, dtype=_wide_dtype(w.dtype), requires_grad=False) for w in like)
                messages += [Message(copy.holder, grad, sends=False) for grad in (home1, home2)]
                self._home.append((copy, home1, home2))
        self._wait = self._transfer.start(messages, f"{self._what}: replica gradients")

    def arrived(self) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Waits for the gradients of this rank's experts: its own number, fc1's and fc2's, in the copies' order."""
        if self._wait is not None:
            self._waiting(self._wait)
            self._wait = None
        home, self._home = self._home, []
        return [(copy.local, dfc1, dfc2) for copy, dfc1, dfc2 in home]

    def _waiting(self, wait: Callable[[], None]) -> None:
        start = perf_counter()
        wait()
        self.moved.waited += perf_counter() - start


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _wide(grad: torch.Tensor) -> torch.Tensor:
    return grad.to(_wide_dtype(grad.dtype)).contiguous()
