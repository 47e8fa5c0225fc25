"""Index maps against loops, and the expert Function and its flow on one rank, without Megatron."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe.compute.activation import Activation
from megatron_lrmoe.compute.compaction import (
    add_rows,
    compact_positions,
    pack_rows,
    rows_where,
    wire_of_expert_order,
)
from megatron_lrmoe.compute.experts import ExpertWeights, expert_mlp
from megatron_lrmoe.compute.flow import PairFlow
from megatron_lrmoe.compute.stage import Stage, phantom
from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.pairs import DrawKey
from megatron_lrmoe.recalibration.plan import KeepPlan
from megatron_lrmoe.reference import ReferenceLayer
from tests import cases, layers

pytestmark = pytest.mark.usefixtures("on_device")
CPU = torch.device("cpu")
TOKENS, EXPERTS, HIDDEN, WIDTH = 12, 4, 8, 6
count = st.one_of(st.just(0), st.just(1), st.integers(0, 12))


@st.composite
def loads(draw: Any) -> list[list[int]]:
    """Pairs of 1 to 4 sources for 1 to 5 experts."""
    experts = draw(st.integers(1, 5))
    return draw(st.lists(st.lists(count, min_size=experts, max_size=experts), min_size=1, max_size=4))


@given(loads())
def test_wire_of_expert_order(loads_Se: list[list[int]]) -> None:
    wire = [
        (source, expert, i)
        for source, loads_e in enumerate(loads_Se)
        for expert, load in enumerate(loads_e)
        for i in range(load)
    ]
    expert_order = sorted(wire, key=lambda row: (row[1], row[0], row[2]))
    wire_of_N = wire_of_expert_order(loads_Se, CPU)
    assert wire_of_N.dtype == torch.int64
    assert [wire[i] for i in wire_of_N.tolist()] == expert_order


masks = st.lists(st.booleans(), max_size=60)


@given(masks, st.randoms())
def test_rows_where_and_compact_positions(mask: list[bool], random: Any) -> None:
    mask_N = torch.tensor(mask, dtype=torch.bool)
    rows = [i for i, kept in enumerate(mask) if kept]
    found = rows_where(mask_N, len(rows))
    assert found.dtype == torch.int64 and found.tolist() == rows
    random.shuffle(rows)
    place_of = {row: place for place, row in enumerate(sorted(rows))}
    positions = compact_positions(mask_N, torch.tensor(rows, dtype=torch.int64))
    assert positions.tolist() == [place_of[row] for row in rows]


@given(st.integers(1, 9), st.lists(st.integers(0, 8), max_size=30), st.booleans(), st.integers(0, 2**31 - 1))
def test_adding_rows_is_the_transpose_of_packing_them(
    num_tokens: int, index: list[int], weighted: bool, seed: int
) -> None:
    index = [i % num_tokens for i in index]
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(num_tokens, 3, generator=generator, dtype=torch.float64)
    y_MD = torch.randn(len(index), 3, generator=generator, dtype=torch.float64)
    weight_M = torch.rand(len(index), generator=generator, dtype=torch.float64) if weighted else None
    factor = [1.0] * len(index) if weight_M is None else weight_M.tolist()
    index_M = torch.tensor(index, dtype=torch.int64)
    packed_MD, summed_TD = pack_rows(x_TD, index_M, weight_M), add_rows(y_MD, index_M, num_tokens)
    for m, t in enumerate(index):
        assert torch.equal(packed_MD[m], x_TD[t] * factor[m])
    expected_TD = torch.zeros_like(x_TD)
    for m, t in enumerate(index):
        expected_TD[t] += y_MD[m]
    torch.testing.assert_close(summed_TD, expected_TD)
    unweighted_MD = pack_rows(x_TD, index_M, None)
    torch.testing.assert_close((unweighted_MD * y_MD).sum(), (x_TD * summed_TD).sum())


def test_packing_rounds_a_weighted_row_once_and_leaves_its_source_alone() -> None:
    x_TD = torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)
    weight_M = torch.tensor([1 + 2**-8, 1.9], dtype=torch.float32)
    packed_MD = pack_rows(x_TD, torch.tensor([0, 0]), weight_M)
    exact = x_TD.float() * weight_M[:, None]
    assert packed_MD.dtype == torch.bfloat16 and torch.equal(packed_MD, exact.to(torch.bfloat16))
    same_type = torch.ones(2, 2)
    assert (pack_rows(same_type, torch.tensor([1]), torch.tensor([5.0])) == 5).all() and (same_type == 1).all()


def storage_bytes(x: torch.Tensor) -> int:
    return x.untyped_storage().nbytes()


def test_phantom_is_one_zero_through_every_change_of_shape() -> None:
    ghost = phantom(torch.Size([6, 4]), torch.bfloat16, CPU)
    assert ghost.shape == (6, 4) and ghost.dtype == torch.bfloat16
    for x in (ghost, ghost.view(2, 3, 4), ghost.reshape(24), ghost.transpose(0, 1), ghost.unsqueeze(1)):
        assert storage_bytes(x) == 2 and not x.any()
    assert phantom(torch.Size([0, 4]), torch.float32, CPU).shape == (0, 4)


def test_stages_hand_autograd_phantoms_that_stay_unmade_through_views() -> None:
    arrived: list[torch.Tensor] = []

    def first_back(grad: torch.Tensor) -> tuple[torch.Tensor]:
        arrived.append(grad)
        return (torch.full((6, 4), 3.0),)

    x = torch.ones(6, 4, requires_grad=True)
    y = Stage.apply(lambda x: x + 1, first_back, x)
    y = y.view(2, 3, 4).reshape(6, 2, 2).transpose(1, 2).transpose(1, 2).reshape(6, 4)
    z = Stage.apply(lambda y: y * 1, lambda grad: (None,), y)
    z.sum().backward()
    assert arrived[0].shape == (6, 4) and storage_bytes(arrived[0]) == 4
    assert (x.grad == 3).all()


def test_a_stage_returns_nothing_for_inputs_that_need_no_gradient() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.ones(2)
    out = Stage.apply(lambda x, y: x.sum() + y.sum(), lambda grad: (torch.full((3,), 2.0), None), x, y)
    out.backward()
    assert (x.grad == 2).all() and y.grad is None


@dataclass
class Problem:
    """One rank's layer, whose parameters and inputs are leaves.

    Args:
        x_TD, probs_TE, g_TD, map_TE: tokens, probabilities, output gradient, routing.
        fc1, fc2: one parameter per expert.
        flow: settled for this routing.
    """

    x_TD: torch.Tensor
    probs_TE: torch.Tensor
    g_TD: torch.Tensor
    map_TE: torch.Tensor
    fc1: list[torch.nn.Parameter]
    fc2: list[torch.nn.Parameter]
    flow: PairFlow


def problem(retention: float = 0.5, dtype: torch.dtype = torch.float64, **lrm: Any) -> Problem:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    routing = cases.route("ragged", TOKENS, EXPERTS, top_k=2)
    config = LrmConfig(retention=retention, **lrm)
    plan = KeepPlan(
        config=config,
        key=DrawKey(seed=0, iteration=0, microbatch=0, layer=1),
        retention=Fraction(repr(retention)),
        loads_SE=[routing.map_TE.sum(0).tolist()],
        rank=0,
    )
    flow = PairFlow(None)  # type: ignore[arg-type]  # a single rank exchanges nothing
    flow.settle(plan, routing.map_TE)
    return Problem(
        x_TD=normal(TOKENS, HIDDEN).requires_grad_(),
        probs_TE=routing.probs_TE.to(torch.promote_types(dtype, torch.float32)).requires_grad_(),
        g_TD=normal(TOKENS, HIDDEN),
        map_TE=routing.map_TE,
        fc1=[torch.nn.Parameter(normal(2 * WIDTH, HIDDEN)) for _ in range(EXPERTS)],
        fc2=[torch.nn.Parameter(normal(HIDDEN, WIDTH)) for _ in range(EXPERTS)],
        flow=flow,
    )


SWIGLU = Activation(F.silu, gated=True)


def dispatched(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and weights as the experts get them."""
    flow = p.flow
    x_PD, alpha_P = Stage.apply(
        lambda x, probs: (x[flow.token_P], probs[flow.token_P, flow.expert_P]),
        flow.permute_backward,
        p.x_TD,
        p.probs_TE,
    )
    x_ND, alpha_N = Stage.apply(lambda x, a: (x.clone(), a.clone()), flow.sort_backward, x_PD, alpha_P)
    return x_ND, alpha_N


def forward(p: Problem, fuse: bool = False, backend: str = "loop") -> torch.Tensor:
    """The layer's stages as the dispatcher strings them together; on one rank nothing is sent."""
    flow = p.flow
    x_ND, alpha_N = dispatched(p)
    y_ND = expert_mlp(x_ND, alpha_N, ExpertWeights(p.fc1, p.fc2, fuse), SWIGLU, flow, backend)
    flow.share_norms()
    y_PD = Stage.apply(torch.clone, flow.unsort_backward, y_ND)
    return Stage.apply(lambda y: add_rows(y, flow.token_P, TOKENS), flow.unpermute_backward, y_PD)


def expected(p: Problem) -> dict[str, torch.Tensor]:
    """The reference's gradients for the pairs that the flow chooses."""
    flow = p.flow
    flow._reset()
    with torch.no_grad():
        flow._select(p.g_TD, flow.token_P)
    weight_TE = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64)
    rows_M = flow.sent.rows_M
    weight_TE[flow.token_P[rows_M], flow.expert_P[rows_M]] = flow.sent.weight_M.double()
    fc1, fc2 = (torch.stack([w.detach().double() for w in weights]) for weights in (p.fc1, p.fc2))
    reference = ReferenceLayer(fc1, fc2, layers.ACTIVATIONS["swiglu"])
    x_TD, probs_TE, g_TD = p.x_TD.detach().double(), p.probs_TE.detach().double(), p.g_TD.double()
    got = reference.backward(x_TD, probs_TE, g_TD, weight_TE)
    return {"x": got.dx_TD, "probs": got.dprobs_TE, "fc1": got.dfc1, "fc2": got.dfc2}


def assert_gradients(p: Problem, without: set[str] = frozenset(), tolerance: float = 1e-10) -> None:
    exact = expected(p)
    found = {
        "x": p.x_TD.grad,
        "probs": p.probs_TE.grad,
        "fc1": [w.grad for w in p.fc1],
        "fc2": [w.grad for w in p.fc2],
    }
    for name, gradient in found.items():
        if name in without:
            assert gradient is None or gradient == [None] * EXPERTS, name
        else:
            gradient = torch.stack(gradient) if isinstance(gradient, list) else gradient
            scale = exact[name].abs().max()
            torch.testing.assert_close(gradient.double() / scale, exact[name] / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("scope", ["expert", "source"])
@pytest.mark.parametrize("selection", ["topk", "unbiased"])
def test_the_flow_gives_the_references_gradients(scope: str, selection: str) -> None:
    p = problem(scope=scope, selection=selection)
    forward(p).backward(p.g_TD)
    assert_gradients(p)


def test_grouped_gemm_gives_the_references_gradients() -> None:
    p = problem(dtype=torch.float32, selection="topk")
    # Rows of multiples of 16 bytes: WIDTH is 6.
    p.fc1 = [torch.nn.Parameter(w.detach()[:8].clone()) for w in p.fc1]
    p.fc2 = [torch.nn.Parameter(w.detach()[:, :4].clone()) for w in p.fc2]
    forward(p, backend="grouped").backward(p.g_TD)
    assert_gradients(p, tolerance=1e-5)


def test_backward_can_run_twice_over_one_graph() -> None:
    p = problem()
    out = forward(p)
    out.backward(p.g_TD, retain_graph=True)
    once = p.x_TD.grad.clone()
    out.backward(p.g_TD)
    torch.testing.assert_close(p.x_TD.grad, 2 * once)


def test_two_calls_in_flight_do_not_share_anything() -> None:
    first, second = problem(selection="topk"), problem(selection="topk")
    second.fc1, second.fc2 = first.fc1, first.fc2
    with torch.no_grad():
        second.x_TD += 1
    outs = [forward(first), forward(second)]
    outs[0].backward(first.g_TD)
    shared = [w.grad.clone() for w in first.fc1]
    outs[1].backward(second.g_TD)
    exact = [expected(first), expected(second)]
    for e, weight in enumerate(first.fc1):
        torch.testing.assert_close(shared[e], exact[0]["fc1"][e])
        torch.testing.assert_close(weight.grad, exact[0]["fc1"][e] + exact[1]["fc1"][e])
    torch.testing.assert_close(second.x_TD.grad, exact[1]["x"])


@pytest.mark.parametrize(
    "frozen",
    [{"x"}, {"probs"}, {"x", "probs"}, {"fc1"}, {"fc2"}, {"fc1", "fc2"}, {"fc1", "fc2", "x"}, {"fc1", "fc2", "probs"}],
    ids=lambda names: "+".join(sorted(names)),
)
def test_what_needs_no_gradient_gets_none(frozen: set[str]) -> None:
    p = problem()
    for name, tensors in (("x", [p.x_TD]), ("probs", [p.probs_TE]), ("fc1", p.fc1), ("fc2", p.fc2)):
        for tensor in tensors:
            tensor.requires_grad_(name not in frozen)
    forward(p).backward(p.g_TD)
    assert_gradients(p, without=frozen)


def test_nothing_needs_a_gradient() -> None:
    p = problem()
    for tensor in (p.x_TD, p.probs_TE, *p.fc1, *p.fc2):
        tensor.requires_grad_(False)
    assert not forward(p).requires_grad


def give_main_grads(weights: list[torch.nn.Parameter], value: float) -> None:
    for weight in weights:
        weight.main_grad = torch.full_like(weight, value)
        weight.grad_added_to_main_grad = False


@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_with_fusion_weight_gradients_are_added_to_main_grad(backend: str) -> None:
    """Twice, so that what is there already stays; autograd gets a stand-in of the right shape."""
    p = problem(dtype=torch.float32, selection="topk")
    p.fc1 = [torch.nn.Parameter(w.detach()[:8].clone()) for w in p.fc1]
    p.fc2 = [torch.nn.Parameter(w.detach()[:, :4].clone()) for w in p.fc2]
    give_main_grads(p.fc1 + p.fc2, 7.0)
    for _ in range(2):
        forward(p, fuse=True, backend=backend).backward(p.g_TD)
    exact = expected(p)
    for name, weights in (("fc1", p.fc1), ("fc2", p.fc2)):
        for e, weight in enumerate(weights):
            assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
            torch.testing.assert_close(weight.main_grad.double(), 7 + 2 * exact[name][e], rtol=1e-5, atol=1e-4)


def test_with_fusion_main_grad_may_be_wider_than_the_weights() -> None:
    p = problem(dtype=torch.bfloat16, selection="topk")
    for weight in p.fc1 + p.fc2:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    forward(p, fuse=True).backward(p.g_TD)
    exact = expected(p)
    got = torch.stack([w.main_grad for w in p.fc2]).double()
    torch.testing.assert_close(
        got / exact["fc2"].abs().max(), exact["fc2"] / exact["fc2"].abs().max(), rtol=0, atol=3e-2
    )


@pytest.mark.parametrize("frozen", ["fc1", "fc2"])
def test_with_fusion_a_frozen_weight_is_left_alone(frozen: str) -> None:
    """Megatron's DDP gives a frozen weight no main_grad."""
    p = problem(selection="topk")
    still, moving = (p.fc1, p.fc2) if frozen == "fc1" else (p.fc2, p.fc1)
    for weight in still:
        weight.requires_grad_(False)
    give_main_grads(moving, 0.0)
    forward(p, fuse=True).backward(p.g_TD)
    exact = expected(p)["fc2" if frozen == "fc1" else "fc1"]
    assert all(weight.grad is None and not hasattr(weight, "main_grad") for weight in still)
    for e, weight in enumerate(moving):
        torch.testing.assert_close(weight.main_grad, exact[e])


def test_experts_that_are_not_ours_get_ordinary_dense_gradients() -> None:
    """Without attach_experts the flow keeps everything with weight 1, whatever the retention."""
    p = problem()
    flow = p.flow
    x_ND, alpha_N = dispatched(p)
    flow.share_norms()
    y_PD = Stage.apply(torch.clone, flow.unsort_backward, torch.tanh(x_ND) * alpha_N[:, None])
    out = Stage.apply(lambda y: add_rows(y, flow.token_P, TOKENS), flow.unpermute_backward, y_PD)
    out.backward(p.g_TD)
    x, probs = p.x_TD.detach().requires_grad_(), p.probs_TE.detach().requires_grad_()
    dense = torch.tanh(x) * (probs * p.map_TE).sum(1, keepdim=True)
    for got, exact in zip((p.x_TD.grad, p.probs_TE.grad), torch.autograd.grad(dense, (x, probs), p.g_TD), strict=True):
        torch.testing.assert_close(got, exact)


def test_a_stage_out_of_turn_is_an_error() -> None:
    flow = problem().flow
    with pytest.raises(RuntimeError, match="ran before the stage that feeds it"):
        flow.take_kept_gradient(torch.zeros(()))
