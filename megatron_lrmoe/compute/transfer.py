"""Moving weights to replicas and their gradients home: one small interface, and torch.distributed behind it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Message:
    """One tensor between two ranks of the expert-parallel group; this rank is one of them.

    Args:
        peer: the other rank's number in the group.
        tensor: contiguous; read until the transfer is over if it is sent, written if it is received.
        sends: whether this rank sends it.
    """

    peer: int
    tensor: torch.Tensor
    sends: bool


class Transfer(Protocol):
    """What a back end provides; between two ranks, messages arrive in the order in which they were given."""

    def start(self, messages: Sequence[Message], what: str) -> Callable[[], None]:
        """Begin to move the messages.

        Args:
            messages: of this rank; the peers start theirs in the same order.
            what: for errors, such as 'layer 3: replica weights'.

        Returns:
            Waits until what was to be received may be read, and what was sent may be written. It raises a RuntimeError
            that says what, and names the peer, where a transfer has failed.
        """
        ...


class TorchTransfer:
    """Point-to-point messages of torch.distributed: NCCL on GPUs, gloo on CPUs.

    Args:
        group: the expert-parallel group.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._global = dist.get_process_group_ranks(group)

    def start(self, messages: Sequence[Message], what: str) -> Callable[[], None]:
        """See Transfer."""
        if not messages:
            return _nothing
        ops = [
            dist.P2POp(dist.isend if m.sends else dist.irecv, m.tensor, self._global[m.peer], self._group)
            for m in messages
        ]
        try:
            works: list[Any] = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise RuntimeError(
                f"{what}: could not be sent to or from ranks {self._peers(messages)}: {error}"
            ) from error
        # NCCL coalesces them into one piece of work, gloo has one for each.
        owners = list(messages) if len(works) == len(messages) else [None] * len(works)

        def wait() -> None:
            for work, message in zip(works, owners, strict=True):
                try:
                    work.wait()
                except RuntimeError as error:
                    peers = self._peers(messages if message is None else [message])
                    raise RuntimeError(
                        f"{what}: a transfer with ranks {peers} of the job has failed: {error}"
                    ) from error

        return wait

    def _peers(self, messages: Sequence[Message]) -> str:
        return ", ".join(str(self._global[peer]) for peer in sorted({m.peer for m in messages}))


def _nothing() -> None:
    """No message, no wait."""
