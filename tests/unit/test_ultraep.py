"""UltraEP's solver: hand-checked cases, its published results, and the compiled one against the readable one."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe.replicas.peers import ultraep, ultraep_compiled
from megatron_lrmoe.replicas.peers.ultraep import UltraepOptions
from megatron_lrmoe.replicas.workloads import Shape, zipf
from tests.loads import small_loads

SOLVERS = [ultraep.solve, ultraep_compiled.solve]


def solve(solver, load_E, owner_E, ranks, slots, options=ultraep.DEFAULTS):
    load_E, owner_E = np.array(load_E, np.int64), np.array(owner_E, np.int64)
    lowest, fast = options.thresholds(int(load_E.sum()), ranks)
    found = solver(load_E, owner_E, ranks, slots, lowest, fast, options.min_rows, options.master_rows)
    assert all(column.dtype == np.int64 for column in found)
    return [tuple(int(value) for value in replica) for replica in zip(*found, strict=True)]


def rows_after(load_E, owner_E, ranks, replicas):
    rows_R = np.bincount(owner_E, weights=load_E, minlength=ranks).astype(np.int64)
    for expert, rank, rows in replicas:
        rows_R[owner_E[expert]] -= rows
        rows_R[rank] += rows
    return rows_R


@pytest.mark.parametrize("solver", SOLVERS)
class TestByHand:
    def test_largest_expert_goes_to_most_slack(self, solver):
        # Mean 400, T 404: rank 0 has 396 too many, ranks 1 and 2 have room for 304 and 104.
        loads, owners = [500, 300, 60, 40, 200, 100], [0, 0, 1, 1, 2, 2]
        assert solve(solver, loads, owners, 3, 1) == [(0, 1, 304), (0, 2, 92)]

    def test_second_expert_gives_what_the_first_lacks(self, solver):
        # Mean 300, T 303: rank 0 has 597 too many, and expert 0 can give all but one of its 300 rows.
        assert solve(solver, [300, 300, 300, 0, 0], [0, 0, 0, 1, 2], 3, 2) == [(0, 1, 299), (1, 2, 298)]

    def test_the_fast_path_makes_no_piece_below_an_equal_share(self, solver):
        # Mean 400, T 404: expert 0 could give 299 of the 396 rows that rank 1, the only one, is asked to take.
        # So T = 400 of the fallback is tried, where min_rows allows it.
        case = [300, 300, 200, 0], [0, 0, 0, 1], 2, 2
        assert solve(solver, *case) == []
        assert solve(solver, *case, UltraepOptions(min_rows=1)) == [(0, 1, 299), (1, 1, 101)]

    @pytest.mark.parametrize(
        ("options", "replicas"),
        [
            (UltraepOptions(min_rows=1), [(0, 1, 299)]),
            (UltraepOptions(min_rows=1, master_rows=0), [(0, 1, 300)]),
            (UltraepOptions(min_rows=300), []),
            (UltraepOptions(), []),
        ],
    )
    def test_the_fallback_searches_for_the_lowest_threshold(self, solver, options, replicas):
        # One slot takes at most expert 0's 300 rows of the 400 that rank 0 has too many.
        assert solve(solver, [300, 250, 250, 0], [0, 0, 0, 1], 2, 1, options) == replicas

    def test_the_search_misses_what_works_at_one_threshold_only(self, solver):
        # As above, but from T = 502 on less than the 299 rows that a piece must have are asked for.
        assert solve(solver, [300, 250, 250, 0], [0, 0, 0, 1], 2, 1, UltraepOptions(min_rows=299)) == []

    def test_a_higher_threshold_asks_for_less(self, solver):
        options = UltraepOptions(threshold=Fraction(3, 2), eps=Fraction(0))
        assert solve(solver, [800, 0], [0, 1], 2, 1, options) == [(0, 1, 200)]

    @pytest.mark.parametrize(
        ("loads", "ranks", "slots"), [([9, 0], 2, 0), ([9, 0], 1, 2), ([0, 0], 2, 1), ([5, 5], 2, 1)]
    )
    def test_nothing_to_do(self, solver, loads, ranks, slots):
        assert solve(solver, loads, [0, ranks - 1], ranks, slots) == []


@pytest.mark.parametrize(("ratio", "replicas", "most"), [(1.5, 38, 4), (2.0, 46, 5), (3.0, 51, 6)])
def test_results_published_for_its_own_loads(ratio, replicas, most):
    """UltraEP's README: EP64, 256 experts, 2 slots, 8k tokens a rank; final 1.01; replicas in all and of one expert."""
    shape = Shape(experts=256, ranks=64, tokens=8192, top_k=8)
    load_E = zipf(shape, ratio, seed=0).sum(axis=0)
    found = solve(ultraep_compiled.solve, load_E, shape.owner_E, 64, 2)
    rows_R = rows_after(load_E, shape.owner_E, 64, found)
    assert round(rows_R.max() / rows_R.mean(), 2) == 1.01
    assert len(found) == pytest.approx(replicas, rel=0.1)
    assert max(np.bincount([expert for expert, _, _ in found])) == most


@given(
    case=small_loads(),
    slots=st.integers(0, 3),
    threshold=st.sampled_from([Fraction(1), Fraction(6, 5)]),
    eps=st.sampled_from([Fraction(0), Fraction(1, 100)]),
    min_rows=st.sampled_from([0, 1, 20, 1024]),
    master_rows=st.integers(0, 1),
)
def test_compiled_and_readable_solvers_agree(case, slots, threshold, eps, min_rows, master_rows):
    loads_SE, owner_E = case
    load_E, ranks = loads_SE.sum(axis=0), len(loads_SE)
    options = UltraepOptions(threshold=threshold, eps=eps, min_rows=min_rows, master_rows=master_rows)
    found = solve(ultraep.solve, load_E, owner_E, ranks, slots, options)
    assert solve(ultraep_compiled.solve, load_E, owner_E, ranks, slots, options) == found
    assert len({(expert, rank) for expert, rank, _ in found}) == len(found)
    assert all(rows > 0 and owner_E[expert] != rank for expert, rank, rows in found)
    assert all(sum(r == rank for _, r, _ in found) <= slots for rank in range(ranks))
    before, after = rows_after(load_E, owner_E, ranks, []), rows_after(load_E, owner_E, ranks, found)
    assert after.max() <= before.max()
    for e in range(len(load_E)):
        assert sum(rows for expert, _, rows in found if expert == e) <= max(0, load_E[e] - master_rows)


@pytest.mark.parametrize(
    "name, value",
    [("threshold", Fraction(1, 2)), ("eps", Fraction(-1)), ("min_rows", -1), ("master_rows", 2)],
)
def test_options_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}: found {value}, allowed is"):
        UltraepOptions(**{name: value})
