"""Which rows are kept, against slow references in exact fractions."""

import itertools
import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe.pairs import DrawKey
from megatron_lrmoe.recalibration.draw import CERTAIN, offsets
from megatron_lrmoe.recalibration.inclusion import MAX_SEGMENT_ROWS
from megatron_lrmoe.recalibration.selection import (
    inclusion_probabilities,
    keep_all,
    select_topk,
    select_unbiased,
)
from tests.cases import quotas, ragged_counts, score_tensors, scores

pytestmark = pytest.mark.usefixtures("on_device")
EDGE_OFFSETS = [0, CERTAIN - 1]
ALL = Fraction(1)
NAN, INF = math.nan, math.inf


def ranked(values: list[float]) -> list[int]:
    """Indices by falling value, non-finite first, ties by index."""
    largest_first = [-value if math.isfinite(value) else -math.inf for value in values]
    return sorted(range(len(values)), key=lambda i: (largest_first[i], i))


def reference_probabilities(sizes: list[float], quota: int, max_weight: float | None = None) -> list[Fraction]:
    """min(1, max(floor, c * size)) with the c that makes the sum the quota, exactly."""
    bad = [i for i, size in enumerate(sizes) if not math.isfinite(size)]
    positive = [i for i, size in enumerate(sizes) if math.isfinite(size) and size > 0]
    if len(bad) >= quota or len(bad) + len(positive) <= quota:
        first = ranked(sizes)[:quota]
        return [Fraction(i in first) for i in range(len(sizes))]
    floor = Fraction(0)
    if max_weight is not None:
        floor = min(1 / Fraction(max_weight), Fraction(quota - len(bad), len(positive)))
    exact = {i: Fraction(sizes[i]) for i in positive}
    budget = quota - len(bad)

    def filled(c: Fraction) -> Fraction:
        return sum(min(ALL, max(floor, c * size)) for size in exact.values())

    # The sum is linear in c between the values of c where a row becomes certain or leaves the floor.
    turns = sorted({turn for size in exact.values() for turn in (floor / size, 1 / size)} | {Fraction(0)})
    above = next(i for i, c in enumerate(turns) if filled(c) >= budget)
    low, high = turns[max(0, above - 1)], turns[above]
    below, full = filled(low), filled(high)
    c = high if full == below else low + (high - low) * (budget - below) / (full - below)
    of = {i: min(ALL, max(floor, c * size)) for i, size in exact.items()}
    return [ALL if i in bad else of.get(i, Fraction(0)) for i in range(len(sizes))]


def reference_draw(units: list[int], offset: int) -> list[int]:
    """Rows whose stretch of the line holds a point offset + k * 2^40."""
    kept, end = [], 0
    for row, length in enumerate(units):
        start, end = end, end + length
        first_point = offset + max(0, -(-(start - offset) // CERTAIN)) * CERTAIN
        if start <= first_point < end:
            kept.append(row)
    return kept


def split(values: torch.Tensor, counts: list[int]) -> list[list]:
    return [part.tolist() for part in values.split(counts)]


def assert_sound(units_N: torch.Tensor, size_N: torch.Tensor, counts: list[int], kept: list[int]) -> None:
    """Exact sums and bounds of every segment."""
    assert units_N.dtype == torch.int64
    for units, sizes, quota in zip(split(units_N, counts), split(size_N, counts), kept, strict=True):
        assert sum(units) == quota * CERTAIN
        assert all(0 <= u <= CERTAIN for u in units)
        bad = sum(not math.isfinite(size) for size in sizes)
        if bad < quota:
            assert all(u >= 1 for u, size in zip(units, sizes, strict=True) if size > 0)
            assert all(u == CERTAIN for u, size in zip(units, sizes, strict=True) if not math.isfinite(size))


@st.composite
def cases(draw, max_count: int = 40):
    counts = draw(ragged_counts(max_segments=5, max_count=max_count))
    size_N = draw(score_tensors(sum(counts))).abs()
    return size_N, counts, draw(quotas(counts))


@given(case=cases())
def test_probabilities_equal_the_reference(case):
    size_N, counts, kept = case
    units_N = inclusion_probabilities(size_N, counts, kept)
    assert_sound(units_N, size_N, counts, kept)
    for units, sizes, quota in zip(split(units_N, counts), split(size_N, counts), kept, strict=True):
        exact = reference_probabilities(sizes, quota)
        assert max((abs(u / CERTAIN - float(p)) for u, p in zip(units, exact, strict=True)), default=0) < 1e-9


@given(case=cases(), max_weight=st.sampled_from([1, 1.5, 2.0, 4.0, 10.0, 1000.0]))
def test_probabilities_have_the_floor_of_the_largest_weight(case, max_weight):
    size_N, counts, kept = case
    units_N = inclusion_probabilities(size_N, counts, kept, max_weight)
    assert_sound(units_N, size_N, counts, kept)
    for units, sizes, quota in zip(split(units_N, counts), split(size_N, counts), kept, strict=True):
        bad = sum(not math.isfinite(size) for size in sizes)
        finite = sum(size != 0 for size in sizes) - bad
        if bad < quota < bad + finite:
            least = min(CERTAIN / Fraction(max_weight), (quota - bad) * CERTAIN // finite)
            assert all(u >= least for u, size in zip(units, sizes, strict=True) if size != 0)


@pytest.mark.parametrize("max_weight", [2.2, 3.6, 5.0, 50.0])
@pytest.mark.parametrize("spread", [0.5, 1.0, 3.0, 10.0])
def test_floored_probabilities_converge_to_the_reference(max_weight, spread):
    generator = torch.Generator().manual_seed(int(10 * spread))
    size_N = (spread * torch.randn(150, dtype=torch.float64, generator=generator)).exp()
    counts, kept = [30, 120], [15, 70]
    units_N = inclusion_probabilities(size_N, counts, kept, max_weight)
    for units, sizes, quota in zip(split(units_N, counts), split(size_N, counts), kept, strict=True):
        exact = reference_probabilities(sizes, quota, max_weight)
        assert max(abs(u / CERTAIN - float(p)) for u, p in zip(units, exact, strict=True)) < 1e-9


def test_no_kept_weight_is_above_the_largest_weight():
    size_N = scores("huge_range", 4000, seed=2)
    found = select_unbiased(size_N, [4000], [2000], [12345], max_weight=3.0)
    assert found.weight_M.max() <= 3.0
    assert select_unbiased(size_N, [4000], [2000], [12345]).weight_M.max() > 3.0


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_sizes_over_the_whole_range_neither_overflow_nor_vanish(wide):
    size_N = torch.tensor([1e30, 1e-30, 3e-30, 1e30, 0.0, 2e-30, 1e30, 1e10, 1e-10], dtype=wide)
    units_N = inclusion_probabilities(size_N, [9], [7])
    expected = [1, 1 / 3, 1, 1, 0, 2 / 3, 1, 1, 1]
    assert [u / CERTAIN for u in units_N.tolist()] == pytest.approx(expected, abs=1e-6)
    # All but certain, with a rest too small for a unit: every row still has one.
    units_N = inclusion_probabilities(torch.tensor([1e30, 1e20, 1e-30], dtype=wide), [3], [2])
    assert units_N.tolist() == [CERTAIN, CERTAIN - 1, 1]


@pytest.mark.parametrize("seed", range(5))
def test_many_large_sizes_leave_the_small_ones_their_probabilities(seed):
    generator = torch.Generator().manual_seed(seed)
    large = torch.pow(10.0, 15 * torch.rand(300, generator=generator))
    size_N = torch.cat([large, torch.rand(300, generator=generator)])
    exact = reference_probabilities(size_N.tolist(), 400)
    units = inclusion_probabilities(size_N, [600], [400]).tolist()
    assert max(abs(u / CERTAIN - float(p)) for u, p in zip(units, exact, strict=True)) < 1e-9


@given(
    counts=st.lists(st.integers(2, 30), min_size=1, max_size=20),
    max_weight=st.sampled_from([1.0001, 1.01, 2, 100]),
    seed=st.integers(0, 2**31 - 1),
)
def test_infinite_sizes_are_certain_whatever_the_largest_weight(counts, max_weight, seed):
    shuffled = random.Random(seed)
    kept = [shuffled.randint(1, n) for n in counts]
    size_N = scores("huge_range", sum(counts), seed)
    for start, quota in zip(itertools.accumulate(counts, initial=0), kept, strict=False):
        size_N[start : start + shuffled.randint(0, quota)] = INF
    units_N = inclusion_probabilities(size_N, counts, kept, max_weight)
    assert bool((units_N[size_N.isinf()] == CERTAIN).all())
    assert [sum(units) for units in split(units_N, counts)] == [quota * CERTAIN for quota in kept]


@pytest.mark.parametrize(
    "sizes, quota, certain",
    [
        ([0.0, 0.0, 0.0], 2, [0, 1]),
        ([0.0, 0.0, 5.0, 0.0], 2, [0, 2]),
        ([0.0, 1.0, 2.0], 2, [1, 2]),
        ([1.0, NAN, INF, -INF], 2, [1, 2]),
        ([NAN, 0.0, 1.0], 1, [0]),
        ([NAN, 0.0, 0.0], 2, [0, 1]),
        ([3.0], 1, [0]),
        ([NAN], 1, [0]),
        ([1.0, 2.0], 0, []),
    ],
)
@pytest.mark.parametrize("max_weight", [None, 2.0])
def test_degenerate_segments_follow_their_rules(sizes, quota, certain, max_weight):
    size_N = torch.tensor([1.0, 2.0, *sizes, 0.0])
    counts, kept = [2, len(sizes), 0, 1], [1, quota, 0, 1]
    units = inclusion_probabilities(size_N, counts, kept, max_weight).split(counts)[1]
    assert units.tolist() == [CERTAIN * (i in certain) for i in range(len(sizes))]


def test_exactly_the_quota_is_drawn_in_5000_segments():
    shuffled = random.Random(5)
    kinds = ["normal", "huge_range", "ties", "zeros", "some_zeros", "nonfinite"]
    for call in range(100):
        counts = [shuffled.choice([0, 1, 2, shuffled.randint(1, 60)]) for _ in range(50)]
        kept = [shuffled.randint(min(1, n), n) for n in counts]
        parts = [scores(shuffled.choice(kinds), n, seed=shuffled.randrange(2**31)).abs() for n in counts]
        where = [shuffled.choice([*EDGE_OFFSETS, shuffled.randrange(CERTAIN)]) for _ in counts]
        found = select_unbiased(torch.cat(parts), counts, kept, where, [None, 2.5][call % 2])
        assert found.rows_M.unique_consecutive().shape == (sum(kept),)
        assert bool((found.rows_M.diff() > 0).all())
        assert bool(found.weight_M.isfinite().all()) and bool((found.weight_M >= 1).all())
        segment_N = torch.arange(50).repeat_interleave(torch.tensor(counts))
        assert segment_N[found.rows_M].bincount(minlength=50).tolist() == kept == list(found.counts_e)


@given(case=cases(), offset=st.one_of(st.sampled_from(EDGE_OFFSETS), st.integers(0, CERTAIN - 1)))
def test_draw_equals_the_reference(case, offset):
    size_N, counts, kept = case
    where = [(offset + 7**20 * e) % CERTAIN for e in range(len(counts))]
    units_N = inclusion_probabilities(size_N, counts, kept)
    found = select_unbiased(size_N, counts, kept, where)
    rows, start = [], 0
    for units, count, at in zip(split(units_N, counts), counts, where, strict=True):
        rows += [start + row for row in reference_draw(units, at)]
        start += count
    assert found.rows_M.tolist() == rows
    assert found.weight_M.tolist() == (CERTAIN / units_N[rows].double()).float().tolist()


def test_over_evenly_spaced_offsets_rows_are_kept_exactly_as_often_as_their_probability_says():
    size, draws = torch.tensor([6.0, 1.0, 4.0, 2.0, 3.0]), 64
    where = [CERTAIN // draws * i for i in range(draws)]
    found = select_unbiased(size.repeat(draws), [5] * draws, [2] * draws, where)
    times = (found.rows_M % 5).bincount(minlength=5)
    assert times.tolist() == [48, 8, 32, 16, 24]  # of 64: 2/16 of the size
    assert found.weight_M[found.rows_M % 5 == 1].tolist() == [8.0] * 8


@pytest.mark.parametrize("max_weight", [None, 3.0])
def test_weighted_draws_are_unbiased(max_weight):
    draws, count, quota = 20_000, 12, 5
    size = scores("normal", count, seed=8)
    where = [offsets(DrawKey(1, iteration, 0, 0), [3])[0] for iteration in range(draws)]
    found = select_unbiased(size.repeat(draws), [count] * draws, [quota] * draws, where, max_weight)
    pi = inclusion_probabilities(size, [count], [quota], max_weight).double() / CERTAIN
    row_M = found.rows_M % count
    times = row_M.bincount(minlength=count)
    error = (pi * (1 - pi) / draws).sqrt()
    assert bool(((times / draws - pi).abs() <= 3 * error).all())
    weighted = row_M.bincount(weights=found.weight_M.double(), minlength=count)
    assert bool(((weighted / draws - 1).abs() <= 3 * error / pi + 1e-6).all())


@given(case=cases())
def test_topk_equals_the_reference(case):
    size_N, counts, kept = case
    found = select_topk(size_N, counts, kept)
    rows, start = [], 0
    for values, count, quota in zip(split(size_N, counts), counts, kept, strict=True):
        rows += [start + row for row in sorted(ranked(values)[:quota])]
        start += count
    assert found.rows_M.tolist() == rows
    assert found.weight_M.tolist() == [1.0] * sum(kept)
    assert found.counts_e == tuple(kept)


def test_non_finite_scores_are_kept_first_and_by_row():
    score_N = torch.tensor([1.0, -INF, 5.0, INF, NAN])
    assert select_topk(score_N, [5], [2]).rows_M.tolist() == [1, 3]
    assert select_topk(score_N, [5], [4]).rows_M.tolist() == [1, 2, 3, 4]


def test_equal_scores_keep_the_first_rows_always():
    """A19 of the known failures."""
    for _ in range(100):
        assert select_topk(torch.ones(4), [4], [2]).rows_M.tolist() == [0, 1]
    many = select_topk(torch.ones(30_000), [10_000, 20_000], [3, 5])
    assert many.rows_M.tolist() == [0, 1, 2, 10_000, 10_001, 10_002, 10_003, 10_004]


def test_topk_keeps_the_pair_whose_weighted_gradient_is_larger():
    """A14 of the known failures: 0.81 against 0.9216."""
    assert select_topk(torch.tensor([0.81, 0.9216]), [2], [1]).rows_M.tolist() == [1]


@given(case=cases())
def test_full_quotas_keep_every_row_with_weight_one(case):
    size_N, counts, _ = case
    for found in (
        select_topk(size_N, counts, counts),
        select_unbiased(size_N, counts, counts, [CERTAIN - 1] * len(counts)),
        keep_all(counts, size_N.device, size_N.dtype),
    ):
        assert found.rows_M.tolist() == list(range(sum(counts)))
        assert found.weight_M.tolist() == [1.0] * sum(counts)
        assert found.counts_e == tuple(counts)
    units_N = inclusion_probabilities(size_N, counts, counts)
    assert bool((units_N == CERTAIN).all())


def test_a_full_segment_among_others_has_weight_one():
    found = select_unbiased(torch.tensor([1e-9, 5.0, 1.0, 2.0]), [2, 2], [2, 1], [9, 9])
    assert found.rows_M.tolist()[:2] == [0, 1]
    assert found.weight_M.tolist()[:2] == [1.0, 1.0]


@pytest.mark.parametrize("counts", [[], [0, 0]])
def test_no_rows(counts):
    empty = torch.empty(0)
    where = [0] * len(counts)
    for found in (select_topk(empty, counts, counts), select_unbiased(empty, counts, counts, where)):
        assert found.rows_M.shape == found.weight_M.shape == (0,)
        assert found.rows_M.dtype == torch.int64
    assert inclusion_probabilities(empty, counts, counts).shape == (0,)


def test_no_quota_at_all():
    assert select_unbiased(torch.ones(3), [3], [0], [0]).rows_M.shape == (0,)
    assert select_topk(torch.ones(3), [3], [0]).rows_M.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_have_the_type_of_the_sizes(dtype):
    size_N = torch.tensor([1.0, 2.0, 4.0], dtype=dtype)
    assert select_unbiased(size_N, [3], [1], [0]).weight_M.dtype == dtype
    assert select_topk(size_N, [3], [1]).weight_M.dtype == dtype


def test_nothing_asks_the_device_for_a_size():
    """Meta tensors have shapes and no data: whatever would wait for the device's values raises."""
    size_N = torch.rand(50, device="meta")
    assert select_topk(size_N, [20, 0, 30], [5, 0, 20]).rows_M.shape == (25,)
    found = select_unbiased(size_N, [20, 0, 30], [5, 0, 20], [0, 1, 2], max_weight=4.0)
    assert found.rows_M.shape == found.weight_M.shape == (25,)
    assert found.rows_M.device.type == "meta"


@pytest.mark.parametrize(
    "size, counts, kept, where",
    [
        (3, [3], [4], [0]),
        (3, [3], [-1], [0]),
        (3, [2], [1], [0]),
        (3, [3], [1], [CERTAIN]),
        (3, [3], [1], [-1]),
        (3, [3], [1], [0, 0]),
        (3, [2, 1], [1], [0]),
    ],
)
def test_what_does_not_belong_together_is_refused(size, counts, kept, where):
    with pytest.raises(RuntimeError, match="found"):
        select_unbiased(torch.ones(size), counts, kept, where)


def test_what_int64_cannot_hold_is_refused():
    rows = MAX_SEGMENT_ROWS
    with pytest.raises(RuntimeError, match=r"2\^22"):
        inclusion_probabilities(torch.ones(rows, device="meta"), [rows], [1])
    with pytest.raises(RuntimeError, match=r"2\^23"):
        select_unbiased(torch.ones(3 * rows, device="meta"), [rows] * 3, [rows - 1] * 3, [0] * 3)
