"""The real layer's gradients on gloo, against the reference for the pairs it kept."""

import itertools
from dataclasses import replace

import pytest
import torch

from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.recalibration.quota import proportional_quota
from megatron_lrmoe.reference import ReferenceLayer, keep_best, stack_sources
from tests import layers
from tests.gloo import Pool
from tests.layers import Case

pytestmark = pytest.mark.dist

CASES = [
    Case(workload=workload, top_k=top_k, expert_parallel=ep, lrm={"scope": scope, "selection": selection})
    for workload, top_k, ep, scope, selection in itertools.product(
        ("ragged", "empty_rank", "one_token", "zipf"), (1, 2), (1, 2), ("expert", "source"), ("unbiased", "topk")
    )
    if not (workload == "empty_rank" and ep == 1)
]
TOP_8 = Case(num_tokens=12, num_experts=16, top_k=8)
BOTH_SCOPES = [
    Case(lrm=lrm, **fields)
    for scope in ("expert", "source")
    for lrm, fields in (
        ({"scope": scope}, {"zero_gradient": True}),
        ({"scope": scope, "selection": "topk"}, {"zero_gradient": True}),
        ({"scope": scope}, {"nan_gradient": True}),
        ({"scope": scope, "selection": "topk"}, {"nan_gradient": True}),
        ({"scope": scope, "min_rows": 5}, {}),
        ({"scope": scope, "max_weight": 2.0, "retention": 0.6}, {}),
        ({"scope": scope, "score": "grad-sq"}, {}),
        ({"scope": scope, "score": "grad-abs"}, {}),
        ({"scope": scope, "score": "random"}, {}),
        ({"scope": scope, "score": "random", "selection": "topk"}, {}),
        ({"scope": scope, "retention": 0.01}, {}),
    )
]
MORE_CASES = [
    *(
        replace(TOP_8, expert_parallel=ep, lrm={"scope": scope, "selection": selection})
        for ep, scope, selection in itertools.product((1, 2), ("expert", "source"), ("unbiased", "topk"))
    ),
    *BOTH_SCOPES,
    *(Case(activation=name) for name in ("geglu", "gelu", "squared_relu", "clamped_quick_geglu", "relu")),
    Case(config={"bias_activation_fusion": True}),
    Case(num_experts=2, top_k=1),
]
GROUPED_CASES = [
    replace(case, lrm={**case.lrm, "gemm": "grouped"})
    for case in (
        Case(),
        Case(workload="empty_rank", lrm={"scope": "source"}),
        Case(workload="one_token", expert_parallel=1),
        replace(TOP_8, lrm={"selection": "topk"}),
        Case(activation="squared_relu"),
    )
]


def check(case: Case, results: list[layers.Result], tolerance: float) -> None:
    """Compare every gradient of one expert-parallel group with the reference for the same kept pairs."""
    parts = [layers.settle(case, rank) for rank in range(len(results))]
    whole = {name: stack_sources([part[name] for part in parts]) for name in ("x_TD", "g_TD", "map_TE", "probs_TE")}
    kept_TE = stack_sources([result.kept_TE for result in results])
    reference = ReferenceLayer(parts[0]["fc1"], parts[0]["fc2"], layers.ACTIVATIONS[case.activation])
    out_TD = reference.forward(whole["x_TD"], whole["probs_TE"], whole["map_TE"])
    grads = reference.backward(whole["x_TD"], whole["probs_TE"], whole["g_TD"], kept_TE)

    def same(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        scale = expected.nan_to_num().abs().max().clamp_min(1e-30)
        torch.testing.assert_close(
            got.double() / scale, expected / scale, rtol=0, atol=tolerance, equal_nan=True, msg=lambda m: f"{name}: {m}"
        )

    same("output", stack_sources([r.out_TD for r in results]), out_TD)
    same("dX", stack_sources([r.dx_TD for r in results]), grads.dx_TD)
    same("dprobs", stack_sources([r.dprobs_TE for r in results]), grads.dprobs_TE)
    for result in results:
        own = slice(result.experts.start, result.experts.stop)
        same("dfc1", result.dfc1, grads.dfc1[own])
        same("dfc2", result.dfc2, grads.dfc2[own])
    check_kept(case, kept_TE, whole["map_TE"])


def check_kept(case: Case, kept_TE: torch.Tensor, map_TE: torch.Tensor) -> None:
    """Exactly the quota of each expert is kept, only what was routed, with weights of 1 or of 1/probability."""
    config = LrmConfig(**{"retention": 0.5, **case.lrm})
    quota = proportional_quota(map_TE.sum(0).tolist(), config.retention_fraction, config.min_rows)
    assert (kept_TE > 0).sum(0).tolist() == quota
    assert not ((kept_TE > 0) & ~map_TE).any()
    least = kept_TE[kept_TE > 0].min()
    assert least == 1 if config.selection == "topk" else least >= 1


def check_all(gloo2: Pool, chosen: list[Case], tolerance: float) -> None:
    ranks = gloo2(layers.run_all, chosen, limit_s=120)
    for i, case in enumerate(chosen):
        results = [rank[i] for rank in ranks]
        try:
            check(case, results[: case.expert_parallel], tolerance)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
def test_every_gradient_equals_the_reference_for_the_kept_pairs(
    gloo2: Pool, dtype: torch.dtype, tolerance: float
) -> None:
    check_all(gloo2, [replace(case, dtype=dtype) for case in CASES + MORE_CASES], tolerance)


def test_grouped_gemm_equals_the_reference(gloo2: Pool) -> None:
    check_all(gloo2, [replace(case, dtype=torch.float32) for case in GROUPED_CASES], 1e-5)


def test_nan_in_the_gradient_is_kept_and_reaches_the_weights(gloo2: Pool) -> None:
    """Megatron checks gradients for NaN; dropping the pairs that bring it would hide it."""
    chosen = [Case(nan_gradient=True, lrm={"scope": scope}) for scope in ("expert", "source")]
    for results in zip(*gloo2(layers.run_all, chosen), strict=True):
        for result in results:
            assert (result.kept_TE[-1] > 0).any()
            assert result.dx_TD[-1].isnan().any() and not result.dx_TD[:-1].isnan().any()
        assert torch.cat([result.dfc2 for result in results]).isnan().any()


def test_topk_keeps_the_pairs_with_the_largest_weight_gradient(gloo2: Pool) -> None:
    """In scope 'expert', over all sources: the reference's own scores and rule choose the same pairs."""
    case = Case(lrm={"selection": "topk", "scope": "expert"})
    results = gloo2(layers.run, case)
    parts = [layers.settle(case, rank) for rank in range(2)]
    x_TD, g_TD, map_TE, probs_TE = (
        stack_sources([part[name] for part in parts]) for name in ("x_TD", "g_TD", "map_TE", "probs_TE")
    )
    reference = ReferenceLayer(parts[0]["fc1"], parts[0]["fc2"], layers.ACTIVATIONS["swiglu"])
    score_TE = reference.scores(x_TD, probs_TE, map_TE, g_TD)
    expected = keep_best(score_TE, map_TE, LrmConfig(retention=0.5).retention_fraction)
    assert torch.equal(stack_sources([r.kept_TE for r in results]) > 0, expected)


@pytest.mark.parametrize("scope", ["expert", "source"])
def test_a_rank_without_tokens_takes_part(gloo2: Pool, scope: str) -> None:
    case = Case(lrm={"scope": scope})
    per_token = {name: layers.settle(case, 1)[name] for name in ("x_TD", "g_TD", "map_TE", "probs_TE")}
    case = replace(case, given=[{}, {name: value[:0] for name, value in per_token.items()}])
    check(case, gloo2(layers.run, case), 1e-10)
