"""Where nothing is dropped, the layer is Megatron's own, bit for bit; where something is, its forward still is."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests import layers
from tests.gloo import Pool
from tests.layers import Case

pytestmark = pytest.mark.dist

FP32 = [
    Case(dtype=torch.float32, expert_parallel=ep, workload=workload, lrm={"scope": scope})
    for ep, workload, scope in itertools.product((1, 2), ("ragged", "zipf"), ("expert", "source"))
]


def run_pairs(cases: list[Case]) -> list[tuple[layers.Result, layers.Result]]:
    """Megatron's layer and ours, for each case."""
    return [layers.run_both(case) for case in cases]


def pairs(gloo2: Pool, cases: list[Case]) -> list[tuple[Case, layers.Result, layers.Result]]:
    ranks = gloo2(run_pairs, cases)
    return [(case, *both) for rank in ranks for case, both in zip(cases, rank, strict=True)]


def test_before_the_start_iteration_every_bit_is_megatrons(gloo2: Pool) -> None:
    cases = [replace(case, lrm={**case.lrm, "start_iter": 5}, iteration=4) for case in FP32]
    for case, stock, ours in pairs(gloo2, cases):
        assert ours.plan is None
        assert torch.equal(ours.out_TD, stock.out_TD), case
        for name, gradient in stock.gradients.items():
            assert torch.equal(ours.gradients[name], gradient), (name, case)


def test_at_the_start_iteration_backward_work_is_dropped(gloo2: Pool) -> None:
    cases = [replace(case, lrm={**case.lrm, "start_iter": 5}, iteration=5) for case in FP32]
    for _, stock, ours in pairs(gloo2, cases):
        assert ours.plan is not None
        assert (ours.kept_TE > 0).sum() < ours.map_TE.sum()
        assert not torch.equal(ours.dx_TD, stock.dx_TD)


def test_on_a_layer_that_is_not_chosen_every_bit_is_megatrons(gloo2: Pool) -> None:
    cases = [replace(case, lrm={**case.lrm, "layers": "2-3"}) for case in FP32[::3]]
    for _, stock, ours in pairs(gloo2, cases):
        assert ours.plan is None
        assert all(torch.equal(ours.gradients[name], gradient) for name, gradient in stock.gradients.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_while_work_is_dropped_forward_is_megatrons_bit_for_bit(gloo2: Pool, dtype: torch.dtype) -> None:
    cases = [replace(case, dtype=dtype, lrm={**case.lrm, "gemm": "loop"}) for case in FP32]
    cases += [Case(dtype=dtype, activation=name) for name in ("geglu", "gelu", "squared_relu", "clamped_quick_geglu")]
    cases += [Case(dtype=dtype, megatron_router=True)]  # probabilities in the tokens' type
    for case, stock, ours in pairs(gloo2, cases):
        assert ours.plan is not None and ours.out_TD.dtype == dtype
        assert torch.equal(ours.out_TD, stock.out_TD), case


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_grouped_gemm_and_fused_activation_change_forward_by_rounding_only(
    gloo2: Pool, dtype: torch.dtype, tolerance: float
) -> None:
    cases = [replace(case, dtype=dtype, lrm={**case.lrm, "gemm": "grouped"}) for case in FP32]
    cases += [Case(dtype=dtype, config={"bias_activation_fusion": True})]
    for case, stock, ours in pairs(gloo2, cases):
        close(ours.out_TD, stock.out_TD, tolerance, case)


@pytest.mark.parametrize("gemm", ["loop", "grouped"])
def test_at_retention_one_the_compacted_path_gives_megatrons_gradients(gloo2: Pool, gemm: str) -> None:
    settings = {"retention": 1.0, "gemm": gemm}
    cases = [replace(case, lrm={**case.lrm, **settings}, always_compact=True) for case in FP32]
    cases += [
        Case(dtype=torch.float32, always_compact=True, lrm=settings | {"selection": "topk"}, activation=name)
        for name in ("geglu", "gelu", "squared_relu", "clamped_quick_geglu")
    ]
    for case, stock, ours in pairs(gloo2, cases):
        assert torch.equal(ours.kept_TE > 0, ours.map_TE)
        for name, gradient in stock.gradients.items():
            close(ours.gradients[name], gradient, 1e-6, (name, case))


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float, what: object) -> None:
    assert got.dtype == expected.dtype
    difference = (got.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert difference <= tolerance, (what, float(difference))


def without_training(case: Case, how: str, ours: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor] | None]:
    """Output under ``eval()`` or ``no_grad()``; with its gradients where there are any."""
    layer = layers.build(case, ours)
    if how == "no_grad":
        x, _ = layers.leaves(layer, case)
        with torch.no_grad():
            return layer(x)[0], None
    result = layers.forward_backward(layer.eval(), case)
    assert result.plan is None
    return result.out_TD, result.gradients


def all_without_training(cases: list[Case], how: str) -> list[tuple]:
    return [(without_training(case, how, False), without_training(case, how, True)) for case in cases]


@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_without_training_every_bit_is_megatrons(gloo2: Pool, how: str) -> None:
    for results in gloo2(all_without_training, FP32, how):
        for (stock_out, stock), (our_out, ours) in results:
            assert torch.equal(our_out, stock_out)
            assert (stock is None) == (how == "no_grad")
            for name, gradient in (stock or {}).items():
                assert torch.equal(ours[name], gradient), name


def class_names(case: Case, ours: bool) -> tuple[list[str], list[str]]:
    """Classes of the layer's parts, and the names of its parameters and sharded keys."""
    layer = layers.build(case, ours)
    parts = [type(part).__name__ for part in (layer, layer.token_dispatcher, layer.experts)]
    names = [name for name, _ in layer.named_parameters()] + sorted(layer.sharded_state_dict(prefix="mlp."))
    return parts, names


def test_without_settings_the_layer_is_megatrons_and_with_them_parameters_keep_their_names(gloo2: Pool) -> None:
    stock, ours = gloo2(class_names, Case(), False)[0], gloo2(class_names, Case(), True)[0]
    assert stock[0] == ["MoELayer", "MoEAlltoAllTokenDispatcher", "SequentialMLP"]
    assert ours[0] == ["LRMoELayer", "LRMAlltoAllTokenDispatcher", "LRMSequentialMLP"]
    assert stock[1] == ours[1] and stock[1]


def through_the_dispatcher(case: Case, ours: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and gradients of tokens and probabilities with a plain function where the experts would be."""
    layer = layers.build(case, ours)
    x, g_TD = layers.leaves(layer, case)
    probs_TE, map_TE = layer.router.answer
    dispatcher = layer.token_dispatcher
    rows, alpha = layer.preprocess(x, probs_TE, map_TE)
    rows, alpha = dispatcher.token_dispatch(rows, alpha)
    rows, _, alpha = dispatcher.dispatch_postprocess(rows, alpha)
    rows = dispatcher.combine_preprocess(torch.tanh(rows) * alpha.unsqueeze(-1))
    out = dispatcher.combine_postprocess(dispatcher.token_combine(rows))
    out.backward(g_TD.view_as(out))
    return out.detach(), x.grad, probs_TE.grad


def all_through_the_dispatcher(cases: list[Case], ours: bool) -> list[tuple[torch.Tensor, ...]]:
    return [through_the_dispatcher(case, ours) for case in cases]


def test_experts_that_are_not_ours_get_megatrons_dense_gradients(gloo2: Pool) -> None:
    """Our dispatcher sends every row back with weight 1 when nobody compacts in between."""
    cases = [replace(case, dtype=torch.float64) for case in FP32]
    ranks = zip(
        gloo2(all_through_the_dispatcher, cases, False), gloo2(all_through_the_dispatcher, cases, True), strict=True
    )
    for stock, ours in ranks:
        for expected, got in zip(stock, ours, strict=True):
            assert torch.equal(got[0], expected[0])
            for gradient, exact in zip(got[1:], expected[1:], strict=True):
                torch.testing.assert_close(gradient, exact, rtol=1e-12, atol=1e-12)
