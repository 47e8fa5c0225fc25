"""The planner by hand: golden plans, options and what it refuses."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from megatron_lrmoe.replicas.cost import RowCost
from megatron_lrmoe.replicas.plan import Limits, Plan
from megatron_lrmoe.replicas.planner import Options, plan
from tests.plans import planned, replicas_of


def copies(found: Plan) -> list[int]:
    return np.bincount(found.expert_I).tolist()


class TestGolden:
    def test_a_backward_limit_of_three_rows_needs_a_replica_before_dropping_and_none_after(self):
        found = planned([4, 2, 3], Limits(backward=3))
        assert copies(found) == [2, 1, 1] and replicas_of(found) == [(0, 1, 1, 1)]
        assert found.kept_R.tolist() == [3, 3, 3] and found.certificate.status == "proven"
        assert copies(planned([4, 2, 3], Limits(backward=3), quota_E=[3, 1, 2])) == [1, 1, 1]

    def test_a_donor_falls_below_its_limit_and_receives_into_its_own_slot(self):
        """One slot on rank 2 has to take all of its 8 rows of room, so rank 0 or 1 ends with room for the other."""
        found = planned([13, 15, 2], Limits(forward=10))
        assert replicas_of(found) == [(0, 1, 3, 3), (1, 2, 8, 8)]
        assert found.rows_R.tolist() == [10, 10, 10] and found.certificate.status == "proven"

    def test_one_expert_on_three_replicas(self):
        found = planned([12, 0, 0, 0], Limits(forward=3))
        assert replicas_of(found) == [(0, 1, 3, 3), (0, 2, 3, 3), (0, 3, 3, 3)]
        assert found.pushes_R.tolist() == [3, 0, 0, 0] and found.slots_R.tolist() == [0, 1, 1, 1]

    def test_a_replica_is_forward_only_where_backward_needs_none(self):
        found = planned([6, 2], Limits(forward=4, backward=3), quota_E=[3, 2])
        assert replicas_of(found) == [(0, 1, 2, 0)]
        assert found.forward_only_I.tolist() == [False, False, True]

    def test_a_replica_that_backward_needs_takes_forward_rows_along(self):
        """No forward limit: the other rows of expert 0 are spread like its kept ones, 3 to 1."""
        assert replicas_of(planned([12, 2, 3], Limits(backward=3), quota_E=[4, 2, 3])) == [(0, 1, 3, 1)]

    def test_two_pairs_take_two_replicas_and_not_three(self):
        """Rank 0 has what rank 3 lacks, and rank 1 what rank 2 lacks."""
        found = planned([15, 13, 7, 5], Limits(forward=10))
        assert replicas_of(found) == [(0, 3, 5, 5), (1, 2, 3, 3)] and found.certificate.replica_bound == 2

    def test_limits_of_each_rank(self):
        assert replicas_of(planned([10, 4, 4, 2], Limits(forward=[9, 4, 4, 3]))) == [(0, 3, 1, 1)]
        found = planned([10, 4, 4, 2], Limits(forward=np.array([6, 6, 5, 3])))  # type: ignore[arg-type]
        assert replicas_of(found) == [(0, 1, 2, 2), (0, 2, 1, 1), (0, 3, 1, 1)]
        assert found.certificate.forward_limit == 6

    def test_a_fraction_is_a_multiple_of_the_mean_rounded_up(self):
        assert planned([4, 2, 4], Limits(forward=Fraction(1))).certificate.forward_limit == 4
        assert planned([7, 0], Limits(forward=Fraction(101, 100))).certificate.forward_limit == 4
        assert planned([0, 0], Limits(forward=Fraction(3, 2), backward="finest")).certificate.status == "proven"

    def test_the_finest_limit_is_as_near_to_the_mean_as_slots_allow(self):
        assert planned([6, 6, 0], Limits(forward="finest"), slots=2).certificate.forward_rows == 4
        spread = planned([4, 4, 0, 0], Limits(forward="finest"), owner_E=[0, 0, 0, 1])
        assert (spread.certificate.forward_rows, spread.certificate.forward_limit) == (4, None)

    @pytest.mark.parametrize(
        ("limit", "slots", "status", "rows"),
        [(4, 0, "proven", 4), (3, 1, "proven", 3), (3, 0, "not found", 4), (2, 1, "impossible", 3)],
    )
    def test_status(self, limit, slots, status, rows):
        certificate = planned([4, 2, 3], Limits(forward=limit), slots=slots).certificate
        assert (certificate.status, certificate.forward_rows) == (status, rows)
        assert certificate.within_limits == (status == "proven")

    def test_one_rank_and_no_experts(self):
        assert planned([9, 1], Limits(forward=20), owner_E=[0, 0]).replicas == 0
        assert plan(np.zeros((2, 0), int), None, [], 1, Limits(forward=1)).replicas == 0


class TestOptions:
    @pytest.mark.parametrize("rank", [1, 2])
    def test_of_equally_many_replicas_resident_ones_are_preferred(self, rank):
        assert replicas_of(planned([4, 2, 2], Limits(forward=3), options=Options(resident=((0, rank),)))) == [
            (0, rank, 1, 1)
        ]

    def test_resident_replicas_that_are_not_needed_are_not_in_the_plan(self):
        assert planned([3, 3], Limits(forward=3), options=Options(resident=((0, 1),))).replicas == 0

    @pytest.mark.parametrize(("cost", "replicas"), [(Fraction(1, 4), 2), (Fraction(1), 1)])
    def test_two_resident_replicas_are_cheaper_than_a_fresh_one_unless_they_cost_as_much(self, cost, replicas):
        """Rank 3 alone could take the 4 rows; ranks 1 and 2 hold copies and have room for 2 each."""
        options = Options(resident=((0, 1), (0, 2)), resident_cost=cost)
        assert planned([10, 4, 4, 2], Limits(forward=6), options=options).replicas == replicas

    def test_replicas_stay_in_their_domain(self):
        options = Options(domain_ranks=2)
        assert replicas_of(planned([8, 4, 0, 0], Limits(forward=6), options=options)) == [(0, 1, 2, 2)]
        certificate = planned([8, 4, 0, 0], Limits(forward=5), options=options).certificate
        assert (certificate.status, certificate.forward_bound) == ("impossible", 6)

    def test_plans_that_leave_the_domain_are_no_candidates(self):
        anywhere = planned([8, 4, 0, 0], Limits(forward=5))
        assert {rank for _, rank, _, _ in replicas_of(anywhere)} & {2, 3}
        planned([8, 4, 0, 0], Limits(forward=5), options=Options(domain_ranks=2, candidates=(anywhere,)))

    def test_a_candidate_with_lower_quotas_or_other_loads_is_not_used(self):
        lower = planned([6, 2], Limits(backward=4), quota_E=[4, 2])
        options = Options(candidates=(lower,))
        assert planned([6, 2], Limits(backward=4), options=options).replicas == 1
        assert planned([7, 1], Limits(backward=4), options=options).replicas == 1

    def test_a_candidate_with_more_slots_or_other_owners_is_not_used(self):
        load_E, owner_E, limits = [3, 3, 3, 3, 0], [0, 0, 0, 0, 1], Limits(forward=6)
        two_slots = planned(load_E, limits, owner_E=owner_E, slots=2)
        assert two_slots.slots_R.tolist() == [0, 2]
        swapped = planned(load_E, limits, owner_E=[1, 1, 1, 1, 0], slots=2)
        for candidate in (two_slots, swapped):
            options = Options(candidates=(candidate,))
            assert planned(load_E, limits, owner_E=owner_E, options=options).slots_R.tolist() == [0, 1]

    def test_replicas_that_lower_quotas_leave_empty_are_not_taken_over_from_a_candidate(self):
        """Before, expert 0 needs ranks 1 and 2 or 3; two rows less, and rank 1 alone will do."""
        higher = planned([11, 2, 4, 4], Limits(backward=6))
        assert [kept for *_, kept in replicas_of(higher)] == [4, 2]
        beside = Options(resident=((0, 2), (0, 3)))
        lower = {"quota_E": [9, 2, 4, 4], "limits": Limits(backward=6)}
        assert planned([11, 2, 4, 4], **lower, options=beside).replicas == 2
        found = planned([11, 2, 4, 4], **lower, options=Options(resident=beside.resident, candidates=(higher,)))
        assert [(expert, rank, kept) for expert, rank, _, kept in replicas_of(found)] == [(0, 1, 4)]

    def test_tiles(self):
        """Of 9 rows in tiles of 4, one tile is left: 8 rows move, and 1 stays."""
        found = planned([9, 0], Limits(forward=8), options=Options(row_cost=RowCost(tile_rows=4)))
        assert replicas_of(found) == [(0, 1, 8, 8)] and found.certificate.forward_rows == 8

    def test_groups(self):
        """A replica on rank 1 costs 5 more there; with a limit of 10 its 5 rows fit, with 9 none are enough."""
        options = Options(row_cost=RowCost(group_rows=5))
        assert replicas_of(planned([10, 0], Limits(forward=10), options=options)) == [(0, 1, 5, 5)]
        assert not planned([10, 0], Limits(forward=9), options=options).certificate.within_limits


class TestBadInput:
    GOOD: tuple[Any, ...] = ([[4, 2], [0, 3]], [3, 1], [0, 1], 1, Limits(forward=5))

    @pytest.mark.parametrize(
        ("place", "value", "message"),
        [
            (0, [[4, 2], [0, -3]], r"loads_SE\[1\]\[1\]: found -3, allowed is a whole number from 0"),
            (0, [[4, 2], [0.5, 3]], r"loads_SE\[1\]\[0\]: found 0.5, allowed is a whole number from 0"),
            (0, [[4, np.nan], [0, 3]], r"loads_SE\[0\]\[1\]: found nan, allowed is a whole number"),
            (0, [[np.inf, 2], [0, 3]], r"loads_SE\[0\]\[0\]: found inf, allowed is a whole number"),
            (0, [[1e300, 2], [0, 3]], r"loads_SE\[0\]\[0\]: found 1e\+300, allowed is .* to 2147483648"),
            (0, np.full((2, 2), 2**63, np.uint64), r"loads_SE\[0\]\[0\]: found 9223372036854775808, allowed is"),
            (0, [[2**31, 2], [0, 3]], r"loads_SE: found 2147483653 rows in all, allowed are 0 to 2147483648"),
            (0, [4, 2], "loads_SE: found 1 dimensions, allowed are 2"),
            (0, [["4", "2"], ["0", "3"]], "loads_SE: found values of type <U1, allowed are whole numbers"),
            (0, np.zeros((0, 2), int), "loads_SE: found no source rank, allowed is one or more"),
            (1, [3], "quota_E: found 1 values, allowed are 2, one for each expert"),
            (1, [5, 1], r"quota_E\[0\]: found 5, allowed is 0 to the expert's load, 4"),
            (1, [3, -1], r"quota_E\[1\]: found -1, allowed is a whole number"),
            (2, [0, 1, 1], "owner_E: found 3 values, allowed are 2, one for each expert"),
            (2, [0, 2], r"owner_E\[1\]: found 2, allowed are ranks 0 to 1"),
            (2, [-1, 1], r"owner_E\[0\]: found -1, allowed is a whole number"),
            (3, -1, "slots: found -1, allowed is a whole number >= 0"),
            (3, 1.5, "slots: found 1.5, allowed is a whole number >= 0"),
            (4, Limits(forward=[5]), "limit: found 1 values, allowed are 2, one for each rank"),
            (4, Limits(backward=[5, 5, 5]), "limit: found 3 values, allowed are 2, one for each rank"),
        ],
    )
    def test_arguments(self, place, value, message):
        plan(*self.GOOD)
        with pytest.raises(ValueError, match=message):
            plan(*[value if n == place else good for n, good in enumerate(self.GOOD)])

    @pytest.mark.parametrize(
        ("limit", "message"),
        [
            (0, "forward limit of rank 0: found 0, allowed is a whole number of rows >= 1"),
            (-3, "forward limit of rank 0: found -3"),
            ([4, 0], "forward limit of rank 1: found 0, allowed is a whole number of rows >= 1"),
            (np.array([4, 0]), "forward limit of rank 1: found 0"),
            (1.5, "forward limit of rank 0: found 1.5"),
            (True, "forward limit of rank 0: found True"),
            ("fine", "forward limit of rank 0: found 'fine'"),
            (Fraction(99, 100), "forward limit: found 99/100 x mean, allowed is a Fraction >= 1"),
        ],
    )
    def test_limits(self, limit, message):
        with pytest.raises(ValueError, match=message):
            Limits(forward=limit)
        with pytest.raises(ValueError, match=message.replace("forward", "backward")):
            Limits(backward=limit)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (Options(domain_ranks=0), "domain_ranks: found 0, allowed is a whole number >= 1"),
            (Options(resident=[(0, 2)]), r"resident\[0\]: found \(0, 2\), allowed is an expert and a rank"),
            (Options(resident=[(0, 1), (2, 0)]), r"resident\[1\]: found \(2, 0\), allowed is an expert and a rank"),
            (Options(resident=[(1, 1)]), r"resident\[0\]: found \(1, 1\), .* a rank that is not its owner"),
            (Options(resident=[(0, 1), (0, 1)]), "resident: found .* allowed are different pairs, at most 1 on a rank"),
            (Options(resident=[(0, 1)], domain_ranks=1), r"resident\[0\]: found \(0, 1\), .* domain of 1 ranks"),
        ],
    )
    def test_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            plan(*self.GOOD, options=options)
