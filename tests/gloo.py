"""Gloo worker processes that stay alive across test cases, and a watchdog that fails a case which hangs.

Starting Megatron costs several seconds per process, so the workers of a world size start once and run one
case after another. A case is a module-level function, called with the same arguments in every rank:

    def sum_over_ranks(x):
        torch.distributed.all_reduce(x)
        return x

    def test_sum(gloo2):
        assert gloo2(sum_over_ranks, torch.ones(1)) == [torch.tensor([2.0])] * 2

Functions, arguments and results travel by pickle: functions by name, tensors by value.
"""

import contextlib
import faulthandler
import gc
import io
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lrmoe.device import activate_if_needed

ROOT = Path(__file__).resolve().parent.parent
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
START_LIMIT_S = 180.0
# How long the other ranks may take to report as well once one rank has failed: long enough for an assertion
# that fails everywhere, short enough not to be felt when they wait in a collective.
GRACE_S = 1.0
STACK_LIMIT_S = 3.0


class HangError(RuntimeError):
    """A case ran into its time limit; the message holds the Python stack of every silent rank."""


class DeadRankError(RuntimeError):
    """A worker process ended in the middle of a case."""


class _Pickler(pickle.Pickler):
    """Tensors as torch.save writes them: their own pickle names a function that Megatron replaces by its own.

    Reading one back would import Megatron into the process of the tests.
    """

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor:
            return NotImplemented
        buffer = io.BytesIO()
        torch.save(obj, buffer)
        return _tensor_from_bytes, (buffer.getvalue(),)


def _tensor_from_bytes(content: bytes) -> torch.Tensor:
    return torch.load(io.BytesIO(content))


def _to_bytes(content: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(content)
    return buffer.getvalue()


@dataclass(frozen=True)
class _Reply:
    """What one rank has to say about a case: a value, or an error with its traceback as text."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


@dataclass(frozen=True)
class _Rank:
    index: int
    process: subprocess.Popen[bytes]
    pipe: connection.Connection
    stacks: Path

    def receive(self) -> _Reply:
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            code = self.process.wait()
            return _Reply(error=DeadRankError(f"rank {self.index} ended with exit code {code}"))

    def stack(self) -> str:
        """Python stacks of all threads, written by a signal handler even while the worker waits in C code."""
        self.process.send_signal(signal.SIGUSR1)
        text, end = "", time.monotonic() + STACK_LIMIT_S
        while time.monotonic() < end:
            time.sleep(0.1)
            before, text = text, self.stacks.read_text()
            if text and text == before:
                return text
        return text or "no answer to SIGUSR1\n"

    def kill(self) -> None:
        """End the worker and whatever it started (it leads a process group of its own)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()


class Pool:
    """Workers of one world size, started by the first case and again by the first case after a failure.

    Args:
        world_size: number of ranks.
        with_megatron: activate the CPU device, which imports Megatron, before the first case.
    """

    def __init__(self, world_size: int, with_megatron: bool = True) -> None:
        self.world_size = world_size
        self.with_megatron = with_megatron
        self._ranks: list[_Rank] = []
        self._store: dist.TCPStore | None = None
        self._clean_up = contextlib.ExitStack()

    def __call__(self, function: Callable[..., Any], *args: Any, limit_s: float = 60.0) -> list[Any]:
        """Run ``function(*args)`` in every rank and return the results in rank order.

        Any failure ends all workers, so that no half-finished state reaches the next case. A function that
        expects an error has to catch it itself.

        Raises:
            BaseException: the error of the rank that failed first, with a note per rank that did not finish.
            HangError: no rank failed, but some did not finish in ``limit_s`` seconds.
        """
        request = _to_bytes((function, args))
        if not self._ranks:
            self._start()
        return self._run(request, limit_s)

    def close(self) -> None:
        """End the workers; the next case starts new ones."""
        self._clean_up.close()
        self._ranks, self._store = [], None

    @property
    def pids(self) -> list[int]:
        """Process ids of the living workers."""
        return [rank.process.pid for rank in self._ranks]

    def _start(self) -> None:
        folder = Path(self._clean_up.enter_context(tempfile.TemporaryDirectory(prefix="gloo-")))
        # Hosted here, on a port that the system picks: no race for a free one, no rank whose death ends it.
        store = self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for index in range(self.world_size):
            rank = _spawn(index, self.world_size, store.port, folder / f"rank{index}.txt")
            self._clean_up.callback(rank.kill)
            self._ranks.append(rank)
        self._run(_to_bytes((_join_group, (self.with_megatron,))), START_LIMIT_S)

    def _run(self, request: bytes, limit_s: float) -> list[Any]:
        try:
            for rank in self._ranks:
                with contextlib.suppress(BrokenPipeError):  # receive() reports a dead rank
                    rank.pipe.send_bytes(request)
            replies = self._collect(limit_s)
            silent = [rank for rank in self._ranks if rank.index not in replies]
            failed = {index: reply for index, reply in replies.items() if reply.error is not None}
            if silent or failed:
                raise _failure(failed, silent, limit_s)
            return [replies[rank.index].value for rank in self._ranks]
        except BaseException:
            self.close()
            raise

    def _collect(self, limit_s: float) -> dict[int, _Reply]:
        """Replies by rank, in order of arrival, until all are in or the limit or grace period is over."""
        replies: dict[int, _Reply] = {}
        waiting: dict[Any, _Rank] = {rank.pipe: rank for rank in self._ranks}
        end = time.monotonic() + limit_s
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                replies[rank.index] = rank.receive()
                if replies[rank.index].error is not None:
                    end = min(end, time.monotonic() + GRACE_S)
        return replies


def _failure(failed: dict[int, _Reply], silent: Iterable[_Rank], limit_s: float) -> BaseException:
    stacks = [f"rank {rank.index} of the case was still at:\n{rank.stack()}" for rank in silent]
    if not failed:
        return HangError("\n".join([f"not finished after {limit_s:g} s", *stacks]))
    error = next(iter(failed.values())).error
    assert error is not None
    for index, reply in failed.items():
        error.add_note(f"rank {index} failed:\n{reply.trace or reply.error}")
    for stack in stacks:
        error.add_note(stack)
    return error


def _spawn(index: int, world_size: int, port: int, stacks: Path) -> _Rank:
    ours, theirs = connection.Pipe()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # a gloo case is a CPU case, also on a machine with GPUs
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    code = "import sys; from tests.gloo import serve; serve(int(sys.argv[1]), sys.argv[2])"
    stacks.touch()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(theirs.fileno()), str(stacks)],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return _Rank(index, process, ours, stacks)


def serve(pipe_number: int, stacks_path: str) -> None:
    """Life of a worker: answer one request after another until the other end of the pipe closes.

    Args:
        pipe_number: file descriptor of this end of the pipe.
        stacks_path: file that takes the Python stacks when SIGUSR1 arrives.
    """
    stacks = open(stacks_path, "w")  # noqa: SIM115  open as long as the handler is
    faulthandler.register(signal.SIGUSR1, file=stacks)
    pipe = connection.Connection(pipe_number)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(pipe, requests), daemon=True).start()
    while True:
        pipe.send_bytes(_answer(requests.get()))
        gc.collect()


def _read_requests(pipe: connection.Connection, requests: "queue.SimpleQueue[bytes]") -> None:
    """Read in a thread of its own, so that a rank stuck in a collective sees too that the tests are gone."""
    try:
        while True:
            requests.put(pipe.recv_bytes())
    except (EOFError, OSError):
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _answer(request: bytes) -> bytes:
    try:
        torch.manual_seed(0)  # a case alone draws the same numbers as a case after others
        function, args = pickle.loads(request)
        return _to_bytes(_Reply(value=function(*args)))
    except BaseException as error:
        return _to_bytes(_Reply(error=_portable(error), trace="".join(traceback.format_exception(error))))


def _portable(error: BaseException) -> BaseException:
    """The error itself if it survives pickling, else a RuntimeError that names it."""
    try:
        return pickle.loads(_to_bytes(error))
    except Exception:
        return RuntimeError(f"{type(error).__qualname__}: {error}")


def _join_group(with_megatron: bool) -> None:
    if with_megatron:
        activate_if_needed()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
