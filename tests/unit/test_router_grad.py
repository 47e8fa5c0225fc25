"""Combine-weight gradients with the baseline, on numbers worked out by hand and in degenerate cases."""

import math

import pytest
import torch

from megatron_lrmoe.compute.router import dprobs_with_baseline
from megatron_lrmoe.pairs import KeptRows

# Two tokens, three experts. Wire order: expert, then token.
TOKEN_P = torch.tensor([0, 1, 0, 1, 0])
EXPERT_P = torch.tensor([0, 0, 1, 1, 2])
ALPHA_P = [0.5, 0.25, 0.3, 0.75, 0.2]
DALPHA_P = [2.0, 4.0, -1.0, 8.0, 5.0]
DOT_T = [2.0 * 0.5 - 0.3 + 1.0, 1.0 + 6.0]


def dprobs(
    kept: list[int],
    weights: list[float] | None = None,
    alpha: list[float] = ALPHA_P,
    dot: list[float] = DOT_T,
    least: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    rows_M = torch.tensor(kept, dtype=torch.int64)
    weight_M = torch.tensor(weights or [1.0] * len(kept), dtype=torch.float64)
    dalpha_M = torch.tensor(DALPHA_P, dtype=torch.float64)[rows_M] * weight_M
    return dprobs_with_baseline(
        dalpha_M.to(dtype),
        KeptRows(rows_M, weight_M, (len(kept),)),
        torch.tensor(alpha, dtype=torch.float64),
        (TOKEN_P, EXPERT_P),
        torch.tensor(dot, dtype=torch.float64),
        3,
        least,
    )


FULL = [[2.0, -1.0, 5.0], [4.0, 8.0, 0.0]]


@pytest.mark.parametrize("kept", [[0, 1, 2, 3, 4], [1, 2, 4], [0, 2, 3], [0, 1, 2], [2, 3, 4]])
def test_with_at_most_one_pair_of_a_token_dropped_everything_is_exact(kept):
    torch.testing.assert_close(dprobs(kept), torch.tensor(FULL, dtype=torch.float64))
    weights = [1.0 + i for i in range(len(kept))]
    torch.testing.assert_close(dprobs(kept, weights), torch.tensor(FULL, dtype=torch.float64))


def test_several_dropped_pairs_share_what_is_missing():
    got = dprobs([1, 4])  # token 0 keeps expert 2 alone, token 1 expert 0
    common = (DOT_T[0] - 0.2 * 5) / (0.5 + 0.3)
    torch.testing.assert_close(got, torch.tensor([[common, common, 5.0], [4.0, 8.0, 0.0]], dtype=torch.float64))


def test_a_token_without_kept_pairs_gets_its_mean():
    got = dprobs([1, 3])
    assert got[0].tolist() == pytest.approx([DOT_T[0]] * 3)  # its alphas sum to 1
    torch.testing.assert_close(dprobs([])[1, :2], torch.tensor([DOT_T[1]] * 2, dtype=torch.float64))
    assert not dprobs([])[1, 2]


def test_dropped_pairs_of_no_weight_get_zero_not_a_quotient_by_zero():
    alpha = [0.5, 0.0, 0.3, 1.0, 0.2]
    assert dprobs([0, 2, 3, 4], alpha=alpha, dot=[DOT_T[0], 8.0])[1].tolist() == [0, 8, 0]
    assert dprobs([], alpha=[0.0] * 5, dot=[0.0, 0.0]).eq(0).all()
    # Beside one with weight they get the common value.
    assert dprobs([0, 4], alpha=alpha, dot=[DOT_T[0], 8.0])[1].tolist() == [8, 8, 0]


def test_a_share_of_alpha_below_rounding_counts_as_none():
    alpha = [0.5, 1e-4, 0.3, 1.0 - 1e-4, 0.2]
    noisy = dprobs([0, 2, 3, 4], alpha=alpha, dot=[DOT_T[0], 8.01])
    assert noisy[1, 0] > 50  # the rounding of <g, o> over 1e-4
    assert dprobs([0, 2, 3, 4], alpha=alpha, dot=[DOT_T[0], 8.01], least=2**-8)[1].tolist() == [0, 8, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_inner_products_reach_their_own_token_only(bad):
    got = dprobs([1, 4], dot=[bad, DOT_T[1]])
    assert not got[0, :2].isfinite().any() and got[0, 2] == 5
    assert got[1].tolist() == FULL[1]
    assert dprobs([0, 1, 2, 4], dot=[bad, DOT_T[1]]).isfinite().all()  # nothing of token 0 is missing


def test_the_result_has_the_type_of_dalpha_and_is_computed_in_fp32():
    got = dprobs([1, 4], dtype=torch.bfloat16)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), dprobs([1, 4]), rtol=2**-8, atol=0)


def test_no_tokens():
    none = torch.zeros(0)
    rows = torch.zeros(0, dtype=torch.int64)
    got = dprobs_with_baseline(none, KeptRows(rows, none, (0,)), none, (rows, rows), none, 3, 0.0)
    assert got.shape == (0, 3)


def test_nothing_asks_the_device():
    """Meta tensors have shapes and no data: whatever would wait for the device's values raises."""
    meta = {"device": "meta"}
    rows = torch.zeros(5, dtype=torch.int64, **meta)
    kept = KeptRows(rows[:3], torch.ones(3, **meta), (3,))
    got = dprobs_with_baseline(
        torch.ones(3, **meta), kept, torch.ones(5, **meta), (rows, rows), torch.ones(2, **meta), 3, 0.1
    )
    assert got.device.type == "meta" and got.shape == (2, 3)
