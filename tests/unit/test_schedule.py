"""Retention over the iterations."""

from fractions import Fraction

import pytest

from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.recalibration.schedule import retention_at


def test_without_start_and_ramp_retention_holds_from_the_first_iteration():
    assert retention_at(LrmConfig(retention=0.7), 0) == Fraction(7, 10)


def test_ramp_falls_in_equal_exact_steps_after_start():
    config = LrmConfig(retention=0.7, start_iter=3, ramp_iters=4)
    found = [retention_at(config, iteration) for iteration in range(9)]
    tenths = ["1", "1", "1", "0.925", "0.85", "0.775", "0.7", "0.7", "0.7"]
    assert found == [Fraction(text) for text in tenths]


@pytest.mark.parametrize("iteration, share", [(4, Fraction(1)), (5, Fraction(1, 2)), (10**9, Fraction(1, 2))])
def test_without_ramp_retention_falls_at_once(iteration, share):
    assert retention_at(LrmConfig(retention=0.5, start_iter=5), iteration) == share


def test_no_retention_given_is_full_retention():
    assert retention_at(LrmConfig(start_iter=2, ramp_iters=3), 4) == 1
