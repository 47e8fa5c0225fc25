"""What a result depends on beside its flags: the source that ran, and the versions of what it ran on."""

import ast
import hashlib
import importlib.metadata
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
PACKAGES = ("megatron-core", "torch", "numpy")

STOCK_ENTRIES = ("megatron_lrmoe.mcore.gpt_training", "megatron_lrmoe.device")
LRM_ENTRIES = (*STOCK_ENTRIES, "megatron_lrmoe.megatron_adaptor")


@dataclass(frozen=True)
class Code:
    """Fingerprints of the source.

    Args:
        stock: of what a run without ``--moe-lrm-*`` flags executes.
        lrm: of what a run with them executes.
        versions: of the packages beneath, by name.
    """

    stock: str
    lrm: str
    versions: dict[str, str]


def code() -> Code:
    """Fingerprints of the installed package as it is now."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return Code(fingerprint(STOCK_ENTRIES), fingerprint(LRM_ENTRIES), versions)


def fingerprint(entries: tuple[str, ...], package: Path = PACKAGE) -> str:
    """Hash of some modules and of all in this package that they import, at any depth and inside functions too.

    Comments, docstrings and layout do not count, so that improving them throws no result away.

    Args:
        entries: dotted names to begin at.
        package: folder of the package.
    """
    seen: dict[str, str] = {}
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        path = _file_of(name, package)
        if name in seen or path is None:
            continue
        text = path.read_text(encoding="utf-8")
        try:
            tree = ast.parse(text)
        except SyntaxError:
            # In the middle of an edit.
            seen[name] = text
            continue
        waiting += _imports(tree, package.name)
        seen[name] = ast.unparse(_without_strings(tree))
    text = "\0".join(part for name in sorted(seen) for part in (name, seen[name]))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def describe() -> str | None:
    """The commit of the checkout that the package runs from, with ``-dirty`` if it was changed; None outside git."""
    command = ["git", "--no-optional-locks", "-C", str(PACKAGE), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _file_of(name: str, package: Path) -> Path | None:
    """The file of a module of this package; None if there is none, as for a name imported from a module."""
    base = package.joinpath(*name.split(".")[1:])
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            if parts[0] == package:
                # The folders above are packages of their own, whose __init__ runs as well.
                yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


def _without_strings(tree: ast.Module) -> ast.Module:
    """The tree without statements that are a bare string: docstrings of modules, functions, classes and fields."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [part for part in body if not _is_string(part)]  # type: ignore[attr-defined]
    return tree


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
