"""The wheel, installed in an environment of its own: what it needs beside the package travels in it."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.unit.test_patch import tree

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # No isolation: the build back end comes with the developer's environment, and a test needs no package index.
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    (built,) = folder.glob("megatron_lrmoe-*.whl")
    return built


@pytest.fixture(scope="module")
def command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``megatron-lrmoe`` of a fresh environment that has the wheel, and this one's libraries but not its checkout."""
    environment = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run(pip, check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # Lines of a .pth file are folders; .pth files in those are not read, so the editable install stays out.
    (packages / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return environment / "bin" / "megatron-lrmoe"


def said(command: Path, *args: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run([command, *args], cwd=cwd, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_wheel_holds_patches_configs_and_scripts(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("patches", "configs", "scripts"):
        here = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert here and {f"megatron_lrmoe/shipped/{name}" for name in here} <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "benchmarks/", "runs/"))]


@pytest.mark.slow
def test_the_installed_command_is_that_of_the_wheel(command: Path, tmp_path: Path) -> None:
    code = "import json, megatron_lrmoe.launch.shipped as s; print(json.dumps([s.__file__, str(s.folder('patches'))]))"
    run = subprocess.run(
        [command.parent / "python", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert all(Path(place).is_relative_to(command.parent.parent) for place in json.loads(run.stdout))


@pytest.mark.slow
def test_recipes_and_patches_work_from_the_wheel(command: Path, tmp_path: Path) -> None:
    assert "qwen3_30b_a3b" in said(command, "recipes", "list", cwd=tmp_path)
    assert "--num-experts" in said(command, "recipes", "show", "qwen3_30b_a3b", cwd=tmp_path)
    checkout = tree(tmp_path / "Megatron-LM")
    assert "+import megatron_lrmoe" in said(command, "patch", str(checkout), "--diff", cwd=tmp_path)
