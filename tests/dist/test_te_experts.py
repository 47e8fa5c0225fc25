"""Experts whose weights Transformer Engine holds, on the CPU: our class in TEGroupedMLP's place.

Our Function reads TE's weights and computes by itself. TE's own GEMMs need a GPU; where Megatron calls them, plain
products stand in. Skipped where TE is not installed.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests import layers
from tests.dist import test_layer_gradients, test_other_dispatchers
from tests.dist.test_other_dispatchers import ALLGATHER, DEEPEP, HYBRIDEP
from tests.dist.test_router_grad import same
from tests.gloo import Pool
from tests.layers import Case

pytestmark = pytest.mark.dist

RECOMPUTE: list[dict[str, Any]] = [
    {"recompute_granularity": "selective", "recompute_modules": modules}
    for modules in (["moe_act"], ["moe"], ["moe", "moe_act"])
]


@pytest.fixture(autouse=True)
def transformer_engine() -> None:
    try:
        import_module("transformer_engine.pytorch")
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"Transformer Engine cannot be loaded here: {error}")


@contextmanager
def products_on_cpu() -> Iterator[None]:
    """Plain products in place of the forwards of TE's Linear and GroupedLinear."""
    te = import_module("transformer_engine.pytorch")

    def linear(self: Any, inp: torch.Tensor, **_: Any) -> torch.Tensor:
        return F.linear(inp, self.weight)

    def grouped(self: Any, inp: torch.Tensor, m_splits: list[int], **_: Any) -> torch.Tensor:
        rows = inp.split(m_splits)
        return torch.cat([F.linear(x, getattr(self, f"weight{i}")) for i, x in enumerate(rows)])

    originals = te.Linear.forward, te.GroupedLinear.forward
    te.Linear.forward, te.GroupedLinear.forward = linear, grouped
    try:
        yield
    finally:
        te.Linear.forward, te.GroupedLinear.forward = originals


def build(case: Case, ours: bool = True) -> Any:
    """As ``layers.build``, from Transformer Engine's modules."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.gpt import moe_module_specs
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    import megatron_lrmoe.megatron_adaptor  # noqa: F401
    from megatron_lrmoe.config import LrmConfig

    layers.parallel(case.expert_parallel)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    layers.at_iteration(case.iteration)
    config = layers.transformer_config(replace(case, config={"moe_grouped_gemm": True, **case.config}))
    if ours:
        config.moe_lrm = LrmConfig(**{"retention": 0.5, **case.lrm})
    spec: Any = moe_module_specs.get_moe_module_spec_for_backend(
        TESpecProvider(), num_experts=case.num_experts, moe_grouped_gemm=True
    )
    layer = spec(config=config, pg_collection=None, is_mtp_layer=False, name="mlp")
    layer.set_layer_number(case.layer_number)
    layer.router = layers.FixedRouter()
    layer.to(case.dtype).train()
    if ours and case.always_compact:
        layer.always_compact = True
    layer.experts.local_experts = [one_expert(layer.experts, i) for i in range(layer.experts.num_local_experts)]
    layers.load_weights(layer, case)
    return layer


def one_expert(experts: Any, index: int) -> SimpleNamespace:
    """TE's weights of one expert under the names that SequentialMLP's have."""
    return SimpleNamespace(
        **{
            name: SimpleNamespace(weight=getattr(getattr(experts, name), f"weight{index}"))
            for name in ("linear_fc1", "linear_fc2")
        }
    )


def helpers(case: Case) -> Any:
    """Where ``forward_backward`` of the case's dispatcher is."""
    return test_other_dispatchers if "moe_token_dispatcher_type" in case.config else layers


def run(case: Case, ours: bool = True) -> layers.Result:
    """Build a layer and run it once."""
    others = helpers(case) is test_other_dispatchers
    with products_on_cpu(), test_other_dispatchers.prepared(case) if others else nullcontext():
        return helpers(case).forward_backward(build(case, ours), case)


def run_all(cases: list[Case]) -> list[layers.Result]:
    return [run(case) for case in cases]


def run_pairs(cases: list[Case]) -> list[tuple[layers.Result, layers.Result]]:
    """Megatron's layer and ours, for each case."""
    return [(run(case, ours=False), run(case)) for case in cases]


def check(case: Case, results: list[layers.Result]) -> None:
    """Compare every gradient of one expert-parallel group with the reference for the same kept pairs."""
    if helpers(case) is test_other_dispatchers:
        test_other_dispatchers.check(case, results)
    else:
        test_layer_gradients.check(case, results, 1e-10)


def check_all(gloo2: Pool, cases: list[Case]) -> None:
    ranks = gloo2(run_all, cases, limit_s=120)
    for i, case in enumerate(cases):
        try:
            check(case, [rank[i] for rank in ranks][: case.expert_parallel])
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def describe(ours: bool) -> dict[str, Any]:
    """What must not change when our class takes TEGroupedMLP's place."""
    layer = build(Case(dtype=torch.float32), ours)
    return {
        "class": type(layer.experts).__name__,
        "shapes": {name: tuple(p.shape) for name, p in layer.named_parameters()},
        "attributes": {name: sorted(vars(p).items(), key=str) for name, p in layer.named_parameters()},
        "sharded": sorted(layer.sharded_state_dict()),
    }


def test_names_attributes_and_sharded_keys_are_tes_own(gloo2: Pool) -> None:
    (stock, _), (ours, _) = gloo2(describe, False), gloo2(describe, True)
    assert stock.pop("class") == "TEGroupedMLP"
    assert ours.pop("class") == "LRMTEGroupedMLP"
    assert ours == stock


def test_every_gradient_equals_the_reference_for_the_kept_pairs(gloo2: Pool) -> None:
    choices = itertools.product(("unbiased", "topk"), ("backward", "forward"))
    chosen = [Case(lrm={"selection": selection, "when": when}) for selection, when in choices]
    chosen += [Case(workload="empty_rank"), Case(workload="one_token"), Case(expert_parallel=1)]
    chosen += [Case(activation=name) for name in ("squared_relu", "clamped_quick_geglu")]
    check_all(gloo2, chosen)


def test_recompute_with_dropped_pairs_equals_the_reference(gloo2: Pool) -> None:
    """Of the layer (moe), of the activation (moe_act), and of both."""
    cases = [Case(config=config, lrm={"when": when}) for config in RECOMPUTE for when in ("backward", "forward")]
    check_all(gloo2, cases)


def test_other_dispatchers_with_dropped_pairs_equal_the_reference(gloo2: Pool) -> None:
    dispatchers = (ALLGATHER, DEEPEP, HYBRIDEP)
    cases = [Case(config={**config, **more}) for config in dispatchers for more in ({}, *RECOMPUTE)]
    cases += [Case(config=config, lrm={"when": "forward"}) for config in dispatchers]
    cases += [Case(config=config, workload="empty_rank", lrm={"selection": "topk"}) for config in dispatchers]
    check_all(gloo2, cases)


EVERY_CONFIG: list[dict[str, Any]] = [{}, *RECOMPUTE, ALLGATHER, DEEPEP]


def test_at_retention_one_gradients_are_megatrons(gloo2: Pool) -> None:
    cases = [Case(config=config, lrm={"retention": 1.0}, always_compact=True) for config in EVERY_CONFIG]
    for rank in gloo2(run_pairs, cases):
        for case, (stock, ours) in zip(cases, rank, strict=True):
            assert torch.equal(ours.kept_TE > 0, ours.map_TE)
            same(ours.out_TD, stock.out_TD, 1e-12)
            for name, gradient in stock.gradients.items():
                # DeepEP brings back the gradients of probabilities in fp32.
                same(ours.gradients[name], gradient, 1e-6 if case.config is DEEPEP and name == "dprobs" else 1e-12)


def test_before_the_start_every_bit_is_megatrons(gloo2: Pool) -> None:
    cases = [Case(config=config, lrm={"start_iter": 5}, iteration=4) for config in EVERY_CONFIG]
    for rank in gloo2(run_pairs, cases):
        for stock, ours in rank:
            assert ours.plan is None and torch.equal(ours.out_TD, stock.out_TD)
            assert all(torch.equal(ours.gradients[name], value) for name, value in stock.gradients.items())


def saved_widths(case: Case, ours: bool) -> list[int]:
    """Last dimension of every tensor of more than one that the layer's forward saves for backward."""
    saved: list[torch.Tensor] = []
    with products_on_cpu():
        layer = build(case, ours)
        x, _ = layers.leaves(layer, case)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
            layers.forward(layer, case, x)
    return sorted(x.shape[-1] for x in saved if x.dim() > 1)


def test_moe_act_has_nothing_left_to_free(gloo2: Pool) -> None:
    """With dropped pairs fc2's input is never saved, with or without it; Megatron saves it where it is not given."""
    without, with_it = Case(), Case(config=RECOMPUTE[0])
    for rank in range(2):
        assert layers.WIDTH in gloo2(saved_widths, without, False)[rank]
        ours = gloo2(saved_widths, without, True)[rank]
        assert layers.WIDTH not in ours and 2 * layers.WIDTH in ours
        assert gloo2(saved_widths, with_it, True)[rank] == ours
    for first, second in gloo2(run_all, [without, with_it]):
        assert all(torch.equal(second.gradients[name], value) for name, value in first.gradients.items())
