"""The plugin with the other versions of Megatron: a choice of tests again, in an interpreter that finds another one.

``make setup`` installs megatron-core 0.18.2 beside the environment's; MEGATRON_LM_PATH names a checkout, of main.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lrmoe.mcore.versions import CHECKOUT_VARIABLES, KNOWN, is_known
from tests.gloo import ROOT

OLDER = ROOT / ".venv" / f"megatron-core-{KNOWN['0.18']}"
CHOSEN = (
    "tests/contract/test_adaptor_megatron.py",
    "tests/contract/test_flags_megatron.py",
    "tests/contract/test_metrics_megatron.py",
    "tests/contract/test_check.py",
    "tests/dist/test_off_is_off.py",
    "tests/integration/test_training.py::test_retention_falls_from_start_along_the_ramp",
)
# They take about a minute of CPU time, most of it on two ranks at once; a busy machine needs longer.
LIMIT_S = 600


def run_chosen_tests(megatron: Path) -> str:
    """Outcome of the chosen tests, one after another, with the Megatron in this folder; its version comes first."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(megatron), str(ROOT)]),
        # A checkout compiles its index builder with the python3 that PATH names.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    for variable in CHECKOUT_VARIABLES:
        environment.pop(variable, None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", *CHOSEN]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    return run.stdout


@pytest.mark.slow
@pytest.mark.dist
def test_the_older_megatron() -> None:
    if not OLDER.is_dir():
        pytest.skip(f"{OLDER} is missing; make setup installs it")
    assert " passed" in run_chosen_tests(OLDER)


@pytest.mark.slow
@pytest.mark.dist
def test_a_checkout() -> None:
    folder = os.environ.get("MEGATRON_LM_PATH")
    if not folder:
        pytest.skip("MEGATRON_LM_PATH names no checkout of Megatron-LM")
    assert " passed" in run_chosen_tests(Path(folder).resolve())


def test_a_version_is_known_by_its_first_two_numbers() -> None:
    known = ["0.18.0", "0.18.2", "0.19.1+abc", "0.20.0rc0", "0.20.0"]
    assert [
        version for version in [*known, "0.17.1", "0.21.0", "1.19.2", "(version unknown)", ""] if is_known(version)
    ] == known
