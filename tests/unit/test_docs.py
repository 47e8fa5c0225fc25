"""The site builds without a warning, and its generated parts are what they are generated from."""

import subprocess
import sys
from pathlib import Path

import pytest

from docs import generate

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    assert generate.filled(page.read_text()) == page.read_text(), "run: .venv/bin/python docs/generate.py"


def test_generated_parts_are_replaced() -> None:
    text = "before\n<!-- generated: flags -->\nOUTDATED\n<!-- end -->\nafter"
    filled = generate.filled(text)
    assert "OUTDATED" not in filled and "`--moe-lrm-retention`" in filled
    assert filled.startswith("before\n") and filled.endswith("\nafter")


def test_the_flags_table_gives_each_flag_once_with_its_default() -> None:
    table = generate.flags_table()
    assert table.count("| `--moe-lrm-retention` | not given |") == 1
    assert table.count("| `--moe-lrm-ramp-iters` | 0 |") == 1
    assert table.count("| `--moe-lrm-log-detail` | off |") == 1
    assert "| `--moe-lrm-selection` | unbiased | `unbiased` `topk` |" in table


def test_the_site_builds_and_links_only_to_what_is_there(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site's builder is not installed: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    # The first page is the README, its links those of the site.
    overview = (tmp_path / "index.html").read_text()
    assert "What to choose" in overview and 'href="replicas/"' in overview


def test_every_page_is_on_the_sites_map() -> None:
    on_map = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in sorted((ROOT / "docs").glob("*.md")) if f": {page.name}" not in on_map] == []
