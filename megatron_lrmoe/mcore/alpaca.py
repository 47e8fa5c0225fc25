"""Instructions and answers to a Megatron indexed dataset: Alpaca's JSON or JSONL, and plain JSONL text.

With a sequence length, examples are packed: each document is exactly that long, holds whole examples in their order,
and ends with end-of-document tokens. Megatron cuts the concatenated documents into samples of that length plus one
token, the last label; so a sample is one packed document, and its last label, the first token of the next, is masked.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from megatron_lrmoe.mcore.data import Problems, new_builder, refuse_directory, whole_or_nothing
from megatron_lrmoe.mcore.loss_mask import mask_of
from megatron_lrmoe.mcore.tokens import Tokenizer

PROMPT = "### Instruction:\n{instruction}\n\n### Response:\n"
PROMPT_WITH_INPUT = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
FIELDS = ("instruction", "input", "output")


@dataclass(frozen=True)
class Options:
    """How examples are written.

    Args:
        seq_length: tokens of a packed document; None: one document an example.
        mask_prompt: learn the answers only.
        template: prompt with {instruction} and {input}; None: two templates of ours, without and with an input.
        json_key: field of a plain text record.
        on_error: stop (nothing is written) or skip at a record that cannot be used.
        too_long: what happens to an example above ``seq_length``: truncate, skip or stop.
    """

    seq_length: int | None = None
    mask_prompt: bool = False
    template: str | None = None
    json_key: str = "text"
    on_error: Literal["stop", "skip"] = "stop"
    too_long: Literal["truncate", "skip", "stop"] = "truncate"

    def __post_init__(self) -> None:
        problems = []
        if self.seq_length is not None and self.seq_length < 2:
            problems.append(f"--seq-length: found {self.seq_length}, allowed is 2 or more")
        if self.template is not None:
            try:
                self.template.format(instruction="", input="")
                named = "{instruction}" in self.template
            except (IndexError, KeyError, ValueError):
                named = False
            if not named:
                problems.append("--template: allowed is a text with {instruction}, perhaps {input}, and no other names")
        if problems:
            raise ValueError("\n".join(problems))

    def prompt(self, instruction: str, given: str) -> str:
        """The text before the answer."""
        template = self.template or (PROMPT_WITH_INPUT if given else PROMPT)
        return template.format(instruction=instruction, input=given)


@dataclass(frozen=True)
class Example:
    """One example as tokens: what is read first, then what is learnt, its end of document last."""

    prompt: list[int]
    answer: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass
class Written:
    """What was written.

    Args:
        prefix: of the dataset; a mask, if there is one, is at ``loss_mask.mask_of(prefix)``.
        examples, documents, tokens: counts; tokens include ends of document and what fills packed documents.
        truncated, too_long: examples cut, and left out, for their length.
        skipped: one sentence for each bad record that was left out, the first 20.
        bad: how many there were.
        filling: tokens that only fill packed documents.
        masked: whether a mask was written.
    """

    prefix: Path
    examples: int = 0
    documents: int = 0
    tokens: int = 0
    truncated: int = 0
    too_long: int = 0
    skipped: list[str] = field(default_factory=list)
    bad: int = 0
    filling: int = 0
    masked: bool = False


def build(files: Sequence[Path], prefix: Path, tokenizer: Tokenizer, options: Options) -> Written:
    """Write instruction files as one indexed dataset, and its mask where prompts or filling are not to be learnt.

    Args:
        files: ``.json`` (a list of Alpaca records) and ``.jsonl`` (a record a line, Alpaca or plain text).
        prefix: of the dataset; existing files are replaced when the new ones are whole.
        tokenizer: of the texts.
        options: how.

    Raises:
        ValueError: everything that is wrong with the input, by file and line; nothing is written.
    """
    refuse_directory(prefix)
    problems, written = Problems(), Written(prefix)
    bad = Problems() if options.on_error == "skip" else problems
    for path in files:
        if not path.is_file():
            problems.add(f"{path}: no such file")
        elif path.suffix not in (".json", ".jsonl"):
            problems.add(f"{path}: found a file {path.suffix or 'without suffix'}, allowed are .json and .jsonl")
    problems.raise_if_any()
    written.masked = options.mask_prompt or options.seq_length is not None
    prefixes = [prefix, mask_of(prefix)] if written.masked else [prefix]
    with whole_or_nothing(*prefixes) as parts:
        writers = [new_builder(parts[0][0], tokenizer.size), *(new_builder(bin_path, 2) for bin_path, _ in parts[1:])]
        kept = _fitting(_examples(files, tokenizer, options, bad), options, problems, written)
        for tokens, mask in _documents(kept, tokenizer.eod, options, written):
            for writer, values in zip(writers, (tokens, mask), strict=False):
                writer.add_document(np.array(values, dtype=writer.dtype), [len(values)])
            written.documents += 1
            written.tokens += len(tokens)
        if not written.examples and not problems.count:
            problems.add("no example found in any file, expected at least one")
        for writer in writers:
            writer.data_file.close()
        problems.raise_if_any()
        for writer, (_, idx_path) in zip(writers, parts, strict=True):
            writer.finalize(str(idx_path))
    written.skipped, written.bad = (bad.shown, bad.count) if options.on_error == "skip" else ([], 0)
    return written


def _examples(
    files: Iterable[Path], tokenizer: Tokenizer, options: Options, bad: Problems
) -> Iterator[tuple[str, Example]]:
    for path in files:
        for place, record in _records(path, bad):
            try:
                prompt, answer = _texts(record, options)
                yield place, Example(tokenizer.encode(prompt), [*tokenizer.encode(answer), tokenizer.eod])
            except ValueError as error:
                bad.add(f"{place}: {error}")


def _records(path: Path, bad: Problems) -> Iterator[tuple[str, Any]]:
    """Each record with its place in the file."""
    if path.suffix == ".json":
        try:
            content = json.loads(path.read_bytes())
        except ValueError as error:
            bad.add(f"{path}: found invalid JSON ({error}), expected a list of records")
            return
        if not isinstance(content, list):
            bad.add(f"{path}: found {type(content).__name__}, expected a list of records")
            return
        yield from ((f"{path}: record {number}", record) for number, record in enumerate(content, 1))
        return
    with path.open("rb") as lines, tqdm(total=path.stat().st_size, unit="B", unit_scale=True, desc=path.name) as bar:
        for number, line in enumerate(lines, 1):
            bar.update(len(line))
            if not line.strip():
                continue
            try:
                yield f"{path}:{number}", json.loads(line)
            except ValueError as error:
                bad.add(f"{path}:{number}: found invalid JSON ({error})")


def _texts(record: Any, options: Options) -> tuple[str, str]:
    """Prompt and answer of a record; plain text has no prompt.

    Raises:
        ValueError: what was found and what was expected.
    """
    expected = f'expected {{"instruction": ..., "input": ..., "output": ...}} or {{"{options.json_key}": ...}}'
    if not isinstance(record, dict):
        raise ValueError(f"found {type(record).__name__}, {expected}")
    is_alpaca = "instruction" in record or "output" in record
    names = FIELDS if is_alpaca else (options.json_key,)
    values = {name: record.get(name, "" if name == "input" else None) for name in names}
    if wrong := [name for name, value in values.items() if not isinstance(value, str)]:
        found = ", ".join(f"{type(record[n]).__name__} in {n!r}" if n in record else f"no field {n!r}" for n in wrong)
        raise ValueError(f"found {found}, {expected}")
    try:
        "".join(values.values()).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"found half a surrogate pair ({error})") from error
    if not (answer := values["output" if is_alpaca else options.json_key]):
        raise ValueError(f"found an empty text to learn, {expected}")
    return (options.prompt(values["instruction"], values["input"]) if is_alpaca else ""), answer


def _fitting(
    examples: Iterable[tuple[str, Example]], options: Options, problems: Problems, written: Written
) -> Iterator[Example]:
    for place, example in examples:
        if options.seq_length is None or len(example) <= options.seq_length:
            yield example
        elif options.too_long == "truncate":
            written.truncated += 1
            prompt = example.prompt[: options.seq_length]
            yield Example(prompt, example.answer[: options.seq_length - len(prompt)])
        elif options.too_long == "skip":
            written.too_long += 1
        else:
            problems.add(f"{place}: found {len(example)} tokens, allowed are {options.seq_length} (--too-long)")


def _documents(
    examples: Iterable[Example], eod: int, options: Options, written: Written
) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens and mask of each document; of exactly ``seq_length`` tokens where there is one."""
    tokens: list[int] = []
    mask: list[int] = []

    def filled() -> tuple[list[int], list[int]]:
        space = (options.seq_length or len(tokens)) - len(tokens)
        written.filling += space
        return tokens + [eod] * space, mask + [0] * space

    for example in examples:
        written.examples += 1
        if tokens and (options.seq_length is None or len(tokens) + len(example) > options.seq_length):
            yield filled()
            tokens, mask = [], []
        tokens = tokens + example.prompt + example.answer
        # The first token of a packed document is the last label of another one's sample.
        learns_prompt = not options.mask_prompt
        mask = mask + [int(learns_prompt)] * len(example.prompt) + [1] * len(example.answer)
        if len(mask) == len(example) and options.seq_length is not None:
            mask[0] = 0
    if tokens:
        yield filled()
