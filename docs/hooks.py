"""The site's first page and changelog are the files at the top of the project, which MkDocs does not read itself."""

from pathlib import Path
from typing import Any

TOP = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in a page that stands for a file outside docs/; its links into docs/ lose that folder."""
    name = TOP.get(page.file.src_uri)
    if name is None:
        return markdown
    text = (Path(__file__).resolve().parent.parent / name).read_text(encoding="utf-8")
    return text.replace("](docs/", "](")
