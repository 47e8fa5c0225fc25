"""``megatron-lrmoe plan``: a plan for given loads, with and without dropping, as text, JSON or a picture."""

from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from megatron_lrmoe.recalibration.balance import RowBytes
from megatron_lrmoe.recalibration.quota import proportional_quota
from megatron_lrmoe.replicas.cost import ByteBudget, RowCost
from megatron_lrmoe.replicas.joint import Retention, plan_with_policy
from megatron_lrmoe.replicas.peers import POLICIES, Policy
from megatron_lrmoe.replicas.plan import IntArray, Limits, Plan
from megatron_lrmoe.replicas.planner import Options, plan
from megatron_lrmoe.replicas.task import Layout, masters
from megatron_lrmoe.replicas.workloads import skew
from megatron_lrmoe.report.plan_loads import Loads, read_loads
from megatron_lrmoe.report.plan_request import BACKWARD_FACTOR, Request, flag, parse_limit

OURS = "lrm"
RowLimit = int | Literal["finest"] | None
_OURS_ALONE = ("domain", "tile_rows", "group_rows", "strong", "backend")
_BF16_BYTES, _FP32_BYTES = 2, 4


def policies() -> dict[str, Policy]:
    """Planners by name: ours, ``lrm``, and the rivals."""
    return {OURS: plan, **POLICIES}


class RowLimits(NamedTuple):
    """Rows that every rank may hold, ``"finest"``, or None for no limit."""

    forward: RowLimit
    backward: RowLimit


class RankRows(NamedTuple):
    """(R,) rows of each rank, counted as the limits count them: with tiles and groups where those cost anything."""

    before_R: IntArray
    """Routed rows at the experts' owners; forward and backward rows are the same, since nothing is dropped."""
    forward_R: IntArray
    """Routed rows with the plan."""
    backward_R: IntArray
    """Kept rows with the plan."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanReport:
    """A plan, and what was asked.

    Args:
        request: the flags.
        loads: the routed rows.
        limits: of every rank.
        quota_E: rows of each expert that keep their backward.
        plan: for these quotas.
        without: by the same policy, within the same limits, if nothing is dropped.
    """

    request: Request
    loads: Loads
    limits: RowLimits
    quota_E: IntArray
    plan: Plan
    without: Plan

    @cached_property
    def load_E(self) -> IntArray:
        """(E,) routed rows of each expert."""
        return self.loads.loads_SE.sum(axis=0)

    @property
    def max_over_mean(self) -> Fraction:
        """Of the routed rows of the ranks, without replicas."""
        return skew(self.loads.loads_SE, self.loads.owner_E)

    @property
    def row_cost(self) -> RowCost:
        """What limits count a group's rows as."""
        return RowCost(tile_rows=self.request.tile_rows, group_rows=self.request.group_rows)

    @cached_property
    def rank_rows(self) -> RankRows:
        """Rows of each rank before and after."""
        return self.rows_of(self.plan)

    def rows_of(self, made: Plan) -> RankRows:
        """Rows of each rank before and after a plan for these loads."""
        start = masters(made.owner_E, self.load_E)
        layouts = [start, *(Layout(made.expert_I, made.rank_I, rows_I) for rows_I in (made.rows_I, made.kept_I))]
        return RankRows(*(_cost_R(self.row_cost, layout, made.num_ranks) for layout in layouts))


def make_report(request: Request) -> PlanReport:
    """Read the loads and plan for them, with and without dropping.

    Raises:
        ValueError: all that is wrong with the flags and the loads, a line each.
    """
    problems = request.input_problems()
    loads = None
    if not problems:
        try:
            loads = read_loads(request)
        except ValueError as error:
            problems.append(str(error))
    problems += request.setting_problems() + _policy_problems(request)
    if problems or loads is None:
        raise ValueError("\n".join(problems))

    options = Options(
        strong=request.strong,
        backend=request.backend,
        domain_ranks=request.domain,
        row_cost=RowCost(tile_rows=request.tile_rows, group_rows=request.group_rows),
    )
    given = loads.loads_SE, loads.owner_E, request.slots
    asked = _limits(request, loads, options.row_cost)
    limits = Limits(forward=asked.forward, backward=asked.backward)
    retention = Retention(share=request.share, least=request.least)
    quota_E, made = plan_with_policy(*given, limits, retention, request.quota, options)
    if request.policy == OURS:
        without = plan(loads.loads_SE, None, *given[1:], limits, options)
    else:
        rival = POLICIES[request.policy]
        made, without = (rival(loads.loads_SE, quotas, *given[1:], limits) for quotas in (quota_E, None))
    return PlanReport(request=request, loads=loads, limits=asked, quota_E=quota_E, plan=made, without=without)


def _policy_problems(request: Request) -> list[str]:
    if request.policy not in policies():
        return [f"--policy: found {request.policy!r}, allowed are {', '.join(policies())}"]
    if request.policy == OURS:
        return []
    usual = Request(ranks=request.ranks)
    return [
        f"{flag(name)}: allowed only with --policy {OURS}"
        for name in _OURS_ALONE
        if getattr(request, name) != getattr(usual, name)
    ]


def _limits(request: Request, loads: Loads, cost: RowCost) -> RowLimits:
    """Limits in rows. A multiple of the mean is one of the routed rows' for both: so dropping comes closer to it."""
    load_E, ranks = loads.loads_SE.sum(axis=0), request.ranks
    if request.budget_bytes is not None and request.hidden is not None and request.ffn is not None:
        even_E = np.array(proportional_quota(load_E.tolist(), request.share), np.int64)
        budget = _byte_budget(request.budget_bytes, request.hidden, request.ffn)
        fitting = budget.limits(loads.loads_SE, even_E, request.slots)
        return RowLimits(cast(int, fitting.forward), cast(int, fitting.backward))
    routed_R = _cost_R(cost, masters(loads.owner_E, load_E), ranks)

    def rows(name: str, text: str | None, usual: Fraction | None) -> RowLimit:
        limit = usual if text is None else parse_limit(name, text)
        if not isinstance(limit, Fraction):
            return limit
        return max(1, -(-int(routed_R.sum()) * limit.numerator // (ranks * limit.denominator)))

    return RowLimits(
        forward=rows("forward_limit", request.forward_limit, None),
        backward=rows("backward_limit", request.backward_limit, BACKWARD_FACTOR),
    )


def _byte_budget(total: int, hidden: int, ffn: int) -> ByteBudget:
    """A budget for bf16 experts with a gated activation; a slot also holds its gradients in fp32."""
    row = RowBytes.of(hidden, ffn, gated=True, item=_BF16_BYTES)
    return ByteBudget(total=total, saved=row.saved, work=row.work, slot=3 * hidden * ffn * (_BF16_BYTES + _FP32_BYTES))


def _cost_R(cost: RowCost, layout: Layout, ranks: int) -> IntArray:
    return layout._replace(rows_I=cost.of(layout.rows_I)).rows_on(ranks)


def as_json(report: PlanReport) -> dict[str, Any]:
    """Every figure of a report, for ``json.dumps``.

    Whole numbers are ints; shares and ratios are exact and so text, such as "4/5". Ranks, experts and sources count
    from 0. The keys::

        input      origin (text), even_sources (bool: only totals were given), experts, ranks, routed (rows in all),
                   busiest_rank_rows and max_over_mean (both before), loads (list per source of rows per expert)
        settings   policy, quota, retention, min_retention, slots, strong, backend, domain_ranks (or null), tile_rows,
                   group_rows, forward_limit and backward_limit (rows, "finest", or null for none)
        quota      rows of each expert to keep
        kept       rows kept in all
        plan, without_dropping
          replicas      instances that are no masters
          migrations    masters that are away from their owners
          owner         rank of each expert
          certificate   status, within_limits, forward_limit, forward_bound, forward_rows, backward_limit,
                        backward_bound, backward_rows, replica_bound, replicas: as in replicas.plan.Certificate
          instances     a list, masters first, in expert order: expert, rank, master (bool), forward_only (bool), rows,
                        kept, rows_by_source (list)
          ranks         a list: rank, forward_rows, backward_rows, forward_cost, backward_cost (rows as the limits
                        count them, with tiles and groups), replicas (slots used), pushes (copies of its own experts
                        that it sends out)
    """
    request, loads = report.request, report.loads
    ranks, experts = loads.loads_SE.shape
    return {
        "input": {
            "origin": loads.origin,
            "even_sources": loads.even_sources,
            "experts": experts,
            "ranks": ranks,
            "routed": int(report.load_E.sum()),
            "busiest_rank_rows": int(masters(loads.owner_E, report.load_E).rows_on(ranks).max()),
            "max_over_mean": str(report.max_over_mean),
            "loads": loads.loads_SE.tolist(),
        },
        "settings": {
            **{name: getattr(request, name) for name in ("policy", "quota", "slots", "strong", "backend")},
            "retention": str(request.share),
            "min_retention": str(request.least),
            "domain_ranks": request.domain,
            "tile_rows": request.tile_rows,
            "group_rows": request.group_rows,
            "forward_limit": report.limits.forward,
            "backward_limit": report.limits.backward,
        },
        "quota": report.quota_E.tolist(),
        "kept": int(report.quota_E.sum()),
        "plan": _plan_as_json(report, report.plan),
        "without_dropping": _plan_as_json(report, report.without),
    }


def _plan_as_json(report: PlanReport, made: Plan) -> dict[str, Any]:
    rows = report.rows_of(made)
    per_instance = {
        "expert": made.expert_I,
        "rank": made.rank_I,
        "master": np.arange(len(made.expert_I)) < made.num_experts,
        "forward_only": made.forward_only_I,
        "rows": made.rows_I,
        "kept": made.kept_I,
        "rows_by_source": made.rows_SI.T,
    }
    per_rank = {
        "rank": np.arange(made.num_ranks),
        "forward_rows": made.rows_R,
        "backward_rows": made.kept_R,
        "forward_cost": rows.forward_R,
        "backward_cost": rows.backward_R,
        "replicas": made.slots_R,
        "pushes": made.pushes_R,
    }
    return {
        "replicas": made.replicas,
        "migrations": made.migrations,
        "owner": made.owner_E.tolist(),
        "certificate": asdict(made.certificate) | {"within_limits": made.certificate.within_limits},
        "instances": _objects(per_instance),
        "ranks": _objects(per_rank),
    }


def _objects(columns: dict[str, Any]) -> list[dict[str, Any]]:
    """One object a row."""
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in values]
