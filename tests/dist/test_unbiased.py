"""The mean gradient over many draws is the full gradient; draws repeat where they must and differ where they must."""

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import pytest
import torch

from megatron_lrmoe.reference import ReferenceLayer, stack_sources
from tests import layers
from tests.gloo import Pool
from tests.layers import Case

pytestmark = pytest.mark.dist

DRAWS = 400
# Chance that a test without bias fails for one of its elements, and for one of its directions.
FALSE_ALARM = 1e-3
DIRECTIONS = 3
# An element that no draw moves has no error of its own; it has to agree to rounding.
ROUNDING = 1e-12


def gradients(result: layers.Result) -> torch.Tensor:
    """(L,) every gradient element of one rank."""
    return torch.cat([gradient.flatten() for gradient in result.gradients.values()])


def draw(case: Case, draws: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(L,) full gradient by Megatron's layer, (n, L) gradients of n iterations, (n, T, E) their kept weights."""
    full_L = gradients(layers.run(case, ours=False))
    layer = layers.build(case)
    samples, kept = [], []
    for iteration in range(draws):
        layers.at_iteration(iteration)
        result = layers.forward_backward(layer, case)
        samples.append(gradients(result))
        kept.append(result.kept_TE)
    return full_L, torch.stack(samples), torch.stack(kept)


def problems(sample_nL: torch.Tensor, full_L: torch.Tensor) -> list[str]:
    """Signs that the mean of independent samples is not ``full_L``; empty if there are none."""
    draws = sample_nL.shape[0]
    size = full_L.abs().max()
    error_L = sample_nL.mean(0) - full_L
    spread_L = sample_nL.std(0)
    moved_L = spread_L > ROUNDING * size
    found = []
    if (error_L[~moved_L].abs() > ROUNDING * size).any():
        found.append("an element that no draw moves is off")
    if not moved_L.any():
        return found
    score_nL = (sample_nL[:, moved_L] - full_L[moved_L]) / spread_L[moved_L]
    z = score_nL.mean(0) * math.sqrt(draws)
    # Bonferroni: the false alarm is that of all elements together.
    bound = NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * z.numel()))
    if z.abs().max() > bound:
        found.append(f"largest |z| {z.abs().max():.2f} > {bound:.2f}")
    low, high = mean_square_bounds(score_nL)
    if not low < z.square().mean() < high:
        found.append(f"mean z^2 {z.square().mean():.2f} is not between {low:.2f} and {high:.2f}")
    generator = torch.Generator().manual_seed(0)
    direction_Ld = torch.randn(full_L.shape[0], DIRECTIONS, generator=generator, dtype=torch.float64)
    along_nd = (sample_nL - full_L) @ direction_Ld
    off_d = along_nd.mean(0).abs() / (along_nd.std(0) / math.sqrt(draws))
    if off_d.max() > 3:
        found.append(f"along a random direction the mean is {off_d.max():.2f} standard errors off")
    return found


def mean_square_bounds(score_nL: torch.Tensor) -> tuple[float, float]:
    """Where the mean of z^2 lies if there is no bias.

    One random offset moves all elements of an expert, so z^2 is averaged over far fewer independent numbers than
    there are elements: by their correlations, as many as a chi-square of the same variance has (Satterthwaite); its
    quantiles by Wilson and Hilferty.
    """
    draws, elements = score_nL.shape
    score_nL = score_nL - score_nL.mean(0)
    correlation_sq = float((score_nL @ score_nL.t() / draws).square().sum())
    part = 2 * correlation_sq / (9 * elements**2)  # 2 / (9 * degrees of freedom)
    width = NormalDist().inv_cdf(1 - FALSE_ALARM / 2) * math.sqrt(part)
    return max(0.0, 1 - part - width) ** 3, (1 - part + width) ** 3


# With 4 tokens a rank an expert has about two pairs from both ranks and a quota of 1.
CASES = {
    "scope expert": Case(num_tokens=12, num_experts=4, workload="balanced"),
    "scope source": Case(num_tokens=12, num_experts=4, workload="balanced", lrm={"scope": "source"}),
    "quota below sources": Case(num_tokens=4, num_experts=8, workload="balanced", lrm={"scope": "source"}),
    "top-1, capped weights": Case(
        num_tokens=16, num_experts=4, top_k=1, workload="hot_expert", lrm={"max_weight": 3.0}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_mean_gradient_is_the_full_gradient(gloo2: Pool, name: str) -> None:
    case = CASES[name]
    ranks = gloo2(draw, case, DRAWS, limit_s=120)
    full_L, sample_nL = (torch.cat([rank[i] for rank in ranks], dim=-1) for i in (0, 1))
    assert problems(sample_nL, full_L) == []
    kept_nTE = torch.cat([kept for _, _, kept in ranks], dim=1)
    map_TE = stack_sources([layers.settle(case, rank)["map_TE"] for rank in range(2)])
    # Every pair is kept at times, and never by more than the quota.
    assert torch.equal(kept_nTE.amax(0) > 0, map_TE)
    assert (kept_nTE > 0).sum(1).unique(dim=0).shape[0] == 1
    if name == "quota below sources":
        quota_E = (kept_nTE[0] > 0).sum(0)
        sources_E = sum(layers.settle(case, rank)["map_TE"].any(0).int() for rank in range(2))
        assert ((quota_E > 0) & (quota_E < sources_E)).any()
    # The same draws without their weights are found out.
    dprobs = [dprobs_of(case, sample_nL, rank) for rank, (_, sample_nL, _) in enumerate(ranks)]
    unweighted = torch.cat(dprobs, dim=1) / kept_nTE.clamp_min(1)
    full = full_dprobs(case)
    assert problems(torch.cat(dprobs, dim=1).flatten(1), full.flatten()) == []
    assert problems(unweighted.flatten(1), full.flatten()) != []


def dprobs_of(case: Case, sample_nL: torch.Tensor, rank: int) -> torch.Tensor:
    values = layers.settle(case, rank)
    start = values["x_TD"].numel()
    return sample_nL[:, start : start + values["map_TE"].numel()].view(-1, *values["map_TE"].shape)


def full_dprobs(case: Case) -> torch.Tensor:
    parts = [layers.settle(case, rank) for rank in range(2)]
    x_TD, g_TD, map_TE, probs_TE = (
        stack_sources([part[name] for part in parts]) for name in ("x_TD", "g_TD", "map_TE", "probs_TE")
    )
    reference = ReferenceLayer(parts[0]["fc1"], parts[0]["fc2"], layers.ACTIVATIONS[case.activation])
    return reference.backward(x_TD, probs_TE, g_TD, map_TE.double()).dprobs_TE


def test_topk_fails_the_same_check(gloo2: Pool) -> None:
    """Its bias does not average out: it keeps the same pairs every time."""
    case = replace(CASES["scope expert"], lrm={"selection": "topk"})
    for full_L, sample_nL, kept_nTE in gloo2(draw, case, 5):
        assert (kept_nTE == kept_nTE[0]).all()
        assert problems(sample_nL, full_L) != []


def draws_of(case: Case, microbatches: int = 1) -> list[layers.Result]:
    """As many calls of one layer in one iteration."""
    layer = layers.build(case)
    return [layers.forward_backward(layer, case) for _ in range(microbatches)]


SAME_OR_NOT = [Case(lrm={"scope": scope}, num_experts=4) for scope in ("expert", "source")]


@pytest.mark.parametrize("case", SAME_OR_NOT, ids=["expert", "source"])
def test_equal_keys_draw_equally_and_others_do_not(gloo2: Pool, case: Case) -> None:
    first = kept(gloo2(draws_of, case))
    assert torch.equal(kept(gloo2(draws_of, case)), first)
    others = {
        "iteration": kept(gloo2(draws_of, replace(case, iteration=1))),
        "layer": kept(gloo2(draws_of, replace(case, layer_number=2))),
        "microbatch": kept(gloo2(draws_of, case, 2)),
    }
    for what, other in others.items():
        assert torch.equal((other > 0).sum(0), (first > 0).sum(0))
        assert not torch.equal(other > 0, first > 0), what
    # The second microbatch of one iteration is no draw of the next.
    assert not torch.equal(others["microbatch"] > 0, others["iteration"] > 0)


def kept(ranks: list[list[layers.Result]]) -> torch.Tensor:
    """Kept weights of the last call, tokens of all ranks."""
    return stack_sources([results[-1].kept_TE for results in ranks])


def test_microbatches_are_counted_anew_in_every_iteration(gloo2: Pool) -> None:
    for keys in gloo2(microbatch_numbers):
        assert keys == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (0, 0)]


def microbatch_numbers() -> list[tuple[int, int]]:
    """(iteration, microbatch) of the keys of calls, among them some that drop nothing."""
    case = Case()
    layer = layers.build(case)
    keys = []
    for iteration in (0, 0, 1, 1, 1, 0):
        layers.at_iteration(iteration)
        x, _ = layers.leaves(layer, case)
        with torch.no_grad():
            layer(x)
        layer.eval()
        layer(x)
        layer.train()
        key = layers.forward_backward(layer, case).plan.key
        keys.append((key.iteration, key.microbatch))
    return keys


@pytest.mark.parametrize("case", SAME_OR_NOT, ids=["expert", "source"])
def test_a_group_draws_alike_and_data_parallel_groups_do_not(gloo4: Pool, case: Case) -> None:
    """EP2 x DP2 on four ranks with equal tokens: the ranks 0, 1 and 2, 3 are the expert-parallel groups."""
    results = [ranks[0] for ranks in gloo4(draws_of, case)]
    facts = [shared_facts(result) for result in results]
    assert facts[0] == facts[1] and facts[2] == facts[3]
    assert facts[0] != facts[2] and results[0].plan.key.data_parallel != results[2].plan.key.data_parallel
    first, second = (stack_sources([results[i].kept_TE, results[i + 1].kept_TE]) for i in (0, 2))
    assert torch.equal((first > 0).sum(0), (second > 0).sum(0))
    assert not torch.equal(first > 0, second > 0)
    for result, peer in ((results[0], results[2]), (results[1], results[3])):
        assert torch.equal(result.out_TD, peer.out_TD)


def shared_facts(result: layers.Result) -> Any:
    """What the ranks of a group have to agree on."""
    plan = result.plan
    return plan.key, plan.quota_E, plan.kept_SE, plan.loads_SE
