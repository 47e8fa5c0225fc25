"""What a finished cell leaves: one JSON file, there as a whole or not at all."""

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_lrmoe.report.ablate_cells import Cell
from megatron_lrmoe.report.ablate_plan import START
from megatron_lrmoe.report.training_log import parse_iteration, parse_log

KEPT_SHARE = "kept_share"
_SCALAR = re.compile(r"moe-lrm/(\w+): (\S+) \|")


@dataclass(frozen=True)
class Result:
    """A finished training run.

    Args:
        key: of the cell, as it was when it ran.
        flags, ranks: of the run.
        losses: Megatron's 'lm loss' of every iteration, nats.
        scalars: of the plugin by name, for every iteration; None where it logged none.
        pairs: routed (token, expert) pairs of one iteration, in all MoE layers and over all ranks.
        validation_loss: at the end, nats; None where there was no validation.
        wall_s, cpu_s: seconds for the whole run, of the slowest rank and of all ranks summed.
        versions: of the packages beneath.
        source: commit of the checkout, or None.
    """

    key: str
    flags: tuple[str, ...]
    ranks: int
    losses: tuple[float, ...]
    scalars: dict[str, tuple[float | None, ...]]
    pairs: int
    validation_loss: float | None
    wall_s: float
    cpu_s: float
    versions: dict[str, str]
    source: str | None

    @property
    def last_tenth(self) -> tuple[float, ...]:
        """Losses of the last tenth of the iterations, of one at least."""
        return self.losses[-max(1, len(self.losses) // 10) :]

    @property
    def training_loss(self) -> float:
        """Mean of the last tenth, nats."""
        return fmean(self.last_tenth)

    @property
    def perplexity(self) -> float:
        """Mean over the last tenth of exp(loss)."""
        return fmean(map(math.exp, self.last_tenth))

    @property
    def rows(self) -> tuple[float, ...]:
        """Rows whose backward was computed, by iteration; every pair in a stock run and before the start iteration."""
        kept = self.scalars.get(KEPT_SHARE) or (None,) * len(self.losses)
        return tuple(self.pairs * (1.0 if share is None else share) for share in kept)

    def mean(self, scalar: str) -> float | None:
        """Mean of a scalar over the iterations that logged it; None where none did."""
        found = [value for value in self.scalars.get(scalar, ()) if value is not None]
        return fmean(found) if found else None


def path_of(cell: Cell, output: Path) -> Path:
    """Where a cell's result stands; its log is beside it with ``.log``."""
    return output / cell.id / "result.json" if cell.variant == START else output / "cells" / f"{cell.id}.json"


def write(cell: Cell, result: Result, output: Path) -> None:
    """Write a result so that a kill at any moment leaves the old file or the new one."""
    path = path_of(cell, output)
    part = path.with_suffix(".part")
    content = {"cell": cell.id, **asdict(result)}
    with part.open("w") as out:
        json.dump(content, out)
        out.flush()
        os.fsync(out.fileno())
    part.replace(path)


def read(cell: Cell, output: Path) -> Result | None:
    """The result of a cell as it is now; None if there is none, or one of other flags or other code."""
    try:
        content = json.loads(path_of(cell, output).read_text())
        values: dict[str, Any] = {f.name: content[f.name] for f in fields(Result)}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if values["key"] != cell.key:
        return None
    values["scalars"] = {name: tuple(logged) for name, logged in values["scalars"].items()}
    for name in ("flags", "losses"):
        values[name] = tuple(values[name])
    return Result(**values)


def from_log(
    cell: Cell, log: Iterable[str], replies: list[dict[str, Any]], versions: dict[str, str], source: str | None
) -> Result:
    """Read what a run printed.

    Args:
        cell: that ran.
        log: Megatron's lines.
        replies: of all ranks: their ``wall_s``, ``cpu_s`` and ``pairs``.
        versions: of the packages beneath.
        source: commit of the checkout, or None.

    Raises:
        ValueError: the log does not hold all iterations and the validation.
    """
    lines = list(log)
    rows = parse_log(lines)
    if [row.iteration for row in rows] != list(range(cell.first, cell.last + 1)):
        raise ValueError(f"the log of {cell.id} does not hold iterations {cell.first} to {cell.last}")
    validation = rows[-1].validation_loss
    if validation is None and cell.flags[cell.flags.index("--eval-iters") + 1] != "0":
        raise ValueError(f"the log of {cell.id} holds no validation loss")
    return Result(
        key=cell.key,
        flags=cell.flags,
        ranks=cell.ranks,
        losses=tuple(row.train_loss for row in rows),
        scalars=_scalars(lines),
        pairs=replies[0]["pairs"],
        validation_loss=validation,
        wall_s=max(reply["wall_s"] for reply in replies),
        cpu_s=round(sum(reply["cpu_s"] for reply in replies), 3),
        versions=versions,
        source=source,
    )


def _scalars(lines: Iterable[str]) -> dict[str, tuple[float | None, ...]]:
    found = [dict(_SCALAR.findall(line)) for line in lines if parse_iteration(line)]
    names = sorted({name for scalars in found for name in scalars})
    return {name: tuple(float(s[name]) if name in s else None for s in found) for name in names}
