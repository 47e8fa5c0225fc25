"""What rows and replicas cost: tiles and groups, a memory budget, and when a replica earns its push."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe.replicas.cost import BreakEven, ByteBudget, RankRows, RowCost
from megatron_lrmoe.replicas.plan import Limits
from megatron_lrmoe.replicas.planner import Options
from tests.plans import loads_of, planned

QWEN3_PARAMETERS = 4_718_592
PRICES = BreakEven(parameters=QWEN3_PARAMETERS, flops=500e12, bytes_per_s=450e9)


class TestBreakEven:
    @pytest.mark.parametrize(
        ("bytes_per_s", "hidden", "retention", "rows"),
        [
            (450e9, False, 1.0, 1481),
            (200e9, False, 1.0, 3333),
            (450e9, False, 0.8, 1709),
            (200e9, False, 0.8, 3846),
            (450e9, True, 1.0, 741),
            (200e9, True, 1.0, 1667),
        ],
    )
    def test_rows_that_a_replica_must_take(self, bytes_per_s, hidden, retention, rows):
        prices = replace(PRICES, bytes_per_s=bytes_per_s, gradient_hidden=hidden)
        assert round(prices.rows_to_earn(retention)) == rows

    @pytest.mark.parametrize(("bytes_per_s", "rows"), [(450e9, 1111), (200e9, 2500)])
    def test_rows_that_a_forward_only_replica_must_take(self, bytes_per_s, rows):
        prices, none = replace(PRICES, bytes_per_s=bytes_per_s), np.zeros(2, np.int64)
        saved = prices.saved_seconds(RankRows(np.array([rows, 0]), none), RankRows(none, none))
        pushed = prices.push_seconds(np.array([0]), np.array([1]), np.array([True]), ranks=2)
        assert saved == pytest.approx(pushed, rel=1e-3)

    def test_the_busiest_link_counts_in_either_direction(self):
        sender_n, full = np.array([0, 0, 1]), np.zeros(3, bool)
        seconds = [PRICES.push_seconds(sender_n, np.array(rank_n), full, 4) for rank_n in ([2, 3, 3], [3, 3, 3])]
        assert seconds == pytest.approx([copies * 8 * QWEN3_PARAMETERS / 450e9 for copies in (2, 3)])

    @pytest.mark.parametrize(("rows", "status"), [(1481, "not worth it"), (1482, "proven")])
    def test_replicas_that_cost_more_than_they_save_are_left_out(self, rows, status):
        found = planned([2 * rows, 0], Limits(forward=Fraction(1)), options=Options(break_even=PRICES))
        assert found.certificate.status == status and found.replicas == (status == "proven")
        assert found.certificate.within_limits == (status == "proven")

    def test_limits_in_rows_are_met_at_any_price(self):
        found = planned([20, 0], Limits(forward=10), options=Options(break_even=PRICES))
        assert found.replicas == 1 and found.certificate.status == "proven"
        assert planned([9, 9], Limits(forward="finest"), options=Options(break_even=PRICES)).replicas == 0


class TestByteBudget:
    BUDGET = ByteBudget(total=1000, saved=10, work=20, slot=100)

    def test_both_limits_are_the_same_multiple_of_their_means(self):
        """800 bytes are left beside two slots: 4/3 of what a rank needs on average, 30 routed and 15 kept rows."""
        limits = self.BUDGET.limits(loads_of([40, 20], 2), np.array([20, 10]), slots=2)
        assert limits == Limits(forward=40, backward=20)

    def test_one_kept_row_fits_however_few_there_are(self):
        budget = ByteBudget(total=100, saved=1, work=50, slot=0)
        limits = budget.limits(loads_of([900, 100], 2), np.array([1, 0]), slots=2)
        assert limits == Limits(forward=50, backward=1)

    def test_a_plan_within_a_budget(self):
        loads_SE, quota_E = loads_of([50, 10], 2), np.array([25, 5])
        found = planned([50, 10], self.BUDGET.limits(loads_SE, quota_E, slots=2), quota_E=[25, 5], slots=2)
        bytes_R = 2 * self.BUDGET.slot + found.rows_R * self.BUDGET.saved + found.kept_R * self.BUDGET.work
        assert found.certificate.within_limits and bytes_R.max() <= self.BUDGET.total

    def test_what_does_not_hold_one_row_is_refused(self):
        with pytest.raises(
            ValueError, match="budget: found 1000 bytes, allowed is 1030 or more, for 10 x 100 of slots and one row"
        ):
            self.BUDGET.limits(loads_of([4], 1), np.array([4]), slots=10)

    @given(
        load_E=st.lists(st.integers(0, 500), min_size=2, max_size=6),
        kept=st.integers(0, 20),
        saved=st.integers(1, 99),
        work=st.integers(1, 99),
        spare=st.integers(0, 200),
    )
    def test_ranks_at_both_limits_are_within_the_budget(self, load_E, kept, saved, work, spare):
        budget = ByteBudget(total=7 * 3 + saved + work + spare, saved=saved, work=work, slot=7)
        quota_E = np.array(load_E) * kept // 20
        limits = budget.limits(loads_of(load_E, 2), quota_E, slots=3)
        assert isinstance(limits.forward, int) and isinstance(limits.backward, int)
        if quota_E.sum() > 0:
            assert limits.forward * saved + limits.backward * work <= budget.total - 7 * 3


class TestRowCost:
    def test_whole_tiles_and_a_constant_for_each_group(self):
        assert RowCost(tile_rows=4, group_rows=3).of(np.array([0, 1, 4, 5])).tolist() == [0, 7, 7, 11]
        assert RowCost().of(np.array([0, 1, 5])).tolist() == [0, 1, 5]

    @pytest.mark.parametrize(("name", "value"), [("tile_rows", 0), ("tile_rows", 1.5), ("group_rows", -1)])
    def test_values_out_of_range_are_refused(self, name, value):
        with pytest.raises(ValueError, match=f"{name}: found {value}, allowed is a whole number >="):
            RowCost(**{name: value})
