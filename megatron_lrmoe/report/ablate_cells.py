"""From a plan to the training runs of its grid: exact flags, what they start from, and a key that changes with both."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from megatron_lrmoe.config import FLAG_PREFIX
from megatron_lrmoe.report.ablate_code import Code
from megatron_lrmoe.report.ablate_plan import START, STOCK, Flags, Plan, Regime, Variant
from megatron_lrmoe.report.corpora import CORPORA

DATA = "data"
STARTS = "starts"
CHECKPOINT = "checkpoint"

_TOKENIZER = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "257")
_WHOLE, _HELD_OUT = "100,0,0", "95,5,0"


@dataclass(frozen=True)
class Dataset:
    """Text of a corpus, or its first ``limit`` bytes."""

    corpus: str
    limit: int | None

    @property
    def prefix(self) -> str:
        """Path of the indexed dataset in the output directory; names the version, since results depend on it."""
        source = CORPORA[self.corpus]
        return f"{DATA}/{self.corpus}-{source.version}" + (f"-{self.limit}" if self.limit else "")


@dataclass(frozen=True)
class Cell:
    """One training run.

    Args:
        id: such as ``scratch/topk@0.8/s1``; of a stock run that others start from, ``starts/`` and its key.
        regime, variant, retention, seed: its place in the grid; retention is 1.0 in stock runs.
        dataset: that it trains on.
        flags: Megatron's, with paths relative to the output directory.
        ranks: processes.
        first, last: iterations, as Megatron numbers them.
        key: changes with anything that the result depends on.
        start: id of the run whose checkpoint it begins with, or None.
    """

    id: str
    regime: str
    variant: str
    retention: float
    seed: int
    dataset: Dataset
    flags: tuple[str, ...]
    ranks: int
    first: int
    last: int
    key: str
    start: str | None = None

    @property
    def iterations(self) -> int:
        """Iterations that the run trains."""
        return self.last - self.first + 1


def grid(plan: Plan, code: Code) -> list[Cell]:
    """All runs of a plan, those that others start from first, then seed by seed, so that whole seeds come early.

    Runs of more ranks come after those of fewer, since their processes are started anew.
    """
    starts: dict[str, Cell] = {}
    cells = []
    for regime in plan.regimes:
        for seed in regime.seeds:
            start = _start(plan, regime, seed, code) if regime.start else None
            if start:
                starts[start.id] = start
            cells += [
                _cell(plan, regime, variant, retention, seed, start, code)
                for variant, retention in _settings(plan, regime, seed)
            ]
    return [
        *sorted(starts.values(), key=lambda cell: cell.ranks),
        *sorted(cells, key=lambda cell: (cell.ranks, cell.seed)),
    ]


def chosen(cells: Sequence[Cell], patterns: Iterable[str]) -> list[Cell]:
    """The cells whose ids match a shell pattern, and what they start from; all without patterns.

    Raises:
        ValueError: a pattern that matches no cell.
    """
    patterns = list(patterns)
    ids = {cell.id for cell in cells if cell.variant != START}
    if unknown := [pattern for pattern in patterns if not any(fnmatchcase(i, pattern) for i in ids)]:
        some = ", ".join(sorted(ids)[:3])
        raise ValueError(
            f"--only: found {unknown}, allowed are ids of cells such as {some}, or patterns like '*/topk@*'"
        )
    if patterns:
        ids = {i for i in ids if any(fnmatchcase(i, pattern) for pattern in patterns)}
    needed = {cell.start for cell in cells if cell.id in ids}
    return [cell for cell in cells if cell.id in ids or cell.id in needed]


def words(flags: Flags) -> Iterator[str]:
    """Flags as they stand on a command line."""
    for name, value in flags:
        yield f"--{name}"
        if value is not True:
            yield from map(str, value if isinstance(value, tuple) else (value,))


def _settings(plan: Plan, regime: Regime, seed: int) -> Iterator[tuple[Variant, float]]:
    yield Variant(STOCK, ()), 1.0
    for variant in plan.variants:
        for retention in regime.retention:
            if variant.covers(regime=regime.name, retention=retention, seed=seed):
                yield variant, retention


def _start(plan: Plan, regime: Regime, seed: int, code: Code) -> Cell:
    is_warm = regime.kind == "warm"
    dataset = Dataset(regime.start_corpus, regime.start_limit)
    flags = [
        # A warm run and what it starts from share one schedule, as if the run had not been parted.
        *("--lr-decay-iters", str(regime.start + (regime.iterations if is_warm else 0))),
        *words(plan.model),
        *words(regime.flags if is_warm else regime.start_flags),
        *_common(dataset, regime.ranks, seed, regime.start, _split(regime) if is_warm else _WHOLE, 0),
    ]
    key = _key(flags, regime.ranks, code.stock, code)
    saving = ["--save", f"{STARTS}/{key}/{CHECKPOINT}", "--save-interval", str(regime.start)]
    return Cell(
        id=f"{STARTS}/{key}",
        regime=regime.name,
        variant=START,
        retention=1.0,
        seed=seed,
        dataset=dataset,
        flags=(*flags, *saving),
        ranks=regime.ranks,
        first=1,
        last=regime.start,
        key=key,
    )


def _cell(
    plan: Plan, regime: Regime, variant: Variant, retention: float, seed: int, start: Cell | None, code: Code
) -> Cell:
    is_stock = variant.name == STOCK
    done_before = regime.start if regime.kind == "warm" else 0
    last = done_before + regime.iterations
    dataset = Dataset(regime.corpus, regime.limit)
    flags = [
        *("--lr-decay-iters", str(last)),
        *words(plan.model),
        *words(regime.flags),
        *_common(dataset, regime.ranks, seed, last, _split(regime), regime.eval_iters),
        *(_loading(regime.kind, start) if start else ()),
        *(() if is_stock else (f"{FLAG_PREFIX}retention", repr(retention))),
        *words(tuple((FLAG_PREFIX.lstrip("-") + name, value) for name, value in variant.flags)),
    ]
    setting = STOCK if is_stock else f"{variant.name}@{retention!r}"
    return Cell(
        id=f"{regime.name}/{setting}/s{seed}",
        regime=regime.name,
        variant=variant.name,
        retention=retention,
        seed=seed,
        dataset=dataset,
        flags=tuple(flags),
        ranks=regime.ranks,
        first=done_before + 1,
        last=last,
        key=_key(flags, regime.ranks, code.stock if is_stock else code.lrm, code),
        start=start.id if start else None,
    )


def _split(regime: Regime) -> str:
    return _HELD_OUT if regime.eval_iters else _WHOLE


def _common(dataset: Dataset, ranks: int, seed: int, last: int, split: str, eval_iters: int) -> list[str]:
    values: dict[str, Any] = {
        "expert-model-parallel-size": ranks,
        "seed": seed,
        "data-path": dataset.prefix,
        "split": split,
        "train-iters": last,
        # Beyond the last: Megatron validates once, when training has ended.
        "eval-interval": last + 1,
        "eval-iters": eval_iters,
        "log-interval": 1,
    }
    return [*_TOKENIZER, *words(tuple(values.items()))]


def _loading(kind: str, start: Cell) -> list[str]:
    # Without exit-on-missing-checkpoint Megatron would go on with random weights.
    flags = ["--load", f"{start.id}/{CHECKPOINT}", "--exit-on-missing-checkpoint"]
    return [*flags, "--finetune" if kind == "memorise" else "--override-opt-param-scheduler"]


def _key(flags: Sequence[str], ranks: int, source: str, code: Code) -> str:
    content = json.dumps([list(flags), ranks, source, code.versions], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
