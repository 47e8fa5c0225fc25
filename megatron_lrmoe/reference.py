"""The whole MoE layer and its recalibrated backward, slow and plain, on one process.

No dispatch, no compaction, no sharing: every pair is one row of a loop, every rank's tokens stand in one tensor. What
the fast paths compute is compared with this, in fp64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

import torch


@dataclass(frozen=True)
class LayerGradients:
    """Gradients of one layer call.

    Args:
        dx_TD: (T, D) of the tokens, through the experts only.
        dprobs_TE: (T, E) of the combine weights, zero for dropped pairs.
        dfc1: (E, G, D), dfc2: (E, D, F) of the expert weights.
    """

    dx_TD: torch.Tensor
    dprobs_TE: torch.Tensor
    dfc1: torch.Tensor
    dfc2: torch.Tensor


@dataclass(frozen=True)
class ReferenceLayer:
    """An MoE layer whose experts are ``(alpha * act(x @ fc1^T)) @ fc2^T``.

    Args:
        fc1: (E, G, D) weights.
        fc2: (E, D, F) weights.
        activation: fc1 output (G,) to ``phi`` (F,), differentiable by autograd.
    """

    fc1: torch.Tensor
    fc2: torch.Tensor
    activation: Callable[[torch.Tensor], torch.Tensor]

    def pair(self, x_D: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """fc1 output and ``phi`` of one token at one expert."""
        z_G = self.fc1[expert] @ x_D
        return z_G, self.activation(z_G)

    def forward(self, x_TD: torch.Tensor, probs_TE: torch.Tensor, map_TE: torch.Tensor) -> torch.Tensor:
        """(T, D) sum over each token's experts."""
        out_TD = torch.zeros_like(x_TD)
        for t, e in map_TE.nonzero().tolist():
            _, phi_F = self.pair(x_TD[t], e)
            out_TD[t] += self.fc2[e] @ (probs_TE[t, e] * phi_F)
        return out_TD

    def scores(
        self, x_TD: torch.Tensor, probs_TE: torch.Tensor, map_TE: torch.Tensor, g_TD: torch.Tensor
    ) -> torch.Tensor:
        """(T, E) squared Frobenius norm of each pair's fc2 gradient; NaN where nothing is routed."""
        score_TE = torch.full_like(probs_TE, torch.nan)
        for t, e in map_TE.nonzero().tolist():
            _, phi_F = self.pair(x_TD[t], e)
            score_TE[t, e] = torch.outer(probs_TE[t, e] * g_TD[t], phi_F).square().sum()
        return score_TE

    def forward_scores(self, x_TD: torch.Tensor, probs_TE: torch.Tensor, map_TE: torch.Tensor) -> torch.Tensor:
        """(T, E) alpha^2 |phi|^2, what of the score is known in forward; NaN where nothing is routed."""
        score_TE = torch.full_like(probs_TE, torch.nan)
        for t, e in map_TE.nonzero().tolist():
            score_TE[t, e] = (probs_TE[t, e] * self.pair(x_TD[t], e)[1]).square().sum()
        return score_TE

    def backward(
        self,
        x_TD: torch.Tensor,
        probs_TE: torch.Tensor,
        g_TD: torch.Tensor,
        weight_TE: torch.Tensor,
    ) -> LayerGradients:
        """Gradients when pair (t, e) counts ``weight_TE[t, e]`` times: 0 is dropped, 1 kept, 1/pi drawn."""
        grads = LayerGradients(*(torch.zeros_like(x) for x in (x_TD, probs_TE, self.fc1, self.fc2)))
        for t, e in weight_TE.nonzero().tolist():
            g_D, alpha = weight_TE[t, e] * g_TD[t], probs_TE[t, e]
            with torch.enable_grad():
                z_G = (self.fc1[e] @ x_TD[t]).requires_grad_()
                phi_F = self.activation(z_G)
            da_F = self.fc2[e].t() @ g_D
            (dz_G,) = torch.autograd.grad(phi_F, z_G, alpha * da_F)
            phi_F = phi_F.detach()
            grads.dfc2[e] += torch.outer(g_D, alpha * phi_F)
            grads.dfc1[e] += torch.outer(dz_G, x_TD[t])
            grads.dprobs_TE[t, e] += da_F @ phi_F
            grads.dx_TD[t] += self.fc1[e].t() @ dz_G
        return grads

    def baseline_dprobs(
        self,
        x_TD: torch.Tensor,
        probs_TE: torch.Tensor,
        map_TE: torch.Tensor,
        g_TD: torch.Tensor,
        kept_TE: torch.Tensor,
    ) -> torch.Tensor:
        """(T, E) gradients of the combine weights: exact for kept pairs, one common value for a token's dropped ones.

        The common value makes sum_u alpha_u dalpha_u over the token what it is, <g, o>. It is 0 where the dropped
        pairs' alphas sum to 0.
        """
        out_TD = self.forward(x_TD, probs_TE, map_TE)
        exact_TE = self.backward(x_TD, probs_TE, g_TD, map_TE.to(probs_TE)).dprobs_TE
        dprobs_TE = torch.zeros_like(probs_TE)
        for t in range(map_TE.shape[0]):
            kept, dropped = map_TE[t] & kept_TE[t], map_TE[t] & ~kept_TE[t]
            dprobs_TE[t, kept] = exact_TE[t, kept]
            left = g_TD[t] @ out_TD[t] - probs_TE[t, kept] @ exact_TE[t, kept]
            share = probs_TE[t, dropped].sum()
            dprobs_TE[t, dropped] = left / share if share > 0 else 0.0
        return dprobs_TE


def keep_best(score_TE: torch.Tensor, map_TE: torch.Tensor, retention: Fraction) -> torch.Tensor:
    """The paper's rule: of each expert's n pairs, the max(1, floor(retention n)) with the highest scores.

    Args:
        score_TE: (T, E); a non-finite score counts as largest.
        map_TE: (T, E) bool, what is routed.
        retention: share kept.

    Returns:
        (T, E) bool. Of equal scores the lower token is kept.
    """
    kept_TE = torch.zeros_like(map_TE)
    for e in range(map_TE.shape[1]):
        tokens = map_TE[:, e].nonzero().flatten().tolist()
        quota = min(len(tokens), max(1, floor(retention * len(tokens))))
        best = sorted(tokens, key=lambda t, e=e: (-_finite(score_TE[t, e]), t))
        kept_TE[best[:quota], e] = True
    return kept_TE


def _finite(score: torch.Tensor) -> float:
    return float(score) if torch.isfinite(score) else float("inf")


def stack_sources(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tokens of all source ranks in one tensor, sources in rank order: the order in which an owner sees them."""
    return torch.cat(list(parts), dim=0)
