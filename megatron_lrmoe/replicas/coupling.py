"""Forward and backward in one plan: backward instances are among the forward ones, since rows cannot move between.

The saved activation of a row lies where its forward ran. So an instance keeps at most the rows that it was sent.
"""

from typing import NamedTuple

import numpy as np

from megatron_lrmoe.replicas.plan import IntArray
from megatron_lrmoe.replicas.split import share_quota
from megatron_lrmoe.replicas.task import Layout, Task


class Coupled(NamedTuple):
    """Forward rows and backward quotas of the same instances; how far each is above its limits; bound on replicas."""

    layout: Layout
    kept_I: IntArray
    above: int
    bound: int

    @property
    def replicas(self) -> int:
        """Instances that are not masters, given that masters come first and there is one per expert."""
        return len(self.layout.expert_I) - int(self.layout.expert_I.max(initial=-1) + 1)

    def rank(self) -> tuple[int, int, int]:
        """Smaller is better: rows above the limits, then replicas, then those that also have a backward."""
        backward = int((self.kept_I[len(self.kept_I) - self.replicas :] > 0).sum())
        return self.above, self.replicas, backward


def forward_only(task: Task, load_E: IntArray, quota_E: IntArray, limit_R: IntArray) -> Coupled:
    """Limits on routed rows alone: kept rows are spread like them."""
    solved = task.place(load_E, limit_R)
    kept_I = share_quota(quota_E, solved.layout.expert_I, solved.layout.rows_I)
    return Coupled(solved.layout, kept_I, solved.above, solved.bound)


def backward_only(task: Task, load_E: IntArray, quota_E: IntArray, limit_R: IntArray) -> Coupled:
    """Limits on kept rows alone: an expert's other rows are spread like its kept ones."""
    solved = task.place(quota_E, limit_R)
    kept = solved.layout
    weight_I = kept.rows_I.copy()
    weight_I[: len(load_E)][quota_E == 0] = 1
    rest_I = share_quota(load_E - quota_E, kept.expert_I, weight_I)
    return Coupled(kept._replace(rows_I=kept.rows_I + rest_I), kept.rows_I, solved.above, solved.bound)


def forward_first(task: Task, load_E: IntArray, quota_E: IntArray, limits: tuple[IntArray, IntArray]) -> Coupled:
    """Replicas as the routed rows need them; kept rows at masters, and moved to replicas only as far as they must."""
    forward_R, backward_R = limits
    solved = task.place(load_E, forward_R)
    expert_I, rank_I, rows_I = solved.layout
    experts = len(load_E)
    kept_I = np.zeros_like(rows_I)
    kept_I[:experts] = np.minimum(quota_E, rows_I[:experts])
    away_I = rows_I.copy()
    away_I[:experts] = 0
    kept_I += share_quota(quota_E - kept_I[:experts], expert_I, away_I)
    kept = task.routed(Layout(expert_I, rank_I, kept_I), rows_I, backward_R)
    over = int(np.maximum(task.cost_on(kept) - backward_R, 0).max())
    return Coupled(solved.layout, kept.rows_I, max(solved.above, over), solved.bound)


def backward_first(task: Task, load_E: IntArray, quota_E: IntArray, limits: tuple[IntArray, IntArray]) -> Coupled:
    """Replicas as the kept rows need them; other rows go there too, and where that is too few to forward-only ones."""
    forward_R, backward_R = limits
    solved = task.place(quota_E, backward_R)
    kept, experts = solved.layout, len(load_E)
    rest_E = load_E - quota_E
    rows_I = kept.rows_I.copy()
    rows_I[:experts] += rest_E
    most_I = kept.rows_I + rest_E[kept.expert_I]
    full = task.routed(kept._replace(rows_I=rows_I), most_I, forward_R, least_I=kept.rows_I)
    free_R = task.slots - np.bincount(kept.rank_I[experts:], minlength=task.ranks)
    extended = task.settle(full, full.rows_I[:experts] - kept.rows_I[:experts], forward_R, free_R)
    kept_I = np.zeros_like(extended.layout.rows_I)
    key = extended.layout.expert_I * task.ranks + extended.layout.rank_I
    place = np.searchsorted(key[experts:], kept.expert_I[experts:] * task.ranks + kept.rank_I[experts:])
    kept_I[:experts], kept_I[experts + place] = kept.rows_I[:experts], kept.rows_I[experts:]
    return Coupled(extended.layout, kept_I, max(solved.above, extended.above), solved.bound)
