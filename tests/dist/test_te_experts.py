"""Experts whose weights Transformer Engine holds, on the CPU: our class in TEGroupedMLP's place.

TE's own GEMMs need a GPU and are not run here; our Function reads TE's weights and computes by itself. Skipped where
TE is not installed.
"""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.dist

HIDDEN, WIDTH, EXPERTS, TOKENS = 32, 16, 4, 40


def te_layer(ours: bool) -> Any:
    import torch.nn.functional as F
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.gpt import moe_module_specs
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_lrmoe.megatron_adaptor  # noqa: F401
    from megatron_lrmoe.config import LrmConfig
    from megatron_lrmoe.mcore import clock
    from tests import layers

    layers.parallel(2)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    clock.follow(lambda: 0, lambda: 1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        moe_ffn_hidden_size=WIDTH,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=2,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        moe_grouped_gemm=True,
    )
    if ours:
        config.moe_lrm = LrmConfig(retention=0.5)
    spec = moe_module_specs.get_moe_module_spec_for_backend(
        TESpecProvider(), num_experts=EXPERTS, moe_grouped_gemm=True
    )
    layer = spec(config=config, pg_collection=None, is_mtp_layer=False, name="mlp")
    layer.set_layer_number(1)
    return layer.train()


def describe(ours: bool) -> dict[str, Any]:
    """What must not change when our class takes TEGroupedMLP's place."""
    layer = te_layer(ours)
    return {
        "class": type(layer.experts).__name__,
        "shapes": {name: tuple(p.shape) for name, p in layer.named_parameters()},
        "attributes": {name: sorted(vars(p).items(), key=str) for name, p in layer.named_parameters()},
        "sharded": sorted(layer.sharded_state_dict()),
    }


def gradients_of_twins() -> list[float]:
    """Largest relative difference of each expert gradient from our own SequentialMLP class on the same weights."""
    from megatron_lrmoe.compute.activation import Activation
    from megatron_lrmoe.compute.experts import ExpertWeights
    from megatron_lrmoe.mcore.experts import LRMTEGroupedMLP

    layer = te_layer(ours=True)
    assert isinstance(layer.experts, LRMTEGroupedMLP)
    x = torch.randn(TOKENS, 1, HIDDEN, requires_grad=True)
    seen: list[ExpertWeights] = []
    original = LRMTEGroupedMLP._live_weights

    def remember(experts: Any) -> Any:
        weights = original(experts)
        seen.append(ExpertWeights(*weights))
        return weights

    LRMTEGroupedMLP._live_weights = remember
    try:
        layer.always_compact = True
        layer.lrm_config = type(layer.lrm_config)(retention=1.0)
        out, _ = layer(x)
        out.square().sum().backward()
    finally:
        LRMTEGroupedMLP._live_weights = original
    # The same layer once more, densely and by autograd, from the weights that TE holds.
    import torch.nn.functional as F
    from megatron.core import parallel_state

    weights, activation = seen[0], Activation(F.silu, gated=True)
    rank = parallel_state.get_expert_model_parallel_rank()
    gathered = []
    for part in (weights.fc1, weights.fc2):
        local = torch.stack([w.detach() for w in part])
        everywhere = [torch.empty_like(local) for _ in range(2)]
        torch.distributed.all_gather(everywhere, local, group=parallel_state.get_expert_model_parallel_group())
        gathered.append(torch.cat(everywhere).double().requires_grad_())
    probs, routing_map = layer.router(x)
    y = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for e in range(EXPERTS):
        a = activation(x.detach()[:, 0].double() @ gathered[0][e].t()) * probs[:, e : e + 1].double()
        y = y + routing_map[:, e : e + 1] * (a @ gathered[1][e].t())
    y.square().sum().backward()
    for grad in (gathered[0].grad, gathered[1].grad):
        torch.distributed.all_reduce(grad)
    own = slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2)
    differences = []
    for part, dense in zip((weights.fc1, weights.fc2), gathered, strict=True):
        ours, expected = torch.stack([w.grad for w in part]).double(), dense.grad[own]
        differences.append(float((ours - expected).abs().max() / expected.abs().max()))
    return differences


@pytest.fixture(autouse=True)
def transformer_engine():
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"Transformer Engine cannot be loaded here: {error}")


def test_names_attributes_and_sharded_keys_are_tes_own(gloo2):
    (stock, _), (ours, _) = gloo2(describe, False), gloo2(describe, True)
    assert stock.pop("class") == "TEGroupedMLP"
    assert ours.pop("class") == "LRMTEGroupedMLP"
    assert ours == stock


def test_forward_and_backward_use_the_weights_that_te_holds(gloo2):
    for differences in gloo2(gradients_of_twins):
        assert max(differences) < 1e-5
