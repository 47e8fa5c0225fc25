"""Models that were built without the plugin and are converted, and the callable layer spec."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import layers
from tests.gloo import Pool
from tests.layers import Case

CASE = Case(num_tokens=24, lrm={"retention": 0.6})


def settings_of(case: Case) -> Any:
    from megatron_lrmoe.config import LrmConfig

    return LrmConfig(**case.lrm)


def named(module: torch.nn.Module) -> dict[str, tuple[int, torch.Size]]:
    return {name: (weight.data_ptr(), weight.shape) for name, weight in module.named_parameters()}


def converted(case: Case) -> tuple[list[int], bool, layers.Result]:
    """A stock layer, converted; whether its parameters are the same tensors under the same names; its gradients."""
    from megatron_lrmoe.mcore import clock
    from megatron_lrmoe.mcore.frameworks import convert_moe_layers

    layer = layers.build(replace(case, lrm={}), ours=False)
    before, keys = named(layer), list(layer.state_dict())
    source = clock._iteration, clock._seed
    numbers = convert_moe_layers(layer, settings_of(case), iteration=source[0], seed=source[1])
    same = before == named(layer) and keys == list(layer.state_dict())
    return numbers, same, layers.forward_backward(layer, case)


@pytest.mark.parametrize(
    "lrm",
    [{}, {"selection": "topk"}, {"replica_policy": "symi", "replica_slots": 1}],
    ids=["unbiased", "topk", "replicas"],
)
def test_a_converted_layer_is_the_layer_that_the_adaptor_builds(gloo2: Pool, lrm: dict[str, Any]) -> None:
    case = replace(CASE, lrm={**CASE.lrm, **lrm})
    stock = gloo2(layers.run, case, False)
    for ours, theirs, whole in zip(gloo2(converted, case), gloo2(layers.run, case), stock, strict=True):
        numbers, same, result = ours
        assert numbers == [case.layer_number]
        assert same
        assert torch.equal(result.out_TD, theirs.out_TD)
        assert result.gradients.keys() == theirs.gradients.keys()
        assert all(torch.equal(result.gradients[name], theirs.gradients[name]) for name in theirs.gradients)
        assert not torch.equal(result.dfc1, whole.dfc1)


def refusals() -> list[str]:
    """What is said of models that the plugin does not run with; each is left as it was."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_lrmoe.config import LrmConfig
    from megatron_lrmoe.mcore.frameworks import convert_moe_layers, lrmoe_block_spec

    said = []

    def refused(run: Callable[[], Any]) -> None:
        with pytest.raises(ValueError) as caught:
            run()
        said.append(str(caught.value))

    layer = layers.build(replace(CASE, lrm={}), ours=False)
    layer.config.moe_paged_stash = True
    layer.config.fp8 = "e4m3"
    for run in (convert_moe_layers, lambda _, settings: lrmoe_block_spec(settings)(layer.config)):
        refused(lambda run=run: run(layer, LrmConfig(retention=0.8)))
    assert type(layer) is MoELayer
    layer.config.moe_paged_stash, layer.config.fp8 = False, None
    refused(lambda: convert_moe_layers(layer, LrmConfig(retention=0.8, adaptive=True)))
    assert convert_moe_layers(layer, LrmConfig()) == [] and type(layer) is MoELayer
    assert convert_moe_layers([layer], LrmConfig(retention=0.8), iteration=lambda: 0, seed=lambda: 1) == [1]
    refused(lambda: convert_moe_layers(layer, LrmConfig(retention=0.5)))
    assert convert_moe_layers(torch.nn.Linear(1, 1), LrmConfig(retention=0.8)) == []
    return said


def test_what_the_plugin_does_not_run_with_is_named_all_at_once(gloo2: Pool) -> None:
    converting, spec, adaptive, twice = gloo2(refusals)[0]
    for said in (converting, spec):
        assert "--fp8-format" in said and "--moe-paged-stash" in said
    assert "--moe-lrm-adaptive" in adaptive
    assert ": found a LRMoELayer, allowed is Megatron's MoELayer, converted once" in twice


def built_from_spec(ours: bool) -> tuple[list[str], dict[str, torch.Size]]:
    """Classes of the MoE layers of a model with a dense first layer, and all names and shapes of its parameters."""
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_lrmoe.config import LrmConfig
    from megatron_lrmoe.mcore.frameworks import lrmoe_block_spec

    layers.parallel(2)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = layers.transformer_config(replace(CASE, config={"moe_layer_freq": [0, 1]}))
    config.transformer_impl = "local"
    if ours:
        spec = lrmoe_block_spec(LrmConfig(retention=0.8), iteration=lambda: 0, seed=lambda: 1)(config, vp_stage=None)
    else:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(config, spec, vocab_size=64, max_sequence_length=16, position_embedding_type="rope")
    kinds = [type(module).__name__ for module in model.modules() if isinstance(module, MoELayer)]
    return kinds, {name: weight.shape for name, weight in model.named_parameters()}


def test_the_layer_spec_builds_our_layers_under_the_stock_names(gloo2: Pool) -> None:
    """So a checkpoint that was imported for stock Megatron loads into ours."""
    (ours, our_shapes), (stock, stock_shapes) = gloo2(built_from_spec, True)[0], gloo2(built_from_spec, False)[0]
    assert (ours, stock) == (["LRMoELayer"], ["MoELayer"])
    assert list(our_shapes.items()) == list(stock_shapes.items())
    assert any(name.endswith("experts.local_experts.0.linear_fc1.weight") for name in our_shapes)
