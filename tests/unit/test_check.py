"""What ``megatron-lrmoe check`` says without asking Megatron: versions, settings with their origin, exit status."""

import sys
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_lrmoe import cli
from megatron_lrmoe.config import LrmConfig, flag_of
from megatron_lrmoe.mcore import check, versions
from megatron_lrmoe.mcore.support import refusals_table


@pytest.fixture(autouse=True)
def no_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in versions.CHECKOUT_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like a checkout of Megatron-LM, in front of the path once it is used."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("__version__ = '0.20.0+abc'\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_without_flags_it_prints_versions_and_table_and_is_status_0(capsys, monkeypatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda: None)
    monkeypatch.setattr(check, "find_spec", lambda module: None)
    assert cli.main(["check"]) == 0
    out = capsys.readouterr().out
    rows = dict(line.split(maxsplit=1) for line in out.split("\n\n")[0].splitlines()[1:])
    assert rows.keys() == {"python", "torch", "megatron-core", "transformer-engine", "apex", "deep-ep"}
    assert {name for name, text in rows.items() if text == "not installed"} == rows.keys() - {"python"}
    assert out.endswith(f"\n\n{refusals_table()}\n")


def test_every_word_goes_to_megatron_as_it_stands(monkeypatch) -> None:
    words = [
        "--num-layers",
        "2",
        "--split",
        "9,-1",
        "--moe-layer-freq",
        "[0]*1",
        "--he",
        "--mock-data",
        "-x",
        "--lr=-1",
    ]
    seen = []
    monkeypatch.setattr(check, "run", lambda flags: seen.append(flags) or 1)
    assert cli.main(["check", *words]) == 1
    assert seen == [words]


def test_other_commands_still_refuse_what_they_do_not_know(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", "--no-such-flag"])
    assert stop.value.code == 2
    assert "unrecognized arguments: --no-such-flag" in capsys.readouterr().err


@pytest.mark.parametrize("variable", versions.CHECKOUT_VARIABLES)
def test_a_checkout_that_the_environment_names_comes_first(checkout, monkeypatch, variable) -> None:
    monkeypatch.setenv(variable, str(checkout))
    assert versions.use_checkout() == (variable, checkout.resolve())
    assert sys.path[0] == str(checkout.resolve())


def test_a_folder_without_megatron_is_refused_by_its_variable(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tmp_path))
    assert cli.main(["check"]) == 2
    assert capsys.readouterr().err.startswith("megatron-lrmoe: error: MEGATRON_LM_PATH: found ")


@pytest.mark.parametrize(
    ("version", "files", "named", "expected"),
    [
        ("0.19.2", [], False, "0.19.2, wheel in {}"),
        ("0.18.0", ["pretrain_gpt.py"], False, "0.18.0, checkout in {}"),
        ("0.20.0", ["pretrain_gpt.py"], True, "0.20.0, checkout {} (MEGATRON_LM_PATH)"),
        ("0.21.0", [], False, "0.21.0, wheel in {}; tested are 0.18.2, 0.19.2, main (0.20.0)"),
    ],
)
def test_where_megatron_comes_from(tmp_path, monkeypatch, version, files, named, expected) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(versions, "installed", lambda: (version, tmp_path))
    checkout = ("MEGATRON_LM_PATH", tmp_path) if named else None
    assert check.megatron_version(checkout) == expected.format(tmp_path)


def namespace(**given: object) -> Namespace:
    return Namespace(num_layers=2, num_experts=4, moe_token_dispatcher_type="alltoall", train_iters=10, **given)


def test_origins_of_settings() -> None:
    args = namespace(moe_lrm_retention=0.4, moe_lrm_max_weight=3.0, lr_warmup_iters=7)
    rows = check.settings(args, ["--moe-lrm-retention", "0.4", "--moe-lrm-max-weight=3"])
    table = {flag: rest for flag, *rest in rows}
    assert list(table) == [flag_of(f.name) for f in fields(LrmConfig)]
    assert table["--moe-lrm-retention"] == ["0.4", "command line"]
    assert table["--moe-lrm-max-weight"] == ["3.0", "command line"]
    assert table["--moe-lrm-start-iter"] == ["7", "derived"]
    assert table["--moe-lrm-min-retention"] == ["0.4", "derived"]
    assert table["--moe-lrm-rank-rows"] == ["not given", "default"]
    assert {origin for _, origin in table.values()} == {"command line", "derived", "default"}


def test_a_start_that_was_given_is_not_derived() -> None:
    args = namespace(moe_lrm_retention=0.4, moe_lrm_start_iter=0, lr_warmup_iters=7)
    rows = {flag: rest for flag, *rest in check.settings(args, ["--moe-lrm-start-iter", "0"])}
    assert rows["--moe-lrm-start-iter"] == ["0", "command line"]


def test_a_retention_out_of_range_is_shown_as_it_was_given() -> None:
    rows = {flag: rest for flag, *rest in check.settings(namespace(moe_lrm_retention=2.0), [])}
    assert rows["--moe-lrm-retention"][0] == "2.0"
    assert rows["--moe-lrm-min-retention"] == ["not given", "default"]


def test_refusals_are_those_of_the_run_and_name_a_yaml_file_too() -> None:
    args = namespace(moe_lrm_retention=0.5, fp8="hybrid", yaml_cfg="model.yaml")
    found = check.refusals(args, ["--moe-lrm-retention=0.5"])
    assert [line.partition(":")[0] for line in found] == ["--fp8-format", "--yaml-cfg"]
    assert check.refusals(namespace(), []) == []


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [((1, 1, 1, 1, None), 1), ((4, 2, 1, 4, 1), 8), ((2, 1, 1, 4, None), 8), ((1, 2, 3, 4, None), 24)],
)
def test_as_few_ranks_as_the_parallel_sizes_allow(monkeypatch, sizes, ranks) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    names = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    args = Namespace(**{f"{n}_parallel_size": s for n, s in zip(names, sizes, strict=True)}, world_size=5)
    assert check._ranks(args) == ranks
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert check._ranks(args) == 5
