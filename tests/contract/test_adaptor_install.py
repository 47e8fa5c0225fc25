"""What the adaptor does when it is imported: which names it replaces, and when it refuses.

A tree of stubs stands in for Megatron, so each case is a fresh interpreter that starts in a moment.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lrmoe.mcore.adaptor import NEEDED, PATCHED
from megatron_lrmoe.mcore.versions import KNOWN
from tests.gloo import ROOT

VERSION = "0.19.77"
CONFIG = "core_transformer_config_from_args"
ADAPTOR = "import megatron_lrmoe.megatron_adaptor"
EVERYTHING = (*PATCHED, *NEEDED)


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A directory with a package ``megatron`` that has every name the adaptor asks for."""
    modules: dict[str, list[str]] = {"megatron.core.package_info": [f"__version__ = '{VERSION}'"]}
    for module, name in EVERYTHING:
        lines = modules.setdefault(module, [])
        owner = name.rpartition(".")[0]
        if not owner:
            lines.append(f"def {name}(*args, **kwargs): return ('stock', args, kwargs)")
        elif f"class {owner}:" not in lines:
            methods = [n.rpartition(".")[2] for m, n in EVERYTHING if m == module and n.startswith(owner + ".")]
            lines += [f"class {owner}:", *(f"    def {m}(self): pass" for m in methods)]
    for module, lines in modules.items():
        path = tmp_path / f"{module.replace('.', '/')}.py"
        for folder in [*path.parents][: len(module.split(".")) - 1]:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").touch()
        path.write_text("\n".join(lines) + "\n")
    return tmp_path


def python(stub: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code as a script, with the stubs in front of the real Megatron."""
    script = stub / "script.py"
    script.write_text(code)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(stub), str(ROOT)])}
    return subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60)


def test_a_version_that_is_not_known_is_one_warning_that_names_those_that_are(
    stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stub / "megatron/core/package_info.py").write_text("__version__ = '0.99.1'\n")
    install_again = "from megatron_lrmoe.mcore.adaptor import install\ninstall()"
    result = python(stub, f"{ADAPTOR}\n{install_again}\n")
    known = ", ".join(KNOWN.values())
    assert result.stderr.splitlines() == [f"found Megatron 0.99.1, megatron_lrmoe is tested with {known}"]
    assert result.returncode == 0
    monkeypatch.setenv("RANK", "1")
    assert python(stub, ADAPTOR).stderr == ""


def error_of(result: subprocess.CompletedProcess[str]) -> str:
    """Last line of the traceback."""
    assert result.returncode == 1, result.stdout + result.stderr
    return result.stderr.strip().splitlines()[-1]


def test_every_name_is_replaced_once_and_keeps_the_original(stub: Path) -> None:
    result = python(
        stub,
        f"""
import importlib, sys
places = {PATCHED!r}
def now():
    return [getattr(importlib.import_module(module), name) for module, name in places]
before = now()
{ADAPTOR}
first = now()
assert all(new is not old and new.__wrapped__ is old for new, old in zip(first, before, strict=True))
from megatron_lrmoe.mcore.adaptor import install
install()
assert now() == first
assert "torch" not in sys.modules
""",
    )
    assert result.returncode == 0 and result.stdout == result.stderr == "", result.stderr


@pytest.mark.parametrize(("module", "name"), EVERYTHING)
def test_a_missing_name_is_an_import_error_with_its_path_and_the_version(stub: Path, module: str, name: str) -> None:
    path = stub / f"{module.replace('.', '/')}.py"
    owner, _, last = name.rpartition(".")
    text = path.read_text()
    at = text.index(f"def {last}(", text.index(f"class {owner}:") if owner else 0)
    path.write_text(text[:at] + "def renamed(" + text[at + len(f"def {last}(") :])
    error = error_of(python(stub, ADAPTOR))
    assert error.startswith(f"ImportError: megatron_lrmoe needs {module}.{name}, which Megatron {VERSION} does not")


def test_a_missing_module_is_the_same_error(stub: Path) -> None:
    (stub / "megatron/core/transformer/moe/moe_logging.py").unlink()
    error = error_of(python(stub, ADAPTOR))
    assert "needs megatron.core.transformer.moe.moe_logging.MoEMetricsTracker.report, which Megatron" in error
    assert VERSION in error and "No module named" in error


def test_without_megatron_the_error_says_so(stub: Path) -> None:
    (stub / "megatron/core/package_info.py").unlink()
    (stub / "megatron/training/__init__.py").unlink()
    (stub / "megatron/training/global_vars.py").unlink()
    assert "Megatron (version unknown) does not have" in error_of(python(stub, ADAPTOR))


def test_every_stale_binding_is_named_and_nothing_is_replaced(stub: Path) -> None:
    (stub / "gpt_builders.py").write_text(f"from megatron.training.arguments import {CONFIG} as make_config\n")
    (stub / "other.py").write_text(
        "from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend\n"
        "from megatron.training.arguments import add_megatron_arguments\n"
    )
    result = python(
        stub,
        f"""
import sys
import gpt_builders, other
from megatron.training.arguments import {CONFIG}
sys.modules["odd"] = object()
sys.modules["none"] = None
try:
    {ADAPTOR}
except RuntimeError as error:
    print(error)
    from megatron.training import arguments
    assert arguments.{CONFIG} is {CONFIG} and not hasattr({CONFIG}, "__wrapped__")
""",
    )
    stale = [f"__main__.{CONFIG}", "gpt_builders.make_config", "other.add_megatron_arguments"]
    stale.append("other.get_moe_module_spec_for_backend")
    assert "imported too late: import it right after torch." in result.stdout, result.stderr
    assert result.stdout.strip().endswith("already: " + ", ".join(stale))


def test_names_taken_after_the_adaptor_are_not_stale(stub: Path) -> None:
    code = f"{ADAPTOR}\nfrom megatron.training.arguments import {CONFIG}\n"
    code += "from megatron_lrmoe.mcore.adaptor import install\ninstall()\n"
    result = python(stub, code)
    assert result.returncode == 0, result.stderr


def test_another_plugin_may_wrap_what_was_replaced(stub: Path) -> None:
    result = python(
        stub,
        f"""
{ADAPTOR}
import functools
from megatron.training import arguments
ours = arguments.add_megatron_arguments
@functools.wraps(ours)
def theirs(parser):
    return ours(parser)
arguments.add_megatron_arguments = theirs
from megatron_lrmoe.mcore.adaptor import install
install()
assert arguments.add_megatron_arguments is theirs
""",
    )
    assert result.returncode == 0, result.stderr


def test_yaml_beside_one_of_our_flags_is_refused_because_the_file_replaces_all_flags(stub: Path) -> None:
    result = python(
        stub,
        f"""
import sys
from types import SimpleNamespace
{ADAPTOR}
from megatron.training.yaml_arguments import core_transformer_config_from_yaml as config
plain = SimpleNamespace()
assert config(plain, "language_model") == ("stock", (plain, "language_model"), {{}})
in_file = SimpleNamespace(moe_lrm_retention=0.5)
for words, args in (["--moe-lrm-retention=0.5", "--lr", "1"], plain), ([], in_file):
    sys.argv[1:] = words
    try:
        config(args)
    except ValueError as error:
        print(error)
""",
    )
    lines = result.stdout.splitlines()
    assert len(lines) == 2, result.stderr
    assert lines[0].startswith("--yaml-cfg: found it together with --moe-lrm-retention, allowed is")
    assert lines[1].startswith("--yaml-cfg: found it together with moe_lrm_retention, allowed is")
