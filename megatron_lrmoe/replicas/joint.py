"""Retention and replicas chosen together: which rows to drop so that the fewest replicas are needed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from megatron_lrmoe.recalibration.balance import balanced_quota, floor_rows, joint_quotas, per_rank
from megatron_lrmoe.recalibration.quota import proportional_quota
from megatron_lrmoe.replicas.cost import ByteBudget
from megatron_lrmoe.replicas.plan import IntArray, Limits, Plan, checked_inputs, limit_rows
from megatron_lrmoe.replicas.planner import Options, plan

Policy = Literal["proportional", "balanced", "joint"]


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What may be dropped.

    Raises:
        ValueError: a share out of range.
    """

    share: Fraction
    """Of all rows, that keep their backward at least."""

    least: Fraction = Fraction(1, 2)
    """Of each expert's rows."""

    min_rows: int = 0
    """An expert with no more rows than this keeps them all."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or not 0 <= self.least <= 1 or self.min_rows < 0:
            raise ValueError(f"found {self}, allowed are 0 < share <= 1, 0 <= least <= 1 and min_rows >= 0")


class JointPlan(NamedTuple):
    """Quotas and the plan made for them."""

    quota_E: IntArray
    plan: Plan


def plan_with_policy(
    loads_SE: ArrayLike,
    owner_E: ArrayLike,
    slots: int,
    limits: Limits | ByteBudget,
    retention: Retention,
    policy: Policy,
    options: Options | None = None,
) -> JointPlan:
    """Quotas by a policy, and a plan for them.

    joint looks at many ways to drop as much as retention allows, or less, and takes the one with the fewest replicas,
    among those the one that keeps most rows. The quotas of the other two policies are among them, so it never needs
    more replicas than they do.

    Args:
        loads_SE: routed rows of each source for each expert.
        owner_E: rank of each expert's master.
        slots: replicas that a rank can hold.
        limits: rows or bytes that a rank may hold. A multiple of the mean in backward is one of the routed rows, and so
            a limit in rows, to be met at any price.
        retention: what may be dropped.
        policy: of the quotas.
        options: of the planner.

    Raises:
        ValueError: a value out of range, with its name and place.
    """
    loads, _, owners = checked_inputs(loads_SE, None, owner_E, slots)
    if policy not in ("proportional", "balanced", "joint"):
        raise ValueError(f"policy: found {policy!r}, allowed are 'proportional', 'balanced' and 'joint'")
    load_E, options = loads.sum(axis=0), options or Options()
    even_E = np.array(proportional_quota(load_E.tolist(), retention.share, retention.min_rows), np.int64)
    if isinstance(limits, ByteBudget):
        limits = limits.limits(loads, even_E, slots)
    if isinstance(limits.backward, Fraction):
        # A multiple of the mean of what is kept would be no easier to meet by dropping.
        cost_R = per_rank(options.row_cost.of(load_E), owners, len(loads))
        routed_R = limit_rows(limits.backward, cost_R)
        limits = replace(limits, backward=None if routed_R is None else np.maximum(routed_R, 1).tolist())
    best: JointPlan | None = None
    for quota_E in _quotas(policy, load_E, even_E, owners, len(loads), limits, retention):
        # A plan for higher quotas is one for lower ones too; only the best so far is worth that look.
        known = replace(options, candidates=(*options.candidates, best.plan)) if best else options
        found = JointPlan(quota_E, plan(loads, quota_E, owners, slots, limits, known))
        if best is None or _order(found) < _order(best):
            best = found
    assert best is not None
    return best


def _order(found: JointPlan) -> tuple[bool, int, int, int]:
    certificate = found.plan.certificate
    over = 0
    for rows, limit in (
        (certificate.forward_rows, certificate.forward_limit),
        (certificate.backward_rows, certificate.backward_limit),
    ):
        over = max(over, rows - (rows if limit is None else limit))
    return not certificate.within_limits, over, found.plan.replicas, -int(found.quota_E.sum())


def _quotas(
    policy: Policy,
    load_E: IntArray,
    even_E: IntArray,
    owners: IntArray,
    ranks: int,
    limits: Limits,
    retention: Retention,
) -> Iterator[IntArray]:
    """Every quota that the policy considers; joint's reach from dropping on many ranks to dropping on few."""
    if policy in ("proportional", "joint"):
        yield even_E
    floor_E = floor_rows(load_E, even_E, min(retention.least, retention.share), retention.min_rows)
    if policy in ("balanced", "joint"):
        yield balanced_quota(load_E, floor_E, owners, ranks, int(even_E.sum()))
    limit_R = limit_rows(
        Fraction(1) if limits.backward == "finest" else limits.backward, per_rank(load_E, owners, ranks)
    )
    if policy == "joint" and limit_R is not None:
        allowance = int(load_E.sum() - even_E.sum())
        above = int((per_rank(load_E, owners, ranks) > limit_R).sum())
        for k in range(above + 1 if allowance else 0):
            yield joint_quotas(load_E, floor_E, owners, limit_R, allowance, k)
