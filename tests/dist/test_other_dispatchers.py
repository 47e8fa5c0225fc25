"""Megatron's other dispatchers move every row themselves; the experts' backward between them runs over kept rows only.

All-gather is real. Under the flex dispatcher lie FAKES of DeepEP and HybridEP (``tests/fake_deep_ep.py``).
"""

import itertools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.reference import keep_best, stack_sources
from tests import fake_deep_ep, layers
from tests.dist.test_layer_gradients import check_kept
from tests.dist.test_router_grad import reference_of, same, stacked
from tests.dist.test_unbiased import gradients, problems
from tests.gloo import Pool
from tests.layers import Case

pytestmark = pytest.mark.dist

ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
DEEPEP, HYBRIDEP = (
    {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": name, "moe_router_dtype": "fp64"}
    for name in ("deepep", "hybridep")
)
PLACES = ((ALLGATHER, 1), (ALLGATHER, 2), (DEEPEP, 2), (HYBRIDEP, 1), (HYBRIDEP, 2))
DRAWS = 120


def is_flex(case: Case) -> bool:
    return case.config["moe_token_dispatcher_type"] == "flex"


def prepared(case: Case) -> AbstractContextManager[None]:
    """DeepEP's fakes where the case needs them."""
    return fake_deep_ep.installed() if is_flex(case) else nullcontext()


@contextmanager
def watching_local_flows(record: list[Any]) -> Iterator[None]:
    """Collect each flow of this rank right after it has chosen its rows."""
    from megatron_lrmoe.compute.local_flow import LocalFlow

    original = LocalFlow.take_kept_gradient

    def take_kept_gradient(self: LocalFlow, g_ND: torch.Tensor) -> Any:
        record.append(self)
        return original(self, g_ND)

    LocalFlow.take_kept_gradient = take_kept_gradient
    try:
        yield
    finally:
        LocalFlow.take_kept_gradient = original


def forward_backward(
    layer: Any, case: Case, around_backward: AbstractContextManager[Any] | None = None
) -> layers.Result:
    """As ``layers.forward_backward``; the kept pairs are the owners' rows, brought back to the tokens' sources."""
    flows: list[Any] = []
    with watching_local_flows(flows):
        result = layers.forward_backward(layer, case, around_backward)
    # All-gather's backward leaves dX in a buffer that the next call writes to (tensor_parallel/mappings.py).
    result = replace(result, dx_TD=result.dx_TD.clone())
    if not flows:
        return result
    return replace(result, plan=flows[-1].plan, kept_TE=kept_at_source(flows[-1], result))


def kept_at_source(flow: Any, result: layers.Result) -> torch.Tensor:
    from megatron.core import parallel_state

    group: Any = parallel_state.get_expert_model_parallel_group()
    maps: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(maps, result.map_TE, group=group)
    map_TE = torch.cat(maps)
    expert_N, token_N = map_TE[:, result.experts.start : result.experts.stop].t().nonzero().unbind(1)
    rows_M = flow.kept.rows_M
    weight_TE = torch.zeros(map_TE.shape, dtype=torch.float64)
    weight_TE[token_N[rows_M], result.experts.start + expert_N[rows_M]] = flow.kept.weight_M.double()
    dist.all_reduce(weight_TE, group=group)
    return weight_TE.split([len(part) for part in maps])[dist.get_rank(group)]


def run(case: Case, ours: bool = True) -> layers.Result:
    with prepared(case):
        return forward_backward(layers.build(case, ours), case)


def run_all(cases: list[Case]) -> list[layers.Result]:
    return [run(case) for case in cases]


def run_pairs(cases: list[Case]) -> list[tuple[layers.Result, layers.Result]]:
    """Megatron's layer and ours, for each case."""
    return [(run(case, ours=False), run(case)) for case in cases]


def check(case: Case, results: list[layers.Result]) -> None:
    """Compare every gradient of one expert-parallel group with the reference for the same kept pairs."""
    parts = [layers.settle(case, rank) for rank in range(len(results))]
    v = {name: stack_sources([part[name] for part in parts]) for name in ("x_TD", "g_TD", "map_TE", "probs_TE")}
    kept_TE = stack_sources([r.kept_TE for r in results if r.kept_TE is not None])
    reference = reference_of(case)
    grads = reference.backward(v["x_TD"], v["probs_TE"], v["g_TD"], kept_TE)
    same(stack_sources([r.out_TD for r in results]), reference.forward(v["x_TD"], v["probs_TE"], v["map_TE"]))
    same(stack_sources([r.dx_TD for r in results]), grads.dx_TD)
    # DeepEP and HybridEP take probabilities, and bring back their gradients, in fp32.
    same(stack_sources([r.dprobs_TE for r in results]), grads.dprobs_TE, 1e-6 if is_flex(case) else 1e-10)
    for r in results:
        own = slice(r.experts.start, r.experts.stop)
        same(r.dfc1, grads.dfc1[own])
        same(r.dfc2, grads.dfc2[own])
    check_kept(case, kept_TE, v["map_TE"])


def check_all(gloo2: Pool, cases: list[Case]) -> None:
    ranks = gloo2(run_all, cases, limit_s=120)
    for i, case in enumerate(cases):
        try:
            check(case, [rank[i] for rank in ranks][: case.expert_parallel])
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


CASES = [
    *(
        Case(expert_parallel=ep, config=config, lrm={"selection": selection, "when": when})
        for (config, ep), (selection, when) in itertools.product(
            PLACES, (("unbiased", "backward"), ("topk", "backward"), ("unbiased", "forward"))
        )
    ),
    *(
        replace(case, config=config)
        for config in (ALLGATHER, DEEPEP, HYBRIDEP)
        for case in (
            Case(workload="empty_rank"),
            Case(workload="empty_rank", lrm={"selection": "topk", "when": "forward"}),
            Case(workload="one_token"),
            Case(workload="one_token", lrm={"selection": "topk"}),
            Case(num_tokens=12, num_experts=16, top_k=8),
            Case(workload="zipf", top_k=1, lrm={"max_weight": 2.0, "retention": 0.6, "min_rows": 5}),
        )
    ),
    Case(config=ALLGATHER, lrm={"score": "grad-abs"}, activation="squared_relu"),
    Case(config=DEEPEP, lrm={"score": "random"}),
    Case(config=HYBRIDEP, lrm={"score": "alpha", "shrink": 0.5}),
    Case(config=ALLGATHER, zero_gradient=True),
]


def test_every_gradient_equals_the_reference_for_the_kept_pairs(gloo2: Pool) -> None:
    check_all(gloo2, CASES)


def test_a_rank_without_tokens_takes_part(gloo2: Pool) -> None:
    """All-gather and HybridEP want as many tokens of every rank; DeepEP does not."""
    case = Case(config=DEEPEP)
    none = {name: layers.settle(case, 1)[name][:0] for name in ("x_TD", "g_TD", "map_TE", "probs_TE")}
    check_all(gloo2, [replace(case, given=[{}, none])])


def test_topk_keeps_the_largest_over_all_sources(gloo2: Pool) -> None:
    for config in (ALLGATHER, DEEPEP, HYBRIDEP):
        case = Case(config=config, lrm={"selection": "topk"})
        v = stacked(case, 2)
        score_TE = reference_of(case).scores(v["x_TD"], v["probs_TE"], v["map_TE"], v["g_TD"])
        expected = keep_best(score_TE, v["map_TE"], LrmConfig(retention=0.5).retention_fraction)
        assert torch.equal(stack_sources([r.kept_TE for r in gloo2(run, case)]) > 0, expected)


def test_allgather_draws_the_pairs_that_the_all_to_all_draws(gloo2: Pool) -> None:
    for lrm in ({}, {"when": "forward"}, {"score": "random"}, {"quota": "balanced"}):
        case = Case(lrm=lrm, workload="hot_rank")
        for theirs, ours in zip(gloo2(layers.run, case), gloo2(run, replace(case, config=ALLGATHER)), strict=True):
            assert torch.equal(theirs.kept_TE, ours.kept_TE)
            assert theirs.plan.quota_E == ours.plan.quota_E and theirs.plan.key == ours.plan.key


def test_the_forward_is_megatrons_bit_for_bit(gloo2: Pool) -> None:
    cases = [
        Case(dtype=dtype, config=config, expert_parallel=ep, lrm={"gemm": "loop"})
        for config, ep in PLACES
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for rank in gloo2(run_pairs, cases):
        for case, (stock, ours) in zip(cases, rank, strict=True):
            assert ours.plan is not None and torch.equal(ours.out_TD, stock.out_TD), case


def test_at_retention_one_gradients_are_megatrons(gloo2: Pool) -> None:
    cases = [
        Case(config=config, expert_parallel=ep, lrm={"retention": 1.0, "when": when}, always_compact=True)
        for (config, ep), when in itertools.product(PLACES, ("backward", "forward"))
    ]
    for rank in gloo2(run_pairs, cases):
        for case, (stock, ours) in zip(cases, rank, strict=True):
            assert torch.equal(ours.kept_TE > 0, ours.map_TE)
            for name, gradient in stock.gradients.items():
                same(ours.gradients[name], gradient, 1e-6 if name == "dprobs" and is_flex(case) else 1e-12)


def test_where_nothing_is_dropped_every_bit_is_megatrons(gloo2: Pool) -> None:
    cases = [Case(config=config, expert_parallel=ep, lrm={"start_iter": 5}, iteration=4) for config, ep in PLACES]
    for rank in gloo2(run_pairs, cases):
        for stock, ours in rank:
            assert ours.plan is None and torch.equal(ours.out_TD, stock.out_TD)
            assert all(torch.equal(ours.gradients[name], value) for name, value in stock.gradients.items())


def test_recompute_keeps_the_same_pairs(gloo2: Pool) -> None:
    plain = [
        Case(config=config, dtype=torch.float32, lrm={"when": when})
        for config, when in itertools.product((ALLGATHER, DEEPEP, HYBRIDEP), ("backward", "forward"))
    ]
    for rank in gloo2(run_all, plain + [replace(case, checkpoint=True) for case in plain]):
        for first, again in zip(rank[: len(plain)], rank[len(plain) :], strict=True):
            assert torch.equal(first.kept_TE, again.kept_TE)
            assert all(torch.equal(value, again.gradients[name]) for name, value in first.gradients.items())


def draw(case: Case, draws: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(L,) full gradient by Megatron's layer, (n, L) gradients of n iterations."""
    with prepared(case):
        full_L = gradients(layers.forward_backward(layers.build(case, ours=False), case))
        layer, samples = layers.build(case), []
        for iteration in range(draws):
            layers.at_iteration(iteration)
            samples.append(gradients(layers.forward_backward(layer, case)))
    return full_L, torch.stack(samples)


def test_the_mean_gradient_is_the_full_gradient(gloo2: Pool) -> None:
    # A pair that is hardly ever drawn would ask for many more draws.
    case = Case(num_tokens=12, num_experts=4, workload="balanced", config=ALLGATHER, lrm={"max_weight": 4.0})
    ranks = gloo2(draw, case, DRAWS, limit_s=120)
    full_L, sample_nL = (torch.cat([rank[i] for rank in ranks], dim=-1) for i in (0, 1))
    assert problems(sample_nL, full_L) == []


def test_deepep_sends_what_has_the_largest_probabilities_and_quotas_follow(gloo2: Pool) -> None:
    """Routed pairs with probability 0 are not told apart from others; the experts then get what DeepEP was given."""
    case = Case(num_experts=8, top_k=3, config=DEEPEP)
    values = [layers.settle(case, rank) for rank in range(2)]
    for v in values:
        last_T1 = v["map_TE"].int().cumsum(1).argmax(1, keepdim=True)
        v["probs_TE"] = v["probs_TE"].scatter(1, last_T1, 0.0)
    given = [{"probs_TE": v["probs_TE"]} for v in values]
    sent_TK = torch.cat([v["probs_TE"] for v in values]).float().topk(3).indices
    for plan in gloo2(plan_of, replace(case, given=given)):
        assert plan.demand_E == sent_TK.flatten().bincount(minlength=8).tolist()
        assert plan.demand_E != torch.cat([v["map_TE"] for v in values]).sum(0).tolist()


def plan_of(case: Case) -> Any:
    flows: list[Any] = []
    with prepared(case), watching_local_flows(flows):
        layers.forward_backward(layers.build(case), case)
    return flows[-1].plan


def error_with_other_counts(case: Case) -> str:
    """What the layer says when rows arrive that were not counted."""
    from megatron_lrmoe.mcore.call import LocalCall

    original = LocalCall.count

    def count(self: LocalCall, map_TE: torch.Tensor) -> None:
        original(self, map_TE.roll(1, dims=1))

    LocalCall.count = count
    try:
        with prepared(case), pytest.raises(RuntimeError) as caught:
            layers.forward(layer := layers.build(case), case, layers.leaves(layer, case)[0])
        return str(caught.value)
    finally:
        LocalCall.count = original


def test_rows_that_were_not_counted_are_an_error(gloo2: Pool) -> None:
    for config in (ALLGATHER, DEEPEP, HYBRIDEP):
        for message in gloo2(error_with_other_counts, Case(config=config)):
            assert "the dispatcher brought" in message and "were routed" in message


def warnings_and_classes(case: Case) -> tuple[list[str], list[str]]:
    """What two layers warn of, and the classes of their parts."""
    from megatron_lrmoe.mcore import layer

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    heard: list[str] = []
    layer._say_once.cache_clear()
    layer.logger.addHandler(listener := Listener())
    try:
        layers.build(case)
        built = layers.build(case)
    finally:
        layer.logger.removeHandler(listener)
    return heard, [type(part).__name__ for part in (built, built.token_dispatcher, built.experts)]


def test_the_dispatcher_stays_megatrons_and_rank_0_says_once_what_is_not_saved(gloo2: Pool) -> None:
    (first, parts), (second, _) = gloo2(warnings_and_classes, Case(config=ALLGATHER))
    assert parts == ["LRMoELayer", "MoEAllGatherTokenDispatcher", "LRMSequentialMLP"]
    assert len(first) == 1 and "allgather" in first[0] and "rows are still sent" in first[0]
    assert second == []
    assert gloo2(warnings_and_classes, Case())[0][0] == []
