"""Megatron's own dispatcher and MoE-layer tests, run against our layer on 2 gloo ranks.

    MEGATRON_LM_PATH=/path/to/Megatron-LM .venv/bin/python -m pytest -s tests/upstream

The tests stay in the checkout, with its root folder and its conftest; ``plugin.py`` is loaded beside them and says what
changes. Gradients are compared at retention 1.0 through the compacted path.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.gloo import LOOPBACK_INTERFACE

WORLD_SIZE = 2
LIMIT_S = 900
FOLDER = Path("tests/unit_tests/transformer/moe")
FILES = (
    "test_a2a_token_dispatcher.py",
    "test_token_dispatcher.py",
    "test_moe_layer.py",
    "test_sequential_mlp.py",
    "test_shared_experts.py",
)
"""Those of Megatron's MoE tests that run a dispatcher or a layer without Transformer Engine. The others look at
routers, TE's grouped MLP or checkpoints, and run no backward of ours."""


@pytest.fixture(scope="module")
def checkout() -> Path:
    path = os.environ.get("MEGATRON_LM_PATH")
    if not path:
        pytest.skip("MEGATRON_LM_PATH names no Megatron-LM checkout")
    folder = Path(path).resolve()
    if not (folder / FOLDER / FILES[0]).is_file():
        raise ValueError(f"MEGATRON_LM_PATH={path}: has no {FOLDER / FILES[0]}, allowed is a Megatron-LM checkout")
    return folder


@pytest.mark.slow
@pytest.mark.dist
def test_megatrons_own_tests_pass_with_our_layer(checkout, tmp_path):
    codes = run(checkout, tmp_path)
    logs = "\n".join(f"rank {rank}: exit code {code}\n{tail(tmp_path, rank)}" for rank, code in enumerate(codes))
    assert codes == [0] * WORLD_SIZE, logs
    records = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    print(summary(records[0]))
    for record in records:
        passed = {test for test, outcome in record["outcomes"].items() if outcome == "passed"}
        judged = passed & set(record["compacted"])
        assert "failed" not in record["outcomes"].values()
        assert record["opened"].get("alltoall"), "no call of our layer was opened"
        assert [t for t in judged if "test_a2a_token_dispatcher" in t], "no dispatcher test ran a compacted backward"
        assert [t for t in judged if "test_moe_layer" in t], "no layer test ran a compacted backward"
    assert records[0]["compacted"] == records[1]["compacted"]


def run(checkout: Path, folder: Path) -> list[int | None]:
    """Exit codes of pytest in every rank; None for one that was ended after LIMIT_S or because another failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [start(rank, port, checkout, folder) for rank in range(WORLD_SIZE)]
    end = time.monotonic() + LIMIT_S
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            if any(rank.poll() for rank in ranks):
                end = min(end, time.monotonic() + 30)
            time.sleep(0.5)
        return [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def start(rank: int, port: int, checkout: Path, folder: Path) -> "subprocess.Popen[bytes]":
    here = Path(__file__).resolve().parent
    paths = [str(checkout), str(here), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD_SIZE),
        "LOCAL_WORLD_SIZE": str(WORLD_SIZE),
        "LRMOE_UPSTREAM_REPORT": str(folder),
    }
    command = [sys.executable, "-m", "pytest", "-p", "plugin", "-p", "no:cacheprovider", "-q"]
    command += ["-o", "faulthandler_timeout=240", *(str(FOLDER / file) for file in FILES)]
    with (folder / f"rank{rank}.log").open("w") as log:
        return subprocess.Popen(command, cwd=checkout, env=environment, stdout=log, stderr=log)


def tail(folder: Path, rank: int, lines: int = 60) -> str:
    return "\n".join((folder / f"rank{rank}.log").read_text(errors="replace").splitlines()[-lines:])


def summary(record: dict) -> str:
    """Counts, then every reason for what did not run, and how often."""
    outcomes, reasons = record["outcomes"], record["reasons"]
    passed = [test for test, outcome in outcomes.items() if outcome == "passed"]
    judged = [test for test in passed if test in record["compacted"]]
    deselected = [test for test in reasons if test not in outcomes]
    lines = [
        f"passed {len(passed)}, of these {len(judged)} through a compacted backward; "
        f"skipped {sum(o == 'skipped' for o in outcomes.values())}, deselected {len(deselected)}",
        f"calls of our layer: {record['opened']}",
        *(f"{count:4} {kind}: {reason}" for (kind, reason), count in why(record, deselected)),
        *(f"{count:4} layers of Megatron: {sentence}" for sentence, count in record["refused"].items()),
    ]
    return "\n".join(lines)


def why(record: dict, deselected: list[str]) -> list[tuple[tuple[str, str], int]]:
    """((kind, reason), count) of the tests that did not run."""
    kinds = Counter(
        ("deselected" if test in deselected else "skipped", reason) for test, reason in record["reasons"].items()
    )
    return kinds.most_common()
