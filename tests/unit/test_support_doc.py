"""docs/support.md says what the checks say, because it is made from them."""

from pathlib import Path

from megatron_lrmoe.mcore.support import REFUSALS, refusals_table

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "support.md"


def test_the_table_in_the_document_is_the_one_that_is_checked():
    assert refusals_table() in DOCUMENT.read_text()


def test_every_refusal_has_a_row():
    table = refusals_table()
    assert table.count("\n") == len(REFUSALS) + 1
    assert all(f"| `{refusal.flag}` |" in table for refusal in REFUSALS)
