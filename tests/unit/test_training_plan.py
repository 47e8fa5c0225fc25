"""Plans of training: what every policy promises on any loads, and hand-checked cases of each rule."""

import sys
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe.recalibration.quota import proportional_quota
from megatron_lrmoe.replicas import planner
from megatron_lrmoe.replicas.joint import Policy, Retention
from megatron_lrmoe.replicas.peers import POLICIES, as_policy, ultraep
from megatron_lrmoe.replicas.peers.symi import popular_counts
from megatron_lrmoe.replicas.peers.ultraep import UltraepOptions
from megatron_lrmoe.replicas.plan import IntArray, Limits, Plan
from megatron_lrmoe.replicas.training import TrainingPolicy, resplit, training_plan, without_replicas
from tests.loads import small_loads
from tests.plans import cases, loads_of, problems_of, replicas_of

ALL = Retention(share=Fraction(1))
HALF = Retention(share=Fraction(1, 2))


class Case(NamedTuple):
    """Arguments of ``training_plan``; quotas of joint are proportional, others anything up to the load."""

    policy: TrainingPolicy
    loads_SE: IntArray
    owner_E: IntArray
    quota_E: IntArray
    retention: Retention
    quota: Policy
    backward_limit_R: IntArray | None
    popularity_E: IntArray | None

    @property
    def limits(self) -> Limits:
        ranks, tolerance = len(self.loads_SE), self.policy.tolerance
        backward = self.backward_limit_R
        if backward is None:
            backward = np.full(ranks, -(-int(self.loads_SE.sum()) * tolerance // ranks), np.int64)
        backward = np.maximum(backward, 1).tolist()
        return Limits(forward=tolerance if self.policy.limits == "both" else None, backward=backward)


@st.composite
def training_cases(draw: st.DrawFn) -> Case:
    loads_SE, owner_E = draw(small_loads())
    ranks, load_E = len(loads_SE), loads_SE.sum(axis=0)
    policy = TrainingPolicy(
        name=draw(st.sampled_from(["lrm", "ultraep", "symi"])),
        slots=draw(st.integers(0, 3)),
        tolerance=draw(st.sampled_from([Fraction(101, 100), Fraction(1), Fraction(4, 3)])),
        limits=draw(st.sampled_from(["both", "backward"])),
        min_rows=draw(st.sampled_from([0, 0, 5])),
        forward_only=draw(st.booleans()),
    )
    kinds: list[Policy] = ["joint", "proportional", "balanced"]
    quota = draw(st.sampled_from(kinds))
    retention = Retention(share=Fraction(draw(st.integers(1, 20)), 20), least=Fraction(draw(st.integers(0, 20)), 20))
    if quota == "joint":
        quota_E = np.array(proportional_quota(load_E.tolist(), retention.share), np.int64)
    else:
        quota_E = np.array([draw(st.just(int(load)) | st.integers(0, int(load))) for load in load_E], np.int64)
    mean = int(load_E.sum()) // ranks
    limit_R = draw(st.none() | st.lists(st.integers(mean // 2, 2 * mean + 1), min_size=ranks, max_size=ranks))
    popular_E = draw(st.none() | st.lists(st.integers(0, 9), min_size=len(load_E), max_size=len(load_E)))
    limit_R, popular_E = (None if value is None else np.array(value, np.int64) for value in (limit_R, popular_E))
    return Case(policy, loads_SE, owner_E, quota_E, retention, quota, limit_R, popular_E)


def kept_of(plan: Plan) -> IntArray:
    """(E,) kept rows of each expert."""
    kept_E = np.zeros(plan.num_experts, np.int64)
    np.add.at(kept_E, plan.expert_I, plan.kept_I)
    return kept_E


def chanceless(plan: Plan) -> list[tuple[int, int]]:
    """(expert, rank) of instances whose rows cannot be kept; of an expert with a quota of 0, replicas alone."""
    hopeless_I = (plan.rows_I > 0) & (plan.kept_I == 0)
    hopeless_I[: plan.num_experts] &= kept_of(plan) > 0
    return list(zip(plan.expert_I[hopeless_I].tolist(), plan.rank_I[hopeless_I].tolist(), strict=True))


def arrays_of(plan: Plan) -> list[list[int]]:
    return [x.tolist() for x in (plan.owner_E, plan.expert_I, plan.rank_I, plan.rows_SI, plan.kept_I)]


def made(load_E: list[int], *, name="lrm", quota_E=None, retention=ALL, backward_limit_R=None, popularity_E=None, **of):
    """A plan for one expert on each rank, with proportional quotas."""
    quota_E = proportional_quota(load_E, retention.share) if quota_E is None else quota_E
    policy = TrainingPolicy(**{"name": name, "slots": 2} | of)
    arguments = (loads_of(load_E, len(load_E)), np.arange(len(load_E)), quota_E, retention, "proportional")
    return training_plan(policy, *arguments, backward_limit_R, popularity_E)


@cases(ci=1000, developer=80)
@given(training_cases())
def test_what_every_policy_promises(case):
    plan, policy, limits = training_plan(*case), case.policy, case.limits
    joint = policy.name == "lrm" and case.quota == "joint"
    quota_E = kept_of(plan) if joint else case.quota_E
    found = problems_of(plan, case.loads_SE, quota_E, case.owner_E, policy.slots, limits)
    # Rivals prove nothing, so their status only says whether the limits are met.
    assert [p for p in found if policy.name == "lrm" or not p.startswith("status is")] == []
    if joint:
        share, least, load_E = case.retention.share, case.retention.least, case.loads_SE.sum(axis=0).tolist()
        assert quota_E.sum() >= sum(proportional_quota(load_E, share))
        for load, kept in zip(load_E, quota_E.tolist(), strict=True):
            assert kept >= min(-(-least * load // 1), share * load // 1)
    if not policy.forward_only:
        assert chanceless(plan) == []
    mean = -(-int(case.loads_SE.sum()) * policy.tolerance // len(case.loads_SE))
    within = bool((plan.kept_R <= limits.backward).all()) and (limits.forward is None or plan.rows_R.max() <= mean)
    assert plan.certificate.within_limits == (within and plan.certificate.status != "not worth it")
    again = training_plan(*case)
    assert arrays_of(plan) == arrays_of(again) and plan.certificate == again.certificate


class TestRepairs:
    def test_the_instance_that_keeps_most_gives_a_row_to_one_that_keeps_none(self):
        """51 of 80 rows stay, and the master's rank has room for the quota of 40."""
        assert made([80, 20], retention=HALF, forward_only=True).kept_I.tolist() == [40, 10, 0]
        assert made([80, 20], retention=HALF).kept_I.tolist() == [39, 10, 1]

    @pytest.mark.parametrize(
        ("quota", "replicas", "master"),
        [
            (3, [(0, 1, 31, 1), (0, 2, 28, 1)], (31, 1)),
            (2, [(0, 1, 31, 1)], (59, 1)),
            (1, [], (90, 1)),
            (0, [], (90, 0)),
        ],
    )
    def test_a_quota_below_its_instances_brings_the_smallest_home(self, quota, replicas, master):
        plan = made([90, 0, 0], name="ultraep", quota_E=[quota, 0, 0])
        assert replicas_of(plan) == replicas
        assert (plan.rows_I[0], plan.kept_I[0]) == master
        assert plan.certificate.replicas == len(replicas) and plan.certificate.forward_rows == max(31, master[0])
        assert plan.certificate.status == ("found" if quota == 3 else "not found")

    @pytest.mark.parametrize(
        ("before", "after"),
        [([2, 5, 0], [2, 4, 1]), ([3, 3, 0], [2, 3, 1]), ([0, 0, 2], [1, 1]), ([0, 1, 0], [1]), ([0, 9, 0], [1, 7, 1])],
    )
    def test_rows_come_from_any_instance_and_go_home_with_their_quota(self, before, after, monkeypatch):
        """Rows 31, 31 and 28; quotas as a planner might share them. Of a quota of 2, the smallest brings both home."""
        quota_E = [sum(before), 0, 0]
        found = made([90, 0, 0], name="ultraep", quota_E=quota_E, forward_only=True)
        uneven = replace(found, kept_I=np.array([before[0], 0, 0, *before[1:]]))
        monkeypatch.setattr(planner, "plan", lambda *_: uneven)
        plan = made([90, 0, 0], quota_E=quota_E)
        assert plan.kept_I[plan.expert_I == 0].tolist() == after

    def test_a_row_too_many_shows_in_the_certificate(self):
        """Rank 1 is at its limit before it has to keep a row of expert 0."""
        options = {"quota_E": [40, 20], "backward_limit_R": np.array([60, 20])}
        loose, tight = (made([80, 20], forward_only=only, **options).certificate for only in (True, False))
        assert (loose.status, loose.backward_rows) == ("proven", 40)
        assert (tight.status, tight.replica_bound, tight.backward_rows) == ("not found", 0, 39)

    def test_a_policy_that_breaks_the_rules(self, monkeypatch):
        """SYMI's own, with contiguous copies, moves masters here; where it does not, it takes slots."""
        moved = POLICIES["symi"]([[9, 1], [0, 0]], None, [1, 0], 0, Limits())
        full = POLICIES["symi"]([[9, 1], [0, 0]], None, [0, 1], 1, Limits())
        for broken, message in ((moved, "found 2 masters away"), (full, "found 1 replicas on one rank, allowed are 0")):
            monkeypatch.setattr(planner, "plan", lambda *_, broken=broken: broken)
            with pytest.raises(RuntimeError, match=message):
                made([9, 1], slots=0)
        with pytest.raises(RuntimeError, match="found 2 masters away"):
            resplit(moved, [[9, 1], [0, 0]], [9, 1], True)


class TestBreakEven:
    @pytest.mark.parametrize(
        ("name", "load_E", "worth"),
        [
            ("lrm", [80, 20], 29),  # (80 + 160 - 51 - 102) / 3 rows for one copy
            ("ultraep", [90, 0, 0], 29),  # (270 - 93) / 3 for two copies from rank 0
            ("ultraep", [50, 50, 2], 7),  # (150 - 105) / 3 for two copies to rank 2
            ("symi", [80, 20], 20),  # (240 - 180) / 3 for one copy
        ],
    )
    def test_replicas_must_earn_their_copies(self, name, load_E, worth):
        popularity_E = np.array(load_E)
        plan, alone = (made(load_E, name=name, min_rows=n, popularity_E=popularity_E) for n in (worth, worth + 1))
        assert plan.replicas > 0 and plan.certificate.status != "not worth it"
        assert (alone.replicas, alone.certificate.status) == (0, "not worth it")
        assert alone.rows_I.tolist() == alone.kept_I.tolist() == load_E
        assert alone.certificate.backward_limit == plan.certificate.backward_limit is not None

    def test_joint_chooses_quotas_with_the_replicas(self):
        """As in the tests of joint: to drop 3 and 1 rows on the two hot ranks brings both to their limit of 7."""
        arguments = (loads_of([10, 8, 6, 2], 4), [0, 1, 2, 3], [8, 6, 4, 1], Retention(share=Fraction(4, 5)), "joint")
        policy = TrainingPolicy(name="lrm", slots=1, limits="backward")
        assert training_plan(policy, *arguments, np.full(4, 7)).kept_I.tolist() == [7, 7, 6, 2]

    def test_joint_falls_back_to_the_quotas_made_without_replicas(self):
        loads_SE, quota_E = loads_of([80, 20], 2), [70, 20]
        policy = TrainingPolicy(name="lrm", slots=1, min_rows=10**6)
        assert training_plan(policy, loads_SE, [0, 1], quota_E, HALF, "joint").kept_I.tolist() == quota_E


class TestLimits:
    def test_tolerance_and_kind(self):
        """Mean 50 of the routed rows; half of them are kept."""
        assert made([80, 20], retention=HALF, tolerance=Fraction(6, 5)).rows_R.max() == 60
        assert made([80, 20], retention=HALF, limits="backward").replicas == 0
        assert made([80, 20], limits="backward").kept_R.max() == 51

    def test_limits_of_each_rank(self):
        assert made([80, 20], limits="backward", backward_limit_R=np.array([70, 30])).kept_R.tolist() == [70, 30]
        assert made([80, 20], limits="backward", backward_limit_R=np.array([0, 99])).kept_R.tolist() == [1, 99]
        assert made([80, 20], name="symi", backward_limit_R=np.array([80, 19])).certificate.status == "not found"


class TestUltraep:
    @cases(ci=200, developer=40)
    @given(case=small_loads(), slots=st.integers(0, 3), eps=st.sampled_from([0, Fraction(1, 100), Fraction(1, 5)]))
    def test_is_the_published_policy(self, case, slots, eps):
        loads_SE, owner_E = case
        own = as_policy(partial(ultraep.place, options=UltraepOptions(eps=Fraction(eps), min_rows=0)))
        policy = TrainingPolicy(name="ultraep", slots=slots, tolerance=1 + Fraction(eps), forward_only=True)
        found = training_plan(policy, loads_SE, owner_E, loads_SE.sum(axis=0), ALL, "proportional")
        assert arrays_of(found) == arrays_of(own(loads_SE, None, owner_E, slots, Limits()))

    @pytest.mark.parametrize("numba", [True, False])
    def test_min_rows_replaces_its_floor(self, numba, monkeypatch):
        """The fast path fails here, and the fallback's pieces have 299 and 101 rows."""
        if not numba:
            monkeypatch.setitem(sys.modules, "megatron_lrmoe.replicas.peers.ultraep_compiled", None)
        case = (loads_of([300, 300, 200, 0], 2), [0, 0, 0, 1], [300, 300, 200, 0], ALL, "proportional")
        rows = [
            [rows for _, _, rows, _ in replicas_of(training_plan(policy, *case))]
            for policy in (TrainingPolicy(name="ultraep", slots=2, min_rows=n) for n in (101, 102))
        ]
        assert rows == [[299, 101], [299]]


class TestSymi:
    @cases(ci=300, developer=60)
    @given(case=small_loads(), slots=st.integers(0, 3), data=st.data())
    def test_copies_are_those_of_its_rule_where_they_fit(self, case, slots, data):
        loads_SE, owner_E = case[0] + 1, case[1]
        ranks, experts = loads_SE.shape
        popular = st.lists(st.integers(0, 9), min_size=experts, max_size=experts).filter(any)
        popularity_E = np.array(data.draw(popular), np.int64)
        policy = TrainingPolicy(name="symi", slots=slots)
        plan = training_plan(
            policy, loads_SE, owner_E, loads_SE.sum(axis=0), ALL, "proportional", popularity_E=popularity_E
        )
        count_E = popular_counts(popularity_E, experts + ranks * slots)
        for e in range(experts):
            rank_i, rows_i = plan.rank_I[plan.expert_I == e], plan.rows_I[plan.expert_I == e]
            assert len(rank_i) <= count_E[e] and rows_i.max() - rows_i.min() <= 1
            if len(rank_i) < count_E[e]:
                assert all(r in rank_i or plan.slots_R[r] == slots for r in range(ranks))

    def test_copies_go_where_most_slots_are_free(self):
        plan = made([9, 9, 9, 9], name="symi", popularity_E=np.array([3, 3, 3, 3]))
        where = [(e, r) for e, r, _, _ in replicas_of(plan)]
        # Two more of each; the last slot is on expert 3's own rank.
        assert where == [(0, 1), (0, 2), (1, 0), (1, 3), (2, 0), (2, 1), (3, 2)]

    @pytest.mark.parametrize("popularity_E", [None, np.zeros(2, np.int64)])
    def test_the_first_iteration_has_no_replicas(self, popularity_E):
        assert made([80, 20], name="symi", popularity_E=popularity_E).replicas == 0


@cases(ci=500, developer=40)
@given(training_cases())
def test_resplit_of_the_same_loads_changes_no_rows(case):
    plan, only = training_plan(*case), case.policy.forward_only
    again = resplit(plan, case.loads_SE, kept_of(plan), only)
    assert arrays_of(again)[:4] == arrays_of(plan)[:4]


@cases(ci=500, developer=40)
@given(training_cases(), st.data())
def test_resplit_of_other_loads_keeps_instances_and_proportions(case, data):
    plan, only = training_plan(*case), case.policy.forward_only
    planned_E, shape = case.loads_SE.sum(axis=0), case.loads_SE.shape
    row_E = st.lists(st.integers(0, 60), min_size=shape[1], max_size=shape[1])
    loads_SE = np.array([data.draw(row_E) for _ in range(shape[0])], np.int64)
    quota_E = np.array([data.draw(st.integers(0, int(load))) for load in loads_SE.sum(axis=0)], np.int64)
    found = resplit(plan, loads_SE, quota_E, only)
    problems = problems_of(found, loads_SE, quota_E, case.owner_E, case.policy.slots, Limits())
    assert [p for p in problems if not p.startswith("status is")] == []
    assert found.certificate.within_limits
    if not only:
        assert chanceless(found) == []
        return
    rows = {(e, r): n for e, r, n in zip(found.expert_I.tolist(), found.rank_I.tolist(), found.rows_I, strict=True)}
    for e, r, planned in zip(plan.expert_I.tolist(), plan.rank_I.tolist(), plan.rows_I, strict=True):
        here = rows.pop((e, r), 0)
        assert abs(here * planned_E[e] - loads_SE[:, e].sum() * planned) < max(1, planned_E[e])
    assert rows == {}


def test_resplit_rounds_to_the_largest_remainder_and_brings_rows_home():
    plan = made([80, 20], name="ultraep")
    assert resplit(plan, [[8, 0], [2, 0]], [10, 0], True).rows_I.tolist() == [6, 0, 4]
    assert resplit(plan, [[1, 3], [0, 0]], [1, 3], False).rows_I.tolist() == [1, 3]
    assert resplit(plan, [[9, 0], [1, 0]], [1, 0], False).rows_SI.tolist() == [[9, 0], [1, 0]]
    with pytest.raises(ValueError, match="source ranks of loads_SE: found 3, allowed is 2"):
        resplit(plan, [[9, 0]] * 3, [27, 0], True)


def test_masters_only():
    plan = without_replicas([[3, 1], [2, 0]], [4, 1], [1, 0])
    assert (plan.rows_SI.tolist(), plan.kept_I.tolist(), plan.rank_I.tolist()) == ([[3, 1], [2, 0]], [4, 1], [1, 0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "eplb"}, "name: found 'eplb', allowed is one of lrm, ultraep, symi"),
        ({"limits": "forward"}, "limits: found 'forward', allowed is one of both, backward"),
        ({"tolerance": Fraction(99, 100)}, "tolerance: found 99/100, allowed is a Fraction >= 1"),
        ({"slots": -1}, "slots: found -1, allowed is a whole number >= 0"),
        ({"min_rows": -1}, "min_rows: found -1"),
        ({"backward_limit_R": np.array([1])}, r"backward_limit_R: found shape \(1,\), allowed is \(2,\)"),
        ({"name": "symi", "popularity_E": np.array([1])}, r"popularity_E: found \[1\], allowed is 2 whole numbers"),
    ],
)
def test_bad_input(values, message):
    with pytest.raises(ValueError, match=message):
        made([80, 20], **values)


def test_a_quota_policy_that_is_not_there():
    with pytest.raises(ValueError, match="quota: found 'even', allowed is one of proportional, balanced, joint"):
        training_plan(TrainingPolicy(name="lrm", slots=1), [[1]], [0], [1], ALL, "even")  # type: ignore[arg-type]
