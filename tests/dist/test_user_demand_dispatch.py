"""What users of MoE training have run into, as in test_user_demand.py: dispatchers, fused permutation, capacity."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_lrmoe.reference import stack_sources
from tests import fake_deep_ep, layers
from tests.dist import test_other_dispatchers as other_dispatchers
from tests.dist.test_other_dispatchers import ALLGATHER, DEEPEP
from tests.dist.test_router_grad import reference_of
from tests.dist.test_user_demand import even, routing
from tests.gloo import Pool
from tests.layers import HIDDEN, WIDTH, Case

pytestmark = pytest.mark.dist


def test_a20_all_to_all_and_flex_keep_the_same_pairs(gloo2: Pool) -> None:
    for seed in range(3):
        case = Case(seed=seed, lrm={"selection": "topk", "retention": 0.5})
        flex = replace(case, config=DEEPEP)
        for ours, theirs in zip(gloo2(layers.run, case), gloo2(other_dispatchers.run, flex), strict=True):
            assert (ours.kept_TE > 0).any() and torch.equal(ours.kept_TE > 0, theirs.kept_TE > 0)


def rows_moved(case: Case) -> tuple[int, Any, dict[str, float]]:
    """Rows that DeepEP brought to this rank, the call's plan, and what is logged of it."""
    from megatron_lrmoe.mcore import metrics

    moved: list[int] = []
    dispatch = fake_deep_ep.Buffer.dispatch

    def watched(buffer: Any, x: torch.Tensor, **given: Any) -> Any:
        result = dispatch(buffer, x, **given)
        moved.append(result[0].shape[0])
        return result

    metrics.forget()
    with mock.patch.object(fake_deep_ep.Buffer, "dispatch", watched):
        plan = other_dispatchers.plan_of(case)
    return moved[0], plan, metrics.collect(1, "cpu", per_layer=False)


def test_a21_a_row_for_two_experts_is_two_pairs(gloo2: Pool) -> None:
    """One token of rank 1 goes to both experts of rank 0."""
    map_TE = routing([[0, 1]], 4)
    one = {"map_TE": map_TE, "probs_TE": even(map_TE), "x_TD": torch.ones(1, HIDDEN, dtype=torch.float64)}
    one["g_TD"] = one["x_TD"]
    given = [{name: value[:0] for name, value in one.items()}, one]
    ranks = gloo2(rows_moved, Case(num_tokens=1, num_experts=4, config=DEEPEP, given=given))
    assert [moved for moved, _, _ in ranks] == [1, 0]
    for _, plan, scalars in ranks:
        assert plan.demand_E == plan.quota_E == [1, 1, 0, 0]
        assert scalars["moe-lrm/kept_share"] == 1.0


class _OneWay(torch.autograd.Function):
    """A fused kernel whose own backward is not to be trusted, so not to be run."""

    @staticmethod
    def forward(ctx: Any, run: Any, *tensors: Any) -> Any:
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("the fused kernel's own backward ran")


def _fused_permute_with_probs(x_TD: torch.Tensor, probs_TE: Any, map_TE: Any, num_out_tokens: int) -> Any:
    expert_P, token_P = map_TE.t().nonzero().unbind(1)
    assert len(token_P) == num_out_tokens
    rows, probs = _OneWay.apply(lambda x, p: (x[token_P], p[token_P, expert_P]), x_TD, probs_TE)
    return rows, probs, token_P


def _fused_unpermute(rows_PD: torch.Tensor, token_P: Any, merging_probs: Any, restore_shape: Any) -> torch.Tensor:
    assert merging_probs is None
    return _OneWay.apply(lambda rows: rows.new_zeros(restore_shape).index_add_(0, token_P, rows), rows_PD)


def _fused_sort(rows: torch.Tensor, sizes: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    def run(rows: torch.Tensor) -> torch.Tensor:
        chunks = rows.split(sizes.flatten().tolist())
        return torch.cat([chunks[i] for i in order.tolist()])

    return _OneWay.apply(run, rows)


def _fused_sort_with_probs(rows: torch.Tensor, probs: torch.Tensor, sizes: Any, order: Any) -> Any:
    return _fused_sort(rows, sizes, order), _fused_sort(probs, sizes, order)


@contextmanager
def fused_kernels() -> Iterator[None]:
    """FAKES of Transformer Engine's fused permutation, with its order of rows and with no backward."""
    from megatron.core.transformer.moe import moe_utils

    fakes = {
        "HAVE_TE": True,
        "fused_permute": _fused_permute_with_probs,
        "fused_permute_with_probs": _fused_permute_with_probs,
        "fused_unpermute": _fused_unpermute,
        "fused_sort_chunks_by_index": _fused_sort,
        "fused_sort_chunks_by_index_with_probs": _fused_sort_with_probs,
    }
    with mock.patch.multiple(moe_utils, **fakes):
        yield


def run_fused(case: Case) -> layers.Result:
    with fused_kernels():
        return layers.run(replace(case, config={**case.config, "moe_permute_fusion": True}))


def error_of_megatrons_layer(case: Case) -> str:
    with fused_kernels(), pytest.raises(AssertionError) as caught:
        layers.run(replace(case, config={**case.config, "moe_permute_fusion": True}), ours=False)
    return str(caught.value)


def identity_experts(num_experts: int) -> dict[str, torch.Tensor]:
    """Weights with which an expert returns a token that has no negative element, under relu."""
    return {
        "fc1": torch.eye(WIDTH, HIDDEN, dtype=torch.float64).expand(num_experts, -1, -1),
        "fc2": torch.eye(HIDDEN, WIDTH, dtype=torch.float64).expand(num_experts, -1, -1),
    }


def a23_case(expert_parallel: int) -> Case:
    """T=4, K=2; alpha and the output gradient are 1, so a token's size is its score; rank 1's are a bit larger."""
    map_TE = routing([[0, 1], [0, 1], [0, 2], [1, 2]], 4)
    size_T = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    ones_TD = torch.ones(4, HIDDEN, dtype=torch.float64)
    common = {"map_TE": map_TE, "probs_TE": map_TE.double(), "g_TD": ones_TD, **identity_experts(4)}
    given = [{**common, "x_TD": size_T[:, None] * factor * ones_TD} for factor in (1.0, 1.125)]
    return Case(
        num_tokens=4,
        num_experts=4,
        expert_parallel=expert_parallel,
        activation="relu",
        lrm={"selection": "topk"},
        given=given,
    )


@pytest.mark.parametrize(("expert_parallel", "kept"), [(1, [[0, 0, 1, 2]]), (2, [[0, 0, 1, 2], [0, 2, 1, 2]])])
def test_a23_dx_counts_the_kept_pairs_with_and_without_fused_permutation(
    gloo2: Pool, expert_parallel: int, kept: list[list[int]]
) -> None:
    """Loads 3, 3, 2 and 6, 6, 4 keep 1, 1, 1 and 3, 3, 2."""
    case = a23_case(expert_parallel)
    for plain, fused, kept_T in zip(gloo2(layers.run, case), gloo2(run_fused, case), kept, strict=False):
        for result in (plain, fused):
            assert (result.kept_TE > 0).sum(1).tolist() == kept_T
            assert torch.equal(result.dx_TD, torch.tensor(kept_T).double()[:, None].expand(-1, HIDDEN))
        assert torch.equal(plain.out_TD, fused.out_TD)
        assert all(torch.equal(fused.gradients[name], value) for name, value in plain.gradients.items())
    # Megatron's layer does run the kernels' backward, so the fakes would have been found out.
    assert "own backward ran" in gloo2(error_of_megatrons_layer, case)[0]


def a24_case(config: dict[str, Any]) -> Case:
    """Expert ids [0, -1, 1, -1]: capacity has dropped the only expert of tokens 1 and 3. All numbers are integers."""
    map_TE = torch.tensor([[True, False], [False, False], [False, True], [False, False]])
    x_TD = torch.arange(4.0 * HIDDEN, dtype=torch.float64).view(4, HIDDEN)
    given = {"map_TE": map_TE, "probs_TE": map_TE.double(), "x_TD": x_TD, "g_TD": x_TD + 1, **identity_experts(2)}
    return Case(
        num_tokens=4,
        num_experts=2,
        top_k=1,
        activation="relu",
        config={**config, "moe_expert_capacity_factor": 1.0},
        always_compact=True,
        given=[given],
    )


@pytest.mark.parametrize("retention", [1.0, 0.5])
@pytest.mark.parametrize("config", [{}, ALLGATHER, DEEPEP], ids=["alltoall", "allgather", "DeepEP"])
def test_a24_dropped_slots_move_no_kept_row(gloo2: Pool, config: dict[str, Any], retention: float) -> None:
    """At 0.5 each expert keeps one of its two pairs, which are of both ranks: always token 0 or token 2."""
    case = replace(a24_case(config), lrm={"retention": retention, "selection": "topk"})
    run = other_dispatchers.run if config else layers.run
    results = gloo2(run, case)
    v = layers.settle(case, 0)
    for result in results:
        assert not result.kept_TE[[1, 3]].any() and not result.dx_TD[[1, 3]].any()
        exact = reference_of(case).backward(v["x_TD"], v["probs_TE"], v["g_TD"], result.kept_TE)
        assert (result.dx_TD - exact.dx_TD).abs().max() == 0 and (result.dprobs_TE - exact.dprobs_TE).abs().max() == 0
    kept_TE = stack_sources([result.kept_TE for result in results])
    assert (kept_TE > 0).sum(0).tolist() == [2 * retention] * 2
    x_TD, probs_TE, g_TD = (torch.cat([v[name]] * 2) for name in ("x_TD", "probs_TE", "g_TD"))
    exact = reference_of(case).backward(x_TD, probs_TE, g_TD, kept_TE)
    for rank, result in enumerate(results):
        assert (result.dfc1 - exact.dfc1[rank]).abs().max() == 0 and (result.dfc2 - exact.dfc2[rank]).abs().max() == 0


def loads_of_dropped_slots() -> list[int]:
    from megatron_lrmoe.mcore.call import pairs_sent

    manager = SimpleNamespace(token_indices=torch.tensor([[0], [-1], [1], [-1]]))
    map_TE = pairs_sent(SimpleNamespace(_comm_manager=manager), torch.ones(4, 2, dtype=torch.bool), 2)
    return map_TE.sum(dim=0).tolist()


def test_a24_dropped_slots_are_no_load(gloo2: Pool) -> None:
    assert gloo2(loads_of_dropped_slots) == [[1, 1]] * 2
