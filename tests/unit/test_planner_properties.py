"""What every plan of replicas promises, on any loads."""

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe.replicas.cost import RowCost
from megatron_lrmoe.replicas.effort import SMALL_RANKS
from megatron_lrmoe.replicas.plan import IntArray, Limit, Limits, Plan
from megatron_lrmoe.replicas.planner import Options, plan
from tests.loads import small_loads
from tests.plans import IN_CI, cases, planned, problems_of, replicas_of


@dataclass(frozen=True)
class Request:
    """Arguments of one call of the planner."""

    loads_SE: IntArray
    quota_E: IntArray
    owner_E: IntArray
    slots: int
    limits: Limits
    options: Options

    @property
    def ranks(self) -> int:
        return len(self.loads_SE)

    @property
    def load_E(self) -> IntArray:
        return self.loads_SE.sum(axis=0)

    def planned(self) -> Plan:
        return plan(self.loads_SE, self.quota_E, self.owner_E, self.slots, self.limits, self.options)

    def problems(self, found: Plan) -> list[str]:
        arguments = (self.loads_SE, self.quota_E, self.owner_E, self.slots, self.limits)
        options = self.options
        return problems_of(found, *arguments, row_cost=options.row_cost, domain_ranks=options.domain_ranks)


def limit_of(draw: st.DrawFn, rows_E: IntArray, ranks: int) -> Limit:
    """A limit of any kind, in most cases between the mean and a little above, where replicas are needed."""
    mean = max(1, -(-int(rows_E.sum()) // ranks))
    rows = st.integers(mean, mean + mean // 4 + 2)
    kind = draw(st.sampled_from(["rows", "each", "share", "finest", "low"]))
    if kind == "finest":
        return "finest"
    if kind == "share":
        return draw(st.fractions(1, Fraction(3, 2), max_denominator=100))
    if kind == "low":
        return draw(st.integers(1, mean))
    return draw(rows) if kind == "rows" else draw(st.lists(rows, min_size=ranks, max_size=ranks))


@st.composite
def requests(draw: st.DrawFn, forward: bool = True, backward: bool = True, plain: bool = False) -> Request:
    """Any request; ``plain`` ones have default options."""
    loads_SE, owner_E = draw(small_loads())
    ranks, load_E = len(loads_SE), loads_SE.sum(axis=0)
    part_E = draw(st.lists(st.integers(0, 8), min_size=len(owner_E), max_size=len(owner_E)))
    quota_E = -(-load_E * np.array(part_E, np.int64) // 8)
    slots = draw(st.integers(0, 3))
    limits = Limits(
        forward=limit_of(draw, load_E, ranks) if forward else None,
        backward=limit_of(draw, quota_E, ranks) if backward else None,
    )
    options = Options() if plain else draw(any_options(owner_E, ranks, slots))
    return Request(loads_SE, quota_E, owner_E, slots, limits, options)


@st.composite
def any_options(draw: st.DrawFn, owner_E: IntArray, ranks: int, slots: int) -> Options:
    """Costs, domains and resident replicas, each in about half of all cases."""
    domain = draw(st.none() | st.integers(1, ranks))
    size = ranks if domain is None else domain
    places = [
        (e, r)
        for e, owner in enumerate(owner_E.tolist())
        for r in range(ranks)
        if r != owner and r // size == owner // size
    ]
    resident = []
    for expert, rank in draw(st.lists(st.sampled_from(places), unique=True, max_size=2 * ranks)) if places else []:
        if sum(held == rank for _, held in resident) < slots and draw(st.booleans()):
            resident.append((expert, rank))
    cost = RowCost(tile_rows=draw(st.sampled_from([1, 1, 4, 16])), group_rows=draw(st.sampled_from([0, 0, 1, 5])))
    strong = draw(st.sampled_from([False, False, False, True]))
    return Options(strong=strong, domain_ranks=domain, row_cost=cost, resident=tuple(resident))


@cases(ci=600, developer=60)
@given(request=requests(backward=False))
def test_plans_for_a_forward_limit_are_valid_and_kept_rows_are_spread_like_routed_ones(request):
    found = request.planned()
    assert request.problems(found) == []
    load_I, quota_I = request.load_E[found.expert_I], request.quota_E[found.expert_I]
    assert (np.abs(found.kept_I * load_I - quota_I * found.rows_I) <= load_I).all()


@cases(ci=600, developer=60)
@given(request=requests(forward=False))
def test_plans_for_a_backward_limit_are_valid_and_no_replica_is_forward_only(request):
    found = request.planned()
    assert request.problems(found) == []
    assert not found.forward_only_I.any()


@cases(ci=1200, developer=120)
@given(request=requests())
def test_plans_for_both_limits_are_valid(request):
    assert request.problems(request.planned()) == []


@cases(ci=200, developer=20)
@given(request=requests(forward=False, backward=False))
def test_without_limits_there_are_no_replicas(request):
    found = request.planned()
    assert request.problems(found) == []
    assert (found.replicas, found.certificate.status) == (0, "proven")


def arrays_of(found: Plan) -> list[list[int]]:
    return [getattr(found, name).tolist() for name in ("owner_E", "expert_I", "rank_I", "rows_SI", "kept_I")]


@cases(ci=300, developer=30)
@given(request=requests())
def test_equal_inputs_give_equal_plans_and_are_left_as_they_are(request):
    given_arrays = (request.loads_SE, request.quota_E, request.owner_E)
    before = [array.copy() for array in given_arrays]
    first, second = request.planned(), request.planned()
    assert arrays_of(first) == arrays_of(second) and first.certificate == second.certificate
    for array, copy in zip(given_arrays, before, strict=True):
        assert array.tolist() == copy.tolist() and array.flags.writeable
    loads, quotas, owners = (array.tolist() for array in given_arrays)
    as_lists = plan(loads, quotas, owners, request.slots, request.limits, request.options)
    assert arrays_of(first) == arrays_of(as_lists)


ONE_LIMIT = st.sampled_from(["forward", "backward"])


@st.composite
def renamed(draw: st.DrawFn) -> tuple[Request, Request, list[int], list[int]]:
    """A request with one limit, the same with other names, and new names of ranks and experts."""
    which = draw(ONE_LIMIT)
    one = draw(requests(forward=which == "forward", backward=which == "backward", plain=True))
    new_R, new_E = draw(st.permutations(range(one.ranks))), draw(st.permutations(range(len(one.owner_E))))
    loads_SE, quota_E, owner_E = (np.empty_like(array) for array in (one.loads_SE, one.quota_E, one.owner_E))
    loads_SE[np.ix_(new_R, new_E)] = one.loads_SE
    quota_E[new_E], owner_E[new_E] = one.quota_E, np.array(new_R)[one.owner_E]

    def moved(limit: Limit) -> Limit:
        return [limit[new_R.index(r)] for r in range(one.ranks)] if isinstance(limit, list) else limit

    limits = Limits(forward=moved(one.limits.forward), backward=moved(one.limits.backward))
    return one, Request(loads_SE, quota_E, owner_E, one.slots, limits, one.options), list(new_R), list(new_E)


@cases(ci=800, developer=80)
@given(pair=renamed())
def test_other_names_of_ranks_and_experts_change_only_names(pair):
    one, other, new_R, new_E = pair
    plans = (one.planned(), other.planned())
    which = 3 if one.limits.backward is None else 4
    limited = [request.load_E if which == 3 else request.quota_E for request in (one, other)]
    moves = [[(r[0], r[1], r[which - 1]) for r in replicas_of(found)] for found in plans]
    sizes = [sorted((int(rows_E[e]), rows) for e, _, rows in m) for rows_E, m in zip(limited, moves, strict=True)]
    assert sizes[0] == sizes[1]
    rows = [sorted((found.rows_R if which == 3 else found.kept_R).tolist()) for found in plans]
    assert rows[0] == rows[1]
    assert plans[0].certificate.status == plans[1].certificate.status
    without_experts = one.ranks - len({*one.owner_E.tolist()})
    if len({*limited[0].tolist()}) == len(limited[0]) and without_experts <= 1:
        assert sorted((new_E[e], new_R[r], rows) for e, r, rows in moves[0]) == moves[1]


@cases(ci=400, developer=40)
@given(request=requests(plain=True), which=ONE_LIMIT)
def test_more_slots_never_cost_more_replicas(request, which):
    limits = replace(request.limits, **{which: None})
    found = [replace(request, slots=slots, limits=limits).planned().certificate for slots in range(4)]
    for fewer, more in pairwise(found):
        if fewer.within_limits and "finest" not in (limits.forward, limits.backward):
            assert more.within_limits and more.replicas <= fewer.replicas


@pytest.mark.parametrize("seed", range(60 if IN_CI else 12))
def test_more_slots_never_cost_more_replicas_on_many_ranks_either(seed):
    random = np.random.default_rng(seed)
    ranks, experts_per_rank = int(random.integers(SMALL_RANKS + 1, 25)), int(random.integers(1, 9))
    load_E = np.exp(random.normal(4, random.uniform(0.5, 2), ranks * experts_per_rank)).astype(np.int64).tolist()
    limit = int(sum(load_E) / ranks * random.choice([1, 1.01, 1.05])) + 1
    owner_E = np.repeat(np.arange(ranks), experts_per_rank).tolist()
    found = [planned(load_E, Limits(forward=limit), owner_E=owner_E, slots=slots).certificate for slots in (1, 2, 3)]
    for fewer, more in pairwise(found):
        assert not fewer.within_limits or (more.within_limits and more.replicas <= fewer.replicas)
    assert found[-1].within_limits and found[-1].replicas > 0


@cases(ci=600, developer=60)
@given(request=requests(), data=st.data())
def test_lower_retention_never_costs_more_replicas_with_the_plan_for_the_higher_at_hand(request, data):
    absolute = {
        name: limit if isinstance(limit, int | list) else 1 + int(rows_E.sum()) // request.ranks
        for name, limit, rows_E in (
            ("forward", request.limits.forward, request.load_E),
            ("backward", request.limits.backward, request.quota_E),
        )
    }
    high = replace(request, limits=Limits(**absolute))
    before = high.planned()
    quota_E = np.array([data.draw(st.integers(0, quota)) for quota in request.quota_E.tolist()], np.int64)
    low = replace(high, quota_E=quota_E, options=replace(high.options, candidates=(before,)))
    after = low.planned()
    assert low.problems(after) == []
    if before.certificate.within_limits:
        assert after.certificate.within_limits and after.replicas <= before.replicas
