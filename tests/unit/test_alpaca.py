"""Instruction files as datasets: records, packing, masks, and input that cannot be used."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe.cli import main
from megatron_lrmoe.mcore import alpaca, data, loss_mask, tokens
from megatron_lrmoe.mcore.alpaca import Example, Options, Written

END = data.END_OF_DOCUMENT


def documents(prefix: Path) -> list[np.ndarray]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    return [np.array(dataset[i]) for i in range(len(dataset))]


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path


GOOD = {"instruction": "Add", "input": "1 2", "output": "3"}


def test_records_become_prompts_and_answers(tmp_path: Path) -> None:
    as_list = tmp_path / "a.json"
    as_list.write_text(json.dumps([GOOD, {"instruction": "Go", "output": "ok"}]))
    lines = write(tmp_path / "b.jsonl", GOOD, {"text": "plain"})
    written = alpaca.build([as_list, lines], tmp_path / "out", tokens.byte_level(), Options(mask_prompt=True))
    assert (written.examples, written.documents, written.filling) == (4, 4, 0)
    prompt = "### Instruction:\nAdd\n\n### Input:\n1 2\n\n### Response:\n"
    texts = [bytes(d[:-1].tolist()).decode() for d in documents(tmp_path / "out")]
    assert texts == [prompt + "3", "### Instruction:\nGo\n\n### Response:\nok", prompt + "3", "plain"]
    masks = documents(loss_mask.mask_of(tmp_path / "out"))
    assert masks[0].tolist() == [0] * len(prompt) + [1, 1]
    assert masks[3].tolist() == [1] * 6
    assert {path.name for path in tmp_path.iterdir()} == {
        "a.json", "b.jsonl", "out.bin", "out.idx", "out.loss_mask.bin", "out.loss_mask.idx",
    }  # fmt: skip


examples = st.lists(
    st.builds(
        Example,
        st.lists(st.integers(0, 255), max_size=5),
        st.lists(st.integers(0, 255), max_size=5).map(lambda answer: [*answer, END]),
    ),
    min_size=1,
)


@given(kept=examples, length=st.integers(11, 30), mask_prompt=st.booleans())
def test_packing_keeps_every_token_once_and_splits_nothing(kept: list[Example], length: int, mask_prompt: bool) -> None:
    options, written = Options(seq_length=length, mask_prompt=mask_prompt), Written(Path("x"))
    made = list(alpaca._documents(kept, END, options, written))
    assert all(len(t) == len(m) == length for t, m in made)
    left = list(kept)
    for packed, mask in made:
        at = 0
        while (
            left and packed[at : at + len(left[0])] == left[0].prompt + left[0].answer and at + len(left[0]) <= length
        ):
            example = left.pop(0)
            expected = [int(not mask_prompt)] * len(example.prompt) + [1] * len(example.answer)
            if at == 0:
                expected[0] = 0
            assert mask[at : at + len(example)] == expected
            at += len(example)
        assert at > 0
        if left and at + len(left[0]) <= length:
            assert packed[at:] == [END] * (length - at)
        assert mask[at:] == [0] * (length - at)
    assert left == []
    assert written.filling == len(made) * length - sum(map(len, kept))


BAD = [
    "{",
    '"text"',
    {"instruction": "a"},
    {"instruction": 3, "output": "b"},
    {"text": ""},
    {"other": 1},
    '{"text": "\\ud800"}',
]


def test_every_bad_line_is_named_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = write(tmp_path / "x.jsonl", GOOD, *BAD)
    assert main(["data", "alpaca", str(path), "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert all(f"{path}:{number}: found " in said for number in range(2, 2 + len(BAD)))
    assert f"{path}:1:" not in said
    assert {p.name for p in tmp_path.iterdir()} == {"x.jsonl"}


def test_bad_lines_are_left_out_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = write(tmp_path / "x.jsonl", *BAD, GOOD)
    assert main(["data", "alpaca", str(path), "--output", str(tmp_path / "out"), "--on-error", "skip"]) == 0
    printed = capsys.readouterr()
    assert f"left out: {path}:1: found invalid JSON" in printed.err
    assert f"{len(BAD)} bad records left out" in printed.out
    assert len(documents(tmp_path / "out")) == 1


@pytest.mark.parametrize(("how", "expected"), [("truncate", [20, 20]), ("skip", [20])])
def test_longer_examples(tmp_path: Path, how: str, expected: list[int]) -> None:
    path = write(tmp_path / "x.jsonl", {"text": "a" * 50}, {"text": "b" * 5})
    written = alpaca.build([path], tmp_path / "out", tokens.byte_level(), Options(seq_length=20, too_long=how))
    assert [len(d) for d in documents(tmp_path / "out")] == expected
    assert (written.truncated, written.too_long) == ((1, 0) if how == "truncate" else (0, 1))
    with pytest.raises(ValueError, match=r"x\.jsonl:1: found 51 tokens, allowed are 20"):
        alpaca.build([path], tmp_path / "no", tokens.byte_level(), Options(seq_length=20, too_long="stop"))


def test_a_dataset_written_anew_without_a_mask_has_none(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", GOOD)
    for mask in (True, False):
        alpaca.build([path], tmp_path / "out", tokens.byte_level(), Options(mask_prompt=mask))
        assert loss_mask.mask_of(tmp_path / "out").with_suffix(".loss_mask.idx").exists() == mask


def test_bad_options_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="--seq-length: found 1") as caught:
        Options(seq_length=1, template="{instruction} {name}")
    assert "--template" in str(caught.value)


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    vocabulary = {"a": 0, "b": 1, "<unk>": 2, "<end>": 3}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>", unk_token="<unk>")
    fast.save_pretrained(tmp_path / "tokenizer")
    loaded = tokens.hugging_face(tmp_path / "tokenizer")
    assert (loaded.encode("a b c"), loaded.eod, loaded.size) == ([0, 1, 2], 3, 4)
    with pytest.raises(ValueError, match="nothing is downloaded"):
        tokens.hugging_face(tmp_path / "nowhere")
