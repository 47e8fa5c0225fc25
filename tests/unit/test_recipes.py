"""Recipes as flags, the variables of a launch, and the command line that comes of them."""

import re
from pathlib import Path

import pytest

from megatron_lrmoe.cli import main
from megatron_lrmoe.launch import recipes
from megatron_lrmoe.launch.launcher import launch, smoke, with_flags
from megatron_lrmoe.launch.settings import Settings
from megatron_lrmoe.launch.shipped import folder

ALL = recipes.names()
PUBLISHED = {  # billions of parameters, all and for a token, as the models' names and model cards give them
    "qwen3_30b_a3b": (30.5, 3.3),
    "qwen3_235b_a22b": (235, 22),
    "glm45_air_106b_a12b": (106, 12),
    "glm45_355b_a32b": (355, 32),
}
GOOD = '# A recipe\n# GPUs: 2\nENV_VARS:\n  A: "1"\nMODEL_ARGS:\n  --num-layers: 2\n'


def test_every_model_has_its_recipe() -> None:
    assert set(ALL) == {*PUBLISHED, "toy"}


@pytest.mark.parametrize("name", ALL)
def test_every_value_has_a_source(name: str) -> None:
    text = recipes.load(name).text
    values = text[text.index("ENV_VARS:") :].replace("ENV_VARS:\n", "").replace("MODEL_ARGS:\n", "")
    assert all(re.search(r"  # \S.{3,}$", line) for line in values.splitlines())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_flags_describe_a_model_of_the_published_size(name: str) -> None:
    flags = recipes.load(name).flags
    total, active = (count / 1e9 for count in recipes.parameters(flags))
    ends = 2 * int(str(flags["--hidden-size"])) * 128 * int(str(flags["--make-vocab-size-divisible-by"])) / 1e9
    published, published_active = PUBLISHED[name]
    assert total == pytest.approx(published, rel=0.02)
    # GLM's cards do not count the embedding and the output layer among what a token uses, Qwen's do.
    counted = active - ends if name.startswith("glm") else active
    assert counted == pytest.approx(published_active, rel=0.03)


def test_glm_air_follows_its_own_published_config() -> None:
    configs = pytest.importorskip("transformers")
    flags, config = recipes.load("glm45_air_106b_a12b").flags, configs.Glm4MoeConfig()
    assert float(str(flags["--norm-epsilon"])) == config.rms_norm_eps == 1e-5
    assert float(str(flags["--moe-router-topk-scaling-factor"])) == config.routed_scaling_factor == 1.0
    same = {
        "--num-layers": "num_hidden_layers",
        "--hidden-size": "hidden_size",
        "--ffn-hidden-size": "intermediate_size",
        "--num-attention-heads": "num_attention_heads",
        "--num-query-groups": "num_key_value_heads",
        "--num-experts": "n_routed_experts",
        "--moe-router-topk": "num_experts_per_tok",
        "--moe-ffn-hidden-size": "moe_intermediate_size",
        "--max-position-embeddings": "max_position_embeddings",
    }
    assert {flag: int(str(flags[flag])) for flag in same} == {flag: getattr(config, key) for flag, key in same.items()}
    assert recipes.moe_layers(str(flags["--moe-layer-freq"]), 46).count(0) == config.first_k_dense_replace
    assert 128 * int(str(flags["--make-vocab-size-divisible-by"])) == config.vocab_size


def test_flags_become_words() -> None:
    text = GOOD + "  --swiglu: true\n  --moe-layer-freq: '[0]*1+[1]*1'\n  --data-path: [1, a, 2, b]\n  --lr: 1e-4\n"
    recipe = recipes.parse(Path("x.yaml"), text)
    assert (recipe.summary, recipe.gpus, recipe.environment) == ("A recipe", 2, {"A": "1"})
    expected = "--num-layers 2 --swiglu --moe-layer-freq [0]*1+[1]*1 --data-path 1 a 2 b --lr 1e-4"
    assert recipes.words(recipe.flags) == expected.split()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "found no YAML"),
        ("MODEL_ARGS: {}", "expected the two mappings"),
        ("ENV_VARS: {}\nMODEL_ARGS: 3", "MODEL_ARGS: expected a mapping"),
        ("# s\n# GPUs: 1\nENV_VARS: {}\nMODEL_ARGS: {num-layers: 2, --a: false}", "found 'num-layers'"),
        ("# s\n# GPUs: 1\nENV_VARS: {}\nMODEL_ARGS: {num-layers: 2, --a: false}", "--a: found False"),
        ("ENV_VARS: {}\nMODEL_ARGS: {}", "found no first lines"),
    ],
)
def test_a_bad_recipe_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"x\.yaml") as caught:
        recipes.parse(Path("x.yaml"), text)
    assert said in str(caught.value)


def test_an_unknown_recipe_names_those_there_are(capsys: pytest.CaptureFixture) -> None:
    assert main(["recipes", "show", "llama"]) == 2
    assert "found 'llama', allowed are glm45_355b_a32b, " in capsys.readouterr().err


def test_list_and_show(capsys: pytest.CaptureFixture) -> None:
    assert main(["recipes", "list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ALL) and "30.53 B parameters,  3.35 B for a token" in listed
    assert main(["recipes", "show", "toy"]) == 0
    assert capsys.readouterr().out == (folder("configs") / "toy.yaml").read_text()


@pytest.mark.parametrize(
    ("frequency", "expected"), [("1", [1, 1, 1, 1]), ("2", [1, 0, 1, 0]), ("[0]*1+[1]*3", [0, 1, 1, 1])]
)
def test_layers_with_experts(frequency: str, expected: list[int]) -> None:
    assert recipes.moe_layers(frequency, 4) == expected


def job(name: str = "qwen3_30b_a3b", extra: tuple[str, ...] = (), **variables: str):
    return with_flags(launch(recipes.load(name), Settings.read(variables)), extra)


def test_the_default_is_the_papers_setting() -> None:
    line = " ".join(job().arguments)
    for part in ("--nproc-per-node=8 --nnodes=1", "--expert-model-parallel-size 8", "--seq-length 8192"):
        assert part in line
    assert "--micro-batch-size 4" in line and "--bf16" in line
    assert "-m megatron_lrmoe.pretrain_gpt " in line
    assert line.endswith("--mock-data --tokenizer-type NullTokenizer --vocab-size 151936 --moe-lrm-retention 0.8")


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("stock", []),
        ("lrm", ["--moe-lrm-retention"]),
        ("lrm+replicas", ["--moe-lrm-retention", "--moe-lrm-replica-policy"]),
    ],
)
def test_one_switch_for_stock_lrm_and_replicas(policy: str, expected: list[str]) -> None:
    assert [flag for flag in job(POLICY=policy).flags if flag.startswith("--moe-lrm")] == expected


def test_variables_replace_the_recipes_values(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").touch()
    (tmp_path / "text.idx").touch()
    flags = job(
        MEGATRON_PATH=str(tmp_path), DATA_PATH=f"0.3 {tmp_path}/text", TOKENIZER=str(tmp_path), TP="2", PP="3", EP="4",
        SEQ="5", MICRO_BATCH="6", GLOBAL_BATCH="7", ITERATIONS="9", SAVE="ckpt", TENSORBOARD="tb", WANDB_PROJECT="w",
        RETENTION="0.5",
    )  # fmt: skip
    line = " ".join(flags.arguments)
    for part in (
        f"-m megatron_lrmoe.run {tmp_path}/pretrain_gpt.py --num-layers 48",
        f"--data-path 0.3 {tmp_path}/text",
        f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}",
        "--tensor-model-parallel-size 2 ",
        "--pipeline-model-parallel-size 3",
        "--expert-model-parallel-size 4",
        "--sequence-parallel",
        "--seq-length 5",
        "--micro-batch-size 6",
        "--global-batch-size 7",
        "--train-iters 9",
        "--save ckpt --load ckpt --save-interval 500",
        "--tensorboard-dir tb",
        "--wandb-project w",
        "--moe-lrm-retention 0.5",
    ):
        assert part in line
    assert "--mock-data" not in line and "--wandb" not in " ".join(job().arguments)


def test_further_flags_win() -> None:
    flags = job(extra=("--lr", "1", "--data-path", "a", "b", "--log-interval=3", "--no-rope-fusion")).flags
    assert (flags["--lr"], flags["--data-path"]) == ("1", ["a", "b"])
    assert (flags["--log-interval"], flags["--no-rope-fusion"]) == ("3", True)
    with pytest.raises(ValueError, match="after --: found 'lr'"):
        job(extra=("lr", "1"))


def test_further_flags_win_over_a_smoke_run_too() -> None:
    small = smoke(job())
    flags = with_flags(small, ("--train-iters", "3")).flags
    assert flags == small.flags | {"--train-iters": "3"}


def test_every_bad_variable_is_named_at_once() -> None:
    bad = {
        "GPUS": "0",
        "EP": "x",
        "NODE_RANK": "-1",
        "RETENTION": "1.5",
        "POLICY": "fast",
        "MEGATRON_PATH": "/nowhere",
        "TOKENIZER": "/nowhere",
        "DATA_PATH": "0.5 /nowhere/text",
    }
    with pytest.raises(ValueError, match="cannot be used") as caught:
        Settings.read(bad)
    said = str(caught.value)
    assert all(f"\n{name}: found '" in said for name in bad)
    assert said.count(", allowed ") == len(bad)


@pytest.mark.parametrize("name", ALL)
def test_a_smoke_run_has_the_same_flags_at_toy_widths(name: str) -> None:
    whole, small = job(name), smoke(job(name))
    left_out = set(whole.flags) - set(small.flags)
    assert left_out <= {
        "--moe-permute-fusion",
        "--moe-grouped-gemm",
        "--transformer-impl",
        "--pipeline-model-parallel-size",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
        "--sequence-parallel",
    }
    assert all(flag in " ".join(small.notes) for flag in left_out)
    assert set(small.flags) == set(whole.flags) - left_out
    assert small.flags["--train-iters"] == "2" and small.settings.ranks == 2
