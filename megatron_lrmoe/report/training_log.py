"""Read a training run: Megatron's own log lines, and what the probe wrote beside them."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Lines of two ranks may end up on one line, so nothing is anchored.
_ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|(.*)")
_VALIDATION = re.compile(r"validation loss at iteration (\d+)(?: on validation set)? \| lm loss value: (\S+)")
_KEPT_SHARE = "moe-lrm/kept_share"
# torchrun's own account of a failure begins here, and names no cause.
_TORCHRUN_STOPS = re.compile(r"^.*(?:closing signal SIG|failed \(exitcode)", re.MULTILINE)


@dataclass
class Iteration:
    """One training iteration, from 1.

    Args:
        train_loss: Megatron's 'lm loss'.
        wall_ms: by the clock on the wall, the whole iteration.
        kept_share: share of the routed pairs that kept their backward; 1 in a stock run.
        validation_loss: after this iteration, where one was made.
        moe_forward_cpu_ms, moe_backward_cpu_ms: CPU time of all MoE layers, all ranks summed.
        moe_backward_bytes: bytes sent between ranks in the backward of all MoE layers, all ranks summed.
    """

    iteration: int
    train_loss: float
    wall_ms: float
    kept_share: float = 1.0
    validation_loss: float | None = None
    moe_forward_cpu_ms: float | None = None
    moe_backward_cpu_ms: float | None = None
    moe_backward_bytes: int | None = None


def parse_iteration(line: str) -> Iteration | None:
    """The iteration that a line of Megatron's log reports, or None.

    Raises:
        ValueError: an iteration line lacks the loss or the time.
    """
    if not (match := _ITERATION.search(line)):
        return None
    parts = (part.rpartition(":") for part in match[2].split("|"))
    values = {name.strip(): value.strip() for name, _, value in parts}
    try:
        return Iteration(
            iteration=int(match[1]),
            train_loss=float(values["lm loss"]),
            wall_ms=float(values["elapsed time per iteration (ms)"]),
            kept_share=float(values.get(_KEPT_SHARE, 1.0)),
        )
    except KeyError as error:
        raise ValueError(f"found no {error} in the log line {line.strip()!r}, expected Megatron 0.19's") from error


def parse_log(lines: Iterable[str]) -> list[Iteration]:
    """Every iteration in Megatron's log; of several validations after one iteration the last counts."""
    rows: dict[int, Iteration] = {}
    for line in lines:
        if row := parse_iteration(line):
            rows[row.iteration] = row
        elif (match := _VALIDATION.search(line)) and int(match[1]) in rows:
            rows[int(match[1])].validation_loss = float(match[2])
    return list(rows.values())


def add_probe(rows: Iterable[Iteration], probe_files: Iterable[Path]) -> None:
    """Add what the probe of every rank measured (``mcore/probe.py``) to the rows of its iteration."""
    by_iteration = {row.iteration: row for row in rows}
    for path in probe_files:
        for line in path.read_text().splitlines():
            measured = json.loads(line)
            if row := by_iteration.get(measured["iteration"]):
                row.moe_forward_cpu_ms = (row.moe_forward_cpu_ms or 0.0) + measured["forward_cpu_ms"]
                row.moe_backward_cpu_ms = (row.moe_backward_cpu_ms or 0.0) + measured["backward_cpu_ms"]
                row.moe_backward_bytes = (row.moe_backward_bytes or 0) + measured["backward_bytes"]


def failure_tail(log: str, lines: int = 40) -> str:
    """The last lines of a failed run's log up to where torchrun stops the processes."""
    return "\n".join(_TORCHRUN_STOPS.split(log)[0].splitlines()[-lines:])
