"""A plan: which rank computes how many rows of which expert, and what is proven about it.

Letters beside those of ``megatron_lrmoe.pairs``: R ranks (the same as S, where a rank is meant as a place rather
than a source), I instances. An instance is a physical copy of an expert's weights: the first E are the masters, in
expert order, then come the replicas by (expert, rank).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_lrmoe.recalibration.balance import IntArray, per_rank

MOST_ROWS = 2**31
"""Of a layer call in all: products of two counts then stay below 2^63."""

Limit = int | Sequence[int] | Fraction | Literal["finest"] | None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Rows that a rank may hold.

    Each limit is an int (rows of every rank), a sequence (rows of each rank), a Fraction (times the mean over the
    ranks, rounded up), ``"finest"`` (the smallest that the planner reaches), or None (no limit).
    """

    forward: Limit = None
    """On routed rows, which are computed and saved in forward."""

    backward: Limit = None
    """On kept rows. Not given: kept rows go where their expert's routed rows are."""

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            if isinstance(getattr(self, name), np.ndarray):
                # An array would be compared with other limits element by element.
                object.__setattr__(self, name, tuple(getattr(self, name).tolist()))
            _check_limit(name, getattr(self, name))


Status = Literal["proven", "found", "not found", "impossible", "not worth it"]


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What a plan reached, against what nothing can beat.

    ``status`` is one of

    - proven: within the limits, and no plan within them has fewer replicas;
    - found: within the limits;
    - not found: above a limit, without a proof that no plan is within it;
    - impossible: above a limit that is below the mean;
    - not worth it: replicas would have cost more than they save, so there are none.
    """

    status: Status
    forward_limit: int | None
    """Largest forward rows allowed on any rank; None without a limit."""
    forward_bound: int
    """No plan's busiest rank has fewer forward rows: the mean, of each domain."""
    forward_rows: int
    """Forward rows of this plan's busiest rank."""
    backward_limit: int | None
    backward_bound: int
    backward_rows: int
    replica_bound: int
    """No plan within the limits has fewer replicas."""
    replicas: int

    @property
    def within_limits(self) -> bool:
        """Whether every rank is within both limits."""
        return self.status in ("proven", "found")


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """Where each expert's rows are computed; arrays are int64 and read-only.

    Args:
        owner_E: rank with each expert's master weights.
        expert_I: expert of each instance; the first E are 0..E-1.
        rank_I: rank of each instance. A master elsewhere than at its owner has been moved there; only some of
            the rivals' policies do that.
        rows_SI: forward rows that each source sends to each instance.
        kept_I: backward quota of each instance.
        certificate: limits, bounds and what was reached.
    """

    owner_E: IntArray
    expert_I: IntArray
    rank_I: IntArray
    rows_SI: IntArray
    kept_I: IntArray
    certificate: Certificate = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("owner_E", "expert_I", "rank_I", "rows_SI", "kept_I"):
            getattr(self, name).setflags(write=False)

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.owner_E)

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.rows_SI)

    @cached_property
    def rows_I(self) -> IntArray:
        """(I,) forward rows of each instance."""
        return self.rows_SI.sum(axis=0)

    @cached_property
    def rows_R(self) -> IntArray:
        """(R,) forward rows of each rank."""
        return per_rank(self.rows_I, self.rank_I, self.num_ranks)

    @cached_property
    def kept_R(self) -> IntArray:
        """(R,) backward rows of each rank."""
        return per_rank(self.kept_I, self.rank_I, self.num_ranks)

    @cached_property
    def slots_R(self) -> IntArray:
        """(R,) replicas that each rank holds."""
        return np.bincount(self.rank_I[self.num_experts :], minlength=self.num_ranks)

    @property
    def replicas(self) -> int:
        """Instances that are not masters."""
        return len(self.expert_I) - self.num_experts

    @cached_property
    def forward_only_I(self) -> NDArray[np.bool_]:
        """(I,) replicas without backward rows: they need no gradient slot and send nothing home."""
        only_I = self.kept_I == 0
        only_I[: self.num_experts] = False
        return only_I

    @property
    def migrations(self) -> int:
        """Masters away from their owners."""
        return int((self.rank_I[: self.num_experts] != self.owner_E).sum())

    @cached_property
    def pushes_R(self) -> IntArray:
        """(R,) copies of its own experts that each owner sends out in a forward."""
        return np.bincount(self.owner_E[self.expert_I[self.num_experts :]], minlength=self.num_ranks)


def checked_inputs(
    loads_SE: ArrayLike, quota_E: ArrayLike | None, owner_E: ArrayLike, slots: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Loads, quotas (the loads themselves if None) and owners as int64 arrays of matching shapes.

    Raises:
        ValueError: a value that is negative, no whole number, or out of range, with its place.
    """
    loads = _whole("loads_SE", loads_SE, dims=2)
    ranks, experts = loads.shape
    quotas = loads.sum(axis=0) if quota_E is None else _whole("quota_E", quota_E, dims=1)
    owners = _whole("owner_E", owner_E, dims=1)
    for name, value in (("quota_E", quotas), ("owner_E", owners)):
        if len(value) != experts:
            raise ValueError(
                f"{name}: found {len(value)} values, allowed are {experts}, one for each expert of loads_SE"
            )
    if loads.sum() > MOST_ROWS:
        raise ValueError(f"loads_SE: found {loads.sum()} rows in all, allowed are 0 to {MOST_ROWS}")
    if ranks == 0:
        raise ValueError("loads_SE: found no source rank, allowed is one or more")
    for e in np.flatnonzero(owners >= ranks)[:1]:
        raise ValueError(f"owner_E[{e}]: found {owners[e]}, allowed are ranks 0 to {ranks - 1}")
    for e in np.flatnonzero(quotas > loads.sum(axis=0))[:1]:
        raise ValueError(f"quota_E[{e}]: found {quotas[e]}, allowed is 0 to the expert's load, {loads[:, e].sum()}")
    if not isinstance(slots, int | np.integer) or slots < 0:
        raise ValueError(f"slots: found {slots!r}, allowed is a whole number >= 0")
    return loads, quotas, owners


def limit_rows(limit: Limit, rows_R: IntArray) -> IntArray | None:
    """(R,) rows allowed on each rank; None for no limit and for ``"finest"``.

    Args:
        limit: as in Limits.
        rows_R: rows of each rank before planning, which give the mean.

    Raises:
        ValueError: as many limits as ranks are needed.
    """
    ranks = len(rows_R)
    if limit is None or limit == "finest":
        return None
    if isinstance(limit, Fraction):
        return np.full(ranks, -(-int(rows_R.sum()) * limit.numerator // (ranks * limit.denominator)), np.int64)
    if isinstance(limit, int | np.integer):
        return np.full(ranks, limit, np.int64)
    if len(limit) != ranks:
        raise ValueError(f"limit: found {len(limit)} values, allowed are {ranks}, one for each rank")
    return np.asarray(limit, np.int64)


def _check_limit(name: str, limit: Limit) -> None:
    if limit is None or limit == "finest":
        return
    if isinstance(limit, Fraction):
        if limit < 1:
            raise ValueError(f"{name} limit: found {limit} x mean, allowed is a Fraction >= 1")
        return
    many = limit if isinstance(limit, Sequence) and not isinstance(limit, str) else [limit]
    for r, rows in enumerate(many):
        if not isinstance(rows, int | np.integer) or isinstance(rows, bool) or rows < 1:
            raise ValueError(f"{name} limit of rank {r}: found {rows!r}, allowed is a whole number of rows >= 1")


def _whole(name: str, values: ArrayLike, dims: int) -> IntArray:
    array = np.asarray(values)
    if array.ndim != dims:
        raise ValueError(f"{name}: found {array.ndim} dimensions, allowed are {dims}")
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name}: found values of type {array.dtype}, allowed are whole numbers")
    with np.errstate(invalid="ignore"):
        bad = np.argwhere(~((array >= 0) & (array <= MOST_ROWS) & (array == np.floor(array)))) if array.size else []
    for place in bad[:1]:
        where = "".join(f"[{i}]" for i in place)
        raise ValueError(f"{name}{where}: found {array[tuple(place)]}, allowed is a whole number from 0 to {MOST_ROWS}")
    return array.astype(np.int64)
