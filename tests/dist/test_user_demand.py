"""What users of MoE training have run into; each test has the number it has in the project's list of such reports.

Those that need Megatron's own router are in test_user_demand_router.py.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_lrmoe.compute.activation import Activation
from megatron_lrmoe.compute.compaction import add_rows, pack_rows
from megatron_lrmoe.compute.experts import ExpertWeights, expert_mlp
from megatron_lrmoe.compute.flow import PairFlow
from megatron_lrmoe.compute.grouped import rows_times_weights, weight_grads
from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.mcore.arguments import config_from_args
from megatron_lrmoe.pairs import DrawKey
from megatron_lrmoe.recalibration.plan import KeepPlan
from megatron_lrmoe.recalibration.score import pair_score
from megatron_lrmoe.recalibration.selection import select_topk
from tests import layers
from tests.dist.test_compaction import backwards, gemms_of_expert
from tests.gloo import Pool
from tests.layers import HIDDEN, WIDTH, Case

dist = pytest.mark.dist


def routing(rows: list[list[int]], num_experts: int) -> torch.Tensor:
    """(T, E) bool from each token's experts."""
    map_TE = torch.zeros(len(rows), num_experts, dtype=torch.bool)
    for token, experts in enumerate(rows):
        map_TE[token, experts] = True
    return map_TE


def even(map_TE: torch.Tensor) -> torch.Tensor:
    """(T, E) probabilities: each of a token's experts weighs the same."""
    return map_TE.double() / map_TE.sum(1, keepdim=True)


@contextmanager
def watching_scores(record: list[torch.Tensor]) -> Iterator[None]:
    """Collect the scores that top-k chooses by."""
    from megatron_lrmoe.recalibration import plan

    def watched(score_N: torch.Tensor, *args: Any) -> Any:
        record.append(score_N)
        return select_topk(score_N, *args)

    plan.select_topk = watched
    try:
        yield
    finally:
        plan.select_topk = select_topk


def everything_to_rank_0(num_tokens: int = 6) -> list[dict[str, torch.Tensor]]:
    map_TE = routing([[0, 1]] * num_tokens, 4)
    return [{"map_TE": map_TE, "probs_TE": even(map_TE)}]


A01 = Case(num_tokens=6, num_experts=4, top_k=2, dtype=torch.float32, given=everything_to_rank_0())


def fused_backward(case: Case) -> dict[str, Any]:
    """Weight gradients go to main_grad, which holds 7 already."""
    layer = layers.build(case)
    layer.experts.config.gradient_accumulation_fusion = True
    weights = list(layer.experts.parameters())
    for weight in weights:
        weight.main_grad = torch.full_like(weight, 7.0)
        weight.grad_added_to_main_grad = False
    seen: list[Any] = []
    with layers.watching_experts(layer, seen):
        layers.forward_backward(layer, case)
    ((x_ND, _, y_ND),) = seen
    return {
        "in": tuple(x_ND.shape),
        "out": tuple(y_ND.shape),
        "in the graph": y_ND.grad_fn is not None,
        "added": [weight.grad_added_to_main_grad for weight in weights],
        "main_grad": [weight.main_grad for weight in weights],
        "has grad": [weight.grad is not None and weight.grad.shape == weight.shape for weight in weights],
    }


@dist
@pytest.mark.parametrize("scope", ["expert", "source"])
def test_a01_whole_rank_gets_no_rows(gloo2: Pool, scope: str) -> None:
    case = replace(A01, lrm={"scope": scope})
    busy, empty = gloo2(fused_backward, case, limit_s=60)
    assert empty["in"] == empty["out"] == (0, HIDDEN) and busy["in"] == (24, HIDDEN)
    assert busy["in the graph"] and empty["in the graph"]
    assert all((grad == 7).all() for grad in empty["main_grad"])
    assert not any((grad == 7).all() for grad in busy["main_grad"])
    for result in (busy, empty):
        assert all(result["added"]) and all(result["has grad"])


@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_a02_empty_experts_get_zero_gradients_whatever_memory_held(backend: str) -> None:
    counts = [5, 0, 3, 0]
    generator = torch.Generator().manual_seed(0)
    g_MO, x_MI = (torch.randn(8, width, generator=generator) for width in (16, 24))
    for _ in range(20):
        for shape in ((4, 16, 24), (16, 24)):
            dirty = torch.full(shape, torch.nan)
            del dirty
        grads = weight_grads(g_MO, x_MI, counts, backend)
        assert [bool((grad == 0).all()) for grad in grads] == [False, True, False, True]
        for e, (g, x) in enumerate(zip(g_MO.split(counts), x_MI.split(counts), strict=True)):
            torch.testing.assert_close(grads[e], g.t() @ x)


def metrics_of(loads_by_rank: list[list[int]]) -> dict[str, float]:
    """Figures after one call per rank, data-parallel ranks of EP1 with these loads."""
    import torch.distributed as dist

    from megatron_lrmoe.mcore import metrics

    metrics.forget()  # what earlier cases in this worker have recorded
    loads_E = loads_by_rank[dist.get_rank()]
    key = DrawKey(seed=0, iteration=0, microbatch=0, layer=1)
    metrics.record(KeepPlan(LrmConfig(retention=0.5), key, LrmConfig(retention=0.5).retention_fraction, [loads_E], 0))
    return metrics.collect(1, "cpu", per_layer=True)


@dist
def test_a06_no_metric_divides_by_zero(gloo2: Pool) -> None:
    """Shares come from sums over all ranks; a layer that nobody routed to reports nothing."""
    for scalars in gloo2(metrics_of, [[7, 3], [0, 0]]):
        assert scalars["moe-lrm/kept_share"] == scalars["moe-lrm/kept_share_layer_1"] == (3 + 1) / 10
        assert all(value == value for value in scalars.values())
    assert gloo2(metrics_of, [[0, 0], [0, 0]]) == [{}, {}]


def scored(case: Case) -> tuple[layers.Result, torch.Tensor]:
    scores: list[torch.Tensor] = []
    with watching_scores(scores):
        result = layers.run(case)
    return result, scores[0]


@dist
def test_a14_alpha_is_counted_once(gloo2: Pool) -> None:
    """u1 (alpha .9, |g| 1, |phi| 1) scores .81, u2 (alpha .3, |g| 3.2, |phi| 1) scores .9216: u2 is kept."""
    unit = torch.eye(HIDDEN, dtype=torch.float64)[0]
    map_TE = routing([[0], [0]], 2)
    given = {
        "map_TE": map_TE,
        "probs_TE": torch.tensor([[0.9, 0.0], [0.3, 0.0]], dtype=torch.float64),
        "x_TD": torch.stack([unit, unit]),
        "g_TD": torch.stack([unit, 3.2 * unit]),
        "fc1": torch.eye(WIDTH, HIDDEN, dtype=torch.float64).expand(2, -1, -1),
    }
    case = Case(
        num_tokens=2,
        num_experts=2,
        top_k=1,
        expert_parallel=1,
        activation="relu",
        lrm={"selection": "topk"},
        given=[given],
    )
    result, score_N = gloo2(scored, case)[0]
    torch.testing.assert_close(score_N, torch.tensor([0.81, 0.9216], dtype=score_N.dtype), rtol=1e-6, atol=0)
    assert result.kept_TE.tolist() == [[0, 0], [1, 0]]
    found = pair_score("lrm", torch.tensor([1.0, 3.2]).square(), torch.tensor([0.9, 0.3]).square())
    torch.testing.assert_close(found, torch.tensor([0.81, 0.9216]), rtol=1e-6, atol=0)


def test_a15_weights_applied_on_the_input_are_refused() -> None:
    args = Namespace(
        num_experts=2,
        moe_router_topk=1,
        moe_token_dispatcher_type="alltoall",
        moe_lrm_retention=0.8,
        moe_apply_probs_on_input=True,
    )
    with pytest.raises(ValueError, match=r"--moe-apply-probs-on-input: found True, allowed is without it"):
        config_from_args(args)
    args.moe_apply_probs_on_input = False
    assert config_from_args(args).retention == 0.8


def test_a18_norms_of_bf16_rows_are_exact() -> None:
    """|phi|^2 of 4096 ones is 4096; a bf16 sum stops at 256."""
    flow = PairFlow(None)  # type: ignore[arg-type]
    flow.counts_e = [1]
    fc1 = torch.nn.Parameter(torch.ones(4096, 1, dtype=torch.bfloat16))
    fc2 = torch.nn.Parameter(torch.ones(1, 4096, dtype=torch.bfloat16))
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    expert_mlp(one, torch.ones(1), ExpertWeights([fc1], [fc2]), Activation(F.relu, gated=False), flow, "loop")
    assert flow.act_norm_sq_N.dtype == torch.float32 and flow.act_norm_sq_N.tolist() == [4096.0]


def equal_scores(case: Case, times: int) -> list[list[list[float]]]:
    layer = layers.build(case)
    kept = []
    for iteration in range(times):
        layers.at_iteration(iteration)
        kept.append(layers.forward_backward(layer, case).kept_TE.tolist())
    return kept


def test_a19_of_equal_scores_the_first_rows_are_kept() -> None:
    for _ in range(100):
        assert select_topk(torch.ones(4), [4], [2]).rows_M.tolist() == [0, 1]


@dist
@pytest.mark.parametrize("scope", ["expert", "source"])
def test_a19_of_equal_scores_two_ranks_keep_the_first_tokens(gloo2: Pool, scope: str) -> None:
    """Rows 0 and 1 of the expert are both of rank 0; with a quota of its own each rank keeps its first token."""
    map_TE = routing([[0], [0]], 2)
    ones = torch.ones(2, HIDDEN, dtype=torch.float64)
    given = [{"map_TE": map_TE, "probs_TE": map_TE.double(), "x_TD": ones, "g_TD": ones}]
    case = Case(num_tokens=2, num_experts=2, top_k=1, lrm={"selection": "topk", "scope": scope}, given=given)
    first, second = gloo2(equal_scores, case, 100)
    one, none, both = [[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0]] * 2, [[1.0, 0.0]] * 2
    expected = (both, none) if scope == "expert" else (one, one)
    assert first == [expected[0]] * 100 and second == [expected[1]] * 100


def test_a22_row_sparse_backward_of_one_linear_layer() -> None:
    x_TD = torch.tensor([[1.0, 0], [0, 1], [1, 1]])
    dy_TO = torch.tensor([[1.0], [2], [3]])
    weight = torch.tensor([[5.0, 6.0]])
    kept_M = torch.tensor([0, 2])
    y_TO = rows_times_weights(x_TD, [weight], [3], "loop", transpose=True)
    assert torch.equal(y_TO, x_TD @ weight.t())
    dy_MO = pack_rows(dy_TO, kept_M, None)
    (dw,) = weight_grads(dy_MO, pack_rows(x_TD, kept_M, None), [2], "loop")
    dx_MD = rows_times_weights(dy_MO, [weight], [2], "loop", transpose=False)
    assert dw.tolist() == [[4, 3]]
    assert add_rows(dx_MD, kept_M, 3).tolist() == [[5, 6], [0, 0], [15, 18]]


@dist
def test_a25_tokens_keep_any_number_of_pairs(gloo2: Pool) -> None:
    """Token 0 keeps two pairs, token 1 none, token 2 one; experts 0, 1, 2 have loads 3, 2, 1 and quotas 1."""
    map_TE = routing([[0, 1], [0, 1], [0, 2]], 3)
    size_T = torch.tensor([100.0, 0.01, 1.0], dtype=torch.float64)
    given = {"map_TE": map_TE, "probs_TE": even(map_TE), "g_TD": size_T[:, None].expand(3, HIDDEN).contiguous()}
    case = Case(num_tokens=3, num_experts=3, expert_parallel=1, lrm={"selection": "topk"}, given=[given])
    result = gloo2(layers.run, case)[0]
    assert result.kept_TE.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    assert result.dx_TD.shape == (3, HIDDEN)
    assert (result.dx_TD != 0).any(1).tolist() == [True, False, True]
    assert (result.dprobs_TE != 0).tolist() == [[True, True, False], [False] * 3, [False, False, True]]
    assert add_rows(torch.ones(3, 2), torch.tensor([0, 0, 2]), 3).tolist() == [[2, 2], [0, 0], [1, 1]]


@dist
def test_a27_bf16_groups_are_not_padded(gloo2: Pool) -> None:
    """Loads [4, 2, 3] at 0.8 keep [3, 1, 2] rows, and the GEMMs have just those."""
    map_TE = routing([[0], [0], [0], [0], [1], [1], [2], [2], [2]], 3)
    given = [{"map_TE": map_TE, "probs_TE": even(map_TE)}]
    case = Case(num_tokens=9, num_experts=3, top_k=1, expert_parallel=1, dtype=torch.bfloat16, given=given)
    cases = [replace(case, lrm={"retention": 0.8, "gemm": gemm}) for gemm in ("loop", "grouped")]
    (loop, result), (grouped, _) = gloo2(backwards, cases)[0]
    assert result.plan.quota_E == [3, 1, 2]
    assert Counter(loop.gemms) == Counter(shapes for m in (3, 1, 2) for shapes in gemms_of_expert(m))
    assert grouped.group_ends == [[3, 4, 6]] * 4
    assert all(6 in shapes[0] for shapes in grouped.gemms)
