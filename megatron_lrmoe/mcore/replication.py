"""Replicas of one layer: what it remembers between calls, and how a plan becomes columns, copies and slots."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_lrmoe.compute.replicas import Copy, Replication, Slots
from megatron_lrmoe.compute.reroute import Columns
from megatron_lrmoe.compute.transfer import TorchTransfer
from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.recalibration.balance import IntArray
from megatron_lrmoe.recalibration.plan import KeepPlan
from megatron_lrmoe.recalibration.quota import proportional_quota
from megatron_lrmoe.replicas.joint import Policy, Retention
from megatron_lrmoe.replicas.plan import Plan
from megatron_lrmoe.replicas.training import TrainingPolicy, resplit, training_plan

SAMPLED = 50
"""Iterations between those whose first microbatch is planned without dropping too, to know what dropping spares."""

Weights = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]

_pools: dict[tuple[Any, ...], Slots] = {}


class LayerReplicas:
    """Plans the replicas of one layer's calls; every rank of the expert-parallel group makes the same plans.

    Args:
        config: the plugin's settings.
        group: the expert-parallel group.
        num_experts: of the layer.
        live_weights: gives this rank's fc1 and fc2 weights as they are now.
        make_current: in forward, waits until they are this iteration's.
    """

    def __init__(
        self,
        config: LrmConfig,
        group: dist.ProcessGroup,
        num_experts: int,
        live_weights: Callable[[], Weights],
        make_current: Callable[[], object],
    ):
        self._config, self._live_weights, self._make_current = config, live_weights, make_current
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._transfer = TorchTransfer(group)
        self._masters = num_experts // self._ranks
        self._owner_E = np.repeat(np.arange(self._ranks), self._masters)
        # A draw after the forward gives a pair without a backward quota no chance, top-k need not give it one.
        self._forward_only = config.selection == "topk"
        name = config.replica_policy
        if name not in ("lrm", "ultraep", "symi"):
            raise RuntimeError(f"replica policy: found {name!r}, allowed are lrm, ultraep and symi")
        self._policy = TrainingPolicy(
            name=name,
            slots=config.replica_slots,
            tolerance=Fraction(repr(config.replica_tolerance)),
            limits=config.replica_limits,
            # SYMI fills its slots in any case.
            min_rows=0 if name == "symi" else config.replica_min_rows,
            forward_only=self._forward_only,
        )
        # SYMI goes by the last iteration, whatever the interval.
        self._interval = 1 if name == "symi" else config.replica_interval
        self._iteration = self._stage = -1
        self._rehearsed: dict[int, tuple[KeepPlan, Plan]] = {}
        self._placed: Plan | None = None
        self._past_SE: IntArray | None = None
        self._loads_SE: IntArray | None = None
        self._kept_E: IntArray | None = None
        self._popularity_E: IntArray | None = None

    def timed_plan(self, keep: KeepPlan, rehearses: bool) -> tuple[Plan, float]:
        """``plan``, and the seconds it took.

        A recomputed forward gets the plan of the first, unless its router has decided otherwise at a near-tie.

        Args:
            keep: as ``plan``'s.
            rehearses: this is the first forward of a recomputed layer, without gradients.
        """
        start = perf_counter()
        self._begin(keep.key.iteration)
        planned = self._rehearsed.pop(keep.key.microbatch, None)
        if rehearses:
            plan = self.plan(keep)
            self._rehearsed[keep.key.microbatch] = keep, plan
        elif planned is not None and planned[0].loads_SE == keep.loads_SE:
            plan = planned[1]
        else:
            plan = self.plan(keep)
        if not rehearses:
            self._count(keep, plan)
        return plan, perf_counter() - start

    def plan(self, keep: KeepPlan) -> Plan:
        """Where the call's rows go, and how many of each instance keep their backward.

        Args:
            keep: the call's loads, and what its quotas would be without replicas.
        """
        loads_SE, quota_E = np.array(keep.loads_SE, np.int64), _uncapped_quota(keep)
        if self._placed is None:
            return self._placed_anew(keep, loads_SE, quota_E)
        return resplit(self._placed, loads_SE, quota_E, self._forward_only)

    def _count(self, keep: KeepPlan, plan: Plan) -> None:
        """Add what the next interval goes by."""
        loads_SE = np.array(keep.loads_SE, np.int64)
        kept_E = np.bincount(plan.expert_I, plan.kept_I, loads_SE.shape[1]).astype(np.int64)
        self._loads_SE = loads_SE if self._loads_SE is None else self._loads_SE + loads_SE
        self._kept_E = kept_E if self._kept_E is None else self._kept_E + kept_E

    def spared(self, keep: KeepPlan, plan: Plan) -> int | None:
        """How many fewer replicas there are than without dropping, in calls that are compared; None in others."""
        compares = keep.key.microbatch == 0 and keep.key.iteration % SAMPLED == 0 and keep.retention < 1
        if not compares or self._placed is not None:
            return None
        loads_SE = np.array(keep.loads_SE, np.int64)
        full = self._chosen(keep, loads_SE, loads_SE.sum(axis=0), Retention(share=Fraction(1)), "proportional")
        return full.replicas - plan.replicas

    def _begin(self, iteration: int) -> None:
        """At the end of an interval, what was seen in it becomes what the next one goes by."""
        if iteration != self._iteration:
            self._iteration = iteration
            self._rehearsed.clear()
        stage = iteration // self._interval
        if stage == self._stage:
            return
        self._stage, self._placed = stage, None
        self._popularity_E, self._past_SE = self._kept_E, self._loads_SE
        self._kept_E = self._loads_SE = None

    def _placed_anew(self, keep: KeepPlan, loads_SE: IntArray, quota_E: IntArray) -> Plan:
        config = self._config
        least = min(keep.least_share, keep.retention)
        retention = Retention(share=keep.retention, least=least, min_rows=config.min_rows)
        quota = config.quota
        if quota == "joint" and config.replica_limits == "both" and not config.limits_rows:
            # It drops more on hot ranks to spare replicas, which the forward needs in any case.
            quota_E = np.array(proportional_quota(keep.valid_E, keep.retention, config.min_rows), np.int64)
            quota = "proportional"
        if self._interval == 1 or self._past_SE is None:
            plan = self._chosen(keep, loads_SE, quota_E, retention, quota)
            if config.limits_rows and not plan.certificate.within_limits:
                # Only where replicas do not reach is a limit in rows met by dropping more.
                quota_E = np.array(keep.policy_quota_E, np.int64)
                plan = self._chosen(keep, loads_SE, quota_E, retention, quota)
        else:
            past_E = self._past_SE.sum(axis=0)
            even_E = np.array(proportional_quota(past_E.tolist(), keep.retention, config.min_rows), np.int64)
            plan = self._chosen(keep, self._past_SE, even_E, retention, quota)
        if self._interval == 1:
            return plan
        self._placed = plan
        return resplit(plan, loads_SE, quota_E, self._forward_only)

    def _chosen(
        self, keep: KeepPlan, loads_SE: IntArray, quota_E: IntArray, retention: Retention, quota: Policy
    ) -> Plan:
        """The policy's replicas for these loads and quotas."""
        config, policy, limit_R = self._config, self._policy, None
        if config.limits_rows:
            # To be met at any price.
            policy, limit_R = replace(policy, min_rows=0), keep.limit_R
        elif config.replica_limits == "both":
            even = policy.tolerance * int(quota_E.sum()) / self._ranks
            limit_R = np.full(self._ranks, max(1, math.ceil(even)), np.int64)
        return training_plan(policy, loads_SE, self._owner_E, quota_E, retention, quota, limit_R, self._popularity_E)

    def columns(self, plan: Plan) -> Columns:
        """Masters and slots of every rank, with this plan's rows; replicas take a rank's slots in the plan's order."""
        per_rank = self._masters + self._config.replica_slots
        count = self._ranks * per_rank
        column_I = [*self._master_columns(per_rank), *self._replica_columns(plan, per_rank)]
        expert_C = np.repeat(np.arange(self._ranks) * self._masters, per_rank)
        expert_C[column_I] = plan.expert_I
        rows_SC = np.zeros((self._ranks, count), np.int64)
        rows_SC[:, column_I] = plan.rows_SI
        kept_C = np.zeros(count, np.int64)
        kept_C[column_I] = plan.kept_I
        return Columns(expert_C.tolist(), rows_SC.tolist(), kept_C.tolist(), self._masters)

    def _master_columns(self, per_rank: int) -> list[int]:
        return [r * per_rank + i for r in range(self._ranks) for i in range(self._masters)]

    def _replica_columns(self, plan: Plan, per_rank: int) -> list[int]:
        taken = [0] * self._ranks
        columns = []
        for rank in plan.rank_I[plan.num_experts :].tolist():
            columns.append(rank * per_rank + self._masters + taken[rank])
            taken[rank] += 1
        return columns

    def replication(self, plan: Plan, layer: int) -> Replication:
        """The plan's replicas, and this rank's slots for them."""
        per_rank = self._masters + self._config.replica_slots
        columns = self._replica_columns(plan, per_rank)
        expert_n, kept_n = (values[plan.num_experts :].tolist() for values in (plan.expert_I, plan.kept_I))
        copies = [
            Copy(
                expert=expert,
                local=expert % self._masters,
                owner=expert // self._masters,
                holder=column // per_rank,
                slot=column % per_rank - self._masters,
                kept=kept,
            )
            for column, expert, kept in zip(columns, expert_n, kept_n, strict=True)
        ]
        self._make_current()
        return Replication(copies, self._rank, self._slots(), self._transfer, self._live_weights, f"layer {layer}")

    def _slots(self) -> Slots:
        fc1, fc2 = (weights[0] for weights in self._live_weights())
        many = self._config.replica_slots
        kind = (many, fc1.shape, fc2.shape, fc1.dtype, fc1.device)
        if kind not in _pools:
            _pools[kind] = Slots(many, fc1.detach(), fc2.detach())
        return _pools[kind]


def _uncapped_quota(keep: KeepPlan) -> IntArray:
    """(E,) quotas as if no flag limited a rank's rows."""
    if not keep.config.limits_rows:
        return np.array(keep.policy_quota_E, np.int64)
    free = replace(keep, config=replace(keep.config, rank_rows=None, budget_gib=None))
    return np.array(free.policy_quota_E, np.int64)


def kept_of(keep: KeepPlan, plan: Plan, columns: Columns | None) -> KeepPlan:
    """The call's loads and quotas by instance, or by expert where the plan has no replicas."""
    if columns is None:
        return replace(keep, given_quota_E=plan.kept_I.tolist())
    return replace(keep, loads_SE=columns.rows_SC, given_quota_E=columns.kept_C, valid_SE=None)
