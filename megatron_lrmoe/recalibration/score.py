"""What a pair is worth, and what its probability of being drawn is proportional to."""

from typing import Literal

import torch

ScoreKind = Literal["lrm", "grad-sq", "grad-abs", "alpha", "random"]

_LOW_PRECISION = (torch.bfloat16, torch.float16)
# On a CPU torch copies low-precision input to fp32 before it takes norms; chunks keep that copy in cache.
_CPU_CHUNK_ROWS = 256
# Products of rows are made in fp32 before they are summed; chunks bound that copy.
_DOT_CHUNK_ROWS = 2048


def row_norm_sq(x: torch.Tensor) -> torch.Tensor:
    """Squared Euclidean norm of each row.

    Args:
        x: (rows, columns), any floating type.

    Returns:
        (rows,) fp32, accumulated in fp32; fp64 for fp64 input.
    """
    return _row_norm(x, order=2).square()


def row_abs_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum of the absolute values of each row; types as in ``row_norm_sq``."""
    return _row_norm(x, order=1)


def gradient_statistic(kind: ScoreKind, g: torch.Tensor) -> torch.Tensor:
    """What ``pair_score`` of this kind wants to know of each row of output gradients."""
    return row_abs_sum(g) if kind == "grad-abs" else row_norm_sq(g)


def row_dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Inner product of each row of x with the same row of y; types as in ``row_norm_sq``."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    parts = zip(x.split(_DOT_CHUNK_ROWS), y.split(_DOT_CHUNK_ROWS), strict=True)
    return torch.cat([torch.linalg.vecdot(a.to(dtype), b.to(dtype)) for a, b in parts])


def _row_norm(x: torch.Tensor, order: int) -> torch.Tensor:
    # The norm converts and accumulates in one kernel on a GPU; x.float() would write a copy of x first.
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    chunked = x.device.type == "cpu" and x.dtype in _LOW_PRECISION
    parts = x.split(_CPU_CHUNK_ROWS) if chunked else (x,)
    return torch.cat([torch.linalg.vector_norm(part, order, dim=-1, dtype=dtype) for part in parts])


def pair_score(
    kind: ScoreKind,
    grad_stat_N: torch.Tensor | None,
    act_norm_sq_N: torch.Tensor | None = None,
    uniform_N: torch.Tensor | None = None,
    alpha_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score of each pair; larger is kept first by top-k.

    On Megatron's tensors the routing weight alpha is already inside the fc2 input, so lrm is the product of
    the two squared norms as they are: the squared Frobenius norm of the pair's fc2 weight gradient. Never
    multiply alpha in again, nor divide it out (it may be 0).

    Args:
        kind: lrm, grad-sq, grad-abs, alpha or random.
        grad_stat_N: (N,) ``row_abs_sum`` of the pair's output gradient for grad-abs, ``row_norm_sq`` of it
            for lrm and grad-sq; not needed for alpha and random.
        act_norm_sq_N: (N,) ``row_norm_sq`` of the pair's fc2 input; needed for lrm only.
        uniform_N: (N,) numbers in [0, 1); needed for random only.
        alpha_N: (N,) combine weights; needed for alpha only.

    Returns:
        (N,) fp32, or fp64 where the input is fp64. A product past the range of the type is inf, which
        selection counts as largest.

    Raises:
        RuntimeError: an input that the kind needs is missing.
    """
    if kind == "random":
        return _needed(uniform_N, "uniform_N", kind)
    if kind == "alpha":
        alpha_N = _needed(alpha_N, "alpha_N", kind)
        return alpha_N.to(torch.promote_types(alpha_N.dtype, torch.float32)).abs()
    grad_stat_N = _needed(grad_stat_N, "grad_stat_N", kind)
    if kind == "lrm":
        return grad_stat_N * _needed(act_norm_sq_N, "act_norm_sq_N", kind)
    return grad_stat_N


def draw_size_N(kind: ScoreKind, score_N: torch.Tensor) -> torch.Tensor:
    """What the unbiased draw's probability is proportional to.

    Proportional to a gradient's norm is the choice with the least variance. lrm and grad-sq are squared norms, so
    their root is taken; grad-abs and alpha grow as a norm does. Random scores say nothing about size: every pair
    is equally likely.

    Args:
        kind: of the scores.
        score_N: (N,) from ``pair_score``.

    Returns:
        (N,) of the same type.
    """
    if kind == "random":
        return torch.ones_like(score_N)
    return score_N.sqrt() if kind in ("lrm", "grad-sq") else score_N


def _needed(value: torch.Tensor | None, name: str, kind: str) -> torch.Tensor:
    if value is None:
        raise RuntimeError(f"score {kind!r} needs {name}, found None")
    return value
