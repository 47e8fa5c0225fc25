"""The expert MLP's activation: fc1 output to fc2 input, and back, on whatever rows it is given."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Activation:
    """One of Megatron's expert activations.

    Args:
        function: elementwise activation; of the first half of fc1's output when gated.
        gated: fc1's output is [gate, linear] along the last dimension and ``h = function(gate) * linear``.
        clamp: Megatron's activation_func_clamp_value: gate at most this, linear within plus or minus this.
        linear_offset: Megatron's glu_linear_offset, added to linear.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    gated: bool
    clamp: float | None = None
    linear_offset: float = 0.0

    def __call__(self, z_MG: torch.Tensor) -> torch.Tensor:
        """(M, G) fc1 output to the (M, F) activation ``phi``, in Megatron's order of operations."""
        if not self.gated:
            return self.function(z_MG)
        gate, linear = z_MG.chunk(2, dim=-1)
        if self.clamp is not None:
            gate, linear = gate.clamp(max=self.clamp), linear.clamp(min=-self.clamp, max=self.clamp)
        if self.linear_offset:
            linear = linear + self.linear_offset
        return self.function(gate) * linear

    def backward(
        self, z_MG: torch.Tensor, alpha_M: torch.Tensor, da_MF: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Recompute ``a = alpha * phi`` and carry its gradient back.

        Nothing of width F is kept from the forward: recomputing phi from fc1's output costs one elementwise
        pass over the kept rows and saves an (N, F) tensor.

        Args:
            z_MG: (M, G) fc1 output of the kept rows.
            alpha_M: (M,) combine weight, of its own dtype.
            da_MF: (M, F) gradient of ``a``.

        Returns:
            a_MF in da's dtype, dz_MG in z's dtype, dalpha_M in alpha's dtype.
        """
        exact = torch.promote_types(z_MG.dtype, torch.float32)
        z, da, alpha = z_MG.to(exact), da_MF.to(exact), alpha_M.to(exact).unsqueeze(-1)
        if self._is_swiglu:
            gate, linear = z.chunk(2, dim=-1)
            silu = F.silu(gate)
            phi = silu * linear
            dphi = da * alpha
            dz = torch.empty_like(z)
            dgate, dlinear = dz.chunk(2, dim=-1)
            torch.mul(dphi, silu, out=dlinear)
            dgate.copy_(torch.ops.aten.silu_backward(dphi * linear, gate))
        else:
            with torch.enable_grad():
                z = z.detach().requires_grad_()
                phi = self(z)
            (dz,) = torch.autograd.grad(phi, z, da * alpha)
            phi = phi.detach()
        dalpha_M = torch.linalg.vecdot(da, phi)
        return (phi * alpha).to(da_MF.dtype), dz.to(z_MG.dtype), dalpha_M.to(alpha_M.dtype)

    @property
    def _is_swiglu(self) -> bool:
        return self.function is F.silu and self.gated and self.clamp is None and not self.linear_offset
