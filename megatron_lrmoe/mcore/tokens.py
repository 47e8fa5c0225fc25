"""Tokenizers of the data commands: bytes, or a Hugging Face tokenizer from a folder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_lrmoe.mcore.data import END_OF_DOCUMENT, TOKENIZER_FLAGS, VOCAB_SIZE


@dataclass(frozen=True)
class Tokenizer:
    """Text to token numbers.

    Args:
        encode: of a text, without special tokens.
        eod: the end of a document.
        size: of the vocabulary.
        flags: of Megatron, for training on what it wrote.
    """

    encode: Callable[[str], list[int]]
    eod: int
    size: int
    flags: tuple[str, ...]


def byte_level() -> Tokenizer:
    """A token a byte, and 256 for the end of a document."""
    return Tokenizer(lambda text: list(text.encode()), END_OF_DOCUMENT, VOCAB_SIZE, TOKENIZER_FLAGS)


def hugging_face(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, as Megatron's HuggingFaceTokenizer takes it too. Nothing is downloaded or run from it.

    Raises:
        ValueError: transformers is not installed, or the folder holds no tokenizer with an end-of-text token.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError("--tokenizer needs transformers: pip install 'megatron-lrmoe[data]'") from error
    if not folder.is_dir():
        raise ValueError(f"--tokenizer: found {str(folder)!r}, allowed is a folder: nothing is downloaded")
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--tokenizer: {folder}: found no tokenizer: {error}") from error
    if loaded.eos_token_id is None:
        raise ValueError(f"--tokenizer: {folder}: found no end-of-text token, allowed is a tokenizer that has one")

    def encode(text: str) -> list[int]:
        return loaded(text, add_special_tokens=False, verbose=False)["input_ids"]

    flags = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder))
    return Tokenizer(encode, loaded.eos_token_id, len(loaded), flags)
