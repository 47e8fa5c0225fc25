"""What a pair is worth."""

import pytest
import torch

from megatron_lrmoe.recalibration.score import draw_size_N, pair_score, row_abs_sum, row_dot, row_norm_sq

pytestmark = pytest.mark.usefixtures("on_device")
LOW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
def test_ones_sum_exactly(dtype):
    """A18 of the known failures: naive bf16 accumulation stops at 256."""
    ones = torch.ones(3, 4096, dtype=dtype)
    for statistic in (row_norm_sq(ones), row_abs_sum(ones)):
        assert statistic.dtype == torch.float32
        assert statistic.tolist() == [4096.0] * 3


@pytest.mark.parametrize("dtype", [*LOW, torch.float32, torch.float64])
def test_statistics_equal_fp64_ones(dtype):
    x = (10 * torch.randn(700, 129, generator=torch.Generator().manual_seed(0))).to(dtype)
    tolerance = 1e-14 if dtype == torch.float64 else 1e-6
    expected_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    norm_sq, abs_sum = x.double().square().sum(1), x.double().abs().sum(1)
    for found, exact in ((row_norm_sq(x), norm_sq), (row_abs_sum(x), abs_sum)):
        assert found.dtype == expected_dtype
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
def test_no_rows_give_no_statistics(dtype):
    empty = torch.empty(0, 8, dtype=dtype)
    assert row_norm_sq(empty).shape == row_abs_sum(empty).shape == (0,)
    assert row_norm_sq(empty).dtype == torch.float32


def test_fp16_norms_do_not_overflow():
    assert row_norm_sq(torch.full((1, 4), 60_000.0, dtype=torch.float16)).item() == pytest.approx(1.44e10)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 5, 2049])
def test_inner_products_of_rows_are_summed_in_fp32_at_least(dtype, rows):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(rows, 65, generator=generator).to(dtype) for _ in range(2))
    found, exact = row_dot(x, y), (x.double() * y.double()).sum(1)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-5)


def test_routing_weight_counts_once():
    """A14 of the known failures: (alpha .9, |g| 1) and (alpha .3, |g| 3.2), alpha inside the fc2 input."""
    grad, alpha, phi = torch.tensor([[1.0], [3.2]]), torch.tensor([[0.9], [0.3]]), torch.ones(2, 1)
    score = pair_score("lrm", row_norm_sq(grad), row_norm_sq(alpha * phi))
    torch.testing.assert_close(score, torch.tensor([0.81, 0.9216]), rtol=0, atol=1e-6)


def test_lrm_is_the_squared_norm_of_the_fc2_weight_gradient():
    generator = torch.Generator().manual_seed(3)
    grad = torch.randn(5, 7, dtype=torch.float64, generator=generator)
    act = torch.randn(5, 4, dtype=torch.float64, generator=generator)
    score = pair_score("lrm", row_norm_sq(grad), row_norm_sq(act))
    exact = torch.stack([torch.outer(g, a).square().sum() for g, a in zip(grad, act, strict=True)])
    torch.testing.assert_close(score, exact, rtol=1e-12, atol=0)
    torch.testing.assert_close(draw_size_N("lrm", score), exact.sqrt(), rtol=1e-12, atol=0)


def test_other_kinds():
    stat, uniform = torch.tensor([4.0, 9.0]), torch.tensor([0.25, 0.5])
    assert pair_score("grad-sq", stat).tolist() == [4, 9]
    assert draw_size_N("grad-sq", stat).tolist() == [2, 3]
    assert pair_score("grad-abs", stat).tolist() == draw_size_N("grad-abs", stat).tolist() == [4, 9]
    alpha_N = torch.tensor([0.25, -0.5], dtype=torch.bfloat16)
    assert pair_score("alpha", stat, alpha_N=alpha_N).tolist() == [0.25, 0.5]
    assert pair_score("alpha", stat, alpha_N=alpha_N).dtype == torch.float32
    assert draw_size_N("alpha", stat).tolist() == [4, 9]
    assert pair_score("random", None, uniform_N=uniform).tolist() == [0.25, 0.5]
    assert draw_size_N("random", uniform).tolist() == [1, 1]


@pytest.mark.parametrize("kind, missing", [("random", "uniform_N"), ("lrm", "act_norm_sq_N"), ("alpha", "alpha_N")])
def test_a_missing_input_is_named(kind, missing):
    with pytest.raises(RuntimeError, match=missing):
        pair_score(kind, torch.ones(2))
