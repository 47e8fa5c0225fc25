"""The command line: instant help, and errors a user can act on."""

import subprocess
import sys

import pytest

from megatron_lrmoe import cli


def test_help_imports_neither_torch_nor_megatron():
    program = (
        "import sys\n"
        "from megatron_lrmoe import cli\n"
        "try:\n    cli.main(['--help'])\n"
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
