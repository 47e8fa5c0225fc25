"""The adaptor inside the real Megatron: flags, settings and the classes that its specs build.

Module-level functions without a test's name run in the gloo workers, which have the CPU device.
"""

import contextlib
import importlib
import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_lrmoe.mcore.adaptor import NEEDED, PATCHED
from megatron_lrmoe.mcore.support import REFUSALS
from tests.gloo import ROOT, Pool
from tests.layers import parallel

SMALL = """--num-layers 2 --hidden-size 16 --ffn-hidden-size 16 --num-attention-heads 2 --seq-length 8
--max-position-embeddings 8 --micro-batch-size 1 --train-iters 2 --lr 1e-3 --vocab-size 64 --swiglu
--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 16 --position-embedding-type rope --mock-data
--untie-embeddings-and-output-weights --use-cpu-initialization --tokenizer-type NullTokenizer"""
ALLTOALL = "--moe-token-dispatcher-type alltoall"
ON = "--moe-lrm-retention 0.8"

# Model flags of the published recipe of Qwen3-30B-A3B, with the number of layers cut.
QWEN3 = """--num-layers 8 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
--group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm --normalization RMSNorm
--norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
--position-embedding-type rope --rotary-percent 1.0 --rotary-base 1000000 --max-position-embeddings 40960
--vocab-size 151936 --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32
--moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-permute-fusion --attention-dropout 0
--hidden-dropout 0 --init-method-std 0.02 --seq-length 4096 --micro-batch-size 1 --global-batch-size 256
--train-iters 100 --lr 1.2e-4 --min-lr 1.2e-5 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0
--bf16 --use-distributed-optimizer --mock-data --tokenizer-type NullTokenizer --attention-backend flash"""
LAUNCHES = {
    "EP8": "--expert-model-parallel-size 8 --overlap-grad-reduce --overlap-param-gather --manual-gc",
    "EP8, moe_act and layernorm recomputed": "--expert-model-parallel-size 8 --recompute-granularity selective "
    "--recompute-modules moe_act layernorm --cross-entropy-loss-fusion",
    "TP4 PP2 EP4, ETP1, all recomputed": "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "
    "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --sequence-parallel "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "capacity factor, shared expert, replay": "--expert-model-parallel-size 8 --moe-expert-capacity-factor 1.25 "
    "--moe-shared-expert-intermediate-size 768 --moe-enable-routing-replay --moe-router-fusion "
    "--moe-z-loss-coeff 1e-3 --deterministic-mode",
    "GLM-like: dense first layer, expert bias, MTP": "--expert-model-parallel-size 8 --mtp-num-layers 1 "
    "--moe-layer-freq [0]*1+[1]*7 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--optimizer-cpu-offload --use-precision-aware-optimizer",
    "offloaded attention": "--expert-model-parallel-size 8 --fine-grained-activation-offloading "
    "--offload-modules core_attn attn_proj",
}


@contextlib.contextmanager
def command_line(words: str, world_size: int = 2) -> Iterator[None]:
    before = sys.argv, os.environ["WORLD_SIZE"]
    sys.argv, os.environ["WORLD_SIZE"] = ["pretrain", *words.split()], str(world_size)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        sys.argv, os.environ["WORLD_SIZE"] = before


def arguments_module() -> Any:
    importlib.import_module("megatron_lrmoe.megatron_adaptor")
    return importlib.import_module("megatron.training.arguments")


def parsed(words: str, world_size: int = 2, provider: Callable[[Any], Any] | None = None) -> Any:
    """Megatron's validated namespace of a command line."""
    arguments = arguments_module()
    with command_line(words, world_size):
        args = arguments.parse_args(provider)
        arguments.validate_args(args)
    return args


def on_cpu(words: str) -> str:
    from megatron_lrmoe.device import cpu_flags

    return f"{words} {' '.join(cpu_flags())}"


def built_classes(words: str) -> dict[str, Any]:
    """What a model built as pretrain_gpt builds it consists of: a list of class names per MoE layer, and more."""
    arguments_module()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import get_submodules
    from megatron.training.argument_utils import gpt_config_from_args

    args = parsed(on_cpu(f"{SMALL} {words}"))
    parallel(1)
    config = gpt_config_from_args(args)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = config.get_builder_cls()(config).build_model(groups, pre_process=True, post_process=True)
    heads = model.mtp.layers if hasattr(model, "mtp") else []
    layers = [*model.decoder.layers, *(head.mtp_model_layer for head in heads)]
    specs = get_gpt_decoder_block_spec(config.transformer, use_transformer_engine=False).layer_specs
    return {
        "settings": getattr(config.transformer, "moe_lrm", None),
        "layers": [parts_of(layer.mlp) for layer in layers],
        "keys": sorted(model.state_dict()),
        "experts in spec": [hasattr(get_submodules(s.submodules.mlp), "experts") for s in specs],
    }


def parts_of(mlp: Any) -> list[str]:
    parts = [mlp, getattr(mlp, "token_dispatcher", None), getattr(mlp, "experts", None)]
    return [type(part).__name__ for part in parts if part is not None]


STOCK = ["MoELayer", "MoEAlltoAllTokenDispatcher", "SequentialMLP"]
OURS = ["LRMoELayer", "LRMAlltoAllTokenDispatcher", "LRMSequentialMLP"]


def test_stock_classes_without_the_flag_and_at_retention_one(gloo2: Pool) -> None:
    for words in (ALLTOALL, f"{ALLTOALL} --moe-lrm-retention 1.0 --moe-lrm-selection topk"):
        for built in gloo2(built_classes, words):
            assert built["settings"] is None
            assert built["layers"] == [STOCK, STOCK]


def test_our_classes_with_the_flag_under_the_same_parameter_names(gloo2: Pool) -> None:
    (stock, _), (ours, _) = gloo2(built_classes, ALLTOALL), gloo2(built_classes, f"{ALLTOALL} {ON}")
    assert ours["settings"].retention == 0.8
    assert ours["layers"] == [OURS, OURS]
    assert ours["keys"] == stock["keys"]
    assert ours["experts in spec"] == stock["experts in spec"] == [True, True]


def test_dense_layers_stay_dense_and_mtp_gets_our_layer(gloo2: Pool) -> None:
    words = f"{ALLTOALL} {ON} --moe-layer-freq [0,1] --mtp-num-layers 1"
    for built in gloo2(built_classes, words):
        assert built["layers"] == [["MLP"], OURS, OURS]
        assert built["experts in spec"] == [False, True]


def refused_layer() -> str:
    from functools import partial

    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import moe_module_specs
    from megatron.core.models.hybrid import hybrid_layer_specs

    arguments = arguments_module()
    parallel(1)
    config = arguments.core_transformer_config_from_args(parsed(on_cpu(f"{SMALL} {ALLTOALL} {ON}")))
    early = hybrid_layer_specs.moe
    foreign = partial(dict, submodules=None)
    stock = moe_module_specs.get_moe_module_spec_for_backend.__wrapped__
    late = stock(LocalSpecProvider(), num_experts=4)
    said = []
    for spec in (
        early,
        late,
        partial(moe_module_specs.get_moe_module_spec_for_backend(LocalSpecProvider(), 4).func, foreign),
    ):
        with pytest.raises(RuntimeError) as caught:
            spec(config=config, pg_collection=None, is_mtp_layer=False, name="mlp")
        said.append(str(caught.value))
    return "\n".join(said)


def test_a_layer_that_would_run_the_full_backward_is_refused(gloo2: Pool) -> None:
    for said in gloo2(refused_layer):
        early, late, foreign = said.splitlines()
        for line in (early, late):
            assert line.startswith("--moe-lrm-retention: found a MoELayer that would run the full backward, allowed")
        assert foreign.startswith("--moe-lrm-retention: found MoE layers of functools.partial")


def errors_of(words: str) -> str:
    arguments = arguments_module()
    args = parsed(on_cpu(words))
    with pytest.raises(ValueError) as caught:
        arguments.core_transformer_config_from_args(args)
    return str(caught.value)


def test_default_dispatcher_and_everything_else_wrong_is_one_error_before_the_model(gloo2: Pool) -> None:
    words = f"{SMALL.replace('--disable-bias-linear', '')} --moe-lrm-retention 0 --moe-lrm-layers 7"
    for text in gloo2(errors_of, words):
        lines = text.splitlines()[1:]
        assert [line.partition(":")[0] for line in lines] == [
            "--moe-lrm-retention",
            "--moe-token-dispatcher-type",
            "--disable-bias-linear",
            "--moe-lrm-layers",
        ]
        assert "found 'allgather'" in lines[1] and "found add_bias_linear=True" in lines[2]


def accepted(launches: dict[str, str]) -> dict[str, Any]:
    from megatron_lrmoe.mcore.arguments import config_from_args

    return {name: config_from_args(parsed(f"{QWEN3} {ON} {words}", world_size=8)) for name, words in launches.items()}


def test_launch_lines_of_real_models_raise_no_false_alarm(gloo2: Pool) -> None:
    for settings in gloo2(accepted, LAUNCHES):
        assert set(settings) == set(LAUNCHES)
        assert all(s.enabled for s in settings.values())


def unset_expert_tensor_parallel() -> str:
    from megatron_lrmoe.mcore.arguments import config_from_args

    args = parsed(f"{QWEN3} {ON} --tensor-model-parallel-size 2 --sequence-parallel", world_size=8)
    with pytest.raises(ValueError) as caught:
        config_from_args(args)
    return str(caught.value)


def test_unset_expert_tensor_parallel_size_is_that_of_attention_and_is_refused(gloo2: Pool) -> None:
    for text in gloo2(unset_expert_tensor_parallel):
        (line,) = text.splitlines()[1:]
        assert line.startswith("--expert-tensor-parallel-size: found 2, allowed is 1 (not given, it is the tensor")


def megatrons_flags() -> dict[str, Any]:
    from argparse import ArgumentParser

    parser = arguments_module().add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    flags = {flag: action.dest for flag, action in parser._option_string_actions.items()}
    return {"flags": flags, "defaults": vars(parser.parse_args([])), "help": parser.format_help()}


def test_every_refusal_names_a_flag_of_megatron_whose_default_is_fine(gloo2: Pool) -> None:
    found, _ = gloo2(megatrons_flags)
    # Flags of an extension that is not installed, of the next Megatron, and an attribute that validate_args derives.
    elsewhere = {"--kitchen-config-file", "--kitchen-recipe-number", "--moe-use-grouped-tensor"}
    derived = {"--expert-tensor-parallel-num-weight-shards": "expert_tensor_parallel_num_weight_shards"}
    for refusal in REFUSALS:
        if refusal.flag in elsewhere:
            assert refusal.flag not in found["flags"]
            continue
        assert found["flags"][refusal.flag] == derived.get(refusal.flag, refusal.dest)
        must_be_given = {"--num-experts", "--moe-token-dispatcher-type", "--disable-bias-linear"}
        default = found["defaults"].get(refusal.dest)
        assert refusal.refused(default) == (refusal.flag in must_be_given), refusal.flag


def test_megatrons_help_has_our_two_groups_and_its_parser_prints_it(gloo2: Pool) -> None:
    found, _ = gloo2(megatrons_flags)
    assert "\nmoe-lrm:\n" in found["help"] and "\nmoe-lrm, advanced:\n" in found["help"]


def with_provider() -> Any:
    def provider(parser: Any) -> Any:
        group = parser.add_argument_group("mine")
        group.add_argument("--mine", type=int, default=3)
        return parser

    args = parsed(on_cpu(f"{SMALL} {ALLTOALL} {ON} --mine 5"), provider=provider)
    return args.mine, args.moe_lrm_retention


def test_an_extra_args_provider_still_works(gloo2: Pool) -> None:
    assert gloo2(with_provider) == [(5, 0.8)] * 2


def log_of_two_configs(rank: str) -> list[str]:
    from megatron_lrmoe.mcore import adaptor

    arguments = arguments_module()
    args = parsed(on_cpu(f"{SMALL} {ALLTOALL} {ON}"))
    off = parsed(on_cpu(f"{SMALL} {ALLTOALL}"))
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    adaptor.logger.addHandler(handler)
    before, adaptor._active = (os.environ["RANK"], adaptor._active), False
    os.environ["RANK"] = rank
    try:
        arguments.core_transformer_config_from_args(off)
        assert not lines
        for _ in range(2):
            arguments.core_transformer_config_from_args(args)
    finally:
        os.environ["RANK"], adaptor._active = before
        adaptor.logger.removeHandler(handler)
    return lines


def test_one_log_line_on_rank_zero_names_what_was_replaced(gloo2: Pool) -> None:
    (line,) = gloo2(log_of_two_configs, "0")[0]
    assert "retention=0.8" in line
    for module, name in PATCHED:
        assert f"{module}.{name}" in line
    assert "MoEMetricsTracker.report" in line and "MoELayer.__init__" in line
    assert gloo2(log_of_two_configs, "1")[0] == []


def overrides_without_a_parent() -> list[str]:
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from megatron_lrmoe.mcore.dispatcher import LRMAlltoAllTokenDispatcher
    from megatron_lrmoe.mcore.layer import LRMoELayer

    checked = {f"{module}.{name}" for module, name in NEEDED}
    for stock in (SequentialMLP, TEGroupedMLP):
        assert "forward" in vars(stock)
    return [
        f"{parent.__module__}.{parent.__name__}.{name}"
        for ours, parent in ((LRMoELayer, MoELayer), (LRMAlltoAllTokenDispatcher, MoEAlltoAllTokenDispatcher))
        for name, value in vars(ours).items()
        if callable(value)
        and name != "__init__"
        and name in dir(parent)
        and f"{parent.__module__}.{parent.__name__}.{name}" not in checked
    ]


def test_every_method_we_override_is_checked_at_import(gloo2: Pool) -> None:
    assert gloo2(overrides_without_a_parent) == [[], []]


# What pretrain_gpt.py and the files beside it import of Megatron.
PRETRAIN_IMPORTS = (
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.experimental_attention_variant_module_specs",
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs",
    "megatron.core.models.hybrid.hybrid_layer_specs",
    "megatron.core.tokenizers.utils.build_tokenizer",
    "megatron.core.transformer.multi_token_prediction",
    "megatron.training",
    "megatron.training.argument_utils",
    "megatron.training.arguments",
    "megatron.training.checkpointing",
    "megatron.training.datasets.sft_dataset",
    "megatron.training.initialize",
    "megatron.training.models.gpt",
    "megatron.training.models.hybrid",
    "megatron.training.training",
    "megatron.training.utils",
    "megatron.training.yaml_arguments",
)


def stale_bindings() -> list[str]:
    """Names in any module that still hold a function of Megatron which the adaptor has replaced."""
    arguments_module()
    for module in PRETRAIN_IMPORTS:
        importlib.import_module(module)
    old = {id(getattr(sys.modules[module], name).__wrapped__) for module, name in PATCHED}
    return [
        f"{name}.{attribute}"
        for name, module in list(sys.modules.items())
        for attribute, value in list(getattr(module, "__dict__", {}).items())
        if id(value) in old
    ]


def test_no_module_of_megatron_holds_an_old_function(gloo2: Pool) -> None:
    assert gloo2(stale_bindings) == [[], []]


@pytest.mark.slow
def test_imported_after_all_of_megatron_it_replaces_the_same_names() -> None:
    code = f"""
import importlib
from megatron_lrmoe.device import activate_if_needed
activate_if_needed()
for module in {PRETRAIN_IMPORTS!r}:
    importlib.import_module(module)
from tests.contract.test_adaptor_megatron import stale_bindings, parsed, SMALL, ALLTOALL, ON, on_cpu
assert stale_bindings() == []
from megatron.training import arguments
config = arguments.core_transformer_config_from_args(parsed(on_cpu(f"{{SMALL}} {{ALLTOALL}} {{ON}}")))
assert config.moe_lrm.retention == 0.8
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
