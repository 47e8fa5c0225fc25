"""Evaluation and inference with our layer: Megatron's own to the last bit, and training goes on as without them."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import layers
from tests.dist.test_options import ALLTOALL, TYPES, same_step
from tests.dist.test_other_dispatchers import ALLGATHER, DEEPEP, HYBRIDEP, forward_backward, prepared
from tests.gloo import Pool
from tests.layers import Case

pytestmark = [pytest.mark.dist, pytest.mark.slow]

HOW = ("eval", "no_grad", "inference_mode", "engine")


def evaluated(layer: Any, case: Case, how: str) -> dict[str, torch.Tensor]:
    """Output without training, and in evaluation with gradients those too; the layer trains on afterwards."""
    from megatron.core.inference.utils import InferenceMode

    layer.train(how == "no_grad")
    if how == "eval":
        result = forward_backward(layer, case)
        assert result.kept_TE is None
        found = {"out": result.out_TD, **result.gradients}
    else:
        without = torch.inference_mode if how == "inference_mode" else torch.no_grad
        with without(), InferenceMode.active() if how == "engine" else nullcontext():
            found = {"out": layer(layers.leaves(layer, case, needs_grad=False)[0])[0].clone()}
    layer.train()
    return found


def trained(case: Case, evaluate: bool) -> tuple[list[layers.Result], list[tuple[Any, Any]], dict[str, float]]:
    """Four iterations of two microbatches, after each of which Megatron's layer and ours may be evaluated.

    Returns:
        The results of training, (Megatron's, our) results of evaluation, and the metrics of it all.
    """
    from megatron_lrmoe.mcore import adaptive, metrics

    results, evaluations = [], []
    with prepared(case):
        stock, layer = layers.build(case, ours=False), layers.build(case)
        metrics.forget()
        for microbatch in range(8):
            layers.at_iteration(microbatch // 2)
            results.append(forward_backward(layer, replace(case, seed=microbatch)))
            if evaluate:
                how, other = HOW[microbatch % len(HOW)], replace(case, seed=100 + microbatch)
                evaluations.append((evaluated(stock, other, how), evaluated(layer, other, how)))
            if case.lrm.get("adaptive") and microbatch % 2:
                adaptive.end_iteration(layer.lrm_config, 2, "cpu")
    return results, evaluations, metrics.collect(2, "cpu", per_layer=True)


def all_trained(cases: list[Case]) -> list[tuple[Any, Any]]:
    return [(trained(case, False), trained(case, True)) for case in cases]


EVALUATED = [
    Case(config=config, lrm=lrm, num_tokens=12)
    for config, lrm in (
        (ALLTOALL, {}),
        (ALLTOALL, {"scope": "source", "selection": "topk", "router_grad": "baseline"}),
        (ALLTOALL, {"when": "forward", "probe_interval": 2}),
        (ALLTOALL, {"adaptive": True}),
        (ALLGATHER, {}),
        (DEEPEP, {}),
        (HYBRIDEP, {"when": "forward"}),
    )
]


@pytest.mark.parametrize("dtype", TYPES, ids=["fp32", "bf16"])
def test_an_evaluation_is_megatrons_and_training_goes_on_as_without_it(gloo2: Pool, dtype: torch.dtype) -> None:
    """The forward bit for bit, whole gradients in ``eval()``; no microbatch is counted, nothing drawn or recorded."""
    cases = [replace(case, dtype=dtype) for case in EVALUATED]
    for rank in gloo2(all_trained, cases, limit_s=120):
        for case, ((without, _, figures), (steps, evaluations, figures_too)) in zip(cases, rank, strict=True):
            assert without[-1].plan.retention < 1 and (without[-1].kept_TE == 0)[without[-1].map_TE].any()
            assert all(same_step(a, b) for a, b in zip(steps, without, strict=True)), case
            assert figures_too == figures and figures, case
            for how, (stock, ours) in zip(HOW * 2, evaluations, strict=True):
                assert set(stock) == set(ours) and ("dfc1" in stock) == (how == "eval")
                assert all(torch.equal(ours[name], value) for name, value in stock.items()), (case, how)


def language_model(case: Case, ours: bool) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    import megatron_lrmoe.megatron_adaptor  # noqa: F401
    from megatron_lrmoe.config import LrmConfig

    layers.parallel(case.expert_parallel)
    layers.at_iteration(0)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = layers.transformer_config(case)
    if ours:
        config.moe_lrm = LrmConfig(retention=0.5)
    spec = get_gpt_layer_local_spec(num_experts=case.num_experts, moe_grouped_gemm=False)
    return GPTModel(config, spec, vocab_size=32, max_sequence_length=8).to(case.dtype).eval()


def logits_of(model: Any) -> list[torch.Tensor]:
    """Of a prompt of 5 tokens, and of 3 tokens that follow one by one, through the cache of keys and values."""
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.utils import InferenceMode

    token_BT, logits = torch.tensor([[3, 14, 15, 9, 26, 5, 31, 8]]), []
    context = StaticInferenceContext(max_batch_size=1, max_sequence_length=8)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).triu(1)
    with torch.no_grad(), InferenceMode.active():
        for first, last in ((0, 5), (5, 6), (6, 7), (7, 8)):
            (context.enable_decode_mode if first else context.enable_prefill_mode)()
            positions, mask = torch.arange(first, last).unsqueeze(0), None if first else mask
            given = {"inference_context": context, "runtime_gather_output": True}
            logits.append(model(token_BT[:, first:last], positions, mask, **given))
            context.increment_sequence_len_offset(last - first)
    return logits


def inferred(case: Case) -> tuple[list[str], list[torch.Tensor], list[torch.Tensor], dict[str, float]]:
    """Classes of the MoE layers, logits of Megatron's model and of ours, and metrics."""
    from megatron_lrmoe.mcore import metrics

    stock, ours = language_model(case, False), language_model(case, True)
    ours.load_state_dict(stock.state_dict())
    metrics.forget()
    expected, found = logits_of(stock), logits_of(ours)
    kinds = [type(layer.mlp).__name__ for layer in ours.decoder.layers]
    return kinds, expected, found, metrics.collect(2, "cpu", per_layer=False)


@pytest.mark.parametrize("dtype", TYPES, ids=["fp32", "bf16"])
def test_inference_with_a_cache_is_megatrons(gloo2: Pool, dtype: torch.dtype) -> None:
    for kinds, stock, ours, figures in gloo2(inferred, Case(num_experts=4, dtype=dtype)):
        assert kinds == ["LRMoELayer"] * 2 and figures == {}
        assert all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True))
        assert len({float(logit.abs().sum()) for logit in ours}) == 4
