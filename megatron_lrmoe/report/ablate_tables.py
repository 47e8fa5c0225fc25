"""An ablation in figures: CSV files of cells, settings and curves, and the Markdown report."""

import csv
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_lrmoe import __version__
from megatron_lrmoe.report.ablate_cells import Cell, words
from megatron_lrmoe.report.ablate_plan import START, STOCK, Plan, Regime
from megatron_lrmoe.report.ablate_results import Result
from megatron_lrmoe.report.ablate_stats import (
    CONFIDENCE,
    Interval,
    Setting,
    metric_of,
    running_means,
    scalar_names,
)

CURVE_POINTS = 50
"""Rows of a setting in ``curves.csv``, at most: points at equal distances."""


def write_cells(path: Path, cells: Iterable[Cell], results: Mapping[str, Result], found: Sequence[Setting]) -> None:
    """A row per finished cell."""
    names = scalar_names(found)
    stock = {(s.regime, seed): metric_of(r) for s in found if s.variant == STOCK for seed, r in s.results.items()}
    rows = []
    for cell in cells:
        if cell.variant == START or (result := results.get(cell.id)) is None:
            continue
        base = stock.get((cell.regime, cell.seed))
        rows.append(
            {
                "cell": cell.id,
                "regime": cell.regime,
                "variant": cell.variant,
                "retention": cell.retention,
                "seed": cell.seed,
                "iterations": cell.iterations,
                "validation_loss": result.validation_loss,
                "training_loss_last_tenth": _number(result.training_loss),
                "perplexity_last_tenth": _number(result.perplexity),
                "over_stock": None if base is None else _number(metric_of(result) - base),
                "over_stock_percent": None if base is None else _number(100 * (metric_of(result) / base - 1)),
                "backward_rows": round(sum(result.rows)),
                "backward_rows_stock": result.pairs * len(result.losses),
                "wall_s": result.wall_s,
                "cpu_s": result.cpu_s,
                "key": result.key,
                "source": result.source,
                **{name: _number(result.mean(name)) for name in names},
            }
        )
    _write(path, rows)


def write_settings(path: Path, found: Sequence[Setting]) -> None:
    """A row per setting: means over its seeds, and its differences against stock."""
    _write(path, [_setting_row(setting, scalar_names(found)) for setting in found])


def _setting_row(setting: Setting, names: Iterable[str]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "regime": setting.regime,
        "variant": setting.variant,
        "retention": setting.retention,
        "seeds": len(setting.results),
        "metric": setting.metric,
        "mean": _number(fmean(setting.values)),
        "spread": _number(setting.spread),
    }
    differences = {
        "over_stock": setting.difference,
        "over_stock_percent": setting.percent,
        "training_loss_over_stock": setting.training_difference,
    }
    for name, difference in differences.items():
        bounds = (None,) * 3 if difference is None else (difference.mean, difference.low, difference.high)
        for part, value in zip(("", "_low", "_high"), bounds, strict=True):
            row[name + part] = _number(value)
    work = [value for value in setting.work if value is not None]
    return row | {
        "kept_share": _number(setting.kept_share),
        "work_to_loss": _number(fmean(work)) if work else None,
        "work_to_loss_reached": f"{len(work)} of {len(setting.work)}",
        "cpu_s": _number(fmean(r.cpu_s for r in setting.results.values())),
        **{name: _number(setting.mean(name)) for name in names},
    }


def write_curves(path: Path, found: Iterable[Setting]) -> None:
    """Means over seeds along the run: training loss, its running mean and the rows computed in backward so far."""
    rows = []
    for setting in found:
        results = list(setting.results.values())
        length = min(len(r.losses) for r in results)
        smooth = [running_means(r.losses) for r in results]
        work = [list(accumulate(r.rows)) for r in results]
        points = min(length, CURVE_POINTS)
        for i in sorted({length * (n + 1) // points - 1 for n in range(points)}):
            rows.append(
                {
                    "regime": setting.regime,
                    "variant": setting.variant,
                    "retention": setting.retention,
                    "iteration": i + 1,
                    "training_loss": _number(fmean(r.losses[i] for r in results)),
                    "training_loss_running_mean": _number(fmean(s[i] for s in smooth)),
                    "backward_rows": round(fmean(w[i] for w in work)),
                }
            )
    _write(path, rows)


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def _number(value: float | None) -> float | None:
    """Six significant digits: Megatron logs seven."""
    return None if value is None else float(f"{value:.6g}")


def table(found: Iterable[Setting]) -> str:
    """Markdown table of one regime's settings."""
    percent = f"{CONFIDENCE:.0%}"
    found = list(found)
    head = [
        *("setting", "seeds", f"{found[0].metric}, mean", "spread", "over stock", f"{percent} interval", "%"),
        *(f"{percent} interval, %", "rows kept", "work to loss"),
    ]
    lines = [head]
    for s in found:
        is_stock = s.variant == STOCK
        lines.append(
            [
                s.name,
                str(len(s.results)),
                f"{fmean(s.values):.4f}",
                "" if s.spread is None else f"{s.spread:.4f}",
                *(("", "") if is_stock else _cells(s.difference, 4)),
                *(("", "") if is_stock else _cells(s.percent, 2)),
                f"{s.kept_share:.3f}",
                "" if is_stock else _work(s),
            ]
        )
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(head))]
    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    rows = [[c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(x, widths, strict=True))] for x in lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [rows[0], rule, *rows[1:]])


def _cells(found: Interval | None, digits: int) -> tuple[str, str]:
    if found is None:
        return "", ""
    bounds = "" if found.half is None else f"{found.low:+.{digits}f} to {found.high:+.{digits}f}"
    return f"{found.mean:+.{digits}f}", bounds


def _work(setting: Setting) -> str:
    reached = [value for value in setting.work if value is not None]
    if not reached:
        return "not reached" if setting.work else ""
    missed = "" if len(reached) == len(setting.work) else f" ({len(reached)} of {len(setting.work)})"
    return f"{fmean(reached):.3f}{missed}"


def report(
    plan: Plan, command: str, found: Sequence[Setting], unfinished: Sequence[str], pictures: Iterable[str]
) -> str:
    """The whole report as Markdown.

    Args:
        plan: that was run.
        command: that makes it again.
        found: settings with finished cells.
        unfinished: ids of cells without a result.
        pictures: names of image files beside it.
    """
    parts = [f"# {plan.title}", f"Made by `{command}`. " + _finished(found, unfinished)]
    for regime in plan.regimes:
        if of_regime := [s for s in found if s.regime == regime.name]:
            parts += [f"## {regime.name}", _described(regime), table(of_regime)]
    parts += ["\n".join(f"![{name}]({name})" for name in pictures), "## How to read it", EXPLANATION]
    parts += ["## Flags", _flags(plan), "## Versions", _versions(found)]
    return "\n\n".join(parts) + "\n"


EXPLANATION = f"""\
- Cells of one seed have the same initial weights, the same data in the same order and the same validation batches, so
  differences against stock are taken seed by seed. Intervals are two-sided, {CONFIDENCE:.0%}, by Student's t over the
  seeds; spread is the standard deviation over seeds.
- Validation loss is Megatron's own evaluation after the last iteration, nats per byte. Training perplexity is the mean
  of exp(loss) over the last tenth of the iterations.
- Rows kept: share of the routed (token, expert) pairs whose backward was computed, over the whole run.
- Work to loss: backward rows computed until the running mean of the training loss (a tenth of the run) was down to
  what stock had after three quarters of its run, over the rows that stock needed; mean over seeds that got there."""


def _finished(found: Iterable[Setting], unfinished: Sequence[str]) -> str:
    done = sum(len(s.results) for s in found)
    if not unfinished:
        return f"All {done} cells are finished."
    some = ", ".join(unfinished[:5]) + (", ..." if len(unfinished) > 5 else "")
    return f"**{len(unfinished)} of {done + len(unfinished)} cells are not finished:** {some}."


def _described(regime: Regime) -> str:
    text, before = (
        f"the first {limit} bytes of {corpus}" if limit else corpus
        for corpus, limit in ((regime.corpus, regime.limit), (regime.start_corpus, regime.start_limit))
    )
    ranks = f", {regime.ranks} expert-parallel ranks" if regime.ranks > 1 else ""
    begins = {
        "scratch": "from random weights",
        "warm": f"after {regime.start} stock iterations that all cells of a seed share, as one run goes on",
        "memorise": f"from the weights of {regime.start} stock iterations on {before}",
    }
    return f"{regime.iterations} iterations on {text}, {begins[regime.kind]}{ranks}."


def _flags(plan: Plan) -> str:
    lines = [f"all runs: `{shlex.join(words(plan.model))}`"]
    for regime in plan.regimes:
        lines += [f"{regime.name}: `{shlex.join(words(regime.flags))}`"] if regime.flags else []
        lines += [f"{regime.name}, before: `{shlex.join(words(regime.start_flags))}`"] if regime.start_flags else []
    for variant in plan.variants:
        flags = shlex.join(words(tuple((f"moe-lrm-{name}", value) for name, value in variant.flags)))
        lines.append(f"{variant.name}: `--moe-lrm-retention R{' ' if flags else ''}{flags}`")
    return "\n".join(f"- {line}" for line in lines)


def _versions(found: Iterable[Setting]) -> str:
    results = [r for s in found for r in s.results.values()]
    lines = sorted({", ".join(f"{name} {version}" for name, version in r.versions.items()) for r in results})
    sources = sorted({r.source for r in results if r.source})
    lines.append(f"megatron_lrmoe {__version__}" + (f", at {', '.join(sources)}" if sources else ""))
    return "\n".join(f"- {line}" for line in lines)
