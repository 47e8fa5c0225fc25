"""The benchmarks run as the documents write them, at small sizes; what they measure is never looked at here."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_lrmoe import cli
from megatron_lrmoe.replicas.trace_writer import TraceWriter
from megatron_lrmoe.replicas.workloads import Shape, zipf
from tests.plans import IN_CI

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IN_CI, reason="the benchmarks run where CI=true")]


def said(name: str, *args: str, cwd: Path = ROOT) -> str:
    """What a benchmark printed; it has to end well."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"benchmarks.{name}", *args]
    # A file: a pipe would stay open as long as any process that the benchmark has left behind.
    with tempfile.TemporaryFile("w+") as printed:
        run = subprocess.run(command, cwd=cwd, env=environment, stdout=printed, stderr=printed, timeout=120)
        printed.seek(0)
        text = printed.read()
    assert run.returncode == 0, text
    return text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a byte-level dataset; a few hundred kB are too few documents for three splits."""
    prefix = tmp_path_factory.mktemp("text") / "text"
    assert cli.main(["data", "corpus", "--output", str(prefix)]) == 0
    return str(prefix)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a trace of two layer calls, 16 experts on 4 ranks."""
    folder = tmp_path_factory.mktemp("trace")
    writer = TraceWriter(folder, "rank0")
    for layer in (1, 2):
        loads_SE = zipf(Shape(experts=16, ranks=4, tokens=64, top_k=2), seed=layer)
        writer.record(0, 0, layer, loads_SE, loads_SE)
    writer.close()
    return str(folder)


def test_backward() -> None:
    printed = said("backward", "--tokens", "64", "--hidden", "32", "--width", "32", "--rounds", "1")
    assert "lrm 0.8" in printed


def test_hot_rank() -> None:
    sizes = ("--tokens", "16", "--hidden", "16", "--width", "16", "--rounds", "1")
    assert "0.8 lrm" in said("hot_rank", "--bias", "-1.2", *sizes)
    assert "lrm, 0.8, chosen in forward" in said("hot_rank", "--memory", "--bias", "-1.2", *sizes)


def test_gradient_error(text: str) -> None:
    assert "unbiased" in said("gradient_error", text, "--steps", "1", "--batches", "1", "--draws", "1")


def test_from_scratch(text: str) -> None:
    assert "seed 1 topk" in said("from_scratch", text, "--steps", "1", "--seeds", "1")


def test_time_to_loss(text: str) -> None:
    assert "lrm 0.8" in said("time_to_loss", text, "--steps", "4", "--extra", "0.25")


def test_replica_budget(trace: str) -> None:
    assert "2 layer calls" in said("replica_budget", trace, "--ranks", "4", "--experts", "16")


def test_planner(trace: str) -> None:
    assert "|" in said("planner", "--trace", trace)
