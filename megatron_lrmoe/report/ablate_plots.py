"""An ablation in pictures: loss curves, loss against work, and differences against stock."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_lrmoe.report.ablate_plan import STOCK
from megatron_lrmoe.report.ablate_results import Result
from megatron_lrmoe.report.ablate_stats import CONFIDENCE, Setting, running_means

SHOWN = 0.75
"""Share of a run at its end that decides the range of the loss axis."""

LINEAR_UP_TO_PERCENT = 2.0
"""Beyond it the axis of differences is logarithmic: what ruins training must not hide what is close to stock."""

BAR_HEIGHT_INCHES = 0.24


def pictures(found: Sequence[Setting]) -> dict[str, Callable[[Path], None]]:
    """Names of the image files, with what writes each."""
    made: dict[str, Callable[[Path], None]] = {}
    for regime in dict.fromkeys(s.regime for s in found):
        of_regime = [s for s in found if s.regime == regime]
        made[f"loss_{regime}.png"] = lambda path, of=of_regime: write_curves(path, of, against_work=False)
        made[f"work_{regime}.png"] = lambda path, of=of_regime: write_curves(path, of, against_work=True)
    if any(s.variant != STOCK and s.percent for s in found):
        made["differences.png"] = lambda path: write_differences(path, found)
    return made


def write_curves(path: Path, found: Sequence[Setting], *, against_work: bool) -> None:
    """Running mean of the training loss, mean over seeds; a panel per retention, stock in each.

    Args:
        path: of the PNG.
        found: settings of one regime.
        against_work: over the rows computed in backward so far instead of iterations.
    """
    retentions = sorted({s.retention for s in found if s.variant != STOCK}, reverse=True) or [1.0]
    figure, axes = _figure(1, len(retentions), (1 + 5 * len(retentions), 4.6))
    colours = _colours(found)
    for panel, retention in zip(axes[0], retentions, strict=True):
        for setting in (s for s in found if s.variant == STOCK or s.retention == retention):
            x, y = _curve(list(setting.results.values()), against_work)
            style = {"color": "black", "lw": 1.6} if setting.variant == STOCK else {"color": colours[setting.variant]}
            panel.plot(x, y, label=setting.variant, **{"lw": 1.1, **style})
        label = "rows computed in backward, millions" if against_work else "iteration"
        panel.set(xlabel=label, ylabel="training loss, running mean, nats per byte", title=f"retention {retention!r}")
        panel.set_ylim(*_range(found))
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.suptitle(found[0].regime)
    figure.savefig(path, format="png", dpi=120)


def write_differences(path: Path, found: Sequence[Setting]) -> None:
    """Difference of the metric against stock in percent, with its interval; a panel per regime."""
    regimes = [
        r for r in dict.fromkeys(s.regime for s in found) if any(s.regime == r and _is_compared(s) for s in found)
    ]
    longest = max(sum(s.regime == r and _is_compared(s) for s in found) for r in regimes)
    figure, axes = _figure(1, len(regimes), (1 + 4.6 * len(regimes), 1.6 + BAR_HEIGHT_INCHES * longest))
    colours = _colours(found)
    for panel, regime in zip(axes[0], regimes, strict=True):
        bars = [s for s in found if s.regime == regime and _is_compared(s)]
        places = range(len(bars))
        intervals = [s.percent for s in bars]
        panel.barh(
            places, [i.mean if i else 0.0 for i in intervals], color=[colours[s.variant] for s in bars], alpha=0.6
        )
        for place, percent in zip(places, intervals, strict=True):
            if percent and percent.half is not None:
                panel.plot([percent.low, percent.high], [place, place], color="black", lw=1.2, marker="|")
        if any(abs(i.mean) > LINEAR_UP_TO_PERCENT for i in intervals if i):
            panel.set_xscale("symlog", linthresh=LINEAR_UP_TO_PERCENT)
        panel.axvline(0, color="black", lw=0.8)
        panel.set_yticks(places, [s.name for s in bars], fontsize=8)
        panel.invert_yaxis()
        panel.set(xlabel=f"{bars[0].metric} over stock, %, with {CONFIDENCE:.0%} interval", title=regime)
        panel.grid(alpha=0.3, axis="x")
    figure.savefig(path, format="png", dpi=120)


def _is_compared(setting: Setting) -> bool:
    return setting.variant != STOCK and setting.percent is not None


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    # An explicit Agg canvas, not pyplot: no window, and no change to the caller's matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _colours(found: Sequence[Setting]) -> dict[str, Any]:
    from matplotlib import colormaps

    variants = [v for v in dict.fromkeys(s.variant for s in found) if v != STOCK]
    palette = colormaps["tab10" if len(variants) <= 10 else "tab20"]
    return {variant: palette(i % palette.N) for i, variant in enumerate(variants)}


def _curve(results: Sequence[Result], against_work: bool) -> tuple[list[float], list[float]]:
    length = min(len(r.losses) for r in results)
    smooth = [running_means(r.losses) for r in results]
    y = [fmean(s[i] for s in smooth) for i in range(length)]
    if not against_work:
        return [float(i + 1) for i in range(length)], y
    work = [list(accumulate(r.rows)) for r in results]
    return [fmean(w[i] for w in work) / 1e6 for i in range(length)], y


def _range(found: Sequence[Setting]) -> tuple[float, float]:
    """Limits of the loss axis: those of all curves after their first quarter."""
    values = [y for s in found for y in _tail(_curve(list(s.results.values()), False)[1])]
    margin = 0.05 * (max(values) - min(values)) or 0.1
    return min(values) - margin, max(values) + margin


def _tail(values: Sequence[float]) -> Sequence[float]:
    return values[int(len(values) * (1 - SHOWN)) :]
