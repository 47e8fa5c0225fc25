"""An independent reading of what a plan of replicas promises, in plain Python, and small makers of its inputs."""

import os
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import settings

from megatron_lrmoe.replicas import planner
from megatron_lrmoe.replicas.cost import RowCost
from megatron_lrmoe.replicas.plan import IntArray, Limit, Limits, Plan
from megatron_lrmoe.replicas.planner import Options

IN_CI = os.environ.get("CI") == "true"


def cases(ci: int, developer: int) -> settings:
    """Hypothesis settings with a number of cases for CI and one for a developer."""
    return settings(max_examples=ci if IN_CI else developer)


def loads_of(load_E: Sequence[int], ranks: int) -> IntArray:
    """(S, E) loads that all come from the last source."""
    loads_SE = np.zeros((ranks, len(load_E)), np.int64)
    loads_SE[-1] = load_E
    return loads_SE


def planned(
    load_E: list[int],
    limits: Limits,
    *,
    quota_E: list[int] | None = None,
    owner_E: list[int] | None = None,
    slots: int = 1,
    options: Options | None = None,
) -> Plan:
    """A plan that has passed ``problems_of``; unless owners are given, every rank has one expert."""
    owners, options = owner_E or list(range(len(load_E))), options or Options()
    loads_SE = loads_of(load_E, len(load_E) if owner_E is None else max(owner_E) + 1)
    found = planner.plan(loads_SE, quota_E, owners, slots, limits, options)
    arguments = (loads_SE, np.array(quota_E or load_E), np.array(owners), slots, limits)
    assert problems_of(found, *arguments, row_cost=options.row_cost, domain_ranks=options.domain_ranks) == []
    return found


def replicas_of(plan: Plan) -> list[tuple[int, int, int, int]]:
    """(expert, rank, forward rows, backward rows) of each replica."""
    columns = (plan.expert_I, plan.rank_I, plan.rows_I, plan.kept_I)
    return list(zip(*(column[plan.num_experts :].tolist() for column in columns), strict=True))


def problems_of(
    plan: Plan,
    loads_SE: IntArray,
    quota_E: IntArray,
    owner_E: IntArray,
    slots: int,
    limits: Limits,
    *,
    row_cost: RowCost | None = None,
    domain_ranks: int | None = None,
) -> list[str]:
    """What is wrong with a plan; empty if nothing is.

    Args:
        plan: to look at.
        loads_SE: it was made for, as are the other arguments.
        quota_E: rows of each expert to keep.
        owner_E: rank of each master.
        slots: replicas that a rank can hold.
        limits: rows that a rank may hold.
        row_cost: as in the planner's options.
        domain_ranks: as in the planner's options.
    """
    load_E, quotas = loads_SE.sum(axis=0).tolist(), quota_E.tolist()
    domain = len(loads_SE) if domain_ranks is None else domain_ranks
    return [
        *_of_instances(plan, owner_E.tolist(), slots, domain),
        *_of_rows(plan, loads_SE.tolist(), quotas),
        *_of_certificate(plan, load_E, quotas, limits, row_cost or RowCost(), domain),
    ]


def _of_instances(plan: Plan, owner_E: list[int], slots: int, domain: int) -> list[str]:
    experts, ranks = len(owner_E), len(plan.rows_SI)
    expert_I, rank_I = plan.expert_I.tolist(), plan.rank_I.tolist()
    where_n = list(zip(expert_I[experts:], rank_I[experts:], strict=True))
    found = []
    arrays = (plan.owner_E, plan.expert_I, plan.rank_I, plan.rows_SI, plan.kept_I)
    if any(array.dtype != np.int64 or array.flags.writeable for array in arrays):
        found.append("an array is not a read-only one of int64")
    if plan.owner_E.tolist() != owner_E:
        found.append("owners have changed")
    if expert_I[:experts] != list(range(experts)) or rank_I[:experts] != owner_E:
        found.append("masters are not first, in order, and at their owners")
    if not all(one < next_one for one, next_one in pairwise(where_n)):
        found.append("replicas are not ordered by (expert, rank)")
    found += [f"rank {r} holds expert {e} twice" for e, r in where_n if owner_E[e] == r]
    found += [f"expert {e} has left its domain" for e, r in where_n if owner_E[e] // domain != r // domain]
    held_R = [sum(rank == r for _, rank in where_n) for r in range(ranks)]
    found += [f"rank {r} holds {held} replicas, {slots} allowed" for r, held in enumerate(held_R) if held > slots]
    return found


def _of_rows(plan: Plan, loads_SE: list[list[int]], quota_E: list[int]) -> list[str]:
    rows_SI, kept_I, expert_I = plan.rows_SI.tolist(), plan.kept_I.tolist(), plan.expert_I.tolist()
    experts, found = len(quota_E), []
    for s, loads in enumerate(loads_SE):
        sum_E = [0] * experts
        for i, rows in enumerate(rows_SI[s]):
            sum_E[expert_I[i]] += rows
            if rows < 0:
                found.append(f"source {s} sends {rows} rows to instance {i}")
        found += [f"source {s} sends {sum_E[e]} of {loads[e]} rows of expert {e}" for e in _differ(sum_E, loads)]
    rows_I = [sum(column) for column in zip(*rows_SI, strict=True)]
    sum_E = [0] * experts
    for i, kept in enumerate(kept_I):
        sum_E[expert_I[i]] += kept
        if not 0 <= kept <= rows_I[i]:
            found.append(f"instance {i} keeps {kept} of {rows_I[i]} rows")
        if i >= experts and rows_I[i] == 0:
            found.append(f"replica {i} has no rows")
    return found + [f"{sum_E[e]} of {quota_E[e]} rows of expert {e} are kept" for e in _differ(sum_E, quota_E)]


def _differ(one: list[int], other: list[int]) -> list[int]:
    return [place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


def _of_certificate(
    plan: Plan, load_E: list[int], quota_E: list[int], limits: Limits, row_cost: RowCost, domain: int
) -> list[str]:
    rows_I = [sum(column) for column in zip(*plan.rows_SI.tolist(), strict=True)]
    certificate, replicas = plan.certificate, len(plan.expert_I) - len(load_E)
    forward = _reached(plan, rows_I, load_E, limits.forward, row_cost, domain)
    backward = _reached(plan, plan.kept_I.tolist(), quota_E, limits.backward, row_cost, domain)
    found = []
    for name, true in (("forward", forward), ("backward", backward)):
        said = tuple(getattr(certificate, f"{name}_{what}") for what in ("limit", "bound", "rows"))
        if said != (true.limit, true.bound, true.rows):
            found.append(f"{name} limit, bound and rows are {true}, the certificate says {said}")
    if certificate.replicas != replicas or not 0 <= certificate.replica_bound <= replicas:
        found.append(f"{replicas} replicas, the certificate says {certificate}")
    if forward.above or backward.above:
        status = "impossible" if forward.hopeless or backward.hopeless else "not found"
    else:
        status = "proven" if certificate.replica_bound == replicas else "found"
    if certificate.status != status and (certificate.status, replicas) != ("not worth it", 0):
        found.append(f"status is {status}, the certificate says {certificate.status}")
    return found


class _Reached(NamedTuple):
    limit: int | None
    bound: int
    rows: int
    above: bool
    hopeless: bool


def _reached(
    plan: Plan, rows_I: list[int], rows_E: list[int], limit: Limit, row_cost: RowCost, domain: int
) -> _Reached:
    ranks = len(plan.rows_SI)
    cost_R = _cost(rows_I, plan.rank_I.tolist(), ranks, row_cost)
    # Every plan costs as much as the masters alone, or more.
    least_R = _cost(rows_E, plan.owner_E.tolist(), ranks, row_cost)
    allowed_R = _allowed(limit, least_R)
    parts = [slice(first, first + domain) for first in range(0, ranks, domain)]
    return _Reached(
        limit=None if allowed_R is None else max(allowed_R),
        bound=max(-(-sum(least_R[part]) // len(least_R[part])) for part in parts),
        rows=max(cost_R),
        above=allowed_R is not None and any(c > most for c, most in zip(cost_R, allowed_R, strict=True)),
        hopeless=allowed_R is not None and any(sum(least_R[part]) > sum(allowed_R[part]) for part in parts),
    )


def _cost(rows_n: list[int], rank_n: list[int], ranks: int, row_cost: RowCost) -> list[int]:
    cost_R = [0] * ranks
    for rows, rank in zip(rows_n, rank_n, strict=True):
        if rows > 0:
            cost_R[rank] += -(-rows // row_cost.tile_rows) * row_cost.tile_rows + row_cost.group_rows
    return cost_R


def _allowed(limit: Limit, cost_R: list[int]) -> list[int] | None:
    if limit is None or limit == "finest":
        return None
    if isinstance(limit, Fraction):
        return [-(-(limit * sum(cost_R)) // len(cost_R))] * len(cost_R)
    return [limit] * len(cost_R) if isinstance(limit, int) else list(limit)
