"""``megatron-lrmoe check`` with the real Megatron, in an interpreter of its own: it changes torch and Megatron."""

import json
import os
import subprocess
import sys

import pytest

from megatron_lrmoe.mcore import versions
from tests.contract.command_lines import ALLTOALL, ON, SMALL
from tests.gloo import ROOT

LINES = {
    "accepted": f"{SMALL} {ALLTOALL} {ON} --lr-warmup-iters 1 --tensor-model-parallel-size 2 --sequence-parallel "
    "--expert-tensor-parallel-size 1 --expert-model-parallel-size 4",
    "off": f"{SMALL} {ALLTOALL}",
    "refused": f"{SMALL.replace('--disable-bias-linear', '')} {ALLTOALL} --moe-lrm-retention=1.5 --moe-lrm-layers 7 "
    "--use-megatron-fsdp",
    "megatron": f"{SMALL.replace('--micro-batch-size 1', '')} {ALLTOALL} {ON} --use-torch-fsdp2",
    "unknown flag": f"{SMALL} {ON} --no-such-flag 3",
}
PROGRAM = """
import contextlib, io, json, sys
from megatron_lrmoe import cli
answers = {}
for name, line in json.loads(sys.argv[1]).items():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = cli.main(["check", *line.split()])
    answers[name] = status, out.getvalue()
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[int, str]]:
    """Exit status and output for each of the lines."""
    python_path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "MEGATRON_LM_PATH")}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(LINES)]
    run = subprocess.run(
        command, env=environment | {"PYTHONPATH": python_path}, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "CPU device" not in run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def block(output: str, title: str) -> list[str]:
    """Lines below a title, without their indent."""
    _, found, rest = output.partition(f"\n{title}")
    assert found, output
    return [line.strip() for line in rest.split("\n\n")[0].splitlines()[1:]]


def test_accepted_flags_are_status_0_with_values_after_validation(answers) -> None:
    status, out = answers["accepted"]
    assert (status, block(out, "refused with")) == (0, ["nothing"])
    rows = {line.split()[0]: line.split()[1:] for line in block(out, "settings")}
    # Tensor parallelism of 2 and 4 experts' ranks need 4 ranks together.
    assert "WORLD_SIZE 4\n" in out
    assert rows["--moe-lrm-retention"] == ["0.8", "command", "line"]
    assert rows["--moe-lrm-start-iter"] == ["1", "derived"]
    assert rows["--moe-lrm-selection"] == ["unbiased", "default"]


def test_the_megatron_that_is_found_is_named(answers) -> None:
    version, folder = versions.installed() or ("", None)
    for _, out in answers.values():
        (line,) = [line for line in out.splitlines() if line.startswith("  megatron-core ")]
        assert line.split()[1] == f"{version}," and line.endswith(str(folder))


def test_without_retention_nothing_is_refused_and_it_says_so(answers) -> None:
    status, out = answers["off"]
    assert (status, block(out, "refused with")) == (0, ["nothing"])
    assert block(out, "settings")[0] == "--moe-lrm-retention is not below 1, no replicas: Megatron's own classes run"


def test_everything_refused_is_listed_at_once_with_status_1(answers) -> None:
    status, out = answers["refused"]
    assert status == 1
    flags = {line.partition(":")[0] for line in block(out, "refused with")}
    assert flags >= {"--moe-lrm-retention", "--moe-lrm-layers", "--disable-bias-linear", "--use-megatron-fsdp"}


def test_what_megatron_refuses_stands_beside_what_the_plugin_refuses(answers) -> None:
    status, out = answers["megatron"]
    lines = block(out, "refused with")
    assert status == 1
    assert lines[0].startswith("Megatron: ") and "micro_batch_size" in lines[0]
    assert any(line.startswith("--use-torch-fsdp2: found True") for line in lines)


def test_a_flag_that_megatrons_parser_does_not_know_is_its_message_and_status_2(answers) -> None:
    status, out = answers["unknown flag"]
    assert (status, block(out, "refused with")) == (2, ["unrecognized arguments: --no-such-flag 3"])
    assert "\nsettings" not in out
