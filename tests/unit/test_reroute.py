"""Pairs and the instances they are sent to: whole, as planned, repeatable, and spread by the shift."""

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe.compute.reroute import Columns, reroute
from tests.plans import cases


class Routed(NamedTuple):
    """A source's map, the instances of the call, and the source's number."""

    map_TE: torch.Tensor
    columns: Columns
    source: int


def parts(draw: st.DrawFn, total: int, many: int) -> list[int]:
    """``total`` cut into ``many`` parts, some of which are 0."""
    cuts = draw(st.lists(st.integers(0, total), min_size=many - 1, max_size=many - 1).map(sorted))
    return [high - low for low, high in pairwise([0, *cuts, total])]


@st.composite
def routings(draw: st.DrawFn) -> Routed:
    """1 to 3 ranks with 1 to 3 masters and 0 to 3 slots each, some empty, and 0 to 12 tokens on any of 0 to E experts.

    The other sources' rows are anything: they do not matter to this one's.
    """
    ranks, masters, slots = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 3))
    experts, tokens = ranks * masters, draw(st.integers(0, 12))
    map_TE = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    map_TE = map_TE < draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    expert_C, filled_C = [], []
    for rank in range(ranks):
        own = range(rank * masters, (rank + 1) * masters)
        others = [e for e in range(experts) if e not in own]
        held = draw(st.lists(st.sampled_from(others), max_size=slots, unique=True)) if others else []
        expert_C += [*own, *held, *[own[0]] * (slots - len(held))]
        filled_C += [True] * (masters + len(held)) + [False] * (slots - len(held))
    source, rows_SC = draw(st.integers(0, ranks - 1)), [[1] * len(expert_C) for _ in range(ranks)]
    rows_SC[source] = [0] * len(expert_C)
    for e in range(experts):
        places = [
            c for c, (expert, filled) in enumerate(zip(expert_C, filled_C, strict=True)) if filled and expert == e
        ]
        for c, rows in zip(places, parts(draw, int(map_TE[:, e].sum()), len(places)), strict=True):
            rows_SC[source][c] = rows
    return Routed(map_TE, Columns(expert_C, rows_SC, [0] * len(expert_C), masters), source)


def by_expert(value_TC: torch.Tensor, columns: Columns, experts: int) -> torch.Tensor:
    """(T, E) sums over the instances of each expert."""
    expert_C = torch.tensor(columns.expert_C)
    return value_TC.new_zeros(len(value_TC), experts).index_add_(1, expert_C, value_TC)


@cases(ci=500, developer=60)
@given(routings(), st.integers(-(2**63), 2**63 - 1))
def test_each_pair_goes_to_one_instance_of_its_expert_as_many_to_each_as_planned(case: Routed, shift: int) -> None:
    map_TE, columns, source = case
    found = reroute(*case, shift)
    assert found.map_TC.dtype == torch.bool
    assert torch.equal(by_expert(found.map_TC.int(), columns, map_TE.shape[1]), map_TE.int())
    assert found.map_TC.sum(0).tolist() == columns.rows_SC[source]
    again = reroute(map_TE.clone(), columns, source, shift)
    assert torch.equal(again.map_TC, found.map_TC)
    # The pairs by expert, then token, as the flow takes them.
    assert torch.equal(torch.stack([found.expert_P, found.token_P], 1), map_TE.t().nonzero())
    assert found.map_TC[found.token_P, found.column_P].all()


@cases(ci=500, developer=60)
@given(routings(), st.integers(0, 99))
def test_probabilities_lie_where_the_pairs_go(case: Routed, shift: int) -> None:
    map_TE, columns, _ = case
    # Positive where nothing is routed too: those must not come along.
    probs_TE = torch.rand(map_TE.shape, dtype=torch.float64) + 0.1
    found = reroute(*case, shift)
    probs_TC = found.probs(probs_TE)
    assert probs_TC.dtype == torch.float64
    assert torch.equal(probs_TC != 0, found.map_TC)
    assert torch.equal(by_expert(probs_TC, columns, map_TE.shape[1]), probs_TE * map_TE)


@cases(ci=300, developer=40)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=3).filter(any))
def test_over_all_shifts_every_pair_meets_every_instance_as_often_as_it_has_rows(rows: list[int]) -> None:
    """One expert, its master on rank 0 and replicas elsewhere; every token is routed to it."""
    ranks, total = len(rows), sum(rows)
    others = [e for rank in range(1, ranks) for e in (rank, 0)]
    columns = Columns(
        [0, 0, *others], [[rows[0], 0] + [n for r in rows[1:] for n in (0, r)]] * ranks, [0] * 2 * ranks, 1
    )
    map_TE = torch.zeros(total, ranks, dtype=torch.bool)
    map_TE[:, 0] = True
    maps = [reroute(map_TE, columns, 0, shift).map_TC for shift in range(total)]
    assert all(map_TC.sum(0).tolist() == columns.rows_SC[0] for map_TC in maps)
    assert torch.equal(torch.stack(maps).sum(0), torch.tensor(columns.rows_SC[0]).expand(total, -1))
    assert torch.equal(reroute(map_TE, columns, 0, total + 1).map_TC, maps[1 % total])


@pytest.mark.parametrize("rows", [(50, 50), (91, 9)])
def test_neighbours_are_spread_over_the_instances(rows: tuple[int, int]) -> None:
    """In every run of 20 of 100 tokens each instance has its share of pairs, give or take two."""
    columns = Columns([0, 0, 1, 0], [[rows[0], 0, 0, rows[1]]] * 2, [0] * 4, 1)
    map_TE = torch.tensor([[True, False]]).expand(100, 2)
    for shift in range(5):
        here_T = reroute(map_TE, columns, 0, shift).map_TC[:, 3]
        assert here_T.sum() == rows[1]
        runs = here_T.unfold(0, 20, 1).sum(1)
        assert (runs - rows[1] / 5).abs().max() <= 2
