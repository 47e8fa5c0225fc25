"""Worker processes of an ablation, seen from outside: started once, ordered to train one cell after another."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_lrmoe.report.ablate_cells import Cell
from megatron_lrmoe.report.ablate_code import PACKAGE
from megatron_lrmoe.report.training_log import failure_tail, parse_iteration

WORK = ".work"
"""Folder in the output directory for what workers need while they run; after a kill it is left over."""

MODULE = "megatron_lrmoe.mcore.ablate_worker"
REPLY = "lrmoe-ablate-reply "
_REPLY = re.compile(re.escape(REPLY) + r"(\{.*?\})$", re.MULTILINE)


class CellFailedError(Exception):
    """A run failed; the message holds the end of its log."""


class Workers:
    """Processes that train cells, started by the first one and anew for another number of ranks; all write one log.

    Args:
        directory: where they run: the output directory, which the paths in flags are relative to.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._output: Any = None
        self._clean_up = contextlib.ExitStack()
        self._scratch = Path()

    def train(self, cell: Cell, log: Path, on_iteration: Callable[[], None]) -> tuple[list[str], list[dict[str, Any]]]:
        """Train a cell and return the lines that the ranks printed, and their replies.

        Args:
            cell: to train.
            log: file for what they print.
            on_iteration: called at every iteration.

        Raises:
            CellFailedError: a rank failed; all of them have ended then.
        """
        if len(self._processes) != cell.ranks:
            self.close()
            self._start(cell.ranks)
        # Jobs would read each other's half-written index files.
        order = {"flags": [*cell.flags, "--data-cache-path", str(self._scratch / "cache")]}
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # its output ends, which is seen below
                _send(process, order)
        lines: list[str] = []
        replies: list[dict[str, Any]] = []
        with log.open("w") as out:
            while len(replies) < cell.ranks and (line := self._output.readline()):
                if found := _REPLY.findall(line):
                    replies += map(json.loads, found)
                    if any("failed" in reply for reply in replies):
                        break
                    continue
                out.write(line)
                lines.append(line)
                if parse_iteration(line):
                    on_iteration()
        if len(replies) < cell.ranks or any("failed" in reply for reply in replies):
            self.close()
            raise CellFailedError(f"{cell.id} failed; the end of {log}:\n{failure_tail(''.join(lines))}")
        return lines, replies

    def kill(self) -> None:
        """End the processes from another thread; the one that waits for them sees a failed run."""
        for process in list(self._processes):
            _kill(process)

    def close(self) -> None:
        """End the processes; the next cell starts new ones."""
        self._clean_up.close()
        self._processes, self._output = [], None

    def _start(self, ranks: int) -> None:
        work = self._directory / WORK
        work.mkdir(exist_ok=True)
        self._scratch = Path(self._clean_up.enter_context(tempfile.TemporaryDirectory(dir=work)))
        reading, writing = os.pipe()
        self._output = os.fdopen(reading, errors="replace")
        self._clean_up.callback(self._output.close)
        try:
            for rank in range(ranks):
                command = [sys.executable, "-P", "-m", MODULE, str(self._scratch / "rendezvous")]
                process = subprocess.Popen(
                    command,
                    env=_environment(rank, ranks),
                    cwd=self._directory,
                    stdin=subprocess.PIPE,
                    stdout=writing,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._clean_up.callback(_end, process)
                self._processes.append(process)
        finally:
            os.close(writing)


def refusals(runs: Mapping[str, Cell], directory: Path) -> dict[str, list[str]]:
    """What Megatron's own parser and the plugin say against the flags of some runs, by their names; empty if nothing.

    Raises:
        CellFailedError: the process that asks them failed.
    """
    order = {"runs": {name: {"flags": cell.flags, "ranks": cell.ranks} for name, cell in runs.items()}}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE],
        env=_environment(0, 1),
        cwd=directory,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        _send(process, order)
        lines = []
        for line in process.stdout or ():
            lines.append(line.decode(errors="replace"))
            if found := _REPLY.findall(lines[-1]):
                answer = json.loads(found[0])
                if "failed" not in answer:
                    return answer["refused"]
        raise CellFailedError(f"asking Megatron for its flags failed:\n{failure_tail(''.join(lines))}")
    finally:
        _end(process)


def _send(process: subprocess.Popen[bytes], order: dict[str, Any]) -> None:
    stdin: Any = process.stdin
    stdin.write(f"{json.dumps(order)}\n".encode())
    stdin.flush()


def _environment(rank: int, ranks: int) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        # The same on every machine: without visible GPUs Megatron runs on the CPU device.
        "CUDA_VISIBLE_DEVICES": "",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    _kill(process)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker and whatever it started (it leads a process group of its own)."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
