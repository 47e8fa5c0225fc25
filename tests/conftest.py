"""Fixtures and hypothesis settings of all tests."""

import os
from collections.abc import Iterator

import hypothesis
import pytest

from tests.gloo import Pool

# No deadline: the first call of an operation is slow on a busy machine. CI runs more cases than a developer
# waits for.
hypothesis.settings.register_profile("developer", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=300, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") == "true" else "developer")


@pytest.fixture(scope="session")
def gloo2() -> Iterator[Pool]:
    """``gloo2(function, *args, limit_s=60.0)``: results of a module-level function on 2 gloo ranks."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def gloo4() -> Iterator[Pool]:
    """``gloo4(function, *args, limit_s=60.0)``: results of a module-level function on 4 gloo ranks."""
    pool = Pool(4)
    yield pool
    pool.close()
