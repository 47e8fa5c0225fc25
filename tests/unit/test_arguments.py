"""The --moe-lrm-* flags: help, choices, and one error for everything that is wrong."""

import argparse
from argparse import ArgumentParser, Namespace
from dataclasses import fields
from typing import Any

import pytest

from megatron_lrmoe.config import ADVANCED, REPLICAS, USUAL, LrmConfig, dest_of, field_help, flag_of
from megatron_lrmoe.mcore.arguments import add_flags, config_from_args, warm_up_iterations
from megatron_lrmoe.mcore.support import REFUSALS

# What the plugin needs of Megatron's namespace, as validate_args leaves it.
FITTING = {
    "num_experts": 8,
    "num_layers": 4,
    "moe_layer_freq": 1,
    "moe_token_dispatcher_type": "alltoall",
    "expert_tensor_parallel_size": 1,
    "add_bias_linear": False,
    "cuda_graph_impl": "none",
    "transformer_impl": "transformer_engine",
}

# A value that is refused, where it is not True.
REFUSED = {
    "--num-experts": None,
    "--moe-flex-dispatcher-backend": "ncclep",
    "--moe-lrm-scope": "source",
    "--moe-lrm-router-grad": "baseline",
    "--expert-tensor-parallel-size": 2,
    "--expert-tensor-parallel-num-weight-shards": 2,
    "--transformer-impl": "inference_optimized",
    "--hybrid-layer-pattern": "M*E/*E",
    "--fp8-format": "hybrid",
    "--fp4-format": "e2m1",
    "--kitchen-recipe-number": 0,
    "--cuda-graph-impl": "full_iteration",
    "--cuda-graph-modules": ["attn", "moe"],
    "--moe-expert-rank-capacity-factor": 0.0,
    "--offload-modules": ["core_attn", "moe_act"],
}


def parse(*words: str) -> Namespace:
    return add_flags(ArgumentParser(allow_abbrev=False)).parse_args(words)


def run_args(*words: str, **megatron: Any) -> Namespace:
    return Namespace(**(vars(parse(*words)) | FITTING | megatron))


def problems(args: Namespace) -> list[str]:
    with pytest.raises(ValueError) as caught:
        config_from_args(args)
    title, *lines = str(caught.value).splitlines()
    assert title == "--moe-lrm-retention: megatron_lrmoe cannot run with these flags:"
    return lines


def test_help_has_three_groups_with_every_docstring() -> None:
    parser = add_flags(ArgumentParser(prog="pretrain", formatter_class=wide))
    text = parser.format_help()
    starts = {title: text.index(f"{title}:\n") for title in (USUAL, REPLICAS, ADVANCED)}
    for f in fields(LrmConfig):
        documented = text.index(field_help()[f.name])
        nearest = max((start, title) for title, start in starts.items() if start < documented)[1]
        assert nearest == f.metadata["group"]
        assert text.rindex(f"  {flag_of(f.name)}", 0, documented) > starts[nearest]
    assert len([g for g in parser._action_groups if g.title in (USUAL, REPLICAS, ADVANCED)]) == 3


def test_help_survives_a_bare_percent_sign_of_megatrons() -> None:
    parser = ArgumentParser()
    parser.add_argument("--theirs", help="headroom (1.10 = 10%).")
    parser.add_argument("--fine", help="100%% or %(default)s", default=7)
    parser.add_argument("--silent")
    assert "(1.10 = 10%)." in (text := add_flags(parser).format_help())
    assert "100% or 7" in text


def wide(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, width=10_000)


def test_flags_become_the_settings_they_name() -> None:
    words = "--moe-lrm-retention 0.7 --moe-lrm-selection topk --moe-lrm-score grad-sq --moe-lrm-scope source"
    words += " --moe-lrm-max-weight 8 --moe-lrm-min-rows 2 --moe-lrm-start-iter 10 --moe-lrm-ramp-iters 5"
    words += " --moe-lrm-layers 2-3 --moe-lrm-gemm loop --moe-lrm-log-detail --moe-lrm-probe-interval 50"
    words += " --moe-lrm-shrink 0.5 --moe-lrm-router-grad baseline"
    words += " --moe-lrm-quota balanced --moe-lrm-min-retention 0.6 --moe-lrm-rank-rows 4096 --moe-lrm-budget-gib 1.5"
    assert config_from_args(run_args(*words.split())) == LrmConfig(
        retention=0.7,
        selection="topk",
        score="grad-sq",
        scope="source",
        max_weight=8.0,
        min_rows=2,
        start_iter=10,
        ramp_iters=5,
        layers="2-3",
        gemm="loop",
        log_detail=True,
        quota="balanced",
        min_retention=0.6,
        rank_rows=4096,
        budget_gib=1.5,
        probe_interval=50,
        shrink=0.5,
        router_grad="baseline",
    )


@pytest.mark.parametrize(
    ("given", "iterations"),
    [
        ({}, 0),
        ({"train_iters": 100, "lr_warmup_iters": 10}, 10),
        ({"train_iters": 100, "lr_warmup_fraction": 0.07}, 7),
        ({"train_iters": 100, "lr_warmup_fraction": 0.071}, 8),
        ({"train_iters": 100, "lr_decay_iters": 50, "lr_warmup_fraction": 0.1}, 5),
        ({"train_samples": 1000, "global_batch_size": 8, "lr_warmup_samples": 81}, 11),
        ({"train_samples": 1000, "global_batch_size": 8, "lr_warmup_fraction": 0.1}, 13),
        ({"train_samples": 1000, "lr_decay_samples": 400, "global_batch_size": 8, "lr_warmup_fraction": 0.1}, 5),
    ],
)
def test_not_given_the_start_is_the_end_of_the_warm_up(given: dict[str, Any], iterations: int) -> None:
    args = run_args("--moe-lrm-retention", "0.8", **given)
    assert warm_up_iterations(args) == iterations
    assert config_from_args(args).start_iter == iterations


@pytest.mark.parametrize("start", [0, 3])
def test_a_given_start_wins_over_the_warm_up(start: int) -> None:
    args = run_args("--moe-lrm-retention", "0.8", "--moe-lrm-start-iter", str(start), train_iters=9, lr_warmup_iters=5)
    assert config_from_args(args).start_iter == start


@pytest.mark.parametrize("words", ["", "--moe-lrm-retention 1.0", "--moe-lrm-retention 1"])
def test_no_flag_and_retention_one_are_off_whatever_megatron_runs(words: str) -> None:
    assert not config_from_args(parse(*words.split())).enabled


def test_a_namespace_without_our_attributes_is_off() -> None:
    assert config_from_args(Namespace()) == LrmConfig()


@pytest.mark.parametrize("flag", ["selection", "quota", "score", "scope", "gemm", "router_grad"])
def test_wrong_choices_are_refused_by_the_parser(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(flag_of(flag), "best")
    assert caught.value.code == 2
    assert f"argument {flag_of(flag)}: invalid choice: 'best' (choose from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"), [("retention", "most"), ("min_rows", "1.5"), ("start_iter", "x"), ("rank_rows", "1e3")]
)
def test_values_of_the_wrong_type_are_refused_by_the_parser(flag: str, value: str) -> None:
    with pytest.raises(SystemExit):
        parse(flag_of(flag), value)


@pytest.mark.parametrize("value", ["0", "0.0", "-0.5", "1.01", "nan", "inf"])
def test_retention_zero_is_refused_and_not_unset(value: str) -> None:
    (line,) = problems(run_args("--moe-lrm-retention", value))
    assert line == f"--moe-lrm-retention: found {float(value)!r}, allowed is 0 < retention <= 1"


def test_a_flag_the_parser_has_already_is_left_alone() -> None:
    parser = ArgumentParser()
    parser.add_argument("--moe-lrm-retention", type=float, default=0.25, help="somebody's own")
    args = add_flags(parser).parse_args(["--moe-lrm-min-rows", "3"])
    assert args.moe_lrm_retention == 0.25 and args.moe_lrm_min_rows == 3
    assert "somebody's own" in parser.format_help()
    before = parser.format_help()
    assert add_flags(parser).format_help() == before


COUNTS_WITH = {
    "--moe-lrm-scope": {"moe_token_dispatcher_type": "flex"},
    "--moe-lrm-router-grad": {"moe_token_dispatcher_type": "allgather"},
    "--cuda-graph-modules": {"cuda_graph_impl": "local"},
    "--offload-modules": {"fine_grained_activation_offloading": True},
}
"""What else has to be set for a setting to have an effect."""


ONCE = {refusal.flag: refusal for refusal in REFUSALS[::-1]}
del ONCE["--moe-lrm-replica-policy"]


@pytest.mark.parametrize("refusal", ONCE.values(), ids=lambda refusal: refusal.flag)
def test_each_refused_setting_is_named_with_what_was_found_and_what_is_allowed(refusal: Any) -> None:
    value = REFUSED.get(refusal.flag, True)
    given = {refusal.dest: value}
    if refusal.flag in COUNTS_WITH:
        assert config_from_args(run_args("--moe-lrm-retention", "0.5", **given)).enabled
        given |= COUNTS_WITH[refusal.flag]
    (line,) = problems(run_args("--moe-lrm-retention", "0.5", **given))
    assert line.startswith(f"{refusal.flag}: found ") and repr(value) in line
    assert f", allowed is {refusal.allowed}: {refusal.why}" in line
    assert not config_from_args(run_args("--moe-lrm-retention", "1.0", **given)).enabled


@pytest.mark.parametrize("policy", ["lrm", "ultraep", "symi"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"moe_token_dispatcher_type": "allgather"}, "none with --moe-token-dispatcher-type allgather"),
        ({"moe_token_dispatcher_type": "flex"}, "none with --moe-token-dispatcher-type allgather"),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": ["moe_router"]}, "none where --cuda-graph-modules has"),
        ({"fp8": "hybrid"}, "without it"),
    ],
)
@pytest.mark.parametrize("words", ["", "--moe-lrm-retention 0.8"])
def test_replicas_need_the_all_to_all_dispatcher(policy: str, given: dict[str, Any], said: str, words: str) -> None:
    policy_words = ["--moe-lrm-replica-policy", policy]
    assert config_from_args(run_args(*words.split(), *policy_words)).enabled
    (line,) = problems(run_args(*words.split(), *policy_words, **given))
    assert f"allowed is {said}" in line


@pytest.mark.parametrize("policy", ["moonep", "eplb"])
def test_policies_that_cannot_be_trained_with_are_named(policy: str) -> None:
    (line,) = problems(run_args("--moe-lrm-retention", "0.8", "--moe-lrm-replica-policy", policy))
    assert line.startswith(f"--moe-lrm-replica-policy: found {policy!r}, allowed is none, lrm, ultraep, symi")


def test_offloading_what_is_not_an_expert_is_fine() -> None:
    modules = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn", "attn_norm"]}
    assert config_from_args(run_args("--moe-lrm-retention", "0.5", **modules)).enabled


@pytest.mark.parametrize("dispatcher", ["allgather", "flex"])
def test_other_dispatchers_run_without_what_only_a_source_can_do(dispatcher: str) -> None:
    given = {"moe_token_dispatcher_type": dispatcher, "moe_flex_dispatcher_backend": "hybridep"}
    assert config_from_args(run_args("--moe-lrm-retention", "0.5", **given)).enabled
    words = "--moe-lrm-retention 0.5 --moe-lrm-scope source --moe-lrm-router-grad baseline"
    lines = problems(run_args(*words.split(), **given))
    assert [line.partition(":")[0] for line in lines] == ["--moe-lrm-scope", "--moe-lrm-router-grad"]
    assert all("with --moe-token-dispatcher-type allgather" in line for line in lines)


def test_expert_tensor_parallelism_says_where_the_unset_value_comes_from() -> None:
    (line,) = problems(run_args("--moe-lrm-retention", "0.5", expert_tensor_parallel_size=4))
    assert "found 4, allowed is 1" in line and "tensor-parallel size" in line


@pytest.mark.parametrize("retention", ["1.5", "0"])
def test_everything_wrong_comes_in_one_error(retention: str) -> None:
    words = f"--moe-lrm-retention {retention} --moe-lrm-min-rows -1 --moe-lrm-layers 3-4,9"
    lines = problems(run_args(*words.split(), fp8="e4m3", moe_flex_dispatcher_backend="ncclep"))
    flags = ["retention", "min-rows"]
    assert [line.partition(":")[0] for line in lines] == [
        *(f"--moe-lrm-{flag}" for flag in flags),
        "--moe-flex-dispatcher-backend",
        "--fp8-format",
        "--moe-lrm-layers",
    ]


def test_wrong_values_of_an_unused_plugin_do_not_bring_up_megatrons_flags() -> None:
    (line,) = problems(parse("--moe-lrm-start-iter", "-1"))
    assert line.startswith("--moe-lrm-start-iter: found -1")


@pytest.mark.parametrize(
    ("modules", "refused"),
    [
        ([], True),
        (["attn"], False),
        (["attn", "mlp", "mamba"], False),
        (["moe"], True),
        (["attn", "moe_router"], False),
        (["moe_router", "moe_preprocess"], False),
        (["moe_router", "moe"], True),
    ],
)
@pytest.mark.parametrize("implementation", ["local", "transformer_engine", "none"])
def test_cuda_graphs_may_hold_what_has_no_experts(modules: list[str], refused: bool, implementation: str) -> None:
    args = run_args("--moe-lrm-retention", "0.8", cuda_graph_impl=implementation, cuda_graph_modules=modules)
    if refused and implementation != "none":
        (line,) = problems(args)
        assert line.startswith(f"--cuda-graph-modules: found {modules!r}, allowed is attn, mlp, mamba, moe_router")
    else:
        assert config_from_args(args).enabled


@pytest.mark.parametrize(
    ("implementation", "modules", "refused"),
    [
        ("none", ["moe_router", "moe_preprocess"], False),
        ("transformer_engine", ["moe_router"], False),
        ("transformer_engine", ["moe_router", "moe_preprocess"], True),
        ("local", ["moe_router"], True),
        ("local", ["attn"], False),
    ],
)
def test_the_routers_baseline_needs_an_output_that_no_graph_holds(
    implementation: str, modules: list[str], refused: bool
) -> None:
    words = "--moe-lrm-retention 0.8 --moe-lrm-router-grad baseline"
    args = run_args(*words.split(), cuda_graph_impl=implementation, cuda_graph_modules=modules)
    if refused:
        (line,) = problems(args)
        assert line.startswith(
            "--moe-lrm-router-grad: found 'baseline', allowed is drop where --cuda-graph-modules has"
        )
    else:
        assert config_from_args(args).enabled


@pytest.mark.parametrize(
    ("frequency", "layers", "wrong", "allowed"),
    [
        (1, "4-6", [5, 6], [1, 2, 3, 4]),
        (2, "1-3", [2], [1, 3]),
        ([0, 1, 1, 0], "1,3", [1], [2, 3]),
    ],
)
def test_layers_must_be_moe_layers_of_this_model(
    frequency: Any, layers: str, wrong: list[int], allowed: list[int]
) -> None:
    args = run_args("--moe-lrm-retention", "0.5", "--moe-lrm-layers", layers, moe_layer_freq=frequency)
    assert problems(args) == [f"--moe-lrm-layers: found {wrong}, allowed are this model's MoE layers {allowed}"]
    args.moe_lrm_layers = ",".join(map(str, allowed))
    assert config_from_args(args).enabled


@pytest.mark.parametrize(("frequency", "allowed"), [([0, 0, 1, 1], [3, 4, 5, 6]), ([1, 1, 0, 0], [1, 2])])
def test_layers_of_multi_token_prediction_count_on_after_the_decoders(frequency: list[int], allowed: list[int]) -> None:
    words = "--moe-lrm-retention 0.5 --moe-lrm-layers 7"
    (line,) = problems(run_args(*words.split(), moe_layer_freq=frequency, mtp_num_layers=2))
    assert line.endswith(f"this model's MoE layers {allowed}")


@pytest.mark.parametrize(("pattern", "allowed"), [("M*E-E", [3, 5]), ("ME|*E", [2, 4]), ("M*E/*-/*-", [3]), ("M*", [])])
def test_layers_of_hybrid_models_are_those_that_the_pattern_marks(pattern: str, allowed: list[int]) -> None:
    words = "--moe-lrm-retention 0.5 --moe-lrm-layers 9"
    (line,) = problems(run_args(*words.split(), hybrid_layer_pattern=pattern))
    assert line.endswith(f"this model's MoE layers {allowed}")


def test_dest_names_are_those_of_the_checkpoint() -> None:
    assert {dest_of(f.name) for f in fields(LrmConfig)} == set(vars(parse()))
