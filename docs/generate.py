"""Writes the generated parts of docs/: ``python docs/generate.py``; with ``--check`` it only says what is out of date.

A part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
"""

import re
import sys
import typing
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from megatron_lrmoe.config import LrmConfig, field_help, flag_of
from megatron_lrmoe.mcore.support import refusals_table
from megatron_lrmoe.mcore.supported import supported_table

DOCS = Path(__file__).resolve().parent


def flags_table() -> str:
    """Every flag of the plugin by group, from the dataclass that the flags are made of."""
    help_of = field_help()
    groups: dict[str, list[str]] = {}
    for f in fields(LrmConfig):
        default = "not given" if f.default is None else "off" if f.default is False else f.default
        allowed = " ".join(f"`{c}`" for c in typing.get_args(f.type)) if "Literal" in str(f.type) else ""
        row = f"| `{flag_of(f.name)}` | {default} | {allowed} | {help_of[f.name].replace('|', chr(92) + '|')} |"
        groups.setdefault(f.metadata["group"], []).append(row)
    head = "| flag | default | allowed | |\n|---|---|---|---|\n"
    return "\n\n".join(f"## {title}\n\n{head}" + "\n".join(rows) for title, rows in groups.items())


PARTS: dict[str, Callable[[], str]] = {
    "flags": flags_table,
    "supported": supported_table,
    "refused": refusals_table,
}


def filled(text: str) -> str:
    """A page with its generated parts as they are to be."""

    def part(found: re.Match[str]) -> str:
        return f"{found[1]}\n\n{PARTS[found[2]]()}\n\n<!-- end -->"

    return re.sub(r"(<!-- generated: (\w+) -->).*?<!-- end -->", part, text, flags=re.DOTALL)


def main(argv: list[str]) -> int:
    """Write, or name, the pages that are out of date; the exit status is 1 if --check finds any."""
    old = [page for page in sorted(DOCS.glob("*.md")) if filled(page.read_text()) != page.read_text()]
    for page in old:
        print(f"{page.name}: {'out of date' if argv == ['--check'] else 'written'}")
        if argv != ["--check"]:
            page.write_text(filled(page.read_text()))
    return 1 if old and argv == ["--check"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
