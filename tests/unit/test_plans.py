"""The checker of plans sees what is wrong with one."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_lrmoe.replicas.plan import Limits, Plan
from megatron_lrmoe.replicas.planner import plan
from tests.plans import loads_of, problems_of, replicas_of

LOADS, QUOTA, OWNERS = loads_of([10, 2, 0], 3), np.array([6, 2, 0]), np.arange(3)
LIMITS = Limits(forward=4, backward=4)


def good_plan() -> Plan:
    return plan(LOADS, QUOTA, OWNERS, 1, LIMITS)


def problems(found: Plan) -> str:
    return " ".join(problems_of(found, LOADS, QUOTA, OWNERS, 1, LIMITS))


def changed(name: str, place: int | tuple[int, int], value: int) -> str:
    """Problems after one number of an array has been replaced."""
    array = getattr(good_plan(), name).copy()
    array[place] = value
    return problems(replace(good_plan(), **{name: array}))


def test_it_sees_no_problem_in_a_good_plan():
    assert problems(good_plan()) == ""
    assert replicas_of(good_plan()) == [(0, 1, 2, 0), (0, 2, 4, 4)]


def test_it_sees_each_wrong_array():
    assert "source 2 sends 12 of 10 rows of expert 0" in changed("rows_SI", (2, 3), 4)
    assert "source 1 sends -1 rows to instance 1" in changed("rows_SI", (1, 1), -1)
    assert "replica 3 has no rows" in changed("rows_SI", (2, 3), 0)
    assert "2 of 6 rows of expert 0 are kept" in changed("kept_I", 4, 0)
    assert "instance 3 keeps 3 of 2 rows" in changed("kept_I", 3, 3)
    assert "masters are not first" in changed("rank_I", 0, 1)
    assert "rank 0 holds expert 0 twice" in changed("rank_I", 3, 0)
    assert "rank 2 holds 2 replicas, 1 allowed" in changed("rank_I", 3, 2)
    assert "not ordered" in changed("rank_I", 3, 2)
    assert "owners have changed" in changed("owner_E", 0, 1)


def test_it_sees_a_replica_outside_its_domain():
    assert "expert 0 has left its domain" in problems_of(good_plan(), LOADS, QUOTA, OWNERS, 1, LIMITS, domain_ranks=2)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"status": "found"}, "status is proven"),
        ({"status": "not worth it"}, "status is proven"),
        ({"replica_bound": 1}, "status is found"),
        ({"replica_bound": 3}, "2 replicas, the certificate says"),
        ({"replicas": 1}, "2 replicas, the certificate says"),
        ({"forward_bound": 5}, "forward limit, bound and rows are"),
        ({"backward_rows": 9}, "backward limit, bound and rows are"),
    ],
)
def test_it_sees_a_wrong_certificate(wrong, problem):
    good = good_plan()
    assert problem in problems(replace(good, certificate=replace(good.certificate, **wrong)))
