"""docs/support.md says what the checks say, because it is made from them."""

from pathlib import Path

import pytest

from megatron_lrmoe.mcore.support import REFUSALS, refusals_table
from megatron_lrmoe.mcore.supported import SUPPORTED, Supported, supported_table

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "support.md"


def test_the_table_in_the_document_is_the_one_that_is_checked():
    assert refusals_table() in DOCUMENT.read_text()


def test_every_refusal_has_a_row():
    table = refusals_table()
    assert table.count("\n") == len(REFUSALS) + 1
    assert all(f"| `{refusal.flag}` |" in table for refusal in REFUSALS)


def test_the_document_holds_what_is_supported():
    assert supported_table() in DOCUMENT.read_text()


@pytest.mark.parametrize("row", SUPPORTED, ids=lambda row: row.what.partition(",")[0])
def test_what_is_supported_has_tests(row: Supported):
    assert row.tests
    for test in row.tests:
        assert (ROOT / test).exists(), test
