"""The slow reference itself, against autograd over the whole layer and against values worked out by hand."""

from fractions import Fraction

import pytest
import torch

from megatron_lrmoe.reference import ReferenceLayer, keep_best, stack_sources
from tests import cases, layers

TOKENS, EXPERTS, HIDDEN, WIDTH = 7, 4, 5, 6


def problem(gated: bool = True, seed: int = 0) -> tuple[ReferenceLayer, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    routing = cases.route("ragged", TOKENS, EXPERTS, top_k=2, seed=seed)
    activation = layers.ACTIVATIONS["swiglu" if gated else "gelu"]
    layer = ReferenceLayer(
        normal(EXPERTS, WIDTH * (2 if gated else 1), HIDDEN), normal(EXPERTS, HIDDEN, WIDTH), activation
    )
    values = {"x_TD": normal(TOKENS, HIDDEN), "probs_TE": routing.probs_TE.double(), "g_TD": normal(TOKENS, HIDDEN)}
    return layer, values | {"map_TE": routing.map_TE}


def dense_output(
    x_TD: torch.Tensor, weight_TE: torch.Tensor, fc1: torch.Tensor, fc2: torch.Tensor, activation: object
) -> torch.Tensor:
    """Every token at every expert, then a weighted sum: nothing in common with the reference's loop."""
    z_ETG = torch.einsum("egd,td->etg", fc1, x_TD)
    return torch.einsum("te,edf,etf->td", weight_TE, fc2, activation(z_ETG))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_forward_and_full_backward_equal_autograd(gated: bool, seed: int) -> None:
    layer, v = problem(gated, seed)
    inputs = [x.clone().requires_grad_() for x in (v["x_TD"], v["probs_TE"], layer.fc1, layer.fc2)]
    out_TD = dense_output(inputs[0], inputs[1] * v["map_TE"], *inputs[2:], layer.activation)
    torch.testing.assert_close(layer.forward(v["x_TD"], v["probs_TE"], v["map_TE"]), out_TD.detach())
    expected = torch.autograd.grad(out_TD, inputs, v["g_TD"])
    got = layer.backward(v["x_TD"], v["probs_TE"], v["g_TD"], v["map_TE"].double())
    for found, exact in zip((got.dx_TD, got.dprobs_TE, got.dfc1, got.dfc2), expected, strict=True):
        torch.testing.assert_close(found, exact)


def test_backward_is_linear_in_the_weights_of_pairs() -> None:
    layer, v = problem()
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.rand(TOKENS, EXPERTS, generator=generator, dtype=torch.float64) for _ in range(2))

    def gradients(weight_TE: torch.Tensor) -> torch.Tensor:
        got = layer.backward(v["x_TD"], v["probs_TE"], v["g_TD"], weight_TE * v["map_TE"])
        return torch.cat([x.flatten() for x in (got.dx_TD, got.dprobs_TE, got.dfc1, got.dfc2)])

    torch.testing.assert_close(gradients(first + 2 * second), gradients(first) + 2 * gradients(second))
    assert not gradients(torch.zeros_like(first)).any()


def test_scores_are_squared_norms_of_each_pairs_fc2_gradient() -> None:
    layer, v = problem()
    score_TE = layer.scores(v["x_TD"], v["probs_TE"], v["map_TE"], v["g_TD"])
    assert torch.equal(score_TE.isnan(), ~v["map_TE"])
    for t, e in v["map_TE"].nonzero().tolist():
        alone = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64)
        alone[t, e] = 1
        dfc2 = layer.backward(v["x_TD"], v["probs_TE"], v["g_TD"], alone).dfc2
        torch.testing.assert_close(score_TE[t, e], dfc2.square().sum())


def one_dropped(map_TE: torch.Tensor) -> torch.Tensor:
    """(T, E) bool: the first pair of each token dropped, where it has more than one."""
    first_TE = map_TE & (map_TE.cumsum(1) == 1) & (map_TE.sum(1, keepdim=True) > 1)
    return map_TE & ~first_TE


def test_the_baseline_is_exact_where_at_most_one_pair_of_a_token_is_dropped() -> None:
    layer, v = problem()
    exact_TE = layer.backward(v["x_TD"], v["probs_TE"], v["g_TD"], v["map_TE"].double()).dprobs_TE
    for kept_TE in (v["map_TE"], one_dropped(v["map_TE"])):
        found_TE = layer.baseline_dprobs(v["x_TD"], v["probs_TE"], v["map_TE"], v["g_TD"], kept_TE)
        torch.testing.assert_close(found_TE, exact_TE)


def test_the_baseline_gives_a_token_without_kept_pairs_one_value_with_the_exact_mean() -> None:
    layer, v = problem()
    exact_TE = layer.backward(v["x_TD"], v["probs_TE"], v["g_TD"], v["map_TE"].double()).dprobs_TE
    nothing_TE = torch.zeros_like(v["map_TE"])
    found_TE = layer.baseline_dprobs(v["x_TD"], v["probs_TE"], v["map_TE"], v["g_TD"], nothing_TE)
    mean_T = (exact_TE * v["probs_TE"]).sum(1) / v["probs_TE"].sum(1)
    torch.testing.assert_close(found_TE, mean_T[:, None] * v["map_TE"])
    zeros_TE = torch.zeros_like(v["probs_TE"])
    assert not layer.baseline_dprobs(v["x_TD"], zeros_TE, v["map_TE"], v["g_TD"], nothing_TE).any()


def test_keep_best_keeps_the_papers_quotas() -> None:
    map_TE = torch.zeros(4, 3, dtype=torch.bool)
    for expert, load in enumerate([4, 2, 3]):
        map_TE[:load, expert] = True
    score_TE = torch.arange(4.0)[:, None].expand(4, 3)
    kept_TE = keep_best(score_TE, map_TE, Fraction(8, 10))
    assert kept_TE.int().tolist() == [[0, 0, 0], [1, 1, 1], [1, 0, 1], [1, 0, 0]]


def test_keep_best_takes_non_finite_first_and_the_lower_of_equal_tokens() -> None:
    map_TE = torch.ones(4, 1, dtype=torch.bool)

    def kept(scores: list[float], retention: Fraction = Fraction(1, 2)) -> list[int]:
        return keep_best(torch.tensor(scores)[:, None], map_TE, retention).flatten().nonzero().flatten().tolist()

    assert kept([1, 1, 1, 1]) == [0, 1]
    assert kept([5, 1, float("nan"), 4]) == [0, 2]
    assert kept([5, float("-inf"), float("nan"), float("inf")]) == [1, 2]
    assert kept([1, 2, 3, 4], Fraction(1, 100)) == [3]
    assert kept([1, 2, 3, 4], Fraction(1)) == [0, 1, 2, 3]


def test_sources_are_stacked_in_rank_order() -> None:
    assert stack_sources([torch.zeros(0, 2), torch.ones(1, 2), torch.full((2, 2), 2.0)])[:, 0].tolist() == [1, 2, 2]
