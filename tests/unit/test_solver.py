"""The planner's solver: its parts against slow plain references, and the compiled form against the readable one."""

import sys
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import megatron_lrmoe.replicas
from megatron_lrmoe.replicas.plan import IntArray, Limits
from megatron_lrmoe.replicas.planner import Options, plan
from megatron_lrmoe.replicas.readable.large import cover
from megatron_lrmoe.replicas.readable.settle import Settling, settle
from megatron_lrmoe.replicas.readable.small import NEVER, best_partition, fewest_exports, set_bounds, solve_small
from megatron_lrmoe.replicas.readable.state import Move, Problem, State, canonical_state
from megatron_lrmoe.replicas.task import solver_of
from megatron_lrmoe.replicas.workloads import Shape, log_normal
from tests.plans import cases, loads_of

Arguments = tuple[IntArray, IntArray, IntArray, IntArray, IntArray, int, bool]
"""Of ``solve``: loads, owners, balances, free slots, (expert, rank) of held replicas, overhead, strong."""


@st.composite
def problems(draw: st.DrawFn, most_ranks: int = 14) -> Arguments:
    """Any problem: ranks without experts, slots that differ, held replicas, overheads, limits below the mean."""
    ranks = draw(st.integers(2, most_ranks))
    experts = draw(st.integers(1, 3)) * ranks
    most = draw(st.sampled_from([9, 60, 1000]))
    load_E = np.array(draw(st.lists(st.integers(0, most), min_size=experts, max_size=experts)), np.int64)
    load_E[draw(st.integers(0, experts - 1))] += draw(st.integers(0, 4 * most))
    owner_E = np.repeat(np.arange(ranks), experts // ranks)
    if draw(st.booleans()):
        owner_E = np.array(draw(st.lists(st.integers(0, ranks - 1), min_size=experts, max_size=experts)), np.int64)
    mean, spread = int(load_E.sum()) // ranks, draw(st.sampled_from([1, 1, 2, most // 2]))
    limit_R = mean + np.array(draw(st.lists(st.integers(0, spread), min_size=ranks, max_size=ranks)), np.int64)
    slots = draw(st.integers(0, 3))
    free_R = np.full(ranks, slots, np.int64)
    if draw(st.booleans()):
        free_R = np.array(draw(st.lists(st.integers(0, slots), min_size=ranks, max_size=ranks)), np.int64)
    places = [(e, r) for e in range(experts) for r in range(ranks) if r != owner_E[e]]
    held = draw(st.just([]) | st.lists(st.sampled_from(places), unique=True, max_size=3))
    rows_R = np.bincount(owner_E, load_E, ranks).astype(np.int64)
    overhead = draw(st.sampled_from([0, 0, 1, 5]))
    held_N2 = np.array(held, np.int64).reshape(-1, 2)
    return load_E, owner_E, limit_R - rows_R, free_R, held_N2, overhead, draw(st.sampled_from([False, False, True]))


def state_of(arguments: Arguments) -> State:
    load_E, owner_E, balance_R, free_R, held_N2, overhead, _ = arguments
    lists = [array.tolist() for array in (load_E, owner_E, balance_R, free_R)]
    held = [(expert, rank) for expert, rank in held_N2.tolist()]
    return canonical_state(Problem(*lists, held=held, overhead=overhead))[0]


class TestReadableAndCompiled:
    @cases(ci=150, developer=40)
    @given(arguments=problems())
    def test_they_give_the_same_moves(self, arguments):
        before = [part.copy() for part in arguments if isinstance(part, np.ndarray)]
        (moves, *rest), (readable, *others) = (solver_of(name)(*arguments) for name in ("compiled", "readable"))
        assert moves.tolist() == readable.tolist() and rest == others
        assert moves.dtype == readable.dtype == np.int64
        arrays = [part for part in arguments if isinstance(part, np.ndarray)]
        assert all((array == copy).all() for array, copy in zip(arrays, before, strict=True))

    @cases(ci=400, developer=60)
    @given(arguments=problems())
    def test_moves_bring_every_rank_within_the_limits_they_were_raised_to(self, arguments):
        load_E, owner_E, balance_R, free_R, held_N2, overhead, _ = arguments
        moves, above, bound = solver_of("compiled")(*arguments)
        left_E, free, balance = load_E.copy(), free_R.copy(), balance_R.copy()
        for expert, rank, rows in moves.tolist():
            left_E[expert] -= rows
            free[rank] -= 1
            balance[owner_E[expert]] += rows
            balance[rank] -= rows + overhead
            assert rows > 0 and owner_E[expert] != rank
        places = [*map(tuple, moves[:, :2].tolist()), *map(tuple, held_N2.tolist())]
        assert len({*places}) == len(places)
        assert left_E.min() >= 0 and free.min() >= 0 and (balance + above).min() >= 0
        assert bound <= len(moves)
        assert moves.tolist() == sorted(moves.tolist())

    @pytest.mark.parametrize(
        ("slots", "limit", "seed"), [(1, 1.01, 0), (2, 1.01, 1), (2, 1.0, 2), (1, 1.0, 3), (0, 1.0, 4)]
    )
    def test_they_agree_on_64_ranks(self, slots, limit, seed):
        shape = Shape(experts=256, ranks=64, tokens=32, top_k=8)
        load_E = log_normal(shape, 0.7, seed=seed).sum(axis=0)
        rows_R = np.bincount(shape.owner_E, load_E, 64).astype(np.int64)
        balance_R = int(np.ceil(rows_R.mean() * limit)) - rows_R
        none, free_R = np.empty((0, 2), np.int64), np.full(64, slots, np.int64)
        arguments = (load_E, shape.owner_E, balance_R, free_R, none, 0, False)
        (moves, *rest), (readable, *others) = (solver_of(name)(*arguments) for name in ("compiled", "readable"))
        assert moves.tolist() == readable.tolist() and rest == others
        assert len(moves) > 0 or slots == 0

    def test_plans_of_both_are_equal_and_no_argument_makes_numba_compile_again(self):
        from megatron_lrmoe.replicas import compiled

        loads_SE = loads_of([90, 10, 40, 5, 33, 2, 7, 1], 4)
        owner_E = np.repeat(np.arange(4, dtype=np.int32), 2)
        limits = Limits(forward=58, backward=60)
        for options in (Options(), Options(strong=True), Options(domain_ranks=2), Options(resident=((0, 1), (2, 3)))):
            for loads in (loads_SE, loads_SE.astype(np.int32), loads_SE.tolist(), loads_SE.T.copy().T):
                readable, again = (
                    plan(loads, None, owner_E, 2, limits, Options(**{**vars(options), "backend": name}))
                    for name in ("readable", "compiled")
                )
                assert readable.certificate == again.certificate and readable.replicas > 0
                for name in ("expert_I", "rank_I", "rows_SI", "kept_I"):
                    assert getattr(readable, name).tolist() == getattr(again, name).tolist()
        assert len(compiled.solve.signatures) == 1


@st.composite
def ties(draw: st.DrawFn) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Loads, owners, balances and free slots, most of them equal."""
    ranks = draw(st.integers(1, 8))
    owner_E = draw(st.lists(st.integers(0, ranks - 1), max_size=16))
    load_E, balance_R, free_R = (
        draw(st.lists(st.integers(0, most), min_size=size, max_size=size))
        for most, size in ((2, len(owner_E)), (1, ranks), (1, ranks))
    )
    load_E, owner_E, balance_R, free_R = (np.array(values, np.int64) for values in (load_E, owner_E, balance_R, free_R))
    return load_E, owner_E, balance_R, free_R


class TestCanonicalOrder:
    def test_by_hand(self):
        """By balance, then free slots, then loads, the largest first; a rank without a third expert comes before."""
        load_E, owner_E = [2, 9, 9, 2, 1, 9, 3], [0, 0, 1, 1, 0, 2, 2]
        problem = Problem(load_E, owner_E, [4, 4, 4, 4, -1, 4], [1, 1, 1, 2, 0, 2])
        case, names = canonical_state(problem)
        assert names.rank_R == [4, 3, 5, 2, 1, 0]
        assert names.expert_E == [5, 6, 2, 3, 1, 0, 4]
        assert case.rows_E == [9, 3, 9, 2, 9, 2, 1] and case.owner_E == [3, 3, 4, 4, 5, 5, 5]

    @cases(ci=300, developer=100)
    @given(arrays=ties())
    def test_both_forms_number_alike(self, arrays):
        from megatron_lrmoe.replicas import compiled

        _, names = canonical_state(Problem(*(array.tolist() for array in arrays)))
        rank_R, expert_E, start_R = compiled._canonical(*arrays)
        assert (rank_R.tolist(), expert_E.tolist()) == names
        assert np.diff(start_R).tolist() == [np.sum(arrays[1] == r) for r in names.rank_R]


class TestBackend:
    def test_unknown_names_are_refused(self):
        with pytest.raises(ValueError, match="backend: found 'numba', allowed are 'auto', 'compiled' and 'readable'"):
            plan([[1, 2]], None, [0, 0], 1, Limits(forward=3), Options(backend="numba"))  # type: ignore[arg-type]

    def test_without_numba_auto_is_readable_and_compiled_is_refused(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "numba", None)
        monkeypatch.delitem(sys.modules, "megatron_lrmoe.replicas.compiled", raising=False)
        monkeypatch.delattr(megatron_lrmoe.replicas, "compiled", raising=False)
        assert solver_of("auto") is solver_of("readable")
        loads_SE = loads_of([4, 2, 3], 3)
        assert plan(loads_SE, None, [0, 1, 2], 1, Limits(forward=3)).replicas == 1
        with pytest.raises(ValueError, match="backend: 'compiled' needs numba: pip install"):
            plan(loads_SE, None, [0, 1, 2], 1, Limits(forward=3), Options(backend="compiled"))

    def test_with_numba_auto_is_compiled(self):
        assert solver_of("auto") is solver_of("compiled") is not solver_of("readable")


def state(balance_R: list[int], rows_E: list[int], owner_E: list[int], slots: int, overhead: int = 0) -> State:
    return State(balance_R, rows_E, owner_E, [slots] * len(balance_R), [[] for _ in balance_R], overhead)


class TestSettle:
    def settled(self, case: State, most: int) -> list[Move]:
        search = Settling(most=most, budget=200)
        assert settle(case, range(len(case.balance_R)), search)
        assert min(case.balance_R) >= 0
        return search.moves

    def test_a_donor_falls_below_its_limit_and_receives_into_its_own_slot(self):
        """Rank 0 fills rank 2, the roomiest, and so has 5 rows too few; rank 1 is finished into its slot."""
        case = state([-3, -5, 8], [8, 9], [0, 1], slots=1)
        assert self.settled(case, most=2) == [(0, 2, 8), (1, 0, 5)]
        assert case.balance_R == [0, 0, 0]

    def test_a_chain_through_two_donors(self):
        case = state([-2, -3, -4, 9], [9, 30, 30], [0, 1, 2], slots=1)
        assert self.settled(case, most=3) == [(0, 3, 9), (1, 0, 7), (2, 1, 4)]

    def test_the_smallest_expert_that_suffices_is_taken_and_the_first_of_equals(self):
        assert self.settled(state([-4, 4], [9, 5, 5], [0, 0, 0], slots=1), most=1) == [(1, 1, 4)]

    def test_a_rank_without_a_free_slot_takes_nothing(self):
        case = state([-4, 9, 4], [9], [0], slots=1)
        case.free_R[1] = 0
        assert self.settled(case, most=1) == [(0, 2, 4)]

    def test_overhead_takes_room(self):
        case = state([-4, 6], [9], [0], slots=1, overhead=2)
        assert self.settled(case, most=1) == [(0, 1, 4)]
        assert not settle(state([-4, 5], [9], [0], slots=1, overhead=2), [0, 1], Settling(most=9, budget=99))

    def test_too_few_moves_and_too_little_room_are_told_apart(self):
        search = Settling(most=1, budget=200)
        assert not settle(state([-2, -2, 4], [2, 2], [0, 1], slots=2), range(3), search)
        assert search.met_most
        search = Settling(most=9, budget=200)
        assert not settle(state([-2, -2, 3], [2, 2], [0, 1], slots=2), range(3), search)
        assert not search.met_most

    @given(arguments=problems(most_ranks=6), most=st.integers(0, 8), budget=st.integers(0, 60))
    def test_it_settles_or_leaves_everything_as_it_was(self, arguments, most, budget):
        case, untouched = state_of(arguments), state_of(arguments)
        search = Settling(most=most, budget=budget)
        if settle(case, range(len(case.balance_R)), search):
            assert min(case.balance_R) >= 0 and len(search.moves) <= most
            for move in reversed(search.moves):
                case.take_back(move)
        else:
            assert search.moves == []
        assert case == untouched


def partitions(ranks: list[int]) -> Iterator[list[int]]:
    """All ways to part ranks into sets, as bit masks."""
    if not ranks:
        yield []
        return
    first, rest = ranks[0], ranks[1:]
    for size in range(len(rest) + 1):
        for others in combinations(rest, size):
            one = sum(1 << r for r in (first, *others))
            for parts in partitions([r for r in rest if r not in others]):
                yield [one, *parts]


class TestPartition:
    @given(ranks=st.integers(1, 5), data=st.data())
    def test_none_is_cheaper(self, ranks, data):
        one = st.just(NEVER) | st.integers(0, 9)
        cost = [0, *data.draw(st.lists(one, min_size=2**ranks - 1, max_size=2**ranks - 1))]
        total, sets = best_partition(cost)
        least = min(sum(cost[part] for part in parts) for parts in partitions(list(range(ranks))))
        if least >= NEVER:
            assert total >= NEVER
        else:
            assert total == least == sum(cost[one] for one in sets)
            assert sum(sets) == 2**ranks - 1 and all(a & b == 0 for a, b in combinations(sets, 2))

    def test_bounds_of_sets(self):
        # Ranks 0 and 1 have 7 and 2 rows too many, and rank 0 has to give rows of two experts.
        bounds = set_bounds(state([-7, -2, 4, 5], [5, 4, 9], [0, 0, 1], slots=1))
        assert bounds[0b0001] == bounds[0b0101] == bounds[0b0011] == bounds[0b1100] == NEVER
        assert bounds[0b0100] == bounds[0b1000] == 0
        assert (bounds[0b0110], bounds[0b1101], bounds[0b1111]) == (1, 2, 3)

    def test_fewest_exports(self):
        assert [fewest_exports([5, 4, 1], need) for need in (-1, 0, 5, 6, 9, 10, 99)] == [0, 0, 1, 2, 2, 3, 3]

    def test_two_groups_take_one_move_less_than_one(self):
        moves, bound = solve_small(state([-5, -3, 3, 5], [9, 9], [0, 1], slots=1), budget=200, tries=30)
        assert sorted(moves or []) == [(0, 3, 5), (1, 2, 3)] and bound == 2

    def test_where_a_set_does_not_settle_others_are_tried_as_often_as_allowed(self):
        """Ranks 0 and 2 would do with one move, but rank 2 has no slot, so rank 1 takes part."""
        case = state([-4, 4, 4], [9], [0], slots=1)
        case.free_R[2] = 0
        assert solve_small(case, budget=200, tries=1) == (None, 1)
        assert solve_small(case, budget=200, tries=2) == ([(0, 1, 4)], 1)

    def test_a_set_that_needs_more_moves_than_its_bound_gets_them(self):
        """Rank 1 has a copy of the expert that would do, and takes rows of the two others."""
        case = state([-4, 6], [4, 3, 3], [0, 0, 0], slots=2)
        case.held_R[1].append(0)
        assert solve_small(case, budget=200, tries=2) == ([(1, 1, 3), (2, 1, 3)], 1)


class TestCover:
    @given(
        need=st.integers(1, 60),
        room=st.lists(st.integers(0, 30), max_size=8).map(sorted),
        allowed=st.integers(0, 5),
    )
    def test_no_cover_of_up_to_three_wastes_less_unless_it_is_good_enough(self, need, room, allowed):
        chosen, waste = cover(need, room, allowed)
        if waste is None:
            assert sum(room) < need
            return
        assert len({*chosen}) == len(chosen) and sum(room[place] for place in chosen) - need == waste >= 0
        over = [sum(rows) - need for size in (1, 2, 3) for rows in combinations(room, size) if sum(rows) >= need]
        assert waste <= max(allowed, min(over, default=waste))

    @pytest.mark.parametrize(
        ("need", "room", "allowed", "chosen", "waste"),
        [
            (5, [1, 4, 5, 9], 0, [2], 0),
            (5, [1, 4, 6, 9], 1, [2], 1),
            (5, [1, 4, 6, 9], 0, [0, 1], 0),
            (7, [1, 2, 4, 9], 0, [0, 1, 2], 0),
            (40, [1, 2, 4, 9, 30], 0, [0, 3, 4], 0),
            (45, [1, 2, 4, 9, 30], 0, [1, 2, 3, 4], 0),
            (99, [1, 2, 4, 9, 30], 0, [], None),
        ],
    )
    def test_golden(self, need, room, allowed, chosen, waste):
        assert cover(need, room, allowed) == (chosen, waste)
