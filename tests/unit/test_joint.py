"""Quotas and replicas chosen together: by hand, and against the policies it has to beat."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe.recalibration.quota import proportional_quota
from megatron_lrmoe.replicas.cost import ByteBudget, RowCost
from megatron_lrmoe.replicas.joint import JointPlan, Policy, Retention, plan_with_policy
from megatron_lrmoe.replicas.plan import Limits
from megatron_lrmoe.replicas.planner import Options
from megatron_lrmoe.replicas.workloads import Shape, log_normal, zipf
from tests.loads import small_loads
from tests.plans import cases, loads_of, problems_of, replicas_of

POLICIES: tuple[Policy, ...] = ("proportional", "balanced", "joint")
FOUR_FIFTHS = Retention(share=Fraction(4, 5))


def by_policy(load_E: list[int], limits: Limits | ByteBudget, retention: Retention = FOUR_FIFTHS) -> list[JointPlan]:
    """Plans of the three policies for one expert on each rank, and one slot."""
    loads_SE, owner_E = loads_of(load_E, len(load_E)), np.arange(len(load_E))
    return [plan_with_policy(loads_SE, owner_E, 1, limits, retention, policy) for policy in POLICIES]


class TestGolden:
    def test_joint_keeps_more_rows_where_no_policy_needs_replicas(self):
        """Backward limit 3 on loads 4, 2, 3: only the first rank has to drop anything."""
        found = by_policy([4, 2, 3], Limits(backward=3))
        assert [one.quota_E.tolist() for one in found] == [[3, 1, 2], [2, 2, 2], [3, 2, 3]]
        assert [one.plan.replicas for one in found] == [0, 0, 0]

    def test_joint_drops_on_hot_ranks_alone(self):
        """Of 26 rows up to 7 may be dropped: 3 and 1 bring both hot ranks to the limit of 7."""
        found = by_policy([10, 8, 6, 2], Limits(backward=7))
        assert [one.quota_E.tolist() for one in found] == [[8, 6, 4, 1], [6, 6, 5, 2], [7, 7, 6, 2]]
        assert [replicas_of(one.plan) for one in found] == [[(0, 3, 7, 6)], [], []]

    def test_joint_leaves_few_ranks_above_the_limit_where_it_cannot_spare_all(self):
        """Balanced parks all three hot ranks above the limit of 32; joint brings two to it."""
        proportional, balanced, joint = by_policy(
            [40, 38, 36, 14], Limits(backward=32), Retention(share=Fraction(93, 100))
        )
        assert (balanced.plan.replicas, joint.plan.replicas) == (3, 1)
        assert joint.plan.replicas <= proportional.plan.replicas
        assert joint.plan.kept_R.max() <= 32

    def test_floors_and_experts_that_keep_everything(self):
        retention = Retention(share=Fraction(1, 2), least=Fraction(9, 20), min_rows=4)
        for one in by_policy([40, 20, 4, 3], Limits(backward=20), retention):
            assert one.quota_E[0] >= 18 and one.quota_E[1] >= 9 and one.quota_E[2:].tolist() == [4, 3]

    def test_retention_one_drops_nothing(self):
        for one in by_policy([10, 6, 5], Limits(backward=8), Retention(share=Fraction(1))):
            assert one.quota_E.tolist() == [10, 6, 5] and one.plan.certificate.status == "proven"

    def test_a_byte_budget_becomes_limits_for_the_proportional_quotas(self):
        budget = ByteBudget(total=700, saved=10, work=20, slot=50)
        for one in by_policy([24, 12, 10], budget):
            bytes_R = 50 + one.plan.rows_R * 10 + one.plan.kept_R * 20
            assert one.plan.certificate.within_limits and bytes_R.max() <= 700

    def test_a_plan_above_the_limit_of_one_rank_is_no_better_for_its_replicas(self):
        """Each rank has its own limit, and quotas that joint also tries break that of rank 1."""
        load_E, owner_E = [36, 28, 6, 2, 32, 128, 8, 17, 77, 113, 21, 69], np.repeat(np.arange(4), 3)
        limits, retention = Limits(backward=[84, 79, 103, 86]), Retention(share=Fraction(1, 2))
        found = plan_with_policy(loads_of(load_E, 4), owner_E, 1, limits, retention, "joint")
        assert found.plan.certificate.within_limits and found.plan.replicas == 2

    @pytest.mark.parametrize("make", [log_normal, zipf])
    def test_of_64_ranks(self, make):
        """Fewer replicas than proportional quotas at 90 percent, under a limit of 1.01 x the undropped mean."""
        shape = Shape(experts=256, ranks=64, tokens=256, top_k=8)
        loads_SE = make(shape, seed=3)
        limits = Limits(backward=int(loads_SE.sum()) * 101 // (64 * 100))
        found = [
            plan_with_policy(loads_SE, shape.owner_E, 2, limits, Retention(share=Fraction(9, 10)), policy).plan
            for policy in ("proportional", "joint")
        ]
        assert all(one.certificate.within_limits for one in found)
        assert found[1].replicas < found[0].replicas
        assert found[1].kept_I.sum() >= found[0].kept_I.sum()


@cases(ci=500, developer=50)
@given(
    case=small_loads(),
    slots=st.integers(0, 3),
    share=st.integers(1, 20),
    least=st.integers(0, 20),
    above=st.fractions(Fraction(1, 2), Fraction(3, 2), max_denominator=50),
    kind=st.sampled_from(["rows", "each", "both", "share", "forward", "finest"]),
    tile=st.sampled_from([1, 1, 4]),
)
def test_joint_never_needs_more_replicas_than_the_other_policies(case, slots, share, least, above, kind, tile):
    loads_SE, owner_E = case
    ranks, load_E = len(loads_SE), loads_SE.sum(axis=0)
    mean = max(1, int(load_E.sum() * above) // ranks)
    limits = {
        "rows": Limits(backward=mean),
        "each": Limits(backward=[mean + r for r in range(ranks)]),
        "both": Limits(forward=mean + mean // 8, backward=mean),
        "share": Limits(backward=max(Fraction(1), above)),
        "forward": Limits(forward=mean),
        "finest": Limits(backward="finest"),
    }[kind]
    retention = Retention(share=Fraction(share, 20), least=Fraction(least, 20))
    options = Options(row_cost=RowCost(tile_rows=tile))
    found = [plan_with_policy(loads_SE, owner_E, slots, limits, retention, policy, options) for policy in POLICIES]
    *others, joint = (one.plan.certificate for one in found)
    even = sum(proportional_quota(load_E.tolist(), retention.share))
    if kind == "share":
        # Of the routed rows, before any are dropped.
        mean_cost = Fraction(int(options.row_cost.of(load_E).sum()), ranks)
        limits = Limits(backward=max(1, math.ceil(limits.backward * mean_cost)))
    for quota_E, one in found:
        arguments = (loads_SE, quota_E, owner_E, slots, limits)
        assert problems_of(one, *arguments, row_cost=options.row_cost) == []
        assert even <= quota_E.sum() and (quota_E <= load_E).all() and (quota_E[load_E > 0] > 0).all()
    for other in others:
        if other.within_limits:
            assert joint.within_limits and joint.replicas <= other.replicas


class TestBadInput:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"share": Fraction(0)}, "allowed are 0 < share <= 1"),
            ({"share": Fraction(6, 5)}, "allowed are 0 < share <= 1"),
            ({"share": Fraction(1), "least": Fraction(-1, 2)}, "0 <= least <= 1"),
            ({"share": Fraction(1), "min_rows": -1}, "min_rows >= 0"),
        ],
    )
    def test_retention(self, values, message):
        with pytest.raises(ValueError, match=message):
            Retention(**values)

    def test_policy_and_loads(self):
        with pytest.raises(
            ValueError, match="policy: found 'both', allowed are 'proportional', 'balanced' and 'joint'"
        ):
            plan_with_policy([[1]], [0], 1, Limits(), FOUR_FIFTHS, "both")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"loads_SE\[0\]\[1\]: found -1"):
            plan_with_policy([[1, -1]], [0, 0], 1, Limits(), FOUR_FIFTHS, "joint")


def test_a_multiple_of_the_mean_in_backward_counts_routed_rows():
    """Mean 3 before dropping: quotas 3, 1, 2 fit; of the mean after it, 2, they would need a replica."""
    loads_SE = np.zeros((3, 3), np.int64)
    loads_SE[0] = [4, 2, 3]
    limits, retention = Limits(backward=Fraction(1)), Retention(share=Fraction(4, 5))
    found = plan_with_policy(loads_SE, [0, 1, 2], 1, limits, retention, "proportional")
    assert found.quota_E.tolist() == [3, 1, 2]
    assert found.plan.certificate.backward_limit == 3
    assert found.plan.replicas == 0
