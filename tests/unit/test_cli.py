"""The command line: instant help, and errors a user can act on."""

import re
import subprocess
import sys
from dataclasses import fields

import pytest

from megatron_lrmoe import cli, report
from megatron_lrmoe.replicas.workloads import WORKLOADS
from megatron_lrmoe.report import plan_report
from megatron_lrmoe.report.plan_report import policies
from megatron_lrmoe.report.plan_request import Request, flag


@pytest.mark.parametrize("command", [[], ["plan"]])
def test_help_imports_neither_torch_nor_megatron(command):
    program = (
        "import sys\n"
        "from megatron_lrmoe import cli\n"
        f"try:\n    cli.main([*{command}, '--help'])\n"
        "except SystemExit as stop:\n    assert stop.code == 0\n"
        "print([m for m in ('torch', 'numpy', 'megatron', 'matplotlib') if m in sys.modules])\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("usage: megatron-lrmoe")
    assert run.stdout.splitlines()[-1] == "[]"


def test_bad_input_is_status_2_and_one_message(tmp_path, capsys):
    missing = tmp_path / "missing.txt"
    assert cli.main(["data", "build", str(missing), "--output", str(tmp_path / "corpus")]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"megatron-lrmoe: error: {missing}: no such file\n")


@pytest.mark.parametrize("retention", ["0", "1.5", "nan"])
def test_demo_refuses_a_retention_before_any_work(tmp_path, capsys, retention):
    assert cli.main(["demo", "--output", str(tmp_path / "demo"), "--retention", retention]) == 2
    assert capsys.readouterr().err.startswith("megatron-lrmoe: error: --retention: found ")
    assert not (tmp_path / "demo").exists()


def test_data_build_says_how_to_train_on_it(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"body": "ab"}\n{"body": ""}\n')
    prefix = tmp_path / "corpus"
    command = ["data", "build", str(tmp_path / "a.jsonl"), "--json-key", "body", "--output", str(prefix)]
    assert cli.main(command) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{prefix}: 1 documents (1 empty ones left out), 3 tokens"
    assert second.endswith(f"--data-path {prefix} --tokenizer-type NullTokenizer --vocab-size 257")


def test_an_unknown_command_is_status_2(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["no-such-command"])
    assert stop.value.code == 2
    assert "no-such-command" in capsys.readouterr().err


def test_plan_help_names_every_flag_workload_and_policy(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    words = set(re.findall("[-a-z_]+", capsys.readouterr().out))
    flags = {flag(field.name) for field in fields(Request)} - {"--file"}
    assert {*flags, *WORKLOADS, *policies(), "--json", "--plot"} <= words


def test_plan_passes_every_flag_on(monkeypatch, tmp_path):
    values = {
        "ranks": 2, "file": tmp_path, "workload": "zipf", "experts": 4, "tokens": 5, "top_k": 6, "seed": 7,
        "iteration": 8, "layer": 9, "microbatch": 10, "slots": 11, "retention": "0.12", "min_retention": "0.11",
        "quota": "joint", "forward_limit": "14", "backward_limit": "15x", "budget_gib": "16", "hidden": 17, "ffn": 18,
        "domain": 19, "tile_rows": 20, "group_rows": 21, "policy": "echo", "strong": True, "backend": "readable",
    }  # fmt: skip
    assert values.keys() == {field.name for field in fields(Request)}
    asked = []

    def stop(request):
        asked.append(request)
        raise ValueError("seen")

    monkeypatch.setattr(plan_report, "make_report", stop)
    flags = [
        text
        for name, value in values.items()
        for text in ([str(value)] if name == "file" else [flag(name)] + ([] if value is True else [str(value)]))
    ]
    assert cli.main(["plan", *flags]) == 2
    assert cli.main(["plan", "--ranks", "3"]) == 2
    assert asked == [Request(**values), Request(ranks=3)]


def test_plan_without_numpy_names_the_extra(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "megatron_lrmoe.report.plan_report")
    monkeypatch.delattr(report, "plan_report")
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert cli.main(["plan", "--workload", "zipf", "--ranks", "2"]) == 2
    assert capsys.readouterr().err == (
        "megatron-lrmoe: error: plan needs numpy: pip install 'megatron-lrmoe[planner]'\n"
    )
