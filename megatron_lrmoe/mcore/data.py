"""Text to a Megatron indexed dataset of byte-level tokens, with megatron.core's own builder.

A token is a byte (0 to 255); every document ends with token 256. That is what Megatron's NullTokenizer
expects of a vocabulary of 257: its end-of-document token is the last one.
"""

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_lrmoe.mcore.loss_mask import mask_of
from megatron_lrmoe.report import corpora

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
TOKENIZER_FLAGS = ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE))
MAX_DOCUMENT_BYTES = 2**31 - 2  # Megatron's index holds sequence lengths as int32
MAX_PROBLEMS_SHOWN = 20


@dataclass
class Built:
    """What was written.

    Args:
        prefix: the dataset is ``prefix.bin`` and ``prefix.idx``; Megatron's ``--data-path`` takes the prefix.
        documents: documents written.
        tokens: tokens written, ends of document included.
        empty: documents without text, left out.
    """

    prefix: Path
    documents: int = 0
    tokens: int = 0
    empty: int = 0


@dataclass
class Problems:
    """Everything wrong with the input: collected, so that one run names all of it."""

    shown: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, problem: str) -> None:
        """Count a problem; the first few are kept in words."""
        self.count += 1
        if self.count <= MAX_PROBLEMS_SHOWN:
            self.shown.append(problem)

    def raise_if_any(self) -> None:
        """Raise one ValueError with all of them."""
        if self.count:
            more = self.count - len(self.shown)
            raise ValueError("\n".join(self.shown + ([f"... and {more} more"] if more else [])))


def build(files: Sequence[Path], prefix: Path, json_key: str = "text") -> Built:
    """Write text and JSONL files as one indexed dataset.

    Args:
        files: ``.jsonl`` files hold a document a line, in the string field ``json_key``; any other file is
            one document, taken byte for byte.
        prefix: path of the dataset without ``.bin`` and ``.idx``; existing ones are replaced when the new
            ones are whole.
        json_key: field of a JSONL line that holds the text.

    Raises:
        ValueError: every missing, empty or malformed input, by file and line; nothing is written.
    """
    refuse_directory(prefix)
    problems = Problems()
    sizes: dict[Path, int] = {}
    for path in files:
        if not path.is_file():
            problems.add(f"{path}: no such file")
        elif not (size := path.stat().st_size):
            problems.add(f"{path}: the file is empty, expected text")
        else:
            sizes[path] = size
    if not sizes:
        problems.raise_if_any()
    built = Built(prefix)
    with whole_or_nothing(prefix) as [(bin_path, idx_path)]:
        writer = new_builder(bin_path)
        with tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, desc=prefix.name) as bar:
            for path in sizes:
                for text, size in _documents(path, json_key, problems):
                    bar.update(size)
                    _add_document(writer, text, built)
        if not built.documents and not problems.count:
            problems.add("no text found in any file, expected at least one document that is not empty")
        writer.data_file.close()
        problems.raise_if_any()
        writer.finalize(str(idx_path))
    return built


def build_corpus(name: str, prefix: Path, limit: int | None = None) -> Built:
    """Write one of the corpora that packages ship as data as an indexed dataset.

    Args:
        name: in ``corpora.CORPORA``.
        prefix: as for ``build``.
        limit: bytes of text taken, from the start; None takes all.

    Raises:
        ValueError: no such corpus, its package is not installed, or a limit below 1.
    """
    refuse_directory(prefix)
    texts = corpora.documents(name, limit)
    built = Built(prefix)
    with whole_or_nothing(prefix) as [(bin_path, idx_path)]:
        writer = new_builder(bin_path)
        for text in texts:
            _add_document(writer, text, built)
        writer.data_file.close()
        writer.finalize(str(idx_path))
    return built


def refuse_directory(prefix: Path) -> None:
    """Raise ValueError for a prefix that names a folder."""
    if prefix.is_dir() or not prefix.name:
        raise ValueError(f"--output: found the directory {prefix}, allowed is a path such as {prefix}/corpus")


def _documents(path: Path, json_key: str, problems: Problems) -> Iterator[tuple[bytes, int]]:
    """Yields each document of a file with the bytes of the file that it took."""
    if path.suffix != ".jsonl":
        text = path.read_bytes()
        if len(text) > MAX_DOCUMENT_BYTES:
            problems.add(f"{path}: found {len(text)} bytes, a document has at most {MAX_DOCUMENT_BYTES}")
        else:
            yield text, len(text)
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield _text_of(line, json_key), len(line)
            except ValueError as error:
                problems.add(f"{path}:{number}: {error}")


def _text_of(line: bytes, json_key: str) -> bytes:
    """Text of one JSONL line.

    Raises:
        ValueError: what was found and what was expected.
    """
    expected = f'expected a line such as {{"{json_key}": "some text"}}'
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"found invalid JSON ({error}), {expected}") from error
    if not isinstance(record, dict):
        raise ValueError(f"found {type(record).__name__} instead of an object, {expected}")
    if json_key not in record:
        raise ValueError(f"found no field {json_key!r} but {sorted(record)}, {expected}; see --json-key")
    text = record[json_key]
    if not isinstance(text, str):
        raise ValueError(f"found {type(text).__name__} in field {json_key!r} instead of a string, {expected}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"found half a surrogate pair in field {json_key!r} ({error}), {expected}") from error


def new_builder(bin_path: Path, vocab_size: int = VOCAB_SIZE) -> Any:
    """Megatron's writer of an indexed dataset, with the smallest type that holds the vocabulary."""
    with warnings.catch_warnings():
        # Megatron warns that Transformer Engine and Apex are absent; a dataset needs neither.
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    return IndexedDatasetBuilder(str(bin_path), dtype=DType.optimal_dtype(vocab_size))


def _add_document(writer: Any, text: bytes, built: Built) -> None:
    if not text:
        built.empty += 1
        return
    tokens = np.empty(len(text) + 1, dtype=writer.dtype)
    tokens[:-1] = np.frombuffer(text, dtype=np.uint8)
    tokens[-1] = END_OF_DOCUMENT
    writer.add_document(tokens, [len(tokens)])
    built.documents += 1
    built.tokens += len(tokens)


@contextlib.contextmanager
def whole_or_nothing(*prefixes: Path) -> Iterator[list[tuple[Path, Path]]]:
    """Yields temporary names beside each ``prefix.bin`` and ``prefix.idx``, renamed to these if all went well.

    Args:
        prefixes: the dataset's, then that of what belongs to it; a loss mask that does not is removed.
    """
    prefixes[0].parent.mkdir(parents=True, exist_ok=True)
    final = [_files(str(prefix)) for prefix in prefixes]
    parts = [_files(f"{prefix}.{os.getpid()}.part") for prefix in prefixes]
    stale = _files(str(mask_of(prefixes[0])))
    try:
        yield parts
        # Without this a stop between two renames would leave new data under an old index, or beside an old mask. The
        # dataset's own index comes last: without it there is no dataset.
        for path in (*(idx for _, idx in final), *stale):
            path.unlink(missing_ok=True)
        for part, whole in reversed(list(zip(parts, final, strict=True))):
            for here, there in zip(part, whole, strict=True):
                here.replace(there)
    finally:
        for path in (path for part in parts for path in part):
            path.unlink(missing_ok=True)


def _files(prefix: str) -> tuple[Path, Path]:
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
