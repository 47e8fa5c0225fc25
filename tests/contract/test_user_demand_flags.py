"""What users of MoE training have run into, as in tests/dist/test_user_demand.py: what is refused, and patch order.

Module-level functions without a test's name run in the gloo workers, which have the CPU device.
"""

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests import layers
from tests.contract.command_lines import ALLTOALL, ON, SMALL, arguments_module, on_cpu, parsed
from tests.gloo import Pool

REFUSED = {
    "A11, ETP2": (
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2",
        "--expert-tensor-parallel-size: found 2, allowed is 1",
    ),
    "A26, fp8": ("--bf16 --fp8-format hybrid", "--fp8-format: found fp8='hybrid', allowed is without it"),
    "A26, mxfp8": (
        "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8",
        "--fp8-format: found fp8='e4m3', allowed is without it",
    ),
    "A28": (
        "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
        "--moe-pad-expert-input-to-capacity: found True, allowed is without it",
    ),
    "A31, overlap": (
        "--bf16 --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm",
        "--overlap-moe-expert-parallel-comm: found True, allowed is without it",
    ),
    "A31, delayed": (
        "--bf16 --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm --delay-wgrad-compute",
        "--delay-wgrad-compute: found True, allowed is without it",
    ),
    "A32, whole layer": (
        "--cuda-graph-impl local",
        "--cuda-graph-modules: found [], allowed is attn, mlp, mamba, moe_router",
    ),
    "A32, attention and experts": (
        "--cuda-graph-impl local --cuda-graph-modules attn moe",
        "--cuda-graph-modules: found [",
    ),
}


def refusals(launches: dict[str, str]) -> dict[str, str]:
    arguments = arguments_module()
    said = {}
    for name, words in launches.items():
        # Not with the CPU device's flags: Megatron itself refuses some of these without Transformer Engine.
        args = parsed(f"{SMALL} {ALLTOALL} {ON} {words}")
        with pytest.raises(ValueError) as caught:
            arguments.core_transformer_config_from_args(args)
        said[name] = str(caught.value)
    return said


@pytest.fixture(scope="module")
def said(gloo2: Pool) -> dict[str, str]:
    return gloo2(refusals, {name: words for name, (words, _) in REFUSED.items()})[0]


@pytest.mark.parametrize("name", REFUSED)
def test_a_combination_that_would_be_silently_dense_is_refused_by_name(said: dict[str, str], name: str) -> None:
    head, *lines = said[name].splitlines()
    assert "megatron_lrmoe" in head
    expected = REFUSED[name][1]
    assert [line for line in lines if line.startswith(expected)], (expected, lines)
    given = {expected.partition(":")[0], *re.findall(r"--[a-z0-9-]+", REFUSED[name][0])}
    assert {line.partition(":")[0] for line in lines} <= given


def test_a_refusal_names_the_plugins_flag_too(said: dict[str, str]) -> None:
    assert all("--moe-lrm-retention" in text for text in said.values())


def captured_modules(impls: list[str]) -> dict[str, tuple[bool, list[str]]]:
    """Whether the config has the plugin on, and what CUDA graphs capture, where attention alone is asked for."""
    found = {}
    for impl in impls:
        words = f"{SMALL} {ALLTOALL} {ON} --cuda-graph-impl {impl} --cuda-graph-modules attn"
        config = arguments_module().core_transformer_config_from_args(parsed(on_cpu(words)))
        assert config.cuda_graph_impl == impl
        found[impl] = config.moe_lrm.enabled, [getattr(m, "name", m) for m in config.cuda_graph_modules]
    return found


def test_a32_graphs_of_attention_alone_are_accepted(gloo2: Pool) -> None:
    impls = ["local", "transformer_engine"]
    assert gloo2(captured_modules, impls) == [{impl: (True, ["attn"]) for impl in impls}] * 2


def choices_refused(words: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit):
        parsed(on_cpu(f"{SMALL} {ALLTOALL} {words}"))
    return said.getvalue()


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (f"{ON} --moe-expert-capacity-factor 1.0 --moe-token-drop-policy prob", "--moe-token-drop-policy"),
        (f"{ON} --moe-lrm-selection best", "--moe-lrm-selection"),
        (f"{ON} --moe-lrm-quota even", "--moe-lrm-quota"),
    ],
)
def test_a28_unknown_policies_are_refused_by_the_parser(gloo2: Pool, words: str, flag: str) -> None:
    for text in gloo2(choices_refused, words):
        assert re.search(rf"argument {flag}: invalid choice", text), text


@pytest.fixture
def fresh() -> Iterator[Pool]:
    """One rank in which the adaptor was never imported."""
    pool = Pool(1)
    yield pool
    pool.close()


def built_after_names_were_taken() -> dict[str, Any]:
    """Names of Megatron's classes are taken first, then the adaptor comes, then the model is built and run."""
    assert "megatron_lrmoe.mcore.adaptor" not in sys.modules
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    case = layers.Case(expert_parallel=1)
    layer = layers.build(case)
    from megatron_lrmoe.mcore.layer import _become_ours

    # Without Transformer Engine the class cannot be built; what it holds does not matter here.
    grouped = TEGroupedMLP.__new__(TEGroupedMLP)
    _become_ours(grouped)
    parts = ((layer, MoELayer), (layer.token_dispatcher, MoEAlltoAllTokenDispatcher), (layer.experts, SequentialMLP))
    kept_TE = layers.forward_backward(layer, case).kept_TE
    return {
        "classes": [type(part).__name__ for part, _ in parts] + [type(grouped).__name__],
        "still theirs": [isinstance(part, theirs) for part, theirs in (*parts, (grouped, TEGroupedMLP))],
        "kept": None if kept_TE is None else int((kept_TE > 0).sum()),
    }


@pytest.mark.slow
@pytest.mark.dist
def test_a37_names_taken_before_the_adaptor_do_not_keep_our_experts_out(fresh: Pool) -> None:
    (found,) = fresh(built_after_names_were_taken)
    ours = ["LRMoELayer", "LRMAlltoAllTokenDispatcher", "LRMSequentialMLP", "LRMTEGroupedMLP"]
    assert found["classes"] == ours and found["still theirs"] == [True] * 4
    assert 0 < found["kept"] < 24 * 2
