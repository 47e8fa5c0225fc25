"""Shared and latent experts of Transformer Engine, and whole hybrid models, which Megatron builds with it alone.

As in ``test_te_experts``: on the CPU, with plain products in place of TE's GEMMs, and skipped where TE is absent.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests import layers
from tests.contract.command_lines import ALLTOALL, ON, SMALL, arguments_module, on_cpu, parsed
from tests.contract.test_adaptor_megatron import parts_of
from tests.dist import test_other_dispatchers
from tests.dist.test_other_dispatchers import ALLGATHER, DEEPEP
from tests.dist.test_router_grad import same
from tests.dist.test_te_experts import (
    RECOMPUTE,
    build,
    check,
    helpers,
    products_on_cpu,
    transformer_engine,  # noqa: F401
)
from tests.gloo import Pool
from tests.layers import Case

pytestmark = pytest.mark.dist

SHARED = {"moe_shared_expert_intermediate_size": 40}
OVERLAPPED = {**SHARED, "moe_shared_expert_overlap": True}
LATENT = 8
STOCK = ["MoELayer", "MoEAlltoAllTokenDispatcher", "TEGroupedMLP"]
OURS = ["LRMoELayer", "LRMAlltoAllTokenDispatcher", "LRMTEGroupedMLP"]


def run(case: Case, function: Any) -> Any:
    """``function(layer, case)`` with what the case needs in place."""
    others = helpers(case) is test_other_dispatchers
    with products_on_cpu(), test_other_dispatchers.prepared(case) if others else nullcontext():
        return function(build(case), case)


def settled(case: Case) -> dict[str, torch.Tensor]:
    """This rank's tokens and output gradient."""
    from megatron.core import parallel_state

    return layers.settle(case, parallel_state.get_expert_model_parallel_rank())


def routed_part(layer: Any, case: Case) -> layers.Result:
    """The layer's result less what its shared experts give; their weights' gradients are compared here."""
    shared = layer.shared_experts
    result = helpers(case).forward_backward(layer, case)
    values = settled(case)
    fc1, fc2 = (w.weight.detach().clone().requires_grad_() for w in (shared.linear_fc1, shared.linear_fc2))
    x_TD = values["x_TD"].requires_grad_()
    y_TD = F.linear(layers.ACTIVATIONS["swiglu"](F.linear(x_TD, fc1)), fc2)
    y_TD.backward(values["g_TD"])
    same(shared.linear_fc1.weight.grad, fc1.grad)
    same(shared.linear_fc2.weight.grad, fc2.grad)
    return replace(result, out_TD=result.out_TD - y_TD.detach(), dx_TD=result.dx_TD - x_TD.grad)


def run_shared(cases: list[Case]) -> list[layers.Result]:
    return [run(case, routed_part) for case in cases]


def test_shared_experts_are_exact_beside_dropped_pairs(gloo2: Pool) -> None:
    configs = [SHARED, OVERLAPPED, {**SHARED, **ALLGATHER}, {**OVERLAPPED, **DEEPEP}]
    configs += [{**OVERLAPPED, **recompute} for recompute in RECOMPUTE]
    cases = [Case(config=config) for config in configs]
    cases += [Case(config=OVERLAPPED, lrm={"when": "forward"}), Case(config=OVERLAPPED, workload="empty_rank")]
    ranks = gloo2(run_shared, cases, limit_s=120)
    for i, case in enumerate(cases):
        check(case, [rank[i] for rank in ranks])


def latent_part(layer: Any, case: Case) -> tuple[layers.Result, dict[str, torch.Tensor]]:
    """Result between the two projections, and the tokens and output gradient there."""
    seen: dict[str, torch.Tensor] = {}

    def watch(value: str, gradient: str, latent: torch.Tensor) -> None:
        # In recompute the second forward comes last and is the one with a backward.
        seen[value] = latent.detach().reshape(-1, LATENT).clone()
        if latent.requires_grad:
            latent.register_hook(lambda g: seen.update({gradient: g.reshape(-1, LATENT).clone()}))

    layer.fc1_latent_proj.register_forward_hook(lambda _, __, out: watch("x_TD", "dx_TD", out[0]))
    layer.fc2_latent_proj.register_forward_pre_hook(lambda _, args: watch("out_TD", "g_TD", args[0]))
    result = helpers(case).forward_backward(layer, case)
    values = settled(case)
    down, up = (w.weight.detach() for w in (layer.fc1_latent_proj, layer.fc2_latent_proj))
    same(result.out_TD, seen["out_TD"] @ up.t())
    same(result.dx_TD, seen["dx_TD"] @ down)
    same(layer.fc1_latent_proj.weight.grad, seen["dx_TD"].t() @ values["x_TD"])
    same(layer.fc2_latent_proj.weight.grad, values["g_TD"].t() @ seen["out_TD"])
    return replace(result, out_TD=seen["out_TD"], dx_TD=seen["dx_TD"]), {name: seen[name] for name in ("x_TD", "g_TD")}


def run_latent(cases: list[Case]) -> list[tuple[layers.Result, dict[str, torch.Tensor]]]:
    return [run(case, latent_part) for case in cases]


def latent_case(**fields: Any) -> Case:
    """Experts of width ``LATENT``; the projections' weights are Megatron's own."""
    case = Case(**{**fields, "config": {"moe_latent_size": LATENT, **fields.get("config", {})}})
    values = layers.settle(case, 0)
    narrow = {"fc1": values["fc1"][:, :, :LATENT].contiguous(), "fc2": values["fc2"][:, :LATENT].contiguous()}
    return replace(case, given=[narrow])


def test_latent_experts_with_dropped_pairs_equal_the_reference(gloo2: Pool) -> None:
    configs = [{}, *RECOMPUTE, ALLGATHER, DEEPEP]
    cases = [latent_case(config=config) for config in configs]
    cases += [latent_case(lrm={"when": "forward"}), latent_case(workload="empty_rank", lrm={"selection": "topk"})]
    ranks = gloo2(run_latent, cases, limit_s=120)
    for i, case in enumerate(cases):
        results, inside = zip(*(rank[i] for rank in ranks), strict=True)
        check(replace(case, given=[{**case.given[0], **part} for part in inside]), list(results))


HYBRID = (
    f"{ALLTOALL} --transformer-impl transformer_engine --moe-grouped-gemm --expert-model-parallel-size 2 "
    "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
)
# Mamba layers need mamba_ssm, even to be built.
PATTERN = "M*-E*E" if find_spec("mamba_ssm") else "*-E*E"


@dataclass(frozen=True)
class Hybrid:
    """A hybrid model.

    Args:
        layers: classes of each layer's MLP by the layer's name; of an MoE layer also those of its parts.
        numbers: what each MoE layer of ours takes for its number in the model.
        parameters: shape and attributes by name.
        sharded: what a checkpoint holds, by key of the state dict.
    """

    layers: dict[str, list[str]]
    numbers: list[int]
    parameters: dict[str, Any]
    sharded: dict[str, Any]


def built_hybrid(words: str) -> Hybrid:
    """A model built as pretrain_hybrid.py builds it."""
    arguments_module()
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.training import argument_utils

    args = parsed(f"{on_cpu(SMALL)} {HYBRID} {words}")
    layers.parallel(2)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    settings = argument_utils.hybrid_config_from_args(args)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = settings.get_builder_cls()(settings).build_model(groups, pre_process=True, post_process=True)
    found = {name: module for name, module in model.named_modules() if name.endswith("mlp")}
    return Hybrid(
        layers={name: parts_of(mlp) for name, mlp in found.items()},
        numbers=[mlp.number_in_model for mlp in found.values() if hasattr(mlp, "number_in_model")],
        parameters={name: (p.shape, sorted(vars(p).items(), key=str)) for name, p in model.named_parameters()},
        sharded={name: stored(value) for name, value in model.sharded_state_dict().items()},
    )


def stored(value: Any) -> list[Any]:
    places = ("key", "global_shape", "global_offset", "replica_id")
    return [type(value).__name__, *(getattr(value, name, None) for name in places)]


def test_a_hybrid_model_gets_our_moe_layers_under_the_same_keys(gloo2: Pool) -> None:
    moe = [f"decoder.layers.{i}.mlp" for i, kind in enumerate(PATTERN) if kind == "E"]
    words = f"--hybrid-layer-pattern {PATTERN}"
    for stock, at_one, ours in zip(
        *(gloo2(built_hybrid, f"{words} {more}") for more in ("", "--moe-lrm-retention 1.0", ON)), strict=True
    ):
        assert at_one == stock
        assert {name: stock.layers[name] for name in moe} == dict.fromkeys(moe, STOCK)
        assert ours.layers == {**stock.layers, **dict.fromkeys(moe, OURS)}
        assert ["MLP"] in stock.layers.values()
        assert ours.numbers == [i + 1 for i, kind in enumerate(PATTERN) if kind == "E"]
        assert ours.parameters == stock.parameters
        assert ours.sharded == stock.sharded
