"""A plan as plain text: bars of the ranks' rows before and after, replicas, and what is proven."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from megatron_lrmoe.replicas.plan import Certificate, IntArray
from megatron_lrmoe.report.plan_report import OURS, PlanReport
from megatron_lrmoe.report.plan_request import BACKWARD_FACTOR

ALL_RANKS = 32
"""Up to here every rank has a line."""
BUSIEST, IDLEST = 8, 4
"""Ranks that have a line where there are more."""

_COLUMNS = 100
_WIDTH = 14
_EIGHTHS = "▏▎▍▌▋▊▉"
_LIMIT, _FULL = "│", "█"
_ASCII = str.maketrans({_LIMIT: "|", _FULL: "#", **dict.fromkeys(_EIGHTHS, "-")})
_FEW_EXPERTS = 16


def text(report: PlanReport) -> str:
    """The whole report, lines of about 100 columns."""
    return "\n".join([*_head(report), "", *_ranks(report), "", *_replicas(report), "", *_outcome(report)])


def encodable(text: str, encoding: str | None) -> str:
    """The text with ASCII bars, and without what else the encoding lacks, if that does not hold it as it is."""
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    return text


def _head(report: PlanReport) -> Iterator[str]:
    request, made = report.request, report.plan
    rows = int(report.load_E.sum())
    yield report.loads.origin
    yield (
        f"{_count(made.num_experts, 'expert')} on {_count(made.num_ranks, 'rank')}, "
        f"{_count(request.slots, 'slot')} on each; {_count(rows, 'row')}; "
        f"max/mean before {float(report.max_over_mean):.3f}"
    )
    options = [
        *(["strong search"] if request.strong else []),
        *([f"replicas stay among {request.domain} ranks"] if request.domain else []),
    ]
    yield ", ".join([f"policy {request.policy}", f"quota {request.quota}", f"retention {request.retention}", *options])
    forward, backward = (
        _limit(report, limit, asked)
        for limit, asked in (
            (report.limits.forward, request.forward_limit),
            (report.limits.backward, request.backward_limit),
        )
    )
    yield f"forward limit {forward}; backward limit {backward}"
    if request.tile_rows > 1 or request.group_rows:
        yield (
            f"rows on ranks and limits count whole tiles of {request.tile_rows}, "
            f"and {request.group_rows} for each expert's group"
        )


def _limit(report: PlanReport, limit: int | str | None, asked: str | None) -> str:
    if not isinstance(limit, int):
        return limit or "none"
    if report.request.budget_gib is not None:
        return f"{limit} ({report.request.budget_gib} GiB)"
    factor = f"{float(BACKWARD_FACTOR):g}x" if asked is None else asked
    return f"{limit} ({factor} the routed mean)" if factor.endswith("x") else str(limit)


def _ranks(report: PlanReport) -> Iterator[str]:
    rows = report.rank_rows
    limits = report.limits
    marked = [limit for limit in limits if isinstance(limit, int)]
    lowest = min(marked, default=None)
    columns = [(rows.before_R, lowest), *zip(rows[1:], limits, strict=True)]
    bars = [_bars(value_R, limit, max(int(r.max()) for r in rows)) for value_R, limit in columns]
    width = len(bars[0][0])
    heads = (head.ljust(width) for head in ("rows before", "forward after", "backward after"))
    head = "  ".join(["rank", *heads, "slots", "pushes"])

    def lines(ranks: Sequence[int]) -> Iterator[str]:
        yield head
        for r in ranks:
            cells = [f"{r:>4}", *(bar[r] for bar in bars), f"{report.plan.slots_R[r]:>5}"]
            yield "  ".join([*cells, f"{report.plan.pushes_R[r]:>6}"])

    if report.plan.num_ranks <= ALL_RANKS:
        yield from lines(range(report.plan.num_ranks))
    else:
        after_R = rows.backward_R if limits.backward is not None or limits.forward is None else rows.forward_R
        for when, value_R in (("before", rows.before_R), ("after", after_R)):
            order = np.argsort(-value_R, kind="stable").tolist()
            yield f"{BUSIEST} busiest and {IDLEST} idlest ranks {when}"
            yield from lines(order[:BUSIEST] + order[-IDLEST:])
            yield ""
    number = len(bars[0][0]) - _WIDTH - 2
    for name, figure in (("max", np.max), ("mean", np.mean), ("min", np.min)):
        form = f">{number}.1f" if name == "mean" else f">{number}d"
        yield "  ".join([f"{name:>4}", *(format(figure(r), form).ljust(width) for r in rows)]).rstrip()
    if marked:
        yield f"{_LIMIT} limit{' (before: the lower one)' if len(marked) > 1 else ''}   ! above it"


def _bars(value_R: IntArray, limit: int | str | None, most: int) -> list[str]:
    """A number and a bar for each rank, equally long; a mark at the limit, unless it is far above all."""
    limit = limit if isinstance(limit, int) else None
    scale = max(1, most, limit if limit is not None and limit <= 2 * most else 0)
    number = max(6, len(str(most)))
    cells = []
    for value in value_R.tolist():
        full, part = divmod(-(-value * _WIDTH * 8 // scale), 8)
        bar = (_FULL * full + (_EIGHTHS[part - 1] if part else "")).ljust(_WIDTH + 1)
        if limit is not None and limit <= scale:
            at = limit * _WIDTH // scale
            bar = bar[:at] + _LIMIT + bar[at + 1 :]
        above = "!" if limit is not None and value > limit else " "
        cells.append(f"{value:>{number}}{above}{bar}")
    return cells


def _replicas(report: PlanReport) -> Iterator[str]:
    made, without = report.plan, report.without
    if (report.quota_E == report.load_E).all():
        yield f"Replicas: {made.replicas}; nothing is dropped"
    else:
        yield (
            f"Replicas: {made.replicas} with dropping, {without.replicas} without (same limits, retention 1.0"
            f"{'' if without.certificate.within_limits else '; above a limit'})"
        )
    if made.num_experts <= _FEW_EXPERTS and made.replicas != without.replicas:
        copies = (" ".join(map(str, np.bincount(p.expert_I))) for p in (without, made))
        yield "Copies of each expert: {} without dropping, {} with".format(*copies)
    first = made.num_experts
    if made.replicas:
        yield f"{'expert':>8}  {'from':>5}  {'to':>5}  {'forward rows':>12}  {'kept rows':>10}"
    for expert, rank, rows, kept, only in zip(
        *(a[first:].tolist() for a in (made.expert_I, made.rank_I, made.rows_I, made.kept_I, made.forward_only_I)),
        strict=True,
    ):
        mark = "  forward only" if only else ""
        yield f"{expert:>8}  {made.owner_E[expert]:>5}  {rank:>5}  {rows:>12}  {kept:>10}{mark}"
    used = sorted(Counter(made.slots_R.tolist()).items(), reverse=True)
    yield "Slots used: " + ", ".join(f"{slots} on {_count(ranks, 'rank')}" for slots, ranks in used)
    busiest = int(made.pushes_R.argmax())
    sender = f" (rank {busiest})" if made.replicas else ""
    yield f"Copies pushed by the rank that pushes most: {made.pushes_R[busiest]}{sender}"
    if made.migrations:
        yield f"Masters moved to another rank: {made.migrations}"


def _outcome(report: PlanReport) -> Iterator[str]:
    kept, routed = int(report.quota_E.sum()), int(report.load_E.sum())
    share = f"{kept / routed:.4f}" if routed else "none"
    yield f"Kept share: {share} ({kept} of {_count(routed, 'row')})"
    yield from textwrap.wrap(verdict(report), _COLUMNS)
    found = report.plan.certificate
    table = [
        ("", "reached", "lower bound", "limit"),
        ("forward rows of a rank", found.forward_rows, found.forward_bound, report.limits.forward),
        ("backward rows of a rank", found.backward_rows, found.backward_bound, report.limits.backward),
        ("replicas", found.replicas, found.replica_bound, ""),
    ]
    for name, reached, bound, limit in table:
        yield f"{name:<24}{reached:>12}  {bound:>12}  {'none' if limit is None else limit:>12}".rstrip()


def verdict(report: PlanReport) -> str:
    """What is known of the plan, in a few sentences."""
    made, found, bound = report.plan, report.plan.certificate, report.plan.certificate.replica_bound
    if found.status == "not worth it":
        return "Not worth it: replicas would cost more than they save, so there are none."
    if found.status == "impossible":
        return f"Impossible: ABOVE A LIMIT ({_excess(found)}). No plan is within all limits: a mean is above its limit."
    if found.status == "not found":
        return f"Not found: ABOVE A LIMIT ({_excess(found)}). Whether some plan is within all limits is open."
    if report.limits == (None, None):
        return "No limits were given" + (": no replica is needed." if report.request.policy == OURS else ".")
    within = "every rank is within the limits"
    if "finest" in report.limits:
        within = "every rank is within the limits, 'finest' being the smallest that the search reached"
    if found.status == "proven":
        fewer = (
            f"no plan within them has fewer replicas than {made.replicas}" if made.replicas else "without any replica"
        )
        return f"Proven: {within}, {'and ' if made.replicas else ''}{fewer}."
    if report.request.policy != OURS:
        return f"Found: {within}. The policy {report.request.policy} proves nothing about the number of replicas."
    least = f"No plan within them has fewer than {_count(bound, 'replica')}. " if bound else ""
    return f"Found: {within}. {least}Whether fewer than {made.replicas} can do is open."


def _excess(found: Certificate) -> str:
    pairs = (
        ("forward", found.forward_rows, found.forward_limit),
        ("backward", found.backward_rows, found.backward_limit),
    )
    return "; ".join(f"{rows} {kind} rows, limit {limit}" for kind, rows, limit in pairs if rows > (limit or rows))


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
