"""Load generators that tests, benchmarks and the command line share.

Everything is a pure function of its arguments. Letters as in ``megatron_lrmoe.replicas.plan``. Each workload gives
(S, E) int64 pairs per source rank and expert. W1 to W7 are the workloads of Megatron-LM pull request 7488, after its
description of what each one isolates; the amounts are ours.

    shape = Shape(experts=256, ranks=64, tokens=4096, top_k=8)
    loads_SE = zipf(shape, 2.0, seed=0)
    skew(loads_SE, shape.owner_E)
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from megatron_lrmoe.recalibration.balance import per_rank
from megatron_lrmoe.replicas.plan import IntArray
from megatron_lrmoe.replicas.sampling import FloatArray, draw, generator, weights_for_ratio

_MOST_ALPHA = 8.0
_MOST_SIGMA = 8.0


@dataclass(frozen=True)
class Shape:
    """Size of a load.

    Args:
        experts: E, a multiple of ``ranks``.
        ranks: R; each is the source of ``tokens`` tokens and the owner of a block of E / R experts.
        tokens: tokens of each source, 0 or more.
        top_k: experts of each token, 1 to E.

    Raises:
        ValueError: a value that is not allowed.
    """

    experts: int
    ranks: int
    tokens: int
    top_k: int

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks: found {self.ranks}, allowed is 1 or more")
        if self.experts < 1 or self.experts % self.ranks:
            raise ValueError(f"experts: found {self.experts}, allowed is a multiple of ranks, {self.ranks}")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k: found {self.top_k}, allowed is 1 to {self.experts}")
        if self.tokens < 0:
            raise ValueError(f"tokens: found {self.tokens}, allowed is 0 or more")

    @property
    def experts_per_rank(self) -> int:
        """Experts in the block of one rank."""
        return self.experts // self.ranks

    @property
    def owner_E(self) -> IntArray:
        """(E,) int64 rank of each expert: contiguous blocks of equal size."""
        return np.arange(self.experts, dtype=np.int64) // self.experts_per_rank

    @property
    def tokens_S(self) -> IntArray:
        """(S,) int64 tokens of each source."""
        return np.full(self.ranks, self.tokens, np.int64)


def skew(loads_SE: IntArray, owner_E: IntArray) -> Fraction:
    """Max/mean of the rows that ranks compute without replicas, exactly; 1 without any row.

    Args:
        loads_SE: (S, E) routed rows; there are as many ranks as sources.
        owner_E: (E,) rank of each expert.
    """
    rows_R = per_rank(loads_SE.sum(axis=0), owner_E, len(loads_SE))
    total = int(rows_R.sum())
    return Fraction(int(rows_R.max()) * len(rows_R), total) if total else Fraction(1)


def balanced(shape: Shape, seed: int = 0) -> IntArray:
    """W0: pairs are dealt to the experts in turn, source after source, so loads differ by at most one.

    What Megatron's ``--moe-router-force-load-balancing`` gives on average. ``seed`` changes nothing.
    """
    edge_s1 = shape.tokens * shape.top_k * np.arange(shape.ranks + 1, dtype=np.int64)[:, None]
    dealt_sE = (edge_s1 + shape.experts - 1 - np.arange(shape.experts)) // shape.experts
    return np.diff(dealt_sE, axis=0)


def zipf(shape: Shape, ratio: float = 2.0, seed: int = 0) -> IntArray:
    """UltraEP's load generator: hot ranks come first, and on each rank its first expert has most of the load.

    Expert i of rank r weighs (r + 1)^-alpha (i + 1)^-4, the same on all sources. ``alpha`` in [0, 8] is such that
    the expected max/mean over ranks is ``ratio``. Source: ``test_solving.py`` of UltraEP 1.0.0.

    Args:
        shape: size of the load.
        ratio: max/mean over ranks, 1 or more; exactly 1 gives ``balanced``.
        seed: 0 or more.

    Raises:
        ValueError: a ratio below 1 or above what alpha = 8 gives.
    """
    if ratio == 1:
        return balanced(shape, seed)
    rank_R, place_e = np.arange(1.0, shape.ranks + 1), np.arange(1.0, shape.experts_per_rank + 1)

    def weigh(alpha: float) -> FloatArray:
        return np.outer(np.power(rank_R, -alpha), np.power(place_e, -4.0)).astype(np.float64).ravel()

    weight_E = weights_for_ratio(weigh, _MOST_ALPHA, ratio, shape.ranks, shape.top_k)
    return draw(weight_E, shape.tokens_S, shape.top_k, seed)


def log_normal(shape: Shape, sigma: float = 1.0, seed: int = 0) -> IntArray:
    """Popularity exp(sigma normal) of each expert, the same on all sources: what recorded loads look like.

    Source: DeepEP pull request 393, where log-normal fitted recorded expert loads best.

    Args:
        shape: size of the load.
        sigma: 0 to 8.
        seed: 0 or more; with one seed, the normals are the same whatever sigma is.

    Raises:
        ValueError: sigma outside of what is allowed.
    """
    return draw(_popularity(shape, sigma, seed), shape.tokens_S, shape.top_k, seed)


def log_normal_to(shape: Shape, ratio: float = 1.5, seed: int = 0) -> IntArray:
    """``log_normal`` with the least sigma whose expected max/mean over ranks is ``ratio``.

    Source: vLLM 57598, which bisects sigma to a target imbalance with the same seed everywhere.

    Args:
        shape: size of the load.
        ratio: max/mean over ranks, 1 or more.
        seed: 0 or more.

    Raises:
        ValueError: a ratio below 1 or above what any sigma up to 8 gives with these normals.
    """
    weight_E = weights_for_ratio(
        lambda sigma: _popularity(shape, sigma, seed), _MOST_SIGMA, ratio, shape.ranks, shape.top_k
    )
    return draw(weight_E, shape.tokens_S, shape.top_k, seed)


def hot_experts(shape: Shape, heat: float = 8.0, seed: int = 0) -> IntArray:
    """W1, the heat of experts alone: E / R experts anywhere weigh ``heat`` times as much as the others."""
    hot = _setup(seed).permutation(shape.experts)[: shape.experts_per_rank]
    return _draw_hot(shape, hot, heat, seed)


def hot_rank(shape: Shape, heat: float = 8.0, seed: int = 0) -> IntArray:
    """W2, the placement of heat: as ``hot_experts``, with the hot experts together on one rank."""
    hot = np.flatnonzero(shape.owner_E == _setup(seed).integers(shape.ranks))
    return _draw_hot(shape, hot, heat, seed)


def spread_hot(shape: Shape, heat: float = 8.0, hot_count: int | None = None, seed: int = 0) -> IntArray:
    """W3, the heat of W2 spread over the layout: hot experts are dealt to the ranks in turn.

    Args:
        shape: size of the load.
        heat: weight of a hot expert; the others weigh 1.
        hot_count: hot experts, 1 to E; E / R if None, as in ``hot_rank``. R puts one on every rank.
        seed: 0 or more.

    Raises:
        ValueError: a count that is not allowed.
    """
    hot_count = shape.experts_per_rank if hot_count is None else hot_count
    if not 1 <= hot_count <= shape.experts:
        raise ValueError(f"hot_count: found {hot_count}, allowed is 1 to {shape.experts}")
    setup = _setup(seed)
    rank_R, place_e = setup.permutation(shape.ranks), setup.permutation(shape.experts_per_rank)
    turn, nth = np.divmod(np.arange(hot_count), shape.ranks)
    return _draw_hot(shape, rank_R[nth] * shape.experts_per_rank + place_e[turn], heat, seed)


def ragged(shape: Shape, sigma: float = 1.0, seed: int = 0) -> IntArray:
    """W4, skew before dispatch: log-normal popularity, and sources with different token counts.

    A source has N(0.5, 0.35) of ``shape.tokens``, cut to [0, 1], as with UltraEP's ``--variable-input-tokens``.
    With two or more ranks the smallest source has none.
    """
    part_S = _setup(seed, 1).normal(0.5, 0.35, shape.ranks).clip(0, 1)
    if shape.ranks > 1:
        part_S[part_S.argmin()] = 0
    return draw(_popularity(shape, sigma, seed), (shape.tokens * part_S).astype(np.int64), shape.top_k, seed)


def zero_load(shape: Shape, all_zero: bool = False, seed: int = 0) -> IntArray:
    """W5, zeros: a source without tokens, a rank without rows, and other experts without rows.

    With two or more ranks, one source has no tokens and one rank's experts have no weight; of the other experts a
    quarter has none. The rest weigh the same. A token has fewer than ``top_k`` experts where too few are left.

    Args:
        shape: size of the load.
        all_zero: nothing at all is routed.
        seed: 0 or more.
    """
    setup = _setup(seed)
    tokens_S, weight_E = shape.tokens_S, np.full(shape.experts, 0.0 if all_zero else 1.0)
    if shape.ranks > 1:
        tokens_S[setup.integers(shape.ranks)] = 0
        weight_E[shape.owner_E == setup.integers(shape.ranks)] = 0
    left = setup.permutation(np.flatnonzero(weight_E))
    weight_E[left[: len(left) // 4]] = 0
    return draw(weight_E, tokens_S, shape.top_k, seed)


def rotating(shape: Shape, heat: float = 8.0, seed: int = 0, step: int = 0) -> IntArray:
    """W6, plans that are a step old: one hot expert, on the next rank in each step, also in another place there."""
    rank, place = divmod(int(_setup(seed).integers(shape.experts)), shape.experts_per_rank)
    hot = (rank + step) % shape.ranks * shape.experts_per_rank + (place + step) % shape.experts_per_rank
    return _draw_hot(shape, np.array([hot]), heat, seed, step)


def burst(shape: Shape, heat: float = 64.0, every: int = 8, length: int = 1, seed: int = 0, step: int = 0) -> IntArray:
    """W7, rare plans that averages hide: balanced, but at the end of each period one expert is very hot.

    Args:
        shape: size of the load.
        heat: weight of the hot expert during a burst; the others weigh 1.
        every: steps of a period.
        length: its last steps are the burst; 0 to ``every``.
        seed: 0 or more; chooses the expert, which is the same in every burst.
        step: 0 or more.

    Raises:
        ValueError: a length or period that is not allowed.
    """
    if not 0 <= length <= every or every < 1:
        raise ValueError(f"every, length: found {every}, {length}, allowed are every >= 1 and length 0 to every")
    hot = _setup(seed).integers(shape.experts, size=1)
    if step % every < every - length:
        return balanced(shape, seed)
    return _draw_hot(shape, hot, heat, seed, step)


WORKLOADS: dict[str, Callable[..., IntArray]] = {
    make.__name__: make
    for make in (
        balanced,
        zipf,
        log_normal,
        log_normal_to,
        hot_experts,
        hot_rank,
        spread_hot,
        ragged,
        zero_load,
        rotating,
        burst,
    )
}
"""Workloads by name: each takes a Shape, then by keyword ``seed`` and its own arguments, which have defaults.

``zipf`` and ``log_normal_to`` raise a ValueError where the shape cannot have the ratio, as on a single rank.
"""


def _setup(seed: int, part: int = 0) -> np.random.Generator:
    """Generator of what a seed fixes for all tokens, apart from the sources' own generators."""
    return generator(seed, part, 1)


def _popularity(shape: Shape, sigma: float, seed: int) -> FloatArray:
    if not 0 <= sigma <= _MOST_SIGMA:
        raise ValueError(f"sigma: found {sigma}, allowed is 0 to {_MOST_SIGMA:g}")
    return np.exp(sigma * _setup(seed).standard_normal(shape.experts))


def _draw_hot(shape: Shape, hot: IntArray, heat: float, seed: int, step: int = 0) -> IntArray:
    if not 0 < heat < np.inf:
        raise ValueError(f"heat: found {heat}, allowed is a finite number > 0")
    weight_E = np.ones(shape.experts)
    weight_E[hot] = heat
    return draw(weight_E, shape.tokens_S, shape.top_k, seed, step)
