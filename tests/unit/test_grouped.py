"""Grouped GEMM back ends against one fp64 matmul per expert, with empty groups and dirty memory."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe.compute.grouped import as_stacked, rows_times_weights, weight_grads
from tests.cases import ragged_counts

pytestmark = pytest.mark.usefixtures("on_device")
INNER, OUTER = 16, 24
# Rounding of sums over 40 rows or 24 columns, against the largest element.
CLOSE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
BACKENDS = [
    ("loop", torch.float64),
    *itertools.product(("loop", "grouped"), (torch.float32, torch.bfloat16, torch.float16)),
]


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def spoil(*shapes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Leave NaN in the memory that the next tensors of these shapes will likely get."""
    for shape in shapes:
        torch.full(shape, torch.nan, dtype=dtype)


def assert_near(got: torch.Tensor, exact: torch.Tensor) -> None:
    scale = exact.abs().max().clamp_min(1) if exact.numel() else 1
    torch.testing.assert_close(got.double() / scale, exact / scale, rtol=0, atol=CLOSE[got.dtype])


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@given(counts=ragged_counts(), transpose=st.booleans(), with_out=st.booleans())
def test_rows_times_weights(
    backend: str, dtype: torch.dtype, counts: list[int], transpose: bool, with_out: bool
) -> None:
    rows = sum(counts)
    x_MI = normal(rows, INNER, dtype=dtype)
    shape = (OUTER, INNER) if transpose else (INNER, OUTER)
    weights = [normal(*shape, dtype=dtype, seed=e + 1) for e in range(len(counts))]
    spoil((rows, OUTER), dtype=dtype)
    out = torch.full((rows, OUTER), torch.nan, dtype=dtype) if with_out else None
    y_MO = rows_times_weights(x_MI, weights, counts, backend, transpose=transpose, out=out)
    assert y_MO.dtype == dtype and (out is None or y_MO is out)
    exact = [
        x.double() @ (w.t() if transpose else w).double() for x, w in zip(x_MI.split(counts), weights, strict=True)
    ]
    assert_near(y_MO, torch.cat(exact))


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@given(counts=ragged_counts())
def test_weight_grads(backend: str, dtype: torch.dtype, counts: list[int]) -> None:
    rows = sum(counts)
    g_MO, x_MI = normal(rows, OUTER, dtype=dtype), normal(rows, INNER, dtype=dtype, seed=1)
    spoil((len(counts), OUTER, INNER), (OUTER, INNER), dtype=dtype)
    grads = weight_grads(g_MO, x_MI, counts, backend)
    assert len(grads) == len(counts)
    for grad, g, x, count in zip(grads, g_MO.split(counts), x_MI.split(counts), counts, strict=True):
        assert grad.dtype == dtype and grad.shape == (OUTER, INNER)
        assert_near(grad, g.double().t() @ x.double())
        assert count or not grad.any()


def test_loop_is_bit_identical_to_one_linear_layer_per_expert() -> None:
    """Megatron's SequentialMLP runs each expert's linear layer on its rows."""
    counts = [5, 0, 1, 9]
    for dtype in (torch.float32, torch.bfloat16):
        x_MI = normal(15, INNER, dtype=dtype)
        weights = [normal(OUTER, INNER, dtype=dtype, seed=e + 1) for e in range(4)]
        expected = [x.matmul(w.t()) for x, w in zip(x_MI.split(counts), weights, strict=True)]
        assert torch.equal(rows_times_weights(x_MI, weights, counts, "loop", transpose=True), torch.cat(expected))


def test_weight_grads_do_not_share_memory_with_their_inputs() -> None:
    for backend in ("loop", "grouped"):
        g_MO, x_MI = normal(3, OUTER, dtype=torch.float32), normal(3, INNER, dtype=torch.float32)
        first = weight_grads(g_MO, x_MI, [2, 1], backend)
        before = [grad.clone() for grad in first]
        g_MO.zero_()
        x_MI.zero_()
        assert all(torch.equal(a, b) for a, b in zip(first, before, strict=True))


def in_one_buffer(num: int, gap: int = 0, falling: bool = False) -> list[torch.Tensor]:
    """(OUTER, INNER) weights at equal steps in one buffer, as Megatron's DDP lays them out."""
    size = OUTER * INNER
    buffer = torch.arange(3.0 + num * (size + gap))[3:]
    starts = [i * (size + gap) for i in range(num)]
    return [buffer[s : s + size].view(OUTER, INNER) for s in (reversed(starts) if falling else starts)]


@pytest.mark.parametrize("gap", [0, 5])
def test_weights_at_equal_steps_are_stacked_without_a_copy(gap: int) -> None:
    weights = in_one_buffer(4, gap)
    stacked = as_stacked(weights)
    assert stacked.untyped_storage().data_ptr() == weights[0].untyped_storage().data_ptr()
    assert torch.equal(stacked, torch.stack(weights))


def uneven() -> list[torch.Tensor]:
    weights = in_one_buffer(4)
    return [weights[0], weights[1], weights[3]]


def transposed() -> list[torch.Tensor]:
    return [w.t() for w in in_one_buffer(3)]


def another_buffer() -> list[torch.Tensor]:
    return [*in_one_buffer(2), torch.ones(OUTER, INNER)]


def twice_the_same() -> list[torch.Tensor]:
    return in_one_buffer(1) * 2


def falling() -> list[torch.Tensor]:
    return in_one_buffer(3, falling=True)


@pytest.mark.parametrize("make", [uneven, transposed, another_buffer, twice_the_same, falling])
def test_other_weights_are_copied(make: object) -> None:
    weights = make()
    stacked = as_stacked(weights)
    assert stacked.untyped_storage().data_ptr() != weights[0].untyped_storage().data_ptr()
    assert torch.equal(stacked, torch.stack(weights))


def test_one_weight_is_a_view_and_parameters_are_detached() -> None:
    weight = torch.nn.Parameter(torch.ones(OUTER, INNER))
    stacked = as_stacked([weight])
    assert stacked.shape == (1, OUTER, INNER) and stacked.data_ptr() == weight.data_ptr()
    assert not stacked.requires_grad and not as_stacked([weight, weight]).requires_grad


@pytest.mark.parametrize("falling", [False, True])
def test_grouped_gemm_takes_weights_from_one_buffer(falling: bool) -> None:
    weights = [w / 1000 for w in in_one_buffer(3, falling=falling)]
    x_MI = normal(6, INNER, dtype=torch.float32)
    expected = [x @ w.t() for x, w in zip(x_MI.split([1, 3, 2]), weights, strict=True)]
    got = rows_times_weights(x_MI, weights, [1, 3, 2], "grouped", transpose=True)
    torch.testing.assert_close(got, torch.cat(expected))
