"""Gradients of the combine weights when the experts computed only some of them.

A token's routed output is o = sum_u alpha_u y_u over its pairs and dalpha_u = <g, y_u>, so

    sum_u alpha_u dalpha_u = <g, o>

whatever the router: softmax or sigmoid, renormalised or scaled, everything of it comes before the final combine
weights alpha, and is differentiated by Megatron after us. What the kept pairs leave of the right side belongs to the
dropped ones. One dropped pair gets its exact gradient; several get one common value, with which the sum over the
token, a softmax's own baseline, is exact.
"""

import torch

from megatron_lrmoe.pairs import KeptRows


def dprobs_with_baseline(
    dalpha_M: torch.Tensor,
    kept: KeptRows,
    alpha_P: torch.Tensor,
    token_expert_P: tuple[torch.Tensor, torch.Tensor],
    dot_T: torch.Tensor,
    num_experts: int,
    least_share: float,
) -> torch.Tensor:
    """Combine-weight gradients: of kept pairs exact, of a token's dropped pairs one common value.

    The common value is (<g, o> - sum_kept alpha dalpha) / sum_dropped alpha. Where the dropped pairs' share of the
    token's alpha is ``least_share`` or less (all of it 0 included) they get 0: what they add to o is then below
    o's own rounding. Non-finite numbers are let through, so that Megatron's checks see them.

    Args:
        dalpha_M: (M,) of the kept pairs, times their weights.
        kept: rows of the wire order and weights.
        alpha_P: (P,) combine weights in wire order.
        token_expert_P: token and expert of each pair, (P,) each.
        dot_T: (T,) <g, o> of each token.
        num_experts: E.
        least_share: rounding of the rows that were multiplied, such as ``torch.finfo(dtype).eps``.

    Returns:
        (T, E) in dalpha's dtype, 0 where nothing is routed.
    """
    exact = torch.promote_types(dalpha_M.dtype, torch.float32)
    token_P = token_expert_P[0]

    def laid_out(value_P: torch.Tensor) -> torch.Tensor:
        # A sum over a dense row is the same in every run; atomic additions by token are not.
        table_TE = value_P.new_zeros(dot_T.shape[0], num_experts)
        table_TE[token_expert_P] = value_P
        return table_TE

    alpha_P = alpha_P.to(exact)
    dropped_P = torch.ones_like(token_P, dtype=torch.bool).index_fill_(0, kept.rows_M, False)
    known_P = torch.zeros_like(alpha_P).index_copy_(0, kept.rows_M, dalpha_M.to(exact) / kept.weight_M.to(exact))
    missing_T = dot_T.to(exact) - laid_out(alpha_P * known_P).sum(1)
    dropped_T = laid_out(alpha_P * dropped_P).sum(1)
    negligible_T = dropped_T <= least_share * laid_out(alpha_P).sum(1)
    common_T = (missing_T / dropped_T).masked_fill(negligible_T, 0.0)
    return laid_out(torch.where(dropped_P, common_T[token_P], known_P).to(dalpha_M.dtype))
