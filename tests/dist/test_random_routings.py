"""Random routings against the reference: whatever is routed, the gradients are those of the pairs that were kept.

Cases go to the workers thirty at a time: a call costs more than a case.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.recalibration.quota import proportional_quota
from megatron_lrmoe.reference import ReferenceLayer, stack_sources
from tests import layers
from tests.dist import test_other_dispatchers as other_dispatchers
from tests.gloo import Pool
from tests.layers import HIDDEN, Case

pytestmark = pytest.mark.dist

BATCH = 30
BATCHES = 67 if os.environ.get("CI") == "true" else 10
MOST_TOKENS = 12
TOLERANCE = 1e-10
# Scores are fp32 in the plugin and fp64 in the reference.
SCORE_ROUNDING = 1e-5

Kind = Literal["even", "one expert", "one rank", "any number", "none"]
Gradient = Literal["normal", "equal", "zero", "some zero", "nan", "inf"]


@dataclass(frozen=True)
class Spec:
    """One case in small numbers.

    Args:
        tokens: of each rank.
        experts, top_k: of the layer.
        kind: even: any top_k experts. one expert: all tokens have one in common. one rank: only a rank's experts.
            any number: 0 to top_k experts of a token. none: nothing is routed at all.
        gradient: of the output.
        equal_tokens: all tokens are the same, with equal weights, so that scores tie.
        dispatcher: Megatron's.
        seed: of everything else.
        lrm: settings.
    """

    tokens: tuple[int, int]
    experts: int
    top_k: int
    kind: Kind
    gradient: Gradient
    equal_tokens: bool
    dispatcher: Literal["alltoall", "allgather"]
    seed: int
    lrm: tuple[tuple[str, Any], ...]

    def case(self) -> Case:
        """For ``tests.layers``, with all that is drawn in ``given``."""
        config: dict[str, Any] = {"moe_token_dispatcher_type": self.dispatcher}
        if self.kind in ("any number", "none"):
            # Without it Megatron takes the number of rows from top_k. The capacity itself is the router's business.
            config["moe_expert_capacity_factor"] = 1.0
        generator = torch.Generator().manual_seed(self.seed)
        given = [self._of_rank(tokens, generator) for tokens in self.tokens]
        return Case(
            num_experts=self.experts,
            top_k=self.top_k,
            config=config,
            lrm=dict(self.lrm),
            always_compact=True,
            given=given,
        )

    def _of_rank(self, tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        x_TD = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
        g_TD = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
        map_TE = self._map(tokens, generator)
        logits_TE = torch.randn(map_TE.shape, generator=generator, dtype=torch.float64)
        if self.equal_tokens:
            x_TD, logits_TE = torch.ones_like(x_TD), torch.zeros_like(logits_TE)
        probs_TE = (logits_TE.exp() * map_TE) / (logits_TE.exp() * map_TE).sum(1, keepdim=True).clamp_min(1e-30)
        some_T = torch.rand(tokens, generator=generator) < 0.3
        match self.gradient:
            case "equal":
                g_TD = torch.ones_like(g_TD)
            case "zero":
                g_TD = torch.zeros_like(g_TD)
            case "some zero":
                g_TD[some_T] = 0
            case "nan" | "inf":
                g_TD[some_T] = float(self.gradient)
        return {"x_TD": x_TD, "g_TD": g_TD, "map_TE": map_TE, "probs_TE": probs_TE}

    def _map(self, tokens: int, generator: torch.Generator) -> torch.Tensor:
        key_TE = torch.rand(tokens, self.experts, generator=generator)
        if self.kind == "one expert":
            key_TE[:, self.seed % self.experts] = 2
        if self.kind == "one rank":
            own = self.experts // 2
            key_TE[:, (self.seed % 2) * own :][:, :own] += 1
        chosen_TK = key_TE.topk(self.top_k, dim=1).indices
        map_TE = torch.zeros(tokens, self.experts, dtype=torch.bool).scatter_(1, chosen_TK, True)
        if self.kind == "any number":
            map_TE &= torch.rand(map_TE.shape, generator=generator) < 0.5
        return map_TE & (self.kind != "none")


@st.composite
def specs(draw: Any) -> Spec:
    """Of two ranks with 0 to 12 tokens each, not both 0; 2 to 8 experts; any top_k."""
    experts = draw(st.sampled_from((2, 4, 6, 8)))
    top_k = draw(st.one_of(st.just(1), st.just(experts), st.integers(1, experts)))
    dispatcher = draw(st.sampled_from(("alltoall", "alltoall", "allgather")))
    count = st.one_of(st.just(1), st.integers(0, MOST_TOKENS))
    tokens = (draw(count), draw(count))
    if dispatcher == "allgather" or tokens == (0, 0):
        tokens = (max(*tokens, 1),) * 2
    kind = draw(st.sampled_from(("even", "even", "one expert", "one rank", "any number", "none")))
    if kind == "one rank":
        top_k = min(top_k, experts // 2)
    lrm = {
        "retention": draw(st.sampled_from((0.01, 0.3, 0.5, 0.8, 0.95, 1.0))),
        "scope": "expert" if dispatcher == "allgather" else draw(st.sampled_from(("expert", "source"))),
        "selection": draw(st.sampled_from(("unbiased", "topk"))),
        "when": draw(st.sampled_from(("backward", "forward"))),
        "min_rows": draw(st.sampled_from((0, 0, 3))),
    }
    return Spec(
        tokens=tokens,
        experts=experts,
        top_k=top_k,
        kind=kind,
        gradient=draw(st.sampled_from(("normal", "normal", "equal", "zero", "some zero", "nan", "inf"))),
        equal_tokens=draw(st.booleans()),
        dispatcher=dispatcher,
        seed=draw(st.integers(0, 2**31 - 1)),
        lrm=tuple(lrm.items()),
    )


def run_all(chosen: Sequence[Spec]) -> list[layers.Result]:
    found = []
    for spec in chosen:
        run = other_dispatchers.run if spec.dispatcher == "allgather" else layers.run
        found.append(run(spec.case()))
    return found


def same(name: str, got: torch.Tensor, exact: torch.Tensor) -> None:
    """Equal where it is not finite, and up to rounding of the largest finite element elsewhere."""
    finite = exact.isfinite()
    assert torch.equal(got.isfinite(), finite), f"{name}: not finite in other places"
    scale = torch.where(finite, exact, 0.0).abs().max().clamp_min(1e-30) if exact.numel() else 1.0
    torch.testing.assert_close(got[finite] / scale, exact[finite] / scale, rtol=0, atol=TOLERANCE, msg=name)


def check(spec: Spec, results: list[layers.Result]) -> None:
    """Every gradient, the number of kept pairs, and with topk that none was dropped above one that was kept."""
    case = spec.case()
    parts = [layers.settle(case, rank) for rank in range(2)]
    v = {name: stack_sources([part[name] for part in parts]) for name in ("x_TD", "g_TD", "map_TE", "probs_TE")}
    assert all(r.kept_TE is not None for r in results)
    kept_TE = stack_sources([r.kept_TE for r in results if r.kept_TE is not None])
    reference = ReferenceLayer(parts[0]["fc1"], parts[0]["fc2"], layers.ACTIVATIONS[case.activation])
    same("output", stack_sources([r.out_TD for r in results]), reference.forward(v["x_TD"], v["probs_TE"], v["map_TE"]))
    grads = reference.backward(v["x_TD"], v["probs_TE"], v["g_TD"], kept_TE)
    same("dX", stack_sources([r.dx_TD for r in results]), grads.dx_TD)
    same("dprobs", stack_sources([r.dprobs_TE for r in results]), grads.dprobs_TE)
    same("dfc1", torch.cat([r.dfc1 for r in results]), grads.dfc1)
    same("dfc2", torch.cat([r.dfc2 for r in results]), grads.dfc2)
    config = LrmConfig(**dict(spec.lrm))
    check_kept(config, kept_TE, v["map_TE"])
    if config.selection == "topk":
        score_TE = reference.scores(v["x_TD"], v["probs_TE"], v["map_TE"], v["g_TD"])
        if config.when == "forward":
            score_TE = reference.forward_scores(v["x_TD"], v["probs_TE"], v["map_TE"])
        blocks = [spec.tokens] if config.scope == "source" else [(sum(spec.tokens),)]
        for sizes in blocks:
            for score, kept, routed in zip(*(t.split(sizes) for t in (score_TE, kept_TE, v["map_TE"])), strict=True):
                check_best(score, kept > 0, routed)


def check_kept(config: LrmConfig, kept_TE: torch.Tensor, map_TE: torch.Tensor) -> None:
    quota_E = proportional_quota(map_TE.sum(0).tolist(), config.retention_fraction, config.min_rows)
    assert (kept_TE > 0).sum(0).tolist() == quota_E
    assert not ((kept_TE > 0) & ~map_TE).any()
    weights = kept_TE[kept_TE > 0]
    assert (weights == 1).all() if config.selection == "topk" else (weights >= 1).all()


def check_best(score_TE: torch.Tensor, kept_TE: torch.Tensor, map_TE: torch.Tensor) -> None:
    """Of each expert's pairs, one that is not finite counts as largest."""
    score_TE = torch.where(score_TE.isfinite(), score_TE, torch.inf)
    for score_T, kept_T, routed_T in zip(score_TE.t(), kept_TE.t(), map_TE.t(), strict=True):
        dropped_T = routed_T & ~kept_T
        if kept_T.any() and dropped_T.any():
            assert score_T[kept_T].min() >= score_T[dropped_T].max() * (1 - SCORE_ROUNDING)


@pytest.mark.slow
@settings(
    max_examples=BATCHES,
    deadline=None,
    # The failing case is named; looking for a smaller one would take minutes.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=(HealthCheck.data_too_large, HealthCheck.large_base_example, HealthCheck.too_slow),
)
@given(chosen=st.lists(specs(), min_size=BATCH, max_size=BATCH))
def test_gradients_equal_the_reference_for_the_kept_pairs_of_any_routing(gloo2: Pool, chosen: list[Spec]) -> None:
    for spec, *results in zip(chosen, *gloo2(run_all, chosen), strict=True):
        try:
            check(spec, results)
        except AssertionError as error:
            raise AssertionError(f"{spec}: {error}") from error
