"""Every setting of the plugin: one dataclass, from whose field docstrings the ``--moe-lrm-*`` flags are made."""

import ast
import inspect
import math
import textwrap
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, Literal

USUAL, REPLICAS, ADVANCED = "moe-lrm", "moe-lrm, replicas", "moe-lrm, advanced"
FLAG_PREFIX = "--moe-lrm-"

TRAINED_POLICIES = ("none", "lrm", "ultraep", "symi")
"""Replica policies that leave masters where they are and honour slots."""


def _in_group(title: str, default: Any) -> Any:
    return field(default=default, metadata={"group": title})


@dataclass(frozen=True, kw_only=True)
class LrmConfig:
    """Settings of the recalibrated, compacted MoE backward.

    Raises:
        ValueError: one error that lists every field out of range, with its flag, value and allowed values.
    """

    retention: float | None = _in_group(USUAL, None)
    """Share of the routed (token, expert) pairs that keep their backward, 0 < r <= 1. Not given, or 1.0:
    Megatron's own classes stay in place, unless there are replicas. The forward is never changed."""

    selection: Literal["unbiased", "topk"] = _in_group(USUAL, "unbiased")
    """How an expert's quota is filled. unbiased: a systematic draw with probability proportional to the
    square root of the score, kept pairs weighted by 1/probability, so that the expected gradient is the full
    one. topk: the highest scores, unweighted (the LRMoE paper's rule; biased)."""

    start_iter: int | None = _in_group(USUAL, None)
    """Iterations at the start of training that run Megatron's full backward. Not given: as many as Megatron's
    learning rate takes to warm up."""

    ramp_iters: int = _in_group(USUAL, 0)
    """After start-iter, the number of iterations over which retention falls linearly from 1.0."""

    adaptive: bool = _in_group(USUAL, False)
    """Let each layer's retention start at 1.0 and go down by 0.01 an iteration, from start-iter on and never below
    retention, while the variance that dropping adds to its gradients stays below adaptive-tau times their own; it goes
    up again where it does not. Needs selection unbiased."""

    layers: str | None = _in_group(USUAL, None)
    """Layer numbers (from 1) that drop backward work, as '2-5,9'. Not given: every MoE layer."""

    quota: Literal["proportional", "balanced", "joint"] = _in_group(USUAL, "proportional")
    """How many rows each expert keeps. proportional: the same share of every expert. balanced: as many rows in
    all, but dropped on the ranks with the most, so that the busiest rank keeps fewer. joint: dropped only on ranks
    above the row limit, down to it, and no more in all than retention allows; with neither rank-rows nor budget-gib
    it aims at 1.01 times the mean of the routed rows. balanced and joint drop far more of a hot expert than of
    others, which unbiased selection bears and topk does not."""

    rank_rows: int | None = _in_group(USUAL, None)
    """Largest number of rows that a rank keeps in one layer call. A rank above it drops more than retention says,
    down to min-retention of each expert and no further. Not given: no limit."""

    budget_gib: float | None = _in_group(USUAL, None)
    """GiB of a rank's memory for what one layer call saves for backward and what its backward then allocates;
    limits a rank's kept rows as rank-rows does, and with both the smaller limit counts. Not given: no limit."""

    router_grad: Literal["drop", "baseline"] = _in_group(USUAL, "drop")
    """Task-loss gradient of the routing weights. drop: a dropped pair's is zero, a kept pair's has the weight of its
    row. baseline: a kept pair's is exact and unweighted, and the dropped pairs of a token share what is missing from
    the inner product of the token's routed output and its gradient, exact where one is dropped; the outputs are kept
    until backward, 2 x hidden bytes a token in bf16."""

    when: Literal["backward", "forward"] = _in_group(USUAL, "backward")
    """When pairs are chosen. backward: when their gradients have arrived. forward: right after the activation, from
    what is known then, so that nothing of dropped pairs is saved and saved memory falls with retention too; score lrm
    is then alpha^2 |phi|^2, and grad-sq and grad-abs cannot be used."""

    score: Literal["lrm", "grad-sq", "grad-abs", "alpha", "random"] = _in_group(ADVANCED, "lrm")
    """What a pair is worth. lrm: alpha^2 |g|^2 |phi|^2. grad-sq: |g|^2. grad-abs: the sum of |g|. alpha: the routing
    weight. random: nothing is worth more than anything else. unbiased draws in proportion to grad-abs and alpha, and
    to the square root of lrm and grad-sq, which are squares."""

    scope: Literal["expert", "source"] = _in_group(ADVANCED, "expert")
    """Over what a quota is filled. expert: over all tokens of an expert, wherever they come from (one host
    sync in backward, none with when forward). source: over each source rank's tokens of an expert (no sync in
    backward)."""

    max_weight: float | None = _in_group(ADVANCED, None)
    """Largest 1/probability that 'unbiased' may give a pair, kept by a floor on the probability; what scope source
    draws among sources is not counted, and shrink comes after. Not given: no cap."""

    shrink: float = _in_group(ADVANCED, 1.0)
    """How far the weights of 'unbiased' are from 1: a kept pair weighs 1 + shrink (1/probability - 1). 1: unbiased.
    0: unweighted. Between them less noise for some bias."""

    min_retention: float | None = _in_group(ADVANCED, None)
    """Share of its rows that every expert keeps at least, rounded up, whatever balanced, joint, rank-rows or
    budget-gib ask for; one row at least, and never more than the proportional quota. While retention ramps down
    from 1.0 this share does too. Not given: 0.5, or retention where that is less."""

    min_rows: int = _in_group(ADVANCED, 0)
    """An expert with no more rows than this keeps them all."""

    gemm: Literal["auto", "loop", "grouped"] = _in_group(ADVANCED, "auto")
    """GEMMs over the experts. loop: one matmul per expert, forward bit-identical to Megatron's SequentialMLP.
    grouped: torch.nn.functional.grouped_mm. auto: grouped for bf16 and fp16 on a GPU, loop otherwise."""

    adaptive_tau: float = _in_group(ADVANCED, 0.025)
    """Largest added variance that adaptive accepts, as a share of the sum of the pairs' squared fc2 gradient norms,
    which is the variance of a gradient whose pairs have nothing in common."""

    probe_interval: int = _in_group(ADVANCED, 0)
    """Every so many iterations the first microbatch runs the full backward, and the bias that topk and the noise that
    unbiased would have had are logged: kappa, topk_dropped_mass, unbiased_variance. Needs the memory of a full
    backward. 0: never."""

    replica_policy: Literal["none", "lrm", "ultraep", "symi", "moonep", "eplb"] = _in_group(REPLICAS, "none")
    """Who decides which experts get replicas on other ranks, for a layer call or for replica-interval iterations. lrm:
    the fewest with which no rank has more rows than replica-tolerance allows, chosen together with quota joint.
    ultraep, symi: as those systems choose, with masters that stay where they are. moonep and eplb can be planned with
    but not trained with."""

    replica_slots: int = _in_group(REPLICAS, 2)
    """Replicas that a rank has room for, one buffer for all layers."""

    replica_tolerance: float = _in_group(REPLICAS, 1.01)
    """Largest rows of a rank that lrm aims at, as a multiple of the mean: of routed rows in forward, and in backward of
    kept rows, or with replica-limits backward of routed ones. Where rank-rows or budget-gib are given they count
    instead in backward."""

    replica_limits: Literal["both", "backward"] = _in_group(REPLICAS, "both")
    """What lrm limits. both: routed rows and kept rows, for the shortest step; quota joint, which spares replicas, is
    then proportional. backward: kept rows alone, for the fewest replicas; ranks stay uneven in forward."""

    replica_min_rows: int = _in_group(REPLICAS, 1024)
    """Rows that lrm's replicas must take off the busiest rank for each copy over the busiest link, a forward row
    counting a third and a kept one two thirds; otherwise there are none. ultraep: fewest rows of a replica where its
    fast search has failed."""

    replica_interval: int = _in_group(REPLICAS, 1)
    """Iterations for which replicas stay where they are. 1: planned anew for each layer call, from its exact loads.
    More: from the loads of the last interval; rows and quotas still follow the exact loads."""

    trace: str | None = _in_group(ADVANCED, None)
    """Folder for the routed, retained and placed loads of each layer call, as Parquet files; needs pyarrow."""

    trace_interval: int = _in_group(ADVANCED, 1)
    """Iterations between those that are traced."""

    log_detail: bool = _in_group(ADVANCED, False)
    """Log the figures of every layer, not only those of all layers together."""

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ValueError("\n".join(problems))

    def problems(self) -> list[str]:
        """Every field out of range, one sentence each: flag, what was found, what is allowed."""
        found: list[str] = []

        def require(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                found.append(f"{flag_of(name)}: found {getattr(self, name)!r}, allowed is {allowed}")

        r = self.retention
        require(r is None or (math.isfinite(r) and 0 < r <= 1), "retention", "0 < retention <= 1")
        m = self.min_retention
        require(m is None or 0 <= m <= 1, "min_retention", "0 <= share <= 1")
        above = r is not None and m is not None and m > r
        require(bool(found) or not above, "min_retention", f"at most {flag_of('retention')}, which is {r!r}")
        require(self.rank_rows is None or self.rank_rows >= 1, "rank_rows", "a whole number >= 1")
        b = self.budget_gib
        require(b is None or (math.isfinite(b) and b > 0), "budget_gib", "a number > 0")
        w = self.max_weight
        require(w is None or (math.isfinite(w) and w >= 1), "max_weight", "a number >= 1")
        require(0 <= self.shrink <= 1, "shrink", "0 <= shrink <= 1")
        tau = self.adaptive_tau
        require(math.isfinite(tau) and tau > 0, "adaptive_tau", "a number > 0")
        policies = [name for name in TRAINED_POLICIES if name != self.replica_policy]
        trained = self.replica_policy in TRAINED_POLICIES
        require(trained, "replica_policy", f"{', '.join(policies)}: its masters do not stay, or slots are not honoured")
        require(self.replica_slots >= 1, "replica_slots", "a whole number >= 1")
        t = self.replica_tolerance
        require(math.isfinite(t) and t >= 1, "replica_tolerance", "a number >= 1")
        for name in ("replica_interval", "trace_interval"):
            require(getattr(self, name) >= 1, name, "a whole number >= 1")
        require(not (self.replicates and self.probe_interval), "probe_interval", "0 with replicas")
        for name in ("start_iter", "ramp_iters", "min_rows", "probe_interval", "replica_min_rows"):
            require((getattr(self, name) or 0) >= 0, name, "a whole number >= 0")
        for f in fields(self):
            choices = getattr(f.type, "__args__", ()) if "Literal" in str(f.type) else ()
            require(not choices or getattr(self, f.name) in choices, f.name, f"one of {list(choices)}")
        if self.when == "forward" and self.score in ("grad-sq", "grad-abs"):
            found.append(
                f"{flag_of('when')}: found 'forward', allowed is 'backward' with {flag_of('score')} {self.score}: "
                "gradients are not known in forward"
            )
        if self.adaptive:
            found += self._problems_of_adaptive()
        try:
            parse_layers(self.layers)
        except ValueError as error:
            found.append(f"{flag_of('layers')}: {error}")
        return found

    def _problems_of_adaptive(self) -> list[str]:
        against = {
            "retention": (not self.drops, "a value below 1, the lowest it may go to"),
            "selection": (self.selection == "topk", "unbiased, since topk adds no sampling variance to go by"),
            "score": (self.score == "grad-abs", "another, since the variance needs the gradients' norms"),
            "ramp_iters": (self.ramp_iters > 0, "0, since retention comes down by itself"),
        }
        return [
            f"{flag_of(name)}: found {getattr(self, name)!r}, allowed with {flag_of('adaptive')} is {allowed}"
            for name, (refused, allowed) in against.items()
            if refused
        ]

    @property
    def drops(self) -> bool:
        """Whether any backward work is to be dropped at any time."""
        return self.retention is not None and self.retention < 1

    @property
    def replicates(self) -> bool:
        """Whether experts may have replicas."""
        return self.replica_policy != "none"

    @property
    def enabled(self) -> bool:
        """Whether our classes are to take the place of Megatron's."""
        return self.drops or self.replicates

    @property
    def first_iteration(self) -> int:
        """Number, from 0, of the first iteration that may drop; 0 where nobody has settled ``start_iter``."""
        return self.start_iter or 0

    @property
    def retention_fraction(self) -> Fraction:
        """Retention as the decimal fraction that was written: 0.7 is 7/10, not the nearest binary float."""
        return Fraction(repr(self.retention)) if self.retention is not None else Fraction(1)

    @property
    def least_share(self) -> Fraction:
        """``min_retention`` as the decimal fraction that was written, or what it is when not given."""
        if self.min_retention is None:
            return min(Fraction(1, 2), self.retention_fraction)
        return Fraction(repr(self.min_retention))

    @property
    def budget_bytes(self) -> int | None:
        """``budget_gib`` in whole bytes."""
        return None if self.budget_gib is None else int(Fraction(repr(self.budget_gib)) * 2**30)

    @property
    def needs_alpha_at_source(self) -> bool:
        """Whether backward needs the combine weights on the ranks whose tokens they are."""
        chosen_there = self.scope == "source" and self.when == "backward"
        return self.router_grad == "baseline" or (self.score == "alpha" and chosen_there)

    @property
    def limits_rows(self) -> bool:
        """Whether a flag limits the rows that a rank keeps."""
        return self.rank_rows is not None or self.budget_gib is not None

    def covers_layer(self, layer_number: int | None) -> bool:
        """Whether the layer with this number (from 1) is among ``layers``."""
        chosen = parse_layers(self.layers)
        return chosen is None or layer_number in chosen


def flag_of(name: str) -> str:
    """Command-line flag of a field: ``max_weight`` is ``--moe-lrm-max-weight``."""
    return FLAG_PREFIX + name.replace("_", "-")


def dest_of(name: str) -> str:
    """Attribute of Megatron's argument namespace that holds a field."""
    return "moe_lrm_" + name


def parse_layers(text: str | None) -> frozenset[int] | None:
    """Layer numbers in ``'2-5,9'``; None (every layer) for None.

    Raises:
        ValueError: a part is no number or rising range of numbers from 1.
    """
    if text is None:
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"found {text!r}, allowed are numbers and ranges such as 2-5,9")
        low, high = int(first), int(last or first)
        if low < 1 or high < low:
            raise ValueError(f"found {part!r} in {text!r}, allowed are layers from 1 and rising ranges")
        chosen.update(range(low, high + 1))
    return frozenset(chosen)


def field_help() -> dict[str, str]:
    """Docstring of each field, as one line of help text."""
    body = ast.parse(textwrap.dedent(inspect.getsource(LrmConfig))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for node, after in zip(body.body, body.body[1:], strict=False):
        is_field = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if is_field and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            texts[node.target.id] = " ".join(str(after.value.value).split())  # type: ignore[union-attr]
    return texts
