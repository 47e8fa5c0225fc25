"""The plugin's flags beside all of Megatron's: what is refused, what is not, and by which name.

Module-level functions without a test's name run in the gloo workers, which have the CPU device.
"""

import os
from argparse import Namespace
from typing import Any

import pytest

from megatron_lrmoe.mcore import versions
from megatron_lrmoe.mcore.support import REFUSALS
from tests.contract.command_lines import ALLTOALL, ON, SMALL, arguments_module, on_cpu, parsed
from tests.gloo import Pool

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

# What a version does not have yet of the flags that are refused.
LATER = {
    "0.18": {"--expert-tensor-parallel-num-weight-shards", "--moe-use-grouped-tensor"},
    "0.19": {"--moe-use-grouped-tensor"},
    "0.20": set(),
}


def errors_of(words: str) -> str:
    arguments = arguments_module()
    args = parsed(on_cpu(words))
    with pytest.raises(ValueError) as caught:
        arguments.core_transformer_config_from_args(args)
    return str(caught.value)


def test_what_the_default_dispatcher_cannot_do_and_everything_else_wrong_is_one_error(gloo2: Pool) -> None:
    words = (
        f"{SMALL.replace('--disable-bias-linear', '')} --moe-lrm-retention 0 --moe-lrm-layers 7 --moe-lrm-scope source"
    )
    for text in gloo2(errors_of, words):
        lines = text.splitlines()[1:]
        assert [line.partition(":")[0] for line in lines] == [
            "--moe-lrm-retention",
            "--moe-lrm-scope",
            "--disable-bias-linear",
            "--moe-lrm-layers",
        ]
        assert "found 'source'" in lines[1] and "allgather" in lines[1] and "found add_bias_linear=True" in lines[2]


def accepted(launches: dict[str, str]) -> dict[str, Any]:
    from megatron_lrmoe.mcore.arguments import config_from_args

    # Megatron 0.18 wants it for --deterministic-mode.
    os.environ.setdefault("NCCL_ALGO", "Ring")
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
    return {
        "version": versions.found(),
        "flags": flags,
        "defaults": vars(parser.parse_args([])),
        "help": parser.format_help(),
    }


def test_every_refusal_names_a_flag_of_megatron_whose_default_is_fine(gloo2: Pool) -> None:
    found, _ = gloo2(megatrons_flags)
    # Flags of an extension that is not installed and of later versions, and an attribute that validate_args derives.
    elsewhere = {"--kitchen-config-file", "--kitchen-recipe-number", *LATER[".".join(found["version"].split(".")[:2])]}
    derived = {"--expert-tensor-parallel-num-weight-shards": "expert_tensor_parallel_num_weight_shards"}
    assert {refusal.flag for refusal in REFUSALS} - set(found["flags"]) == elsewhere
    for refusal in REFUSALS:
        if refusal.flag in elsewhere:
            continue
        assert found["flags"][refusal.flag] == derived.get(refusal.flag, refusal.dest)
        must_be_given = {"--num-experts", "--disable-bias-linear"}
        refused = refusal.sentence(Namespace(**found["defaults"])) is not None
        assert refused == (refusal.flag in must_be_given), refusal.flag


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
