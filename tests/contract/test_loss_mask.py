"""Masks that ``data alpaca`` writes, read by Megatron's own GPTDataset."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lrmoe.mcore import alpaca, loss_mask, tokens
from megatron_lrmoe.mcore.alpaca import Options

SEQUENCE = 64

# In a process of its own: the adaptor changes a class of Megatron.
CODE = """
import json, sys
prefix, length, cache, plugin = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "True"
from megatron_lrmoe.device import activate_if_needed
activate_if_needed()
if plugin:
    import megatron_lrmoe.megatron_adaptor
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list
class Tokenizer:
    eod, pad, unique_identifiers, vocab_size = 256, -1, {"class": "test"}, 257
config = GPTDatasetConfig(
    random_seed=1, sequence_length=length, blend=get_blend_from_list([prefix]), split="1,0,0", path_to_cache=cache,
    tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    create_attention_mask=False, mid_level_dataset_surplus=0.005,
)
train = BlendedMegatronDatasetBuilder(GPTDataset, [12, 0, 0], lambda: True, config).build()[0]
items = [train[i] for i in range(12)]
print(json.dumps([{name: item[name].tolist() for name in ("tokens", "labels", "loss_mask")} for item in items]))
"""


def samples(prefix: Path, cache: Path, plugin: bool) -> list[dict[str, list]]:
    command = [sys.executable, "-c", CODE, str(prefix), str(SEQUENCE), str(cache), str(plugin)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture
def instructions(tmp_path: Path) -> Path:
    # Capital letters are learnt, small ones are read.
    records = [{"instruction": "ab" * (i % 3), "output": "AB" * (1 + i % 5)} for i in range(40)]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(records))
    return path


def test_a_sample_learns_answers_only(instructions: Path, tmp_path: Path) -> None:
    template = "{instruction}{input}"
    options = Options(seq_length=SEQUENCE, mask_prompt=True, template=template)
    alpaca.build([instructions], tmp_path / "out", tokens.byte_level(), options)
    stock = samples(tmp_path / "out", tmp_path / "cache", plugin=False)
    ours = samples(tmp_path / "out", tmp_path / "cache", plugin=True)
    for plain, masked in zip(stock, ours, strict=True):
        assert plain["tokens"] == masked["tokens"] and plain["labels"] == masked["labels"]
        assert set(plain["loss_mask"]) == {1.0}
        learnt = masked["loss_mask"]
        # Letters: by their kind. An end of document: where it ends an answer, which a capital letter does.
        for token, label, weight in zip(masked["tokens"][:-1], masked["labels"][:-1], learnt[:-1], strict=True):
            capital = chr(label).isupper() if label < 256 else token < 256 and chr(token).isupper()
            assert weight == float(capital)
        # The last label is the first token of another packed document.
        assert learnt[-1] == 0
        assert 0 < sum(learnt) < SEQUENCE


def test_a_dataset_without_a_mask_gives_what_it_gave(instructions: Path, tmp_path: Path) -> None:
    alpaca.build([instructions], tmp_path / "out", tokens.byte_level(), Options())
    stock, ours = (samples(tmp_path / "out", tmp_path / "cache", plugin) for plugin in (False, True))
    assert stock == ours


def test_a_mask_of_another_dataset_is_refused(instructions: Path, tmp_path: Path) -> None:
    alpaca.build([instructions], tmp_path / "out", tokens.byte_level(), Options(mask_prompt=True))
    alpaca.build([instructions], tmp_path / "other", tokens.byte_level(), Options(seq_length=SEQUENCE))
    for suffix in (".bin", ".idx"):
        mask = Path(f"{loss_mask.mask_of(tmp_path / 'other')}{suffix}")
        mask.replace(f"{loss_mask.mask_of(tmp_path / 'out')}{suffix}")
    with pytest.raises(AssertionError, match="found documents of other lengths"):
        samples(tmp_path / "out", tmp_path / "cache", plugin=True)
