"""Cases that tests and ``benchmarks/`` share: routings by kind of load, scores, and hypothesis strategies.

Everything is a pure function of its arguments. Letters as in ``megatron_lrmoe.pairs``: T tokens, E experts of
the layer, S source ranks; ``ranks`` ranks own contiguous blocks of E / ranks experts each.

    routing = route("hot_rank", num_tokens=64, num_experts=8, top_k=2, ranks=2, seed=1)
    routing.map_TE, routing.probs_TE, loads(routing, ranks=2)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

ScoreKind = Literal["normal", "huge_range", "ties", "zeros", "some_zeros", "nonfinite"]
SCORE_KINDS: tuple[ScoreKind, ...] = get_args(ScoreKind)
FINITE_SCORE_KINDS = tuple(kind for kind in SCORE_KINDS if kind != "nonfinite")


@dataclass(frozen=True)
class Routing:
    """What a router decided.

    Args:
        map_TE: (T, E) bool, the chosen experts of each token.
        probs_TE: (T, E) fp32, positive on the chosen experts, where each row sums to 1; zero elsewhere.
    """

    map_TE: torch.Tensor
    probs_TE: torch.Tensor


@dataclass(frozen=True)
class Shape:
    """Size of a case: tokens, experts, experts per token, ranks that share the experts."""

    num_tokens: int
    num_experts: int
    top_k: int
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.num_experts < 1 or self.num_experts % self.ranks:
            raise ValueError(f"{self}: ranks has to divide num_experts")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"{self}: allowed is 1 <= top_k <= num_experts")
        if self.num_tokens < 0:
            raise ValueError(f"{self}: num_tokens is negative")

    @property
    def experts_per_rank(self) -> int:
        """Experts in the block of one rank."""
        return self.num_experts // self.ranks


def balanced(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """(T, E) bool: loads of any two experts differ by at most one."""
    order_E = torch.randperm(shape.num_experts, generator=generator)
    pair_TK = torch.arange(shape.num_tokens * shape.top_k).view(shape.num_tokens, shape.top_k)
    return _map_of(order_E[pair_TK % shape.num_experts], shape)


def hot_expert(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """(T, E) bool: one expert weighs as much as all others together."""
    weight_E = torch.ones(shape.num_experts)
    weight_E[_pick(shape.num_experts, generator)] = max(1, shape.num_experts - 1)
    return _draw(weight_E, shape, generator)


def hot_rank(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """(T, E) bool: each expert of one rank weighs eight times an expert elsewhere."""
    weight_RE = torch.ones(shape.ranks, shape.experts_per_rank)
    weight_RE[_pick(shape.ranks, generator)] = 8
    return _draw(weight_RE.flatten(), shape, generator)


def empty_expert(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """(T, E) bool: one expert gets nothing. A row has E - 1 experts where top_k is E."""
    weight_E = torch.ones(shape.num_experts)
    weight_E[_pick(shape.num_experts, generator)] = 0
    return _draw(weight_E, shape, generator)


def empty_rank(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """(T, E) bool: all experts of one rank get nothing. A row has fewer than top_k where too few are left."""
    if shape.ranks < 2:
        raise ValueError("empty_rank needs at least 2 ranks: with one, no expert would be left")
    weight_RE = torch.ones(shape.ranks, shape.experts_per_rank)
    weight_RE[_pick(shape.ranks, generator)] = 0
    return _draw(weight_RE.flatten(), shape, generator)


def one_token(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """(1, E) bool: a single token, whatever ``num_tokens`` says."""
    shape = Shape(1, shape.num_experts, shape.top_k, shape.ranks)
    return _draw(torch.ones(shape.num_experts), shape, generator)


def ragged(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """(T, E) bool: one expert with no token, one with exactly one, the others with very uneven loads.

    With fewer than top_k + 2 experts there are only uneven loads.
    """
    weight_E = (2 * torch.randn(shape.num_experts, generator=generator)).exp()
    if shape.num_experts < shape.top_k + 2 or shape.num_tokens == 0:
        return _draw(weight_E, shape, generator)
    empty, single = torch.randperm(shape.num_experts, generator=generator)[:2].tolist()
    weight_E[[empty, single]] = 0
    map_TE = _draw(weight_E, shape, generator)
    token = _pick(shape.num_tokens, generator)
    map_TE[token, map_TE[token].nonzero()[0]] = False
    map_TE[token, single] = True
    return map_TE


def zipf(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """(T, E) bool: weights 1, 1/2, 1/3, ... in random order over the experts."""
    weight_E = 1 / torch.arange(1, shape.num_experts + 1, dtype=torch.float32)
    return _draw(weight_E[torch.randperm(shape.num_experts, generator=generator)], shape, generator)


WORKLOADS: dict[str, Callable[[Shape, torch.Generator], torch.Tensor]] = {
    kind.__name__: kind for kind in (balanced, hot_expert, hot_rank, empty_expert, empty_rank, one_token, ragged, zipf)
}


def route(workload: str, num_tokens: int, num_experts: int, top_k: int, ranks: int = 1, seed: int = 0) -> Routing:
    """A routing of the named kind of load; equal arguments give equal routings.

    Args:
        workload: a name in ``WORKLOADS``.
        num_tokens: T, of one rank or of the whole group, as the caller likes.
        num_experts: E, a multiple of ``ranks``.
        top_k: chosen experts per token (exactly, except where the workload says it cannot be).
        ranks: ranks that share the experts; only ``hot_rank`` and ``empty_rank`` depend on it.
        seed: other seeds give other tokens, and other experts and ranks that are hot or empty.
    """
    generator = torch.Generator().manual_seed(seed)
    map_TE = WORKLOADS[workload](Shape(num_tokens, num_experts, top_k, ranks), generator)
    logits_TE = torch.randn(map_TE.shape, generator=generator)
    return Routing(map_TE, logits_TE.masked_fill(~map_TE, -torch.inf).softmax(dim=1))


def loads(routing: Routing, ranks: int = 1) -> torch.Tensor:
    """(S, E) int64: pairs per source and expert; each of ``ranks`` sources has a block of the tokens."""
    return torch.stack([part.sum(dim=0) for part in routing.map_TE.tensor_split(ranks)])


def scores(kind: ScoreKind, size: int, seed: int = 0) -> torch.Tensor:
    """(size,) fp32 scores of pairs, none negative (``nonfinite`` has NaN, inf and -inf among ordinary ones).

    ``huge_range`` spans the fp32 exponents down to subnormals, ``ties`` has three distinct values,
    ``some_zeros`` has about half zeros.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(size, generator=generator).square()
    other = torch.rand(size, generator=generator)
    match kind:
        case "normal":
            return normal
        case "huge_range":
            return torch.pow(10.0, other.double() * 82 - 44).float()
        case "ties":
            return (other * 3).floor() + 1
        case "zeros":
            return torch.zeros(size)
        case "some_zeros":
            return normal * (other < 0.5)
        case "nonfinite":
            bad = torch.tensor([torch.nan, torch.inf, -torch.inf])
            return torch.where(other < 0.7, normal, bad[(other * 997).long() % 3])


def ragged_counts(max_segments: int = 8, max_count: int = 40) -> "SearchStrategy[list[int]]":
    """Strategy: rows per segment, lists of 1 to ``max_segments`` ints, where 0 and 1 are frequent."""
    from hypothesis import strategies as st  # here, so that benchmarks run without hypothesis

    count = st.one_of(st.just(0), st.just(1), st.integers(0, max_count))
    return st.lists(count, min_size=1, max_size=max_segments)


def quotas(counts: Sequence[int], least: int = 1) -> "SearchStrategy[list[int]]":
    """Strategy: a quota for each count, from ``least`` (0 where the count is 0) to the count."""
    from hypothesis import strategies as st

    return st.tuples(*[st.integers(min(least, count), count) for count in counts]).map(list)


def score_tensors(size: int, kinds: Sequence[ScoreKind] = SCORE_KINDS) -> "SearchStrategy[torch.Tensor]":
    """Strategy: (size,) fp32 tensors of ``scores`` of the given kinds."""
    from hypothesis import strategies as st

    return st.builds(scores, st.sampled_from(kinds), st.just(size), st.integers(0, 2**31 - 1))


def _pick(size: int, generator: torch.Generator) -> int:
    return int(torch.randint(size, (), generator=generator))


def _draw(weight_E: torch.Tensor, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """(T, E) bool: top_k experts per token without replacement by weight, never one of weight zero."""
    # The largest of log-weight plus Gumbel noise are a draw without replacement. Clamped: rand may give 0.
    noise_TE = torch.rand(shape.num_tokens, shape.num_experts, generator=generator).clamp(1e-7, 1 - 1e-7)
    key_TE = weight_E.log() - (-noise_TE.log()).log()
    width = min(shape.top_k, int((weight_E > 0).sum()))
    return _map_of(key_TE.topk(width, dim=1).indices, shape)


def _map_of(expert_TK: torch.Tensor, shape: Shape) -> torch.Tensor:
    map_TE = torch.zeros(shape.num_tokens, shape.num_experts, dtype=torch.bool)
    return map_TE.scatter_(1, expert_TK, True)
