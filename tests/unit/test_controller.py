"""A layer's retention under the controller: where it settles, what it never does, and what its flags refuse."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe.config import LrmConfig, flag_of
from megatron_lrmoe.recalibration.controller import STEP, next_steps, retention_after

TAU = 0.025
HALF = Fraction(1, 2)


def run(variance_of, iterations: int, target: Fraction = HALF, steps: int = 0) -> list[Fraction]:
    """Retention of each iteration of a layer whose draws add ``variance_of(retention, iteration)``."""
    retentions = []
    for iteration in range(iterations):
        retention = retention_after(steps, target)
        retentions.append(retention)
        ratio = None if retention == 1 else variance_of(float(retention), iteration)
        steps = next_steps(steps, target, ratio, TAU)
    return retentions


def quadratic(retention: float, scale: float = 1.0) -> float:
    return scale * (1 - retention) ** 2


def test_it_goes_down_by_a_hundredth_until_the_variance_is_tau_and_stays_there() -> None:
    found = run(lambda r, _: quadratic(r), 60)
    assert found[:3] == [1, Fraction(99, 100), Fraction(98, 100)]
    # 0.15 squared is below 0.025, 0.16 squared is above.
    assert found[15] == Fraction(85, 100) and set(found[16:]) == {Fraction(84, 100), Fraction(85, 100)}


def test_it_stops_at_the_target_which_need_not_be_a_whole_number_of_steps() -> None:
    found = run(lambda r, _: 0.0, 60, target=Fraction(755, 1000))
    assert found[24] == Fraction(76, 100) and set(found[25:]) == {Fraction(755, 1000)}
    # Above the target again, and no time is lost on steps that did nothing.
    assert run(lambda r, _: 1.0, 3, Fraction(755, 1000), steps=40)[1:] == [Fraction(76, 100), Fraction(77, 100)]


def test_it_goes_up_where_the_variance_has_grown_and_down_again_when_that_is_over() -> None:
    found = run(lambda r, i: quadratic(r, 50.0 if 20 <= i < 40 else 1.0), 80)
    assert max(found[38:41]) >= Fraction(97, 100) and min(found) == found[16] == Fraction(84, 100)
    assert min(found[60:]) == Fraction(84, 100)


def test_where_any_drop_is_too_much_it_tries_a_hundredth_every_other_iteration() -> None:
    assert run(lambda r, _: 1.0, 6) == [1, Fraction(99, 100)] * 3


def test_no_number_counts_as_too_much_and_an_unknown_one_as_none() -> None:
    assert next_steps(5, HALF, math.nan, TAU) == next_steps(5, HALF, math.inf, TAU) == 4
    assert next_steps(5, HALF, None, TAU) == next_steps(5, HALF, TAU, TAU) == 5


@given(
    st.integers(1, 999),
    st.integers(0, 200),
    st.lists(st.one_of(st.none(), st.floats(allow_nan=True)), max_size=40),
)
def test_it_is_never_below_its_target_nor_above_one_and_moves_by_a_step(thousandths, steps, ratios) -> None:
    target = Fraction(thousandths, 1000)
    for ratio in ratios:
        before = retention_after(steps, target)
        steps = next_steps(steps, target, ratio, TAU)
        after = retention_after(steps, target)
        assert target <= after <= 1 and abs(after - before) <= STEP


def test_flags_that_do_not_go_with_it_are_named_all_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        LrmConfig(adaptive=True, retention=1.0, selection="topk", score="grad-abs", ramp_iters=3)
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        flag_of(name) for name in ("retention", "selection", "score", "ramp_iters")
    ]
    assert all("found " in line and "allowed with --moe-lrm-adaptive is " in line for line in lines)
    with pytest.raises(ValueError, match=r"^--moe-lrm-retention: found None"):
        LrmConfig(adaptive=True)
    LrmConfig(adaptive=True, retention=0.5, start_iter=3, when="forward")


@pytest.mark.parametrize("tau", [0.0, -1.0, math.nan, math.inf])
def test_tau_out_of_range_is_refused(tau: float) -> None:
    with pytest.raises(ValueError, match=rf"^--moe-lrm-adaptive-tau: found {tau!r}, allowed is a number > 0$"):
        LrmConfig(adaptive_tau=tau)
