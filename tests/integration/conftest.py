"""Fixtures of whole training runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gloo import Pool


@pytest.fixture(scope="module")
def stock2() -> Iterator[Pool]:
    """Two ranks in which the adaptor is never imported."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the runs' caches and checkpoints."""
    return tmp_path_factory.mktemp("training")
