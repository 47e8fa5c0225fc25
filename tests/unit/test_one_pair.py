"""Every name that docs/one_pair.md gives, as `megatron_lrmoe/room/file.py:Class.method`, exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "one_pair.md"
FEWEST_NAMES = 8


def mentions(text: str) -> list[str]:
    """Everything between backticks that begins like a path of the package."""
    return re.findall(r"`(megatron_lrmoe/[^`]*)`", text)


def definitions(scope: ast.AST) -> dict[str, ast.AST]:
    """Functions and classes defined directly in a module, class or function, also under if, try and with."""
    found: dict[str, ast.AST] = {}
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif not isinstance(node, ast.expr):
            found |= definitions(node)
    return found


def problem_with(mention: str, root: Path) -> str | None:
    """Why a mention is wrong; None if its file (and the name after the colon) exists."""
    path, colon, dotted = mention.partition(":")
    if not (root / path).exists():
        return f"{mention}: no such file"
    if not colon:
        return None
    scope: ast.AST = ast.parse((root / path).read_text(encoding="utf-8"))
    for name in dotted.split("."):
        inner = definitions(scope)
        if name not in inner:
            return f"{mention}: no def or class {name!r}"
        scope = inner[name]
    return None


def test_document_names_only_what_exists() -> None:
    found = mentions(DOCUMENT.read_text(encoding="utf-8"))
    named = {mention for mention in found if ":" in mention}
    assert len(named) >= FEWEST_NAMES, f"{DOCUMENT.name} names only {sorted(named)}"
    assert [problem for mention in found if (problem := problem_with(mention, ROOT))] == []


@pytest.mark.parametrize(
    ("mention", "problem"),
    [
        ("megatron_lrmoe/room/x.py", None),
        ("megatron_lrmoe/room/x.py:plain", None),
        ("megatron_lrmoe/room/x.py:Outer", None),
        ("megatron_lrmoe/room/x.py:Outer.method", None),
        ("megatron_lrmoe/room/x.py:guarded", None),
        ("megatron_lrmoe/room/y.py:plain", "no such file"),
        ("megatron_lrmoe/room/x.py:method", "no def or class 'method'"),
        ("megatron_lrmoe/room/x.py:Outer.gone", "no def or class 'gone'"),
        ("megatron_lrmoe/room/x.py:CONSTANT", "no def or class 'CONSTANT'"),
        ("megatron_lrmoe/room/x.py:plain()", "no def or class 'plain()'"),
    ],
)
def test_the_check_itself(mention: str, problem: str | None, tmp_path: Path) -> None:
    lines = ["CONSTANT = 1", "def plain(): ...", "class Outer:", " def method(self): ...", "if CONSTANT:"]
    source = "\n".join([*lines, " def guarded(): ..."])
    (tmp_path / "megatron_lrmoe" / "room").mkdir(parents=True)
    (tmp_path / "megatron_lrmoe" / "room" / "x.py").write_text(source)
    assert mentions(f"text `{mention}` and `other/file.py:name`") == [mention]
    found = problem_with(mention, tmp_path)
    assert found == (problem and f"{mention}: {problem}")
