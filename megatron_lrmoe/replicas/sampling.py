"""How the tokens of a workload choose experts, given the experts' weights.

A token draws ``top_k`` different experts one after the other, in proportion to the weights of those that are left.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from megatron_lrmoe.replicas.plan import IntArray

FloatArray = NDArray[np.float64]

_SOURCE_STRIDE = 104729
_BLOCK_VALUES = 1 << 18
_LEAST_WEIGHT = 1e-30
_STEPS = 32


def generator(*key: int) -> np.random.Generator:
    """Generator of a key, whose first number is a seed; trailing zeros change nothing.

    Raises:
        ValueError: a negative number.
    """
    if min(key) < 0:
        raise ValueError(f"seed, step: found {key}, allowed are whole numbers >= 0")
    return np.random.default_rng(key)


def draw(weight_E: FloatArray, tokens_S: IntArray, top_k: int, seed: int, step: int = 0) -> IntArray:
    """(S, E) int64 pairs per source and expert.

    Every token draws min(top_k, experts with a weight) experts. Those with the smallest exponential/weight are
    distributed as draws one after the other (Efraimidis and Spirakis, 2006; as the Gumbel top-k trick).

    Args:
        weight_E: finite, 0 or more; below 1e-30 of the largest, a positive one counts as 1e-30 of it.
        tokens_S: tokens of each source.
        top_k: experts of a token.
        seed: source s draws with seed + 104729 s, as in UltraEP's generator.
        step: other steps have other draws.
    """
    loads_SE = np.zeros((len(tokens_S), len(weight_E)), np.int64)
    with_weight = np.flatnonzero(weight_E > 0)
    if not len(with_weight):
        return loads_SE
    weight_e = weight_E[with_weight] / weight_E.max()
    scale_e = (1 / np.maximum(weight_e, _LEAST_WEIGHT)).astype(np.float32)
    for source, tokens in enumerate(tokens_S.tolist()):
        own = generator(seed + _SOURCE_STRIDE * source, step)
        loads_SE[source, with_weight] = _draw_source(scale_e, tokens, min(top_k, len(scale_e)), own)
    return loads_SE


def expected_shares(weight_E: FloatArray, top_k: int) -> FloatArray:
    """(E,) approximate probability that a token draws each expert: 1 - exp(-rate weight), which sum to top_k.

    Args:
        weight_E: 0 or more; where top_k or fewer are positive, each of those is drawn for certain.
        top_k: experts of a token.
    """
    if np.count_nonzero(weight_E) <= top_k:
        return (weight_E > 0).astype(np.float64)

    def short(rate: float) -> bool:
        return float(-np.expm1(-rate * weight_E).sum()) < top_k

    low = top_k / float(weight_E.sum())
    high = 2 * low
    while short(high):
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if short(middle) else (low, middle)
    return -np.expm1(-high * weight_E)


def weights_for_ratio(
    weigh: Callable[[float], FloatArray], most: float, ratio: float, ranks: int, top_k: int
) -> FloatArray:
    """(E,) ``weigh(x)`` for the least x in [0, most] whose expected max/mean over ranks is ``ratio``.

    The ratio need not grow with x, so it is looked for on a grid of 32 steps, then bisected in 32 steps. With
    thousands of tokens per source, what is drawn has the ratio within about 2 percent.

    Args:
        weigh: gives the experts' weights; ranks own contiguous blocks of equal size.
        most: largest x allowed.
        ratio: 1 or more.
        ranks: R.
        top_k: experts of a token.

    Raises:
        ValueError: a ratio below 1, or above what was found on the grid.
    """

    def expected(x: float) -> float:
        share_R = expected_shares(weigh(x), top_k).reshape(ranks, -1).sum(axis=1)
        return float(share_R.max() / share_R.mean())

    grid = np.linspace(0, most, _STEPS + 1).tolist()
    reached = [expected(x) for x in grid]
    if not 1 <= ratio <= max(reached):
        most_ratio = math.floor(1000 * max(reached)) / 1000
        raise ValueError(f"ratio: found {ratio}, allowed is 1 to {most_ratio} with these experts and this top_k")
    end = next(n for n, value in enumerate(reached) if value >= ratio)
    low, high = grid[max(end - 1, 0)], grid[end]
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if expected(middle) >= ratio else (middle, high)
    return weigh(high)


def _draw_source(scale_e: NDArray[np.float32], tokens: int, top_k: int, own: np.random.Generator) -> IntArray:
    loads_e = np.zeros(len(scale_e), np.int64)
    if top_k == len(scale_e):
        return loads_e + tokens
    block = max(1, _BLOCK_VALUES // len(scale_e))
    for start in range(0, tokens, block):
        key_Te = own.standard_exponential((min(block, tokens - start), len(scale_e)), dtype=np.float32)
        # A draw is exactly 0 once in 2^23, which would choose an expert of however small a weight.
        key_Te += np.float32(2**-23)
        key_Te *= scale_e
        chosen_TK = np.argpartition(key_Te, top_k - 1, axis=1)[:, :top_k]
        loads_e += np.bincount(chosen_TK.ravel(), minlength=len(scale_e))
    return loads_e
