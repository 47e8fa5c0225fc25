"""The plan of one layer call in training: a policy's replicas, made safe for unbiased gradients.

    plan = training_plan(policy, loads_SE, owner_E, quota_E, retention, "joint")

In training the masters stay at their owners, which hold the optimizer state. A row can be kept in backward only where
its forward ran. So an instance with forward rows and a quota of 0 would leave its rows no chance at all, and no weight
could make up for that. Unless the policy allows it, no plan here has such an instance.

Three policies choose the replicas:

- lrm: our planner, with quotas chosen together with the replicas where the quota policy is joint.
- ultraep: ``peers.ultraep``, at the policy's tolerance, with ``min_rows`` in place of its 1,024 rows of a replica.
- symi: the popularity rule of ``peers.symi`` from the loads of the iteration before, E + R * slots copies in all. What
  differs from SYMI's own: SYMI decouples the optimizer from the experts' ranks, so its masters move and any rank may
  hold any copy. Here masters stay, and the other copies go, in expert order, to the rank with most free slots that has
  no copy of the expert yet (ties: lowest). A copy that finds no such rank is not made. SYMI places no matter what the
  loads are; here a break-even, if one is set, can take the replicas back.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from megatron_lrmoe.replicas import planner
from megatron_lrmoe.replicas.joint import Policy, Retention, plan_with_policy
from megatron_lrmoe.replicas.peers import ultraep
from megatron_lrmoe.replicas.peers.finish import check_option, even_split, plan_from_rows, rows_at
from megatron_lrmoe.replicas.peers.symi import popular_counts
from megatron_lrmoe.replicas.peers.ultraep import UltraepOptions
from megatron_lrmoe.replicas.plan import Certificate, IntArray, Limits, Plan, checked_inputs, limit_rows
from megatron_lrmoe.replicas.split import share_quota, split_sources

Name = Literal["lrm", "ultraep", "symi"]
LimitKind = Literal["both", "backward"]


@dataclass(frozen=True, kw_only=True)
class TrainingPolicy:
    """How replicas are chosen in training.

    Raises:
        ValueError: a value that is not allowed.
    """

    name: Name
    """Of the policy, see the module."""

    slots: int
    """Replicas that a rank has room for."""

    tolerance: Fraction = Fraction(101, 100)
    """Most rows of a rank, as a multiple of the mean of the routed rows."""

    limits: LimitKind = "both"
    """Rows that the tolerance is for: kept ones (backward), or routed ones too (both)."""

    min_rows: int = 0
    """Break-even: rows of work that the busiest rank must lose for each copy over the busiest link, or there are no
    replicas. A rank's work is a third of its forward rows and two thirds of its kept ones. 0: no break-even."""

    forward_only: bool = False
    """Whether an instance may have forward rows and no backward rows."""

    def __post_init__(self) -> None:
        for field, allowed in (("name", get_args(Name)), ("limits", get_args(LimitKind))):
            value = getattr(self, field)
            check_option(field, repr(value), f"one of {', '.join(allowed)}", value in allowed)
        check_option("tolerance", self.tolerance, "a Fraction >= 1", self.tolerance >= 1)
        for field in ("slots", "min_rows"):
            check_option(field, getattr(self, field), "a whole number >= 0", getattr(self, field) >= 0)


def training_plan(
    policy: TrainingPolicy,
    loads_SE: ArrayLike,
    owner_E: ArrayLike,
    quota_E: ArrayLike,
    retention: Retention,
    quota: Policy,
    backward_limit_R: IntArray | None = None,
    popularity_E: IntArray | None = None,
) -> Plan:
    """Where each expert's rows are computed and kept; a pure function, in integers, the same on every rank.

    Args:
        policy: how replicas are chosen.
        loads_SE: routed rows of each source for each expert; there are as many ranks as sources.
        owner_E: rank of each expert's master.
        quota_E: rows of each expert to keep, chosen without replicas in view. They are kept as they are, but for lrm
            with joint quotas, which needs them only for a plan without replicas.
        retention: what joint may drop.
        quota: policy of the quotas.
        backward_limit_R: kept rows that each rank may have; not given, the tolerance. ultraep and symi know no limits:
            for them it reaches the certificate only.
        popularity_E: for symi, rows of each expert in the iteration before; None or all 0: no replicas.

    Raises:
        ValueError: a value out of range, with its name and place.
        RuntimeError: the policy moved a master or used more slots than there are.
    """
    loads, quotas, owners = checked_inputs(loads_SE, quota_E, owner_E, policy.slots)
    check_option("quota", repr(quota), f"one of {', '.join(get_args(Policy))}", quota in get_args(Policy))
    limits = _limits(policy, loads, backward_limit_R)
    if policy.name == "lrm" and quota == "joint":
        found = plan_with_policy(loads, owners, policy.slots, limits, retention, quota).plan
    elif policy.name == "lrm":
        found = planner.plan(loads, quotas, owners, policy.slots, limits)
    else:
        rows_ER = _rival_rows(policy, loads, owners, popularity_E)
        found = plan_from_rows(rows_ER, owners, loads, quotas, owners, limits)
    _check_masters(found)
    if found.slots_R.max() > policy.slots:
        raise RuntimeError(f"found {found.slots_R.max()} replicas on one rank, allowed are {policy.slots}")
    found = _repaired(found, loads, policy.forward_only, limits)
    if policy.min_rows == 0 or found.replicas == 0:
        return found
    alone = _masters_only(loads, quotas, owners, limits)
    if _saved_thirds(alone, found) >= 3 * policy.min_rows * max(found.pushes_R.max(), found.slots_R.max()):
        return found
    return replace(alone, certificate=replace(alone.certificate, status="not worth it"))


def resplit(plan: Plan, loads_SE: ArrayLike, quota_E: ArrayLike, forward_only: bool) -> Plan:
    """The same instances for other loads; replicas that get no rows are left out.

    An expert's rows go to its instances in the plan's proportions (remainders to the largest, then lowest), and to the
    master alone where the plan has no rows of it.

    Args:
        plan: with its masters at their owners.
        loads_SE: routed rows of each source for each expert.
        quota_E: rows of each expert to keep.
        forward_only: whether an instance may have forward rows and no backward rows.

    Raises:
        ValueError: loads or quotas out of range, or for other ranks or experts than the plan's.
        RuntimeError: a master of the plan is not at its owner.
    """
    loads, quotas, owners = checked_inputs(loads_SE, quota_E, plan.owner_E, 0)
    ranks = (len(loads), plan.num_ranks)
    check_option("source ranks of loads_SE", ranks[0], f"{ranks[1]}, as in the plan", ranks[0] == ranks[1])
    _check_masters(plan)
    weight_I, planned_E = plan.rows_I.copy(), np.zeros(plan.num_experts, np.int64)
    np.add.at(planned_E, plan.expert_I, weight_I)
    weight_I[: plan.num_experts][planned_E == 0] = 1
    rows_ER = np.zeros((plan.num_experts, plan.num_ranks), np.int64)
    rows_ER[plan.expert_I, plan.rank_I] = share_quota(loads.sum(axis=0), plan.expert_I, weight_I)
    return _repaired(plan_from_rows(rows_ER, owners, loads, quotas, owners, Limits()), loads, forward_only, Limits())


def without_replicas(loads_SE: ArrayLike, quota_E: ArrayLike, owner_E: ArrayLike) -> Plan:
    """Masters only: each expert's rows at its owner.

    Args:
        loads_SE: routed rows of each source for each expert.
        quota_E: rows of each expert to keep.
        owner_E: rank of each expert's master.

    Raises:
        ValueError: a value out of range, with its name and place.
    """
    return _masters_only(*checked_inputs(loads_SE, quota_E, owner_E, 0), Limits())


def _masters_only(loads: IntArray, quotas: IntArray, owners: IntArray, limits: Limits) -> Plan:
    rows_ER = rows_at(owners, loads.sum(axis=0), len(loads))
    return plan_from_rows(rows_ER, owners, loads, quotas, owners, limits)


def _limits(policy: TrainingPolicy, loads: IntArray, backward_limit_R: IntArray | None) -> Limits:
    if backward_limit_R is None:
        backward_limit_R = limit_rows(policy.tolerance, loads.sum(axis=1))
    # A budget that is full can leave 0 rows, which Limits does not allow.
    backward = np.maximum(np.asarray(backward_limit_R, np.int64), 1)
    check_option("backward_limit_R", f"shape {backward.shape}", f"({len(loads)},)", backward.shape == (len(loads),))
    return Limits(forward=policy.tolerance if policy.limits == "both" else None, backward=backward.tolist())


def _rival_rows(policy: TrainingPolicy, loads: IntArray, owners: IntArray, popularity_E: IntArray | None) -> IntArray:
    """(E, R) forward rows of each expert on each rank."""
    if policy.name == "ultraep":
        return _ultraep_rows(policy, loads, owners)
    return even_split(loads.sum(axis=0), _symi_copies(policy.slots, len(loads), owners, popularity_E))


def _ultraep_rows(policy: TrainingPolicy, loads: IntArray, owners: IntArray) -> IntArray:
    """(E, R) rows as ``ultraep.place`` puts them, by its compiled solver where numba is installed."""
    try:
        from megatron_lrmoe.replicas.peers.ultraep_compiled import solve
    except ImportError:
        solve = ultraep.solve
    ranks, load_E = len(loads), loads.sum(axis=0)
    options = UltraepOptions(eps=policy.tolerance - 1, min_rows=policy.min_rows)
    lowest, fast = options.thresholds(int(load_E.sum()), ranks)
    found = solve(load_E, owners, ranks, policy.slots, lowest, fast, options.min_rows, options.master_rows)
    rows_ER = rows_at(owners, load_E, ranks)
    rows_ER[found.expert_n, found.rank_n] += found.rows_n
    np.subtract.at(rows_ER, (found.expert_n, owners[found.expert_n]), found.rows_n)
    return rows_ER


def _symi_copies(slots: int, ranks: int, owners: IntArray, popularity_E: IntArray | None) -> IntArray:
    """(E, R) copies of each expert on each rank, 0 or 1: the masters, and replicas by popularity."""
    experts = len(owners)
    copies_ER = rows_at(owners, np.ones(experts, np.int64), ranks)
    popular_E = np.zeros(experts, np.int64) if popularity_E is None else np.asarray(popularity_E, np.int64)
    fine = popular_E.shape == (experts,) and popular_E.min(initial=0) >= 0
    check_option("popularity_E", popular_E.tolist(), f"{experts} whole numbers >= 0", fine)
    if not popular_E.any():
        return copies_ER
    free_R = np.full(ranks, slots, np.int64)
    more_E = popular_counts(popular_E, experts + ranks * slots) - 1
    for e in np.repeat(np.arange(experts), more_E):
        rank = np.where(copies_ER[e] == 0, free_R, 0).argmax()
        if copies_ER[e, rank] == 0 and free_R[rank] > 0:
            copies_ER[e, rank] = 1
            free_R[rank] -= 1
    return copies_ER


def _check_masters(plan: Plan) -> None:
    if plan.migrations > 0:
        raise RuntimeError(f"found {plan.migrations} masters away from their owners, allowed is none")


def _repaired(plan: Plan, loads: IntArray, forward_only: bool, limits: Limits) -> Plan:
    """The plan without replicas that have no forward rows, and, unless allowed, without quotas of 0 beside rows."""
    experts, rows_I, kept_I = plan.num_experts, plan.rows_I.copy(), plan.kept_I.copy()
    if not forward_only:
        for e in np.unique(plan.expert_I[(rows_I > 0) & (kept_I == 0)]):
            _give_each_a_row(np.flatnonzero(plan.expert_I == e), rows_I, kept_I)
    stays_I = rows_I > 0
    stays_I[:experts] = True
    if stays_I.all() and (kept_I == plan.kept_I).all():
        return plan
    expert_I, rank_I, rows_I = plan.expert_I[stays_I], plan.rank_I[stays_I], rows_I[stays_I]
    rows_SI = split_sources(loads, expert_I, rank_I, rows_I)
    found = replace(plan, expert_I=expert_I, rank_I=rank_I, rows_SI=rows_SI, kept_I=kept_I[stays_I])
    return replace(found, certificate=_measured(found, limits))


def _give_each_a_row(instances: IntArray, rows_I: IntArray, kept_I: IntArray) -> None:
    """Changes rows and quotas of an expert's instances, master first, so that each with rows keeps one or more.

    Where the quota is too small for that, the rows of the smallest replicas go back to the master. An expert with a
    quota of 0 is left with its master, which keeps none.
    """
    master, replicas = instances[0], instances[1:]
    for i in replicas[np.argsort(rows_I[replicas], kind="stable")]:
        if (rows_I[instances] > 0).sum() <= kept_I[instances].sum():
            break
        for value_I in (rows_I, kept_I):
            value_I[master] += value_I[i]
            value_I[i] = 0
    if kept_I[instances].any():
        for i in instances[(rows_I[instances] > 0) & (kept_I[instances] == 0)]:
            kept_I[instances[kept_I[instances].argmax()]] -= 1
            kept_I[i] = 1


def _measured(plan: Plan, limits: Limits) -> Certificate:
    """The plan's certificate, made before its rows were changed, with what they reach now."""
    old, status = plan.certificate, plan.certificate.status
    forward_R, backward_R = limit_rows(limits.forward, plan.rows_R), limit_rows(limits.backward, plan.kept_R)
    pairs = ((plan.rows_R, forward_R), (plan.kept_R, backward_R))
    within = all(limit_R is None or bool((rows_R <= limit_R).all()) for rows_R, limit_R in pairs)
    bound = min(old.replica_bound, plan.replicas) if within else 0
    if within:
        status = "proven" if bound == plan.replicas else "found"
    elif old.within_limits:
        status = "not found"
    return replace(
        old,
        status=status,
        forward_rows=int(plan.rows_R.max()),
        backward_rows=int(plan.kept_R.max()),
        replica_bound=bound,
        replicas=plan.replicas,
    )


def _saved_thirds(before: Plan, after: Plan) -> int:
    """Thirds of a row of work by which the busiest rank's falls."""
    work = [int(plan.rows_R.max() + 2 * plan.kept_R.max()) for plan in (before, after)]
    return work[0] - work[1]
