"""What the rivals' policies share: from the rows of each expert on each rank to a checked plan.

A policy is written as a ``place`` function, which sees loads, owners and slots, and ``as_policy`` makes of it a
function with the signature of our own planner. A policy that puts several copies of an expert on one rank counts
them in ``copies_ER``; in a plan they are one instance, with the rows of all of them.
"""

import math
from collections import Counter
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from megatron_lrmoe.recalibration.balance import per_rank
from megatron_lrmoe.replicas.plan import Certificate, IntArray, Limit, Limits, Plan, checked_inputs, limit_rows
from megatron_lrmoe.replicas.split import instances_of, share_quota, split_sources


class Placed(NamedTuple):
    """Outcome of a policy."""

    rows_ER: IntArray
    """(E, R) forward rows of each expert on each rank; the rows of an expert sum to its load."""
    home_E: IntArray
    """(E,) rank of each expert's master."""


class Place(Protocol):
    """What a module of this package provides."""

    def __call__(self, loads_SE: IntArray, owner_E: IntArray, slots: int) -> Placed:
        """Puts rows and masters on ranks; options of the policy's own, if any, have defaults."""
        ...


class Policy(Protocol):
    """Signature of every planner."""

    def __call__(
        self, loads_SE: ArrayLike, quota_E: ArrayLike | None, owner_E: ArrayLike, slots: int, limits: Limits
    ) -> Plan:
        """A plan for one layer and microbatch.

        Args:
            loads_SE: (S, E) routed rows of each source for each expert; there are as many ranks as sources.
            quota_E: (E,) rows of each expert that keep their backward; None for all.
            owner_E: (E,) rank with each expert's master weights.
            slots: replicas that a rank has room for. Some policies take more, and say so.
            limits: rows that a rank may hold. The rivals know no limits: these reach the certificate only.

        Raises:
            ValueError: an input that is not allowed, with its place.
        """
        ...


def as_policy(place: Place) -> Policy:
    """A planner that checks its inputs, places rows as ``place`` does, and splits them over sources.

    Args:
        place: the ``place`` function of a module of this package, or a ``functools.partial`` of it with options.
    """

    def policy(loads_SE: ArrayLike, quota_E: ArrayLike | None, owner_E: ArrayLike, slots: int, limits: Limits) -> Plan:
        loads, quotas, owners = checked_inputs(loads_SE, quota_E, owner_E, slots)
        check_option("experts of loads_SE", len(owners), "one or more", len(owners) > 0)
        rows_ER, home_E = place(loads, owners, slots)
        return plan_from_rows(rows_ER, home_E, loads, quotas, owners, limits)

    return policy


def plan_from_rows(
    rows_ER: IntArray, home_E: IntArray, loads_SE: IntArray, quota_E: IntArray, owner_E: IntArray, limits: Limits
) -> Plan:
    """A plan with the given rows, and what is known of it: bounds are the means, nothing is proven of replicas.

    Quotas follow the rows, so a backward limit is met or not by chance.

    Args:
        rows_ER: (E, R) forward rows of each expert on each rank; the rows of an expert sum to its load.
        home_E: (E,) rank of each master.
        loads_SE: as ``checked_inputs`` gives them, with ``quota_E`` and ``owner_E``.
        quota_E: rows of each expert to keep.
        owner_E: rank with each expert's master weights.
        limits: rows that a rank may hold.
    """
    expert_I, rank_I, rows_I = instances_of(rows_ER, home_E)
    rows_SI = split_sources(loads_SE, expert_I, rank_I, rows_I)
    kept_I = share_quota(quota_E, expert_I, rows_I)
    ranks = len(loads_SE)
    forward = _reached(limits.forward, per_rank(rows_I, rank_I, ranks))
    backward = _reached(limits.backward, per_rank(kept_I, rank_I, ranks))
    certificate = Certificate(
        status="found" if forward.within and backward.within else "not found",
        forward_limit=forward.limit,
        forward_bound=forward.bound,
        forward_rows=forward.rows,
        backward_limit=backward.limit,
        backward_bound=backward.bound,
        backward_rows=backward.rows,
        replica_bound=0,
        replicas=len(expert_I) - len(home_E),
    )
    return Plan(
        owner_E=owner_E.copy(),
        expert_I=expert_I,
        rank_I=rank_I,
        rows_SI=rows_SI,
        kept_I=kept_I,
        certificate=certificate,
    )


def rows_at(home_E: IntArray, load_E: IntArray, ranks: int) -> IntArray:
    """(E, R) rows when each expert's load is computed at its master."""
    rows_ER = np.zeros((len(home_E), ranks), np.int64)
    rows_ER[np.arange(len(home_E)), home_E] = load_E
    return rows_ER


def even_split(load_E: IntArray, copies_ER: IntArray) -> IntArray:
    """(E, R) each expert's load in equal parts over its copies; remainders to the largest, then the lowest rank.

    Args:
        load_E: rows of each expert.
        copies_ER: copies of each expert on each rank; one or more for an expert with rows.
    """
    count_E = np.maximum(copies_ER.sum(axis=1), 1)
    rows_ER, rest_ER = np.divmod(load_E[:, None] * copies_ER, count_E[:, None])
    short_E = load_E - rows_ER.sum(axis=1)
    order_ER = np.argsort(-rest_ER, axis=1, kind="stable")
    extra_ER = (np.arange(copies_ER.shape[1]) < short_E[:, None]).astype(np.int64)
    np.put_along_axis(rows_ER, order_ER, np.take_along_axis(rows_ER, order_ER, axis=1) + extra_ER, axis=1)
    return rows_ER


def home_among(copies_ER: IntArray, owner_E: IntArray) -> IntArray:
    """(E,) rank of each master: its owner if a copy is there, else the lowest rank with one."""
    at_owner_E = copies_ER[np.arange(len(owner_E)), owner_E] > 0
    return np.where(at_owner_E, owner_E, (copies_ER > 0).argmax(axis=1))


def even_room(experts: int, ranks: int, slots: int) -> list[int]:
    """Instances that each rank has room for: E + R * slots in all, and one more on the first E mod R ranks.

    Args:
        experts: E.
        ranks: R.
        slots: replicas for each rank.
    """
    return [experts // ranks + slots + (r < experts % ranks) for r in range(ranks)]


def heaviest_copies(load_E: list[int], expert_n: list[int]) -> list[tuple[int, int]]:
    """(weight, expert) of each copy, heaviest first; equal ones in the order given.

    A copy weighs load / copies, as a whole number of an equal small part of a row, so that sums are exact.

    Args:
        load_E: rows of each expert.
        expert_n: expert of each copy.
    """
    copies = Counter(expert_n)
    parts = math.lcm(*copies.values())
    return sorted(((load_E[e] * (parts // copies[e]), e) for e in expert_n), key=lambda copy: -copy[0])


def check_option(name: str, found: object, allowed: str, fine: bool) -> None:
    """Refuses an option's value.

    Raises:
        ValueError: unless ``fine``.
    """
    if not fine:
        raise ValueError(f"{name}: found {found}, allowed is {allowed}")


class _Reached(NamedTuple):
    rows: int
    bound: int
    limit: int | None
    within: bool


def _reached(limit: Limit, rows_R: IntArray) -> _Reached:
    allowed_R = limit_rows(limit, rows_R)
    return _Reached(
        rows=int(rows_R.max()),
        bound=-(-int(rows_R.sum()) // len(rows_R)),
        limit=None if allowed_R is None else int(allowed_R.max()),
        within=allowed_R is None or bool((rows_R <= allowed_R).all()),
    )
