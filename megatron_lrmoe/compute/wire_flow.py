"""A PairFlow between Megatron's own permutations, where those may be in a CUDA graph.

A captured permutation has a captured backward: it brings the gradient of every routed row and wants one for each.
So in ``compute/flow.py``'s list the stages permute and unpermute are Megatron's; the others carry kept rows only.
"""

import torch

from megatron_lrmoe.compute.compaction import spread_rows
from megatron_lrmoe.compute.exchange import taken
from megatron_lrmoe.compute.flow import PairFlow


class WireFlow(PairFlow):
    """The way back of one layer call, from wire order to wire order."""

    def combine_backward(self, g_PD: torch.Tensor) -> tuple[None]:
        """Score, select and pack the (P, D) gradient of every row; send each owner the kept rows of its experts."""
        self._reset()
        self._take_up(g_PD, None)
        return super().combine_backward(g_PD)

    def dispatch_backward(self, *_: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Send dX rows and dalpha of the kept pairs home.

        Returns:
            (P, D) and (P,), zeros where a pair was dropped. None for one that nothing downstream depends on.
        """
        super().dispatch_backward()
        rows_M, many = taken(self.sent).rows_M, len(self.token_P)
        dx_PD, dalpha_P = (
            None if value_M is None else spread_rows(value_M, rows_M, many) for value_M in (self.dx_MD, self.dalpha_M)
        )
        self._reset()
        return dx_PD, dalpha_P
