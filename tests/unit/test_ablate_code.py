"""What makes a result stale: the source a run executes, and not how it is written down."""

from pathlib import Path

import pytest

from megatron_lrmoe.report import ablate_code
from megatron_lrmoe.report.ablate_code import fingerprint

FILES = {
    "__init__.py": '"""Package."""\n',
    "entry.py": "from pkg.lib import used\n\ndef f():\n    from pkg import lazy\n    return used(lazy)\n",
    "lib/__init__.py": "",
    "lib/used.py": "import os\n\nX = 1\n",
    "lazy.py": "Y = 2\n",
    "other.py": "Z = 3\n",
}


@pytest.fixture
def package(tmp_path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "pkg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "pkg"


def of(package: Path) -> str:
    return fingerprint(("pkg.entry",), package)


@pytest.mark.parametrize(
    ("name", "text", "counts"),
    [
        ("lib/used.py", "import os\n\nX = 2\n", True),
        ("lib/__init__.py", "X = 1\n", True),
        ("__init__.py", "X = 1\n", True),
        ("lazy.py", "Y = 3\n", True),
        ("lazy.py", "Y = (\n", True),
        ("other.py", "Z = 4\n", False),
        ("lib/used.py", '"""Says more."""\nimport os\n\nX = 1  # one\n"""About X."""\n', False),
        ("entry.py", '"""Doc."""\n' + FILES["entry.py"].replace("f():\n", 'f():\n    "Doc."\n'), False),
    ],
)
def test_only_what_runs_counts(package, name, text, counts):
    before = of(package)
    (package / name).write_text(text)
    assert (of(package) != before) == counts


def test_a_string_that_is_used_counts(package):
    (package / "lazy.py").write_text('Y = "a"\n')
    before = of(package)
    (package / "lazy.py").write_text('Y = "b"\n')
    assert of(package) != before


def test_stock_runs_do_not_depend_on_what_only_the_plugin_executes(monkeypatch):
    read: list[str] = []
    find = ablate_code._file_of
    monkeypatch.setattr(ablate_code, "_file_of", lambda name, package: read.append(name) or find(name, package))
    found = ablate_code.code()
    in_stock = set(read[: read.index("megatron_lrmoe.megatron_adaptor")])
    assert "megatron_lrmoe.device.cpu" in in_stock and "megatron_lrmoe.mcore.gpt_training" in in_stock
    assert not any("recalibration" in name or "compute" in name for name in in_stock)
    assert {"megatron_lrmoe.recalibration.selection", "megatron_lrmoe.compute.experts"} <= set(read)
    assert not any(name.startswith("megatron_lrmoe.report") for name in read)
    assert found.stock != found.lrm and set(found.versions) == {"megatron-core", "torch", "numpy"}
