"""The import rule: a room imports only rooms above it, and few may import Megatron (DESIGN section 6)."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatron_lrmoe"

ENTRIES = ("cli", "run", "pretrain_gpt", "megatron_adaptor")
MAY_IMPORT_MEGATRON = {"device", "mcore", *ENTRIES}
# __init__ is the package's own, which does nothing.
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": set(),
    "config": set(),
    "pairs": {"config"},
    "recalibration": {"config", "pairs"},
    "compute": {"config", "pairs", "recalibration"},
    "replicas": {"config", "pairs", "recalibration", "compute"},
    "report": {"config", "pairs", "recalibration", "compute", "replicas"},
    "launch": {"config"},
    "device": {"config", "pairs", "recalibration", "compute", "replicas", "report"},
    "mcore": {"config", "pairs", "recalibration", "compute", "replicas", "report", "device"},
    "reference": {"config", "pairs", "recalibration", "compute"},
}
EVERYTHING = {*MAY_IMPORT, *ENTRIES}
MAY_IMPORT |= dict.fromkeys(ENTRIES, EVERYTHING)


def imported_names(source: str, package: str) -> Iterator[str]:
    """Dotted names a source imports anywhere, in functions and by import_module("literal") too.

    ``from a import b`` gives both ``a`` and ``a.b``, since b may be a module.

    Args:
        source: text of a module.
        package: dotted name that relative imports of this module start from.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *filter(None, [base])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))


def violations(path: Path, source: str) -> list[str]:
    """What a module imports and may not.

    Args:
        path: the module, relative to the package's folder.
        source: its text.
    """
    room = path.parts[0].removesuffix(".py")
    if room not in MAY_IMPORT:
        return [f"{path}: {room} is no room of the design"]
    found = set()
    for name in imported_names(source, ".".join([PACKAGE, *path.parts[:-1]])):
        top, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if top == "megatron" and room not in MAY_IMPORT_MEGATRON:
            found.add(f"{path} imports megatron")
        if top == PACKAGE and other in EVERYTHING - MAY_IMPORT[room] - {room}:
            found.add(f"{path} imports {other}")
    return sorted(found)


def test_rooms_import_only_rooms_above_them() -> None:
    folder = ROOT / PACKAGE
    modules = sorted(folder.rglob("*.py"))
    assert folder / "config.py" in modules and folder / "__init__.py" in modules
    found = {path: violations(path.relative_to(folder), path.read_text(encoding="utf-8")) for path in modules}
    assert [problem for problems in found.values() for problem in problems] == []


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("recalibration/score.py", "from megatron_lrmoe.compute.x import y", ["imports compute"]),
        ("recalibration/score.py", "from megatron_lrmoe import compute", ["imports compute"]),
        ("recalibration/score.py", "from ..compute import x", ["imports compute"]),
        ("recalibration/score.py", "from .. import mcore", ["imports mcore"]),
        ("recalibration/deep/score.py", "from ...mcore import x", ["imports mcore"]),
        ("recalibration/score.py", "import megatron_lrmoe.report.memory as m", ["imports report"]),
        ("compute/x.py", "def f():\n    from megatron_lrmoe.replicas import plan", ["imports replicas"]),
        ("compute/x.py", "def f():\n    import megatron.core", ["imports megatron"]),
        ("compute/x.py", "if TYPE_CHECKING:\n    from megatron import core", ["imports megatron"]),
        ("report/x.py", "importlib.import_module('megatron.core')", ["imports megatron"]),
        (
            "report/x.py",
            "from importlib import import_module\nimport_module('megatron')",
            ["imports megatron"],
        ),
        ("config.py", "from megatron_lrmoe import pairs", ["imports pairs"]),
        ("pairs.py", "from .recalibration import x", ["imports recalibration"]),
        ("device/__init__.py", "from ..mcore import x", ["imports mcore"]),
        ("mcore/layer.py", "from megatron_lrmoe.cli import main", ["imports cli"]),
        ("mcore/layer.py", "from megatron_lrmoe.reference import layer", ["imports reference"]),
        ("reference.py", "from . import replicas\nimport megatron", ["imports megatron", "imports replicas"]),
        ("__init__.py", "from . import config", ["imports config"]),
        ("compute/x.py", "import torch, megatron_lrmoe.pairs\nfrom . import y\nfrom ..config import z", []),
        (
            "mcore/layer.py",
            "import megatron.core\nfrom .. import device, report\nfrom ..compute import x",
            [],
        ),
        ("device/__init__.py", "from megatron.training import x\nfrom .stubs import y", []),
        ("cli.py", "from megatron_lrmoe import mcore, reference, run\nimport megatron", []),
        ("compute/x.py", "import megatron_lrmoe_other, megatrons", []),
    ],
)
def test_the_walker_finds_violations(path: str, source: str, expected: list[str]) -> None:
    assert violations(Path(path), source) == [f"{path} {problem}" for problem in expected]


def test_the_walker_refuses_a_module_outside_the_rooms() -> None:
    assert violations(Path("helpers.py"), "") == ["helpers.py: helpers is no room of the design"]


def test_importing_the_package_loads_neither_torch_nor_megatron() -> None:
    code = f"import sys, {PACKAGE}; print(sorted({{'torch', 'megatron', 'numpy'}} & set(sys.modules)))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
