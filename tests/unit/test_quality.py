"""What a selection costs, against sums written out."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe.pairs import KeptRows
from megatron_lrmoe.recalibration.draw import CERTAIN
from megatron_lrmoe.recalibration.quality import SELECTION_SUMS, selection_sums
from megatron_lrmoe.recalibration.selection import inclusion_probabilities, select_topk, select_unbiased

DRAWS = 64
# Probabilities of sizes like these are multiples of 1/64: 64 evenly spaced offsets keep each row exactly as often.
SIZES = torch.tensor([6.0, 1.0, 4.0, 2.0, 3.0])


def sums_of(*args) -> dict[str, float]:
    return dict(zip(SELECTION_SUMS, selection_sums(*args).tolist(), strict=True))


def test_topk_has_a_dropped_mass_and_no_variance():
    mass_N = torch.tensor([1.0, 8.0, 2.0, 4.0])
    kept = select_topk(mass_N, [4], [3])
    assert sums_of(mass_N, kept, None, 2.0) == {"mass": 15, "dropped": 1, "variance": 0, "kept": 3, "capped": 0}


def shrunk(kept: KeptRows, shrink: float) -> KeptRows:
    return KeptRows(kept.rows_M, 1 + shrink * (kept.weight_M - 1), kept.counts_e)


@pytest.mark.parametrize("shrink", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("score_is_mass", [True, False])
def test_over_all_offsets_the_variance_is_poissons(shrink, score_is_mass):
    """The mean over every offset that there is: w^2 p (1 - p) R summed over all rows, kept or not."""
    mass_N = SIZES.square() if score_is_mass else torch.tensor([0.1, 9.0, 3.0, 7.0, 2.0])
    total = 0.0
    for i in range(DRAWS):
        drawn = select_unbiased(SIZES, [5], [2], [CERTAIN // DRAWS * i])
        total += sums_of(mass_N, shrunk(drawn, shrink), drawn.weight_M, None)["variance"]
    p_N = inclusion_probabilities(SIZES, [5], [2]).double() / CERTAIN
    weight_N = 1 + shrink * (1 / p_N - 1)
    exact = (weight_N.square() * p_N * (1 - p_N) * mass_N).sum().item()
    assert total / DRAWS == pytest.approx(exact, rel=1e-5)
    if shrink == 1:
        assert exact == pytest.approx(((1 / p_N - 1) * mass_N).sum().item())


def test_rows_at_the_cap_are_counted():
    size_N = torch.tensor([100.0, 50.0, 1e-3, 1e-4, 2e-3, 40.0])
    drawn = select_unbiased(size_N, [6], [4], [CERTAIN // 3], max_weight=3.0)
    assert (drawn.weight_M == 3).sum() == 1
    assert sums_of(size_N, drawn, drawn.weight_M, 3.0)["capped"] == 1
    assert sums_of(size_N, drawn, drawn.weight_M, None)["capped"] == 0
    assert sums_of(None, drawn, drawn.weight_M, 3.0) == {"mass": 0, "dropped": 0, "variance": 0, "kept": 4, "capped": 1}


@given(st.lists(st.sampled_from([1.0, 3.0, math.nan, math.inf, -math.inf]), min_size=2, max_size=20))
def test_non_finite_scores_leave_the_sums_finite(values):
    mass_N = torch.tensor(values)
    quota = [len(values) // 2]
    for kept, inverse_M in (
        (select_topk(mass_N, [len(values)], quota), None),
        ((drawn := select_unbiased(mass_N.abs(), [len(values)], quota, [7])), drawn.weight_M),
    ):
        sums = sums_of(mass_N, kept, inverse_M, None)
        assert all(math.isfinite(value) for value in sums.values())
        assert sums["mass"] == sum(value for value in values if math.isfinite(value))
        assert 0 <= sums["dropped"] <= sums["mass"]


def test_no_rows():
    empty = torch.zeros(0)
    kept = select_topk(empty, [0], [0])
    assert selection_sums(empty, kept, empty, 2.0).tolist() == [0.0] * 5


def test_nothing_asks_the_device():
    """Meta tensors have shapes and no data: whatever would wait for the device's values raises."""
    mass_N = torch.rand(50, device="meta")
    drawn = select_unbiased(mass_N, [20, 30], [5, 20], [0, 1])
    assert selection_sums(mass_N, drawn, drawn.weight_M, 4.0).device.type == "meta"
