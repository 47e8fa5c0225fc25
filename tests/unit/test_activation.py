"""Each activation's forward against a plain one, and its backward against autograd."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lrmoe.compute.activation import Activation
from tests.layers import ACTIVATIONS, CLAMP, LINEAR_OFFSET

ROWS, WIDTH = 9, 6


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


OURS = {
    "swiglu": Activation(F.silu, gated=True),
    "geglu": Activation(F.gelu, gated=True),
    "clamped_quick_geglu": Activation(quick_gelu, gated=True, clamp=CLAMP, linear_offset=LINEAR_OFFSET),
    "gelu": Activation(F.gelu, gated=False),
    "relu": Activation(F.relu, gated=False),
    "squared_relu": Activation(lambda z: F.relu(z).square(), gated=False),
}
CLAMPED_SWIGLU = Activation(F.silu, gated=True, clamp=CLAMP)
OFFSET_SWIGLU = Activation(F.silu, gated=True, linear_offset=LINEAR_OFFSET)


def inputs(activation: Activation, dtype: torch.dtype, rows: int = ROWS) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    z_MG = 2 * torch.randn(rows, WIDTH * (2 if activation.gated else 1), generator=generator, dtype=torch.float64)
    alpha_M = torch.rand(rows, generator=generator, dtype=torch.float64)
    da_MF = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    return z_MG.to(dtype), alpha_M.to(wide), da_MF.to(dtype)


def by_autograd(
    activation: Activation, z_MG: torch.Tensor, alpha_M: torch.Tensor, da_MF: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    z, alpha = z_MG.clone().requires_grad_(), alpha_M.clone().requires_grad_()
    a = activation(z) * alpha.unsqueeze(1)
    return a.detach(), *torch.autograd.grad(a, (z, alpha), da_MF)


@pytest.mark.parametrize("name", OURS)
def test_forward_equals_a_plain_one(name: str) -> None:
    z_MG, _, _ = inputs(OURS[name], torch.float64)
    torch.testing.assert_close(OURS[name](z_MG), ACTIVATIONS[name](z_MG))


@pytest.mark.parametrize(
    "activation", [*OURS.values(), CLAMPED_SWIGLU, OFFSET_SWIGLU], ids=[*OURS, "clamped swiglu", "offset swiglu"]
)
def test_backward_equals_autograd(activation: Activation) -> None:
    given = inputs(activation, torch.float64)
    with torch.no_grad():  # as inside an autograd Function
        found = activation.backward(*given)
    for got, exact in zip(found, by_autograd(activation, *given), strict=True):
        assert not got.requires_grad
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", OURS)
def test_backward_computes_in_fp32_and_rounds_once(name: str, dtype: torch.dtype) -> None:
    z_MG, alpha_M, da_MF = inputs(OURS[name], dtype)
    a, dz, dalpha = OURS[name].backward(z_MG, alpha_M, da_MF)
    assert (a.dtype, dz.dtype, dalpha.dtype) == (dtype, dtype, torch.float32)
    exact = by_autograd(OURS[name], z_MG.double(), alpha_M.double(), da_MF.double())
    half_step = torch.finfo(dtype).eps / 2
    for got, expected, step in zip((a, dz, dalpha), exact, (half_step, half_step, 0), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=step + 2e-6, atol=2e-6)


@pytest.mark.parametrize("name", OURS)
def test_no_rows(name: str) -> None:
    a, dz, dalpha = OURS[name].backward(*inputs(OURS[name], torch.float32, rows=0))
    assert a.shape == (0, WIDTH) and dz.shape[0] == 0 and dalpha.shape == (0,)


def test_backward_leaves_its_inputs_alone() -> None:
    for activation in OURS.values():
        given = inputs(activation, torch.float64)
        before = [x.clone() for x in given]
        activation.backward(*given)
        assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))
