"""Two training runs side by side: a table, a plot and the figures behind them."""

import csv
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from megatron_lrmoe.report.training_log import Iteration

WARM_UP = 5
"""Iterations at the start whose times do not count."""


@dataclass(frozen=True)
class Run:
    """A finished training run.

    Args:
        name: as the table heads it.
        command: the command line that made it.
        rows: its iterations in order.
    """

    name: str
    command: tuple[str, ...]
    rows: tuple[Iteration, ...]

    def median(self, field: str) -> float:
        """Median over the iterations after warm-up, of those that have the field; NaN where none has."""
        later = self.rows[WARM_UP:] or self.rows
        values = [v for row in later if (v := getattr(row, field)) is not None]
        return float(statistics.median(values)) if values else math.nan

    @property
    def validations(self) -> list[tuple[int, float]]:
        """Iteration and loss of every validation."""
        return [(r.iteration, r.validation_loss) for r in self.rows if r.validation_loss is not None]


def _last_validation(run: Run) -> float:
    return run.validations[-1][1] if run.validations else math.nan


_FIGURES: tuple[tuple[str, str, Callable[[Run], float]], ...] = (
    ("validation loss, nats per byte", ".4f", _last_validation),
    ("train loss, last iteration", ".4f", lambda run: run.rows[-1].train_loss),
    ("pairs kept in backward, share", ".3f", lambda run: run.median("kept_share")),
    ("MoE backward, CPU ms", ".1f", lambda run: run.median("moe_backward_cpu_ms")),
    ("MoE backward, MB sent", ".3f", lambda run: run.median("moe_backward_bytes") / 1e6),
    ("MoE forward, CPU ms", ".1f", lambda run: run.median("moe_forward_cpu_ms")),
    ("whole iteration, wall ms", ".1f", lambda run: run.median("wall_ms")),
)


def table(runs: Sequence[Run]) -> str:
    """Markdown table, a column a run; of two runs, also the second over the first."""
    head = ["", *(run.name for run in runs)] + (["ratio"] if len(runs) == 2 else [])
    lines = [head]
    for label, form, figure in _FIGURES:
        values = [figure(run) for run in runs]
        ratio = [format(values[1] / values[0], ".3f")] if len(runs) == 2 and values[0] else []
        lines.append([label, *(format(v, form) for v in values), *ratio])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    rows = [
        [c.ljust(w) if not i else c.rjust(w) for i, (c, w) in enumerate(zip(x, widths, strict=True))] for x in lines
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [rows[0], rule, *rows[1:]])


def write_csv(path: Path, runs: Iterable[Run]) -> None:
    """One row per run and iteration; a figure that was not measured is empty."""
    with path.open("w", newline="") as out:
        writer = csv.DictWriter(out, ["run", *(f.name for f in fields(Iteration))])
        writer.writeheader()
        for run in runs:
            writer.writerows({"run": run.name, **asdict(row)} for row in run.rows)


def write_plot(path: Path, runs: Iterable[Run]) -> None:
    """Training loss of the runs over iterations, and validations as points."""
    # An explicit Agg canvas, not pyplot: no window, and no change to the caller's matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for run in runs:
        (line,) = axes.plot(
            [r.iteration for r in run.rows],
            [r.train_loss for r in run.rows],
            lw=0.9,
            label=f"{run.name}, train",
        )
        at, loss = zip(*run.validations, strict=True) if run.validations else ((), ())
        axes.plot(at, loss, "o", color=line.get_color(), label=f"{run.name}, validation")
    axes.set(xlabel="iteration", ylabel="loss, nats per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=120)
