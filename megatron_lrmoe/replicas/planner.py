"""The plan of one layer call: which experts get replicas, and how many rows each instance computes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from megatron_lrmoe.replicas import coupling
from megatron_lrmoe.replicas.cost import BreakEven, RankRows, RowCost
from megatron_lrmoe.replicas.coupling import Coupled
from megatron_lrmoe.replicas.plan import Certificate, IntArray, Limit, Limits, Plan, checked_inputs, limit_rows
from megatron_lrmoe.replicas.split import split_sources
from megatron_lrmoe.replicas.task import Backend, Layout, Task, masters


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a plan takes into account beside loads and limits."""

    strong: bool = False
    """Use the strong search from the start. It is used anyway where the fast one ends above a limit."""

    backend: Backend = "auto"
    """readable and compiled give the same plan; auto is compiled where numba is installed."""

    domain_ranks: int | None = None
    """Ranks 0 to n-1, n to 2n-1, ... are NVLink domains, which replicas do not leave. Not given: one domain."""

    row_cost: RowCost = field(default_factory=RowCost)
    """Limits and means count this cost instead of rows."""

    resident: Sequence[tuple[int, int]] = ()
    """(expert, rank) of replicas whose weights are in their slots already."""

    resident_cost: Fraction = Fraction(1, 4)
    """Cost of a resident replica, where one that must be pushed costs 1."""

    candidates: Sequence[Plan] = ()
    """Plans for the same loads and limits with quotas that are nowhere lower: this plan will not have more replicas."""

    break_even: BreakEven | None = None
    """Where all limits are relative to the mean: replicas must save more time than they cost, or there are none."""


def plan(
    loads_SE: ArrayLike,
    quota_E: ArrayLike | None,
    owner_E: ArrayLike,
    slots: int,
    limits: Limits,
    options: Options | None = None,
) -> Plan:
    """Fewest replicas with which every rank is within its limits, or as near as the search gets.

    It is a pure function of its arguments, in integers: equal arguments give equal plans on any rank.

    Args:
        loads_SE: routed rows of each source for each expert; there are as many ranks as sources.
        quota_E: rows of each expert that keep their backward; None for all.
        owner_E: rank of each expert's master.
        slots: replicas that a rank can hold.
        limits: rows that a rank may hold, in forward and in backward.
        options: everything else.

    Raises:
        ValueError: a value out of range, with its name and place.
    """
    options = options or Options()
    loads, quotas, owners = checked_inputs(loads_SE, quota_E, owner_E, slots)
    load_E = loads.sum(axis=0)
    task = _task(options, owners, len(loads), int(slots))
    allowed = _allowed(limits, task, load_E, quotas)
    found = [*_solutions(task, load_E, quotas, allowed)]
    found += [c for old in options.candidates if (c := _from_plan(task, old, load_E, quotas, allowed)) is not None]
    best = min(found, key=Coupled.rank)
    worth = options.break_even is None or _earns(options.break_even, limits, task, load_E, quotas, best)
    if not worth:
        best = Coupled(masters(owners, load_E), quotas, 0, 0)
    expert_I, rank_I, rows_I = best.layout
    return Plan(
        owner_E=owners,
        expert_I=expert_I,
        rank_I=rank_I,
        rows_SI=split_sources(loads, expert_I, rank_I, rows_I),
        kept_I=best.kept_I,
        certificate=_certificate(task, limits, allowed, best, max(c.bound for c in found) if worth else 0, worth),
    )


def _task(options: Options, owners: IntArray, ranks: int, slots: int) -> Task:
    domain = ranks if options.domain_ranks is None else options.domain_ranks
    if domain < 1:
        raise ValueError(f"domain_ranks: found {domain}, allowed is a whole number >= 1")
    resident = np.array(list(options.resident), np.int64).reshape(-1, 2)
    for n, (expert, rank) in enumerate(resident.tolist()):
        if not (0 <= expert < len(owners) and 0 <= rank < ranks) or owners[expert] == rank:
            raise ValueError(
                f"resident[{n}]: found {(expert, rank)}, allowed is an expert and a rank that is not its owner"
            )
        if owners[expert] // domain != rank // domain:
            raise ValueError(
                f"resident[{n}]: found {(expert, rank)}, allowed is a rank of the owner's domain of {domain} ranks"
            )
    if len(np.unique(resident, axis=0)) < len(resident) or np.bincount(resident[:, 1]).max(initial=0) > slots:
        raise ValueError(f"resident: found {resident.tolist()}, allowed are different pairs, at most {slots} on a rank")
    return Task(
        owner_E=owners,
        ranks=ranks,
        slots=slots,
        domain_ranks=domain,
        cost=options.row_cost,
        strong=options.strong,
        backend=options.backend,
        resident_N2=resident,
        resident_cost=options.resident_cost,
    )


def _allowed(limits: Limits, task: Task, load_E: IntArray, quotas: IntArray) -> list[IntArray | None]:
    """(R,) forward and backward limits; None for no limit. The finest limit starts at the mean."""

    def rows(limit: Limit, rows_E: IntArray) -> IntArray | None:
        return limit_rows(Fraction(1) if limit == "finest" else limit, task.cost_on(masters(task.owner_E, rows_E)))

    return [rows(limits.forward, load_E), rows(limits.backward, quotas)]


def _solutions(task: Task, load_E: IntArray, quotas: IntArray, allowed: list[IntArray | None]) -> list[Coupled]:
    forward_R, backward_R = allowed
    if forward_R is not None and backward_R is not None:
        both = (forward_R, backward_R)
        return [way(task, load_E, quotas, both) for way in (coupling.forward_first, coupling.backward_first)]
    if forward_R is not None:
        return [coupling.forward_only(task, load_E, quotas, forward_R)]
    if backward_R is not None:
        return [coupling.backward_only(task, load_E, quotas, backward_R)]
    return [Coupled(masters(task.owner_E, load_E), quotas, 0, 0)]


def _from_plan(
    task: Task, old: Plan, load_E: IntArray, quotas: IntArray, allowed: list[IntArray | None]
) -> Coupled | None:
    """An earlier plan with its quotas lowered to these, replicas first; None if it is not one for the same loads."""
    experts = len(load_E)
    same = old.owner_E.shape == task.owner_E.shape and (old.owner_E == task.owner_E).all() and old.migrations == 0
    if not same or old.slots_R.max(initial=0) > task.slots or len(old.rows_SI) != task.ranks:
        return None
    if (old.rank_I // task.domain_ranks != old.owner_E[old.expert_I] // task.domain_ranks).any():
        return None
    routed_E, kept_E = (np.bincount(old.expert_I, values, experts) for values in (old.rows_I, old.kept_I))
    if (routed_E != load_E).any() or (kept_E < quotas).any():
        return None
    kept_I, give_E = old.kept_I.copy(), kept_E.astype(np.int64) - quotas
    for i in range(len(kept_I) - 1, -1, -1):
        given = min(kept_I[i], give_E[old.expert_I[i]])
        kept_I[i] -= given
        give_E[old.expert_I[i]] -= given
    rows_I = old.rows_I.copy()
    stays_I = np.ones(len(kept_I), np.bool_)
    if allowed[0] is None:
        stays_I[experts:] = kept_I[experts:] > 0
        np.add.at(rows_I, old.expert_I[~stays_I], rows_I[~stays_I])
    layout = Layout(old.expert_I[stays_I], old.rank_I[stays_I], rows_I[stays_I])
    kept = layout._replace(rows_I=kept_I[stays_I])
    pairs = zip((layout, kept), allowed, strict=True)
    above = max((int((task.cost_on(rows) - limit).max()) for rows, limit in pairs if limit is not None), default=0)
    return Coupled(layout, kept.rows_I, max(above, 0), 0)


def _earns(prices: BreakEven, limits: Limits, task: Task, load_E: IntArray, quotas: IntArray, best: Coupled) -> bool:
    """Whether the replicas save more time than they cost; a limit in rows has to be met at any price."""
    if any(not isinstance(limit, Fraction | str | None) for limit in (limits.forward, limits.backward)):
        return True
    experts, layout = len(load_E), best.layout
    before = RankRows(*(masters(task.owner_E, rows_E).rows_on(task.ranks) for rows_E in (load_E, quotas)))
    after = RankRows(layout.rows_on(task.ranks), layout._replace(rows_I=best.kept_I).rows_on(task.ranks))
    expert_n, rank_n = layout.expert_I[experts:], layout.rank_I[experts:]
    pushed = prices.push_seconds(task.owner_E[expert_n], rank_n, best.kept_I[experts:] == 0, task.ranks)
    return prices.saved_seconds(before, after) > pushed or len(expert_n) == 0


def _certificate(
    task: Task, limits: Limits, allowed: list[IntArray | None], best: Coupled, bound: int, worth: bool
) -> Certificate:
    kinds = [best.layout, best.layout._replace(rows_I=best.kept_I)]
    cost_R = [task.cost_on(layout) for layout in kinds]
    least_R = [_least_cost(task, layout) for layout in kinds]
    hard = [
        None if asked == "finest" else limit
        for asked, limit in zip((limits.forward, limits.backward), allowed, strict=True)
    ]
    over = [limit is not None and bool((cost > limit).any()) for cost, limit in zip(cost_R, hard, strict=True)]
    hopeless = any(
        limit is not None and bool((_by_domain(task, least) > _by_domain(task, limit)).any())
        for least, limit in zip(least_R, hard, strict=True)
    )
    fewest = 0 if any(over) else min(bound, best.replicas)
    if not worth:
        status = "not worth it"
    elif any(over):
        status = "impossible" if hopeless else "not found"
    else:
        status = "proven" if best.replicas == fewest else "found"
    return Certificate(
        status=status,
        forward_limit=None if hard[0] is None else int(hard[0].max()),
        forward_bound=_mean_bound(task, least_R[0]),
        forward_rows=int(cost_R[0].max()),
        backward_limit=None if hard[1] is None else int(hard[1].max()),
        backward_bound=_mean_bound(task, least_R[1]),
        backward_rows=int(cost_R[1].max()),
        replica_bound=fewest,
        replicas=best.replicas,
    )


def _least_cost(task: Task, layout: Layout) -> IntArray:
    """(R,) cost of all rows at their masters; replicas can only add to the sum of a domain."""
    rows_E = np.zeros(len(task.owner_E), np.int64)
    np.add.at(rows_E, layout.expert_I, layout.rows_I)
    return task.cost_on(masters(task.owner_E, rows_E))


def _mean_bound(task: Task, cost_R: IntArray) -> int:
    """Largest mean of a domain, rounded up: some rank of it has at least as much."""
    size_d = _by_domain(task, np.ones(task.ranks, np.int64))
    return int((-(-_by_domain(task, cost_R) // size_d)).max())


def _by_domain(task: Task, value_R: IntArray) -> IntArray:
    """(d,) sum over the ranks of each domain."""
    return np.add.reduceat(value_R, np.arange(0, task.ranks, task.domain_ranks))
