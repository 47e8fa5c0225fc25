"""What backward really computes, sends and allocates: kept rows and nothing else."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import layers
from tests.gloo import Pool
from tests.layers import HIDDEN, WIDTH, Case

pytestmark = pytest.mark.dist

Kind = Literal["ours", "stock", "stock experts"]
FC1_WIDTH = 2 * WIDTH


@dataclass(frozen=True)
class Allocation:
    """A tensor whose storage an operation made: its shape, and how much of it is really there."""

    operation: str
    shape: tuple[int, ...]
    floating: bool
    bytes: int


@dataclass(frozen=True)
class Exchange:
    """One all-to-all: rows to and from each rank, and the width of a row."""

    send: list[int]
    receive: list[int]
    width: int


@dataclass(frozen=True)
class Observed:
    """Everything that happened in one backward."""

    gemms: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)
    group_ends: list[list[int]] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    collectives: Counter[str] = field(default_factory=Counter)
    allocations: list[Allocation] = field(default_factory=list)


class Watch(TorchDispatchMode):
    """Below autograd, every operation passes here, whoever calls it."""

    def __init__(self, seen: Observed) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        owned = {x.untyped_storage().data_ptr() for x in inputs}
        name = func.overloadpacket._qualified_op_name
        if name.startswith("c10d::"):
            self._exchange(name, args)
        result = func(*args, **kwargs)
        if "mm" in name.removeprefix("aten::").split("_"):
            self.seen.gemms.append(tuple(tuple(x.shape) for x in inputs if x.dim() >= 2)[:2])
            if name == "aten::_grouped_mm":
                self.seen.group_ends.append(args[2].tolist())
        elif name.removeprefix("aten::") in ("bmm", "addmm", "baddbmm", "addbmm", "mv", "dot"):
            self.seen.gemms.append(tuple(tuple(x.shape) for x in inputs[:2]))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in owned | {0}:
                size = x.untyped_storage().nbytes()
                self.seen.allocations.append(Allocation(name, tuple(x.shape), x.is_floating_point(), size))
        return result

    def _exchange(self, name: str, args: Any) -> None:
        self.seen.collectives[name] += 1
        if name == "c10d::alltoall_base_":
            output, rows, _, receive, send = args[:5]
            assert sum(send) == rows.shape[0] and sum(receive) == output.shape[0]
            self.seen.exchanges.append(Exchange(list(send), list(receive), math.prod(rows.shape[1:])))


@contextmanager
def watching_backward(seen: Observed) -> Iterator[None]:
    with Watch(seen):
        yield


def backward(case: Case, kind: Kind) -> tuple[Observed, layers.Result]:
    """One backward of our layer, of Megatron's, or of our dispatcher around Megatron's experts."""
    layer = layers.build(case, ours=kind != "stock")
    if kind == "stock experts":
        from megatron.core.transformer.moe.experts import SequentialMLP

        layer.experts.__class__ = SequentialMLP
    seen = Observed()
    result = layers.forward_backward(layer, case, watching_backward(seen))
    return seen, result


def backwards(cases: list[Case], kind: Kind = "ours") -> list[tuple[Observed, layers.Result]]:
    return [backward(case, kind) for case in cases]


# Retention 0.4 and top-3: no kept count is a simple fraction of a routed one, so sizes cannot coincide.
CASES = [
    Case(
        num_tokens=31,
        top_k=3,
        dtype=torch.float32,
        expert_parallel=ep,
        lrm={"retention": 0.4, "scope": scope, "gemm": gemm, "selection": how},
    )
    for ep, scope, gemm, how in itertools.product(
        (1, 2), ("expert", "source"), ("loop", "grouped"), ("unbiased", "topk")
    )
]
CASES += [replace(case, lrm={**case.lrm, "when": "forward"}) for case in CASES if case.lrm["selection"] == "unbiased"]


@dataclass(frozen=True)
class Numbers:
    """What one rank may and may not touch, counted from the kept pairs of all ranks.

    Args:
        tokens, routed, held: T, P and N.
        sent: kept pairs of its tokens, by owner.
        kept_from: kept pairs of its experts, by source.
        kept_e: kept pairs of each of its experts.
    """

    tokens: int
    routed: int
    held: int
    routed_to: list[int]
    held_from: list[int]
    sent: list[int]
    kept_from: list[int]
    kept_e: list[int]


def count(results: list[layers.Result], rank: int) -> Numbers:
    def pairs(map_TE: torch.Tensor, experts: range) -> int:
        return int(map_TE[:, experts.start : experts.stop].sum())

    own = results[rank].experts
    kept = [r.kept_TE > 0 for r in results]
    return Numbers(
        tokens=results[rank].map_TE.shape[0],
        routed=int(results[rank].map_TE.sum()),
        held=sum(pairs(r.map_TE, own) for r in results),
        routed_to=[pairs(results[rank].map_TE, r.experts) for r in results],
        held_from=[pairs(r.map_TE, own) for r in results],
        sent=[pairs(kept[rank], r.experts) for r in results],
        kept_from=[pairs(k, own) for k in kept],
        kept_e=[sum(pairs(k, range(e, e + 1)) for k in kept) for e in own],
    )


def dense(allocations: list[Allocation], numbers: Numbers) -> list[Allocation]:
    """Floating tensors of all routed rows with two or more columns, in any layout, that occupy memory."""
    rows = {numbers.routed, numbers.held}
    widths = (HIDDEN, WIDTH, FC1_WIDTH)
    return [
        a
        for a in allocations
        if a.floating
        and a.bytes >= 4 * math.prod(a.shape)
        and (
            any(size in rows and math.prod(a.shape) >= 2 * size for size in a.shape)
            or any(math.prod(a.shape) == size * width for size in rows for width in widths)
        )
    ]


def by_case(
    gloo2: Pool, chosen: list[Case], kind: Kind = "ours"
) -> Iterator[tuple[Case, list[Observed], list[Numbers]]]:
    """What each rank of the group did in each case, and the numbers to compare it with."""
    ranks = gloo2(backwards, chosen, kind)
    for i, case in enumerate(chosen):
        group = [rank[i] for rank in ranks[: case.expert_parallel]]
        results = [result for _, result in group]
        yield case, [seen for seen, _ in group], [count(results, r) for r in range(len(results))]


def test_every_gemm_of_backward_has_kept_rows(gloo2: Pool) -> None:
    """Four a expert with the loop, in the kept pairs of that expert; four in all with grouped GEMM."""
    for case, seen, numbers in by_case(gloo2, CASES):
        for did, n in zip(seen, numbers, strict=True):
            if case.lrm["gemm"] == "loop":
                expected = [shapes for m in n.kept_e for shapes in gemms_of_expert(m)]
                assert Counter(did.gemms) == Counter(expected), case
            else:
                assert did.group_ends == [list(itertools.accumulate(n.kept_e))] * 4, case
                assert len(did.gemms) == 4 and all(sum(n.kept_e) in shapes[0] for shapes in did.gemms), case


def gemms_of_expert(m: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [
        ((m, HIDDEN), (HIDDEN, WIDTH)),  # gradient of fc2's input
        ((HIDDEN, m), (m, WIDTH)),  # fc2's weight gradient
        ((FC1_WIDTH, m), (m, HIDDEN)),  # fc1's weight gradient
        ((m, FC1_WIDTH), (FC1_WIDTH, HIDDEN)),  # dX
    ]


def test_every_wide_exchange_of_backward_carries_kept_rows(gloo2: Pool) -> None:
    """Gradient rows, dX rows and dalpha; besides them only one scalar a pair to choose by, none if chosen before."""
    chosen = [case for case in CASES if case.expert_parallel == 2]
    for case, seen, numbers in by_case(gloo2, chosen):
        for did, n in zip(seen, numbers, strict=True):
            to_owners = Exchange(n.routed_to, n.held_from, 1)
            to_sources = Exchange(n.held_from, n.routed_to, 1)
            choosing = [to_owners, to_sources] if case.lrm["scope"] == "expert" else [to_owners]
            if "when" in case.lrm:
                choosing = []
            kept = [
                Exchange(n.sent, n.kept_from, HIDDEN),  # g rows
                Exchange(n.kept_from, n.sent, HIDDEN),  # dX rows
                Exchange(n.kept_from, n.sent, 1),  # dalpha
            ]
            assert did.exchanges == choosing + kept, case
            assert sum(did.collectives.values()) == len(did.exchanges), case


def test_alone_no_rank_exchanges_anything_in_backward(gloo2: Pool) -> None:
    for _, seen, _ in by_case(gloo2, [case for case in CASES if case.expert_parallel == 1]):
        assert [did.collectives for did in seen] == [Counter()] * len(seen)


def test_backward_allocates_no_tensor_of_all_routed_rows(gloo2: Pool) -> None:
    for case, seen, numbers in by_case(gloo2, CASES):
        for did, n in zip(seen, numbers, strict=True):
            lawful = {n.tokens, sum(n.sent), sum(n.kept_e), HIDDEN, WIDTH, FC1_WIDTH, case.num_experts}
            assert not {n.routed, n.held} & lawful, (case, n)
            assert did.allocations and dense(did.allocations, n) == [], case


@pytest.mark.parametrize("kind", ["stock", "stock experts"])
def test_the_allocation_hook_finds_a_dense_backward(gloo2: Pool, kind: Kind) -> None:
    """Megatron's own backward, and our dispatcher's when the experts are not ours."""
    chosen = [case for case in CASES if case.lrm["gemm"] == "loop" and case.lrm["selection"] == "topk"]
    ours = list(by_case(gloo2, chosen))
    for (case, _, numbers), per_case in zip(ours, zip(*gloo2(backwards, chosen, kind), strict=True), strict=True):
        for (did, _), n in zip(per_case, numbers, strict=False):
            assert dense(did.allocations, n), case
            assert not any(sum(n.kept_e) in shape for shapes in did.gemms for shape in shapes), case
