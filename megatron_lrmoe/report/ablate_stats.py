"""Settings of an ablation over their seeds: means, spreads and paired differences against stock with an interval."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, stdev

from megatron_lrmoe.report.ablate_cells import Cell
from megatron_lrmoe.report.ablate_plan import START, STOCK
from megatron_lrmoe.report.ablate_results import KEPT_SHARE, Result

CONFIDENCE = 0.9
VALIDATION, PERPLEXITY = "validation loss", "training perplexity"


@dataclass(frozen=True)
class Interval:
    """A mean with its two-sided confidence interval by Student's t; no bounds of a single value."""

    mean: float
    half: float | None

    @property
    def low(self) -> float | None:
        """Lower bound."""
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        """Upper bound."""
        return None if self.half is None else self.mean + self.half


@dataclass(frozen=True)
class Setting:
    """Cells that differ in the seed alone.

    Args:
        regime, variant, retention: of the cells.
        results: finished ones, by seed.
        stock: finished stock cells of the regime, by seed.
    """

    regime: str
    variant: str
    retention: float
    results: dict[int, Result]
    stock: dict[int, Result]

    @property
    def name(self) -> str:
        """Such as ``topk@0.8``."""
        return self.variant if self.variant == STOCK else f"{self.variant}@{self.retention!r}"

    @property
    def pairs(self) -> list[tuple[Result, Result]]:
        """The setting's and the stock result of every seed that has both."""
        return [(self.results[seed], self.stock[seed]) for seed in sorted(self.results) if seed in self.stock]

    @property
    def metric(self) -> str:
        """What the setting is judged by: validation loss in nats, or without a validation the training perplexity."""
        return PERPLEXITY if any(r.validation_loss is None for r in self.results.values()) else VALIDATION

    @property
    def values(self) -> list[float]:
        """The metric, seed by seed."""
        return [metric_of(self.results[seed]) for seed in sorted(self.results)]

    @property
    def spread(self) -> float | None:
        """Standard deviation of the metric over seeds; None of a single one."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> Interval | None:
        """Metric minus that of stock with the same seed; None without pairs."""
        return interval([metric_of(ours) - metric_of(stock) for ours, stock in self.pairs])

    @property
    def percent(self) -> Interval | None:
        """The same difference in percent of stock's metric."""
        return interval([100 * (metric_of(ours) / metric_of(stock) - 1) for ours, stock in self.pairs])

    @property
    def training_difference(self) -> Interval | None:
        """Mean training loss of the last tenth minus that of stock, nats."""
        return interval([ours.training_loss - stock.training_loss for ours, stock in self.pairs])

    @property
    def kept_share(self) -> float:
        """Mean share of the pairs whose backward was computed, over the whole run."""
        return fmean(sum(r.rows) / (r.pairs * len(r.losses)) for r in self.results.values())

    @property
    def work(self) -> list[float | None]:
        """Seed by seed, backward rows to stock's target loss over those of stock; None where it was not reached."""
        found: list[float | None] = []
        for ours, stock in self.pairs:
            target = target_loss(stock)
            ours_at, stock_at = rows_to(ours, target), rows_to(stock, target)
            found.append(None if ours_at is None or not stock_at else ours_at / stock_at)
        return found

    def mean(self, scalar: str) -> float | None:
        """Mean over seeds and iterations of a scalar that the plugin logged; None if it logged none."""
        found = [m for r in self.results.values() if (m := r.mean(scalar)) is not None]
        return fmean(found) if found else None


def settings(cells: Iterable[Cell], results: dict[str, Result]) -> list[Setting]:
    """Settings with at least one finished cell, stock first in each regime, else in the order of the cells.

    Args:
        cells: of the grid.
        results: finished ones, by the id of the cell.
    """
    found: dict[tuple[str, str, float], dict[int, Result]] = {}
    for cell in cells:
        if cell.variant != START and cell.id in results:
            found.setdefault((cell.regime, cell.variant, cell.retention), {})[cell.seed] = results[cell.id]
    regimes = list(dict.fromkeys(regime for regime, _, _ in found))
    ordered = sorted(found, key=lambda place: (regimes.index(place[0]), place[1] != STOCK))
    return [Setting(*place, found[place], found.get((place[0], STOCK, 1.0), {})) for place in ordered]


def scalar_names(found: Iterable[Setting]) -> list[str]:
    """Names of everything that the plugin logged, but the kept share."""
    return sorted({n for s in found for r in s.results.values() for n in r.scalars} - {KEPT_SHARE})


def metric_of(result: Result) -> float:
    """Validation loss, or the perplexity of a run without a validation."""
    return result.perplexity if result.validation_loss is None else result.validation_loss


def running_means(losses: Sequence[float]) -> list[float]:
    """Mean of each iteration's loss and those before it, a tenth of the run in all; fewer at the start."""
    window = max(1, len(losses) // 10)
    sums = [0.0, *accumulate(losses)]
    return [(sums[i] - sums[max(0, i - window)]) / min(i, window) for i in range(1, len(sums))]


def target_loss(stock: Result) -> float:
    """The running mean that a stock run has come down to after three quarters of its iterations."""
    return running_means(stock.losses)[len(stock.losses) * 3 // 4 - 1]


def rows_to(result: Result, loss: float) -> float | None:
    """Backward rows computed when the running mean of the training loss first is at or below a loss; None if never.

    The first tenth of the run, whose running means are of fewer iterations, is left out.
    """
    window = max(1, len(result.losses) // 10)
    reached = zip(accumulate(result.rows), running_means(result.losses), strict=True)
    return next((rows for i, (rows, mean) in enumerate(reached, 1) if i >= window and mean <= loss), None)


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Mean of independent normal values, with the interval mean +- t s / sqrt(n), t of n - 1 degrees of freedom.

    Args:
        values: one per seed.
        confidence: that the interval holds the expectation.

    Returns:
        None of no values.
    """
    if not values:
        return None
    if len(values) == 1:
        return Interval(values[0], None)
    t = student_quantile((1 + confidence) / 2, len(values) - 1)
    return Interval(fmean(values), t * stdev(values) / math.sqrt(len(values)))


def student_quantile(p: float, freedom: int) -> float:
    """The value that a Student t variable stays below with probability ``p``.

    Args:
        p: 0.5 < p < 1.
        freedom: degrees of freedom, a whole number >= 1.

    Raises:
        ValueError: p or freedom out of range.
    """
    if not 0.5 < p < 1 or freedom < 1:
        raise ValueError(
            f"quantile of Student's t: found p {p} and {freedom} degrees, allowed are 0.5 < p < 1 and >= 1"
        )
    low, high = 0.0, 1.0
    while _within(high, freedom) < 2 * p - 1:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if _within(middle, freedom) < 2 * p - 1:
            low = middle
        else:
            high = middle
    return high


def _within(t: float, freedom: int) -> float:
    """Probability that a Student t variable lies between -t and t (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
