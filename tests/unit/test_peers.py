"""The rivals' policies: what each promises, on any loads, and hand-checked cases."""

from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe.replicas.peers import (
    POLICIES,
    as_policy,
    echo,
    eplb,
    fastermoe,
    flexmoe,
    laer,
    llep,
    moonep,
    smartmoe,
    symi,
)
from megatron_lrmoe.replicas.peers.eplb import EplbOptions
from megatron_lrmoe.replicas.peers.fastermoe import FasterMoeCost
from megatron_lrmoe.replicas.peers.finish import even_room, even_split, home_among, plan_from_rows
from megatron_lrmoe.replicas.peers.flexmoe import FlexMoeOptions
from megatron_lrmoe.replicas.peers.laer import LaerOptions
from megatron_lrmoe.replicas.peers.llep import LlepOptions
from megatron_lrmoe.replicas.plan import Limits
from tests.loads import small_loads

WITHIN_SLOTS = ["fixed", "ultraep", "echo", "flexmoe", "smartmoe"]
EVEN_ROOM = ["symi", "eplb", "laer"]
MOVES_MASTERS = ["symi", "eplb", "laer", "smartmoe"]
# Small enough thresholds and costs that small loads get replicas.
EAGER = POLICIES | {
    "llep": as_policy(partial(llep.place, options=LlepOptions(min_rows=2))),
    "flexmoe": as_policy(partial(flexmoe.place, options=FlexMoeOptions(node_ranks=2))),
    "laer": as_policy(partial(laer.place, options=LaerOptions(node_ranks=2))),
    "fastermoe": as_policy(partial(fastermoe.place, options=FasterMoeCost(hidden=1, width=1))),
}

LIMITS = st.sampled_from(
    [Limits(), Limits(forward=Fraction(11, 10)), Limits(forward=40, backward=20), Limits(backward="finest")]
)


def check_sums(plan, loads_SE, quota_E, owner_E):
    """Rows of each source and quotas of each expert are all somewhere, and no rank has an expert twice."""
    experts = len(owner_E)
    assert plan.expert_I[:experts].tolist() == list(range(experts))
    assert len({*zip(plan.expert_I.tolist(), plan.rank_I.tolist(), strict=True)}) == len(plan.expert_I)
    assert plan.rows_SI.min() >= 0 and plan.kept_I.min() >= 0
    assert (plan.kept_I <= plan.rows_I).all()
    for e in range(experts):
        assert plan.rows_SI[:, plan.expert_I == e].sum(axis=1).tolist() == loads_SE[:, e].tolist()
        assert plan.kept_I[plan.expert_I == e].sum() == quota_E[e]
    assert (plan.rows_I[experts:] > 0).all()
    assert plan.owner_E.tolist() == owner_E.tolist()


def check_certificate(plan, limits):
    certificate = plan.certificate
    assert certificate.forward_rows == plan.rows_R.max() >= certificate.forward_bound
    assert certificate.backward_rows == plan.kept_R.max() >= certificate.backward_bound
    assert (certificate.forward_bound - 1) * plan.num_ranks < max(1, plan.rows_R.sum())
    assert (certificate.replica_bound, certificate.replicas) == (0, plan.replicas)
    above = [
        rows > limit
        for rows, limit in (
            (certificate.forward_rows, certificate.forward_limit),
            (certificate.backward_rows, certificate.backward_limit),
        )
        if limit is not None
    ]
    assert certificate.status == ("not found" if any(above) else "found")
    assert (certificate.forward_limit is None) == (limits.forward is None)


@pytest.mark.parametrize("name", POLICIES)
@given(case=small_loads(), slots=st.integers(0, 3), limits=LIMITS, kept=st.fractions(0, 1, max_denominator=4))
def test_every_policy_keeps_its_promises(name, case, slots, limits, kept):
    loads_SE, owner_E = case
    ranks = len(loads_SE)
    quota_E = np.array([int(load * kept) for load in loads_SE.sum(axis=0).tolist()], np.int64)
    plan = EAGER[name](loads_SE, quota_E, owner_E, slots, limits)
    check_sums(plan, loads_SE, quota_E, owner_E)
    check_certificate(plan, limits)
    if name in WITHIN_SLOTS:
        assert (plan.slots_R <= slots).all()
    if name in EVEN_ROOM:
        room_R = even_room(len(owner_E), ranks, slots)
        assert (np.bincount(plan.rank_I, minlength=ranks) <= room_R).all()
    if name not in MOVES_MASTERS:
        assert plan.migrations == 0
    again = EAGER[name](loads_SE, quota_E, owner_E, slots, limits)
    for array in ("expert_I", "rank_I", "rows_SI", "kept_I"):
        assert getattr(again, array).tolist() == getattr(plan, array).tolist()


@pytest.mark.parametrize("name", ["ultraep", "moonep", "echo", "smartmoe"])
@given(case=small_loads(), slots=st.integers(0, 3))
def test_the_busiest_rank_is_never_busier_than_without(name, case, slots):
    loads_SE, owner_E = case
    plan, fixed = (POLICIES[n](loads_SE, None, owner_E, slots, Limits()) for n in (name, "fixed"))
    assert plan.rows_R.max() <= fixed.rows_R.max()


@given(case=small_loads())
def test_moonep_is_exact_with_one_donor_for_each_receiver(case):
    loads_SE, owner_E = case
    plan = POLICIES["moonep"](loads_SE, None, owner_E, 0, Limits())
    assert plan.rows_R.max() - plan.rows_R.min() <= 1
    for rank in range(len(loads_SE)):
        experts = plan.expert_I[len(owner_E) :][plan.rank_I[len(owner_E) :] == rank]
        assert len(set(owner_E[experts])) <= 1


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("case", "message"),
    [
        (([[1, -1]], None, [0, 0], 1), r"loads_SE\[0\]\[1\]: found -1"),
        (([[1, 1]], [2, 1], [0, 0], 1), r"quota_E\[0\]: found 2"),
        (([[1, 1]], None, [0, 1], 1), r"owner_E\[1\]: found 1"),
        (([[1, 1]], None, [0, 0], -1), "slots: found -1"),
        ((np.zeros((2, 0)), None, np.zeros(0), 1), "experts of loads_SE: found 0"),
    ],
)
def test_bad_input_is_refused(name, case, message):
    with pytest.raises(ValueError, match=message):
        POLICIES[name](*case, Limits())


class TestFinish:
    def test_rows_and_quotas_follow_the_policy(self):
        loads_SE, quota_E, owner_E = np.array([[6, 1], [4, 0]]), np.array([5, 1]), np.array([0, 0])
        rows_ER = np.array([[3, 7], [0, 1]])
        plan = plan_from_rows(rows_ER, np.array([0, 1]), loads_SE, quota_E, owner_E, Limits(forward=7, backward=4))
        assert (plan.expert_I.tolist(), plan.rank_I.tolist()) == ([0, 1, 0], [0, 1, 1])
        assert plan.rows_SI.tolist() == [[3, 1, 3], [0, 0, 4]]
        # 5 kept of 3 and 7 rows: 1.5 and 3.5, the remainder to the larger remainder, which both are, so to the first.
        assert plan.kept_I.tolist() == [2, 1, 3]
        assert (plan.migrations, plan.replicas) == (1, 1)
        certificate = plan.certificate
        assert (certificate.forward_limit, certificate.forward_bound, certificate.forward_rows) == (7, 6, 8)
        assert (certificate.backward_limit, certificate.backward_bound, certificate.backward_rows) == (4, 3, 4)
        assert certificate.status == "not found"

    @pytest.mark.parametrize(
        ("limits", "status"),
        [
            (Limits(), "found"),
            (Limits(forward="finest"), "found"),
            (Limits(forward=Fraction(3, 2)), "found"),
            (Limits(forward=[8, 2]), "found"),
            (Limits(forward=[8, 1]), "not found"),
            (Limits(forward=8, backward=3), "not found"),
        ],
    )
    def test_status(self, limits, status):
        case = np.array([[8, 0], [0, 2]]), np.array([4, 2]), np.array([0, 1])
        assert plan_from_rows(np.array([[8, 0], [0, 2]]), case[2], *case, limits).certificate.status == status

    def test_even_split_gives_remainders_to_the_largest_then_the_lowest(self):
        copies_ER = np.array([[1, 1, 1], [4, 0, 1], [0, 0, 0]])
        assert even_split(np.array([8, 6, 0]), copies_ER).tolist() == [[3, 3, 2], [5, 0, 1], [0, 0, 0]]

    def test_a_master_is_at_its_owner_if_a_copy_is_there(self):
        copies_ER = np.array([[1, 0, 1], [0, 1, 2], [0, 1, 0]])
        assert home_among(copies_ER, np.array([2, 0, 1])).tolist() == [2, 1, 1]


def placed(module, loads, owners, slots, options=None):
    """Rows of each expert on each rank and homes; loads of experts come from rank 0 unless given by source."""
    loads_SE = np.atleast_2d(np.array(loads, np.int64))
    if len(loads_SE) == 1:
        loads_SE = np.vstack([loads_SE, np.zeros((max(owners), loads_SE.shape[1]), np.int64)])
    rows_ER, home_E = module.place(loads_SE, np.array(owners), slots, **({"options": options} if options else {}))
    return rows_ER.tolist(), home_E.tolist()


def test_fixed_leaves_all_rows_at_their_owners():
    plan = POLICIES["fixed"]([[3, 0, 2], [1, 5, 0]], None, [1, 0, 0], 2, Limits())
    assert plan.rows_R.tolist() == [7, 4]
    assert plan.rows_SI.tolist() == [[3, 0, 2], [1, 5, 0]]
    assert (plan.replicas, plan.migrations) == (0, 0)


class TestSymi:
    def test_copies_in_proportion_laid_out_contiguously(self):
        # 8 slots for 8 rows: shares 6, 1, 1, 0; the last is raised to one, which the first, with none below, pays.
        assert symi.popular_counts(np.array([6, 1, 1, 0]), 8).tolist() == [5, 1, 1, 1]
        rows_ER, home_E = placed(symi, [6, 1, 1, 0], [0, 0, 1, 1], 2)
        # Ranks hold 0 0 0 0 and 0 1 2 3: five copies share 6 rows.
        assert rows_ER == [[5, 1], [0, 1], [0, 1], [0, 0]]
        assert home_E == [0, 1, 1, 1]

    def test_shares_are_rounded_where_they_are_furthest_off(self):
        # Shares 2.4, 2.1, 1.5 of 6: the floors make 5, and 1.5 is furthest above its floor.
        assert symi.popular_counts(np.array([8, 7, 5]), 6).tolist() == [2, 2, 2]
        assert symi.popular_counts(np.array([0, 0]), 5).tolist() == [3, 2]


class TestMoonep:
    @pytest.mark.parametrize(
        ("rows_R", "moves"),
        [
            ([500, 400, 200, 100], {(0, 3): 200, (1, 2): 100}),
            # The second donor gives more than it has to, and then receives from the first.
            ([700, 500, 0, 0], {(0, 2): 300, (1, 3): 300, (0, 1): 100}),
        ],
    )
    def test_largest_surplus_fills_largest_deficit(self, rows_R, moves):
        moved_RR = moonep.rank_moves(np.array(rows_R))
        assert {(d, r): moved_RR[d, r] for d, r in zip(*moved_RR.nonzero(), strict=True)} == moves

    def test_largest_remaining_expert_serves_largest_receiver(self):
        rows_ER, _ = placed(moonep, [450, 250, 500, 0, 0, 0], [0, 0, 1, 1, 2, 3], 0)
        assert rows_ER[:3] == [[150, 0, 300, 0], [150, 100, 0, 0], [0, 200, 0, 300]]

    def test_fullest_ranks_keep_the_rows_that_do_not_divide(self):
        assert placed(moonep, [1, 4], [0, 1], 0)[0] == [[1, 0], [1, 3]]
        assert placed(moonep, [4, 1], [0, 1], 0)[0] == [[3, 1], [0, 1]]


class TestEplb:
    @pytest.mark.parametrize(
        ("load_E", "experts_RI"),
        [
            (
                [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
                [[5, 6], [5, 7], [8, 4], [3, 4], [10, 9], [10, 2], [0, 1], [11, 1]],
            ),
            (
                [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
                [[7, 10], [6, 8], [6, 11], [8, 9], [2, 4], [5, 1], [5, 0], [3, 1]],
            ),
        ],
    )
    def test_plan_printed_in_its_readme(self, load_E, experts_RI):
        """12 experts in 4 groups, 16 slots on 8 ranks of 2 nodes."""
        copies_ER = eplb.place_copies(load_E, [2] * 8, EplbOptions(groups=4, nodes=2))
        held = [np.repeat(np.arange(12), copies_R).tolist() for copies_R in copies_ER.T]
        assert held == [sorted(experts) for experts in experts_RI]

    def test_global_mode(self):
        # Copies of 0 at 6, 6/2 (tied with 1, lowest first), so three of 2 rows each. Heaviest first, 1 0 2 0 0 3 go
        # to ranks 0 1 1 0 1 0.
        assert eplb.replicate([6, 3, 2, 1], 6) == [0, 1, 2, 3, 0, 0]
        rows_ER, home_E = placed(eplb, [6, 3, 2, 1], [0, 0, 1, 1], 1)
        assert rows_ER == [[2, 4], [3, 0], [0, 2], [1, 0]]
        assert home_E == [0, 0, 1, 0]

    def test_one_item_for_each_pack_keeps_its_order(self):
        assert placed(eplb, [1, 5, 3], [2, 1, 0], 0)[1] == [0, 1, 2]

    def test_nodes_that_do_not_divide_the_groups_give_the_global_mode(self):
        loads = [9, 1, 1, 1, 1, 1]
        found = eplb.place_copies(loads, [3, 3], EplbOptions(groups=3, nodes=2))
        assert found.tolist() == eplb.place_copies(loads, [3, 3]).tolist()

    @pytest.mark.parametrize(("option", "value"), [("groups", 4), ("nodes", 3), ("groups", 0)])
    def test_topology_that_does_not_fit_is_refused(self, option, value):
        with pytest.raises(ValueError, match=f"{option}: found {value}"):
            eplb.place_copies([1] * 6, [3, 3], EplbOptions(**{option: value}))


@pytest.mark.parametrize(
    ("loads", "owners", "homes"),
    [
        # Heaviest first: 10 stays where it is, 9 and 2 go to the other rank, 1 fills the first.
        ([10, 9, 2, 1], [0, 0, 1, 1], [0, 1, 1, 0]),
        ([10, 9, 2, 1], [1, 1, 0, 0], [1, 0, 0, 1]),
        # One 4 would go to rank 2, but the busiest rank would still have 9.
        ([9, 0, 4, 4, 0, 0], [0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2]),
        # Equal numbers would put a 3 beside the 9.
        ([9, 3, 3, 3], [0, 1, 1, 1], [0, 1, 1, 1]),
    ],
)
def test_smartmoe_packs_whole_experts_if_that_helps(loads, owners, homes):
    rows_ER, home_E = placed(smartmoe, loads, owners, 0)
    assert home_E == homes
    assert [rows_R[home] for rows_R, home in zip(rows_ER, homes, strict=True)] == loads


class TestEcho:
    LOADS = (50, 100, 150, 200, 50, 80, 100, 120, 25, 25, 25, 25, 20, 10, 10, 10)
    OWNERS = (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)

    def test_overlaps_of_spills_and_rooms(self):
        # Mean 250. Experts 2, 3 and 7 spill 50, 200 and 100 rows; ranks 3 and 2 have room for 200 and 150.
        spill_E = echo.spills(np.array(self.LOADS), np.array(self.OWNERS), 250, 4)
        assert {e: spill_E[e] for e in spill_E.nonzero()[0]} == {2: 50, 3: 200, 7: 100}
        rows_ER, _ = placed(echo, self.LOADS, self.OWNERS, 2)
        assert [rows_ER[e] for e in (2, 3, 7)] == [[100, 0, 50, 0], [0, 0, 0, 200], [0, 20, 100, 0]]

    def test_a_rank_takes_its_largest_overlap_with_one_slot(self):
        rows_ER, _ = placed(echo, self.LOADS, self.OWNERS, 1)
        assert [rows_ER[e] for e in (2, 3, 7)] == [[150, 0, 0, 0], [0, 0, 0, 200], [0, 20, 100, 0]]


class TestLlep:
    def test_least_loaded_ranks_take_what_does_not_fit(self):
        # Mean 400: rank 2 takes 400 of the 500, then rank 1, whose own 300 rows are yet to come, the rest.
        rows_ER, _ = placed(llep, [900, 300, 0], [0, 1, 2], 0, LlepOptions(min_rows=1))
        assert rows_ER == [[400, 100, 400], [0, 300, 0], [0, 0, 0]]

    def test_a_spill_without_a_large_enough_piece_is_forced_on_the_least_loaded(self):
        assert placed(llep, [900, 300, 0], [0, 1, 2], 0)[0][0] == [400, 0, 500]

    def test_alpha_and_skip(self):
        rows_ER, _ = placed(llep, [900, 300, 0], [0, 1, 2], 0, LlepOptions(alpha=Fraction(3, 2)))
        assert rows_ER[0] == [600, 0, 300]
        skipped = placed(llep, [900, 300, 0], [0, 1, 2], 0, LlepOptions(skip_below=Fraction(5, 2)))
        assert skipped[0] == [[900, 0, 0], [0, 300, 0], [0, 0, 0]]


class TestLaer:
    def test_in_one_node_copies_go_to_the_rank_with_fewest_rows(self):
        # Copies 3 1 1 1 as with EPLB. Heaviest first, 1 0 0 0 2 3 go to ranks 0 1 1 0 1 0.
        assert laer.hot_counts([6, 3, 2, 1], 6, 1) == [3, 1, 1, 1]
        rows_ER, home_E = placed(laer, [6, 3, 2, 1], [0, 0, 1, 1], 1)
        assert rows_ER == [[2, 4], [3, 0], [0, 2], [1, 0]]
        assert home_E == [0, 0, 1, 0]

    def test_each_node_has_a_copy_if_that_fits_and_rows_stay_there(self):
        assert laer.hot_counts([9, 1], 5, 2) == [2, 2]
        assert laer.hot_counts([9, 1], 3, 2) == [2, 1]
        rows_ER, _ = placed(laer, [[6, 0], [2, 2]], [0, 1], 1, LaerOptions(node_ranks=1))
        assert rows_ER == [[6, 2], [0, 2]]

    def test_the_cheaper_candidate_is_taken(self):
        # Even copies: 6 of 12 rows are sent, ranks compute 7 and 5. Three copies of expert 0: 9 are sent, 6 and 6.
        slow, fast = LaerOptions(row_seconds=1.0, token_bytes=1), LaerOptions(row_seconds=1e-12)
        found = [placed(laer, [[0, 3], [9, 0]], [0, 1], 1, options)[0] for options in (slow, fast)]
        assert found == [[[6, 3], [0, 3]], [[5, 4], [2, 1]]]


class TestFlexmoe:
    def test_the_hottest_expert_expands_while_that_helps(self):
        # Rows 10 and 2, then 5 and 7; the hottest then has a copy everywhere.
        assert placed(flexmoe, [10, 2], [0, 1], 1)[0] == [[5, 5], [0, 2]]

    @pytest.mark.parametrize(
        ("rounds", "rows_ER"),
        [
            (0, [[12, 0, 0, 0], [0, 11, 0, 0]]),
            (1, [[3, 3, 3, 3], [0, 11, 0, 0]]),
            (2, [[6, 6, 0, 0], [3, 3, 3, 2]]),
            (3, [[3, 3, 3, 3], [6, 5, 0, 0]]),
            (10, [[3, 3, 3, 3], [6, 5, 0, 0]]),
        ],
    )
    def test_the_coldest_shrinks_where_no_slot_is_free(self, rounds, rows_ER):
        # Ranks 2 and 3 own experts without rows; every rank is a node. A fourth round would undo the third.
        found, _ = placed(flexmoe, [12, 11, 0, 0], [0, 1, 2, 3], 1, FlexMoeOptions(rounds=rounds, node_ranks=1))
        assert found[:2] == rows_ER


def test_fastermoe_shadows_the_hottest_while_the_layers_cost_falls():
    # A row costs 1 + 40 s, a shadowed expert 1,000 s: 60 rows 2,460 s, 20 rows 1,820 s, 1 row 2,041 s.
    cost = FasterMoeCost(hidden=1, width=100, value_bytes=1, matrices=1, bandwidth=0.1, flops=600.0)
    assert (cost.row_seconds, cost.expert_seconds) == (41, 1000)
    assert fastermoe.shadowed_experts(np.array([20, 60, 1]), cost).tolist() == [1]
    rows_ER, _ = placed(fastermoe, [[20, 10, 1], [0, 50, 0]], [1, 0, 1], 0, cost)
    assert rows_ER == [[0, 20], [10, 50], [0, 1]]


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (LlepOptions, "alpha", Fraction(0)),
        (LlepOptions, "min_rows", -1),
        (LaerOptions, "node_ranks", 0),
        (FlexMoeOptions, "rounds", -1),
        (FlexMoeOptions, "node_ranks", 0),
        (FasterMoeCost, "bandwidth", 0.0),
    ],
)
def test_options_out_of_range_are_refused(make, name, value):
    with pytest.raises(ValueError, match=f"{name}: found {value}, allowed is"):
        make(**{name: value})
