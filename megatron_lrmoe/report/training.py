"""Start Megatron training runs as subprocesses, follow their log, and read what they left."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from megatron_lrmoe.report.comparison import Run
from megatron_lrmoe.report.training_log import add_probe, failure_tail, parse_iteration, parse_log


class RunFailedError(Exception):
    """A subprocess failed; the message holds the end of its log."""


def train(name: str, megatron_flags: list[str], directory: Path, *, ranks: int, iterations: int) -> Run:
    """Train in subprocesses on the CPU, with a progress line.

    Args:
        name: of the run, in the progress line and in tables.
        megatron_flags: for ``megatron_lrmoe.pretrain_gpt``.
        directory: emptied, then left with the log and the probe's files.
        ranks: processes.
        iterations: that the log must hold in the end.

    Raises:
        RunFailedError: torchrun failed, or the log or the probe's files lack iterations.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    log = directory / "train.log"
    launcher = ["--standalone", "--nproc-per-node", str(ranks), "-m", "megatron_lrmoe.pretrain_gpt"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # The same on every machine: without visible GPUs Megatron runs on the CPU device.
        "CUDA_VISIBLE_DEVICES": "",
        "LRMOE_PROBE": str(directory / "probe.jsonl"),
    }
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, *megatron_flags]
    with _process(command, environment) as process:
        _follow(process, log, name, iterations)
    text = log.read_text()
    if process.returncode:
        raise RunFailedError(f"the run '{name}' failed; the end of {log}:\n{failure_tail(text)}")
    rows = parse_log(text.splitlines())
    add_probe(rows, sorted(directory.glob("probe.jsonl.rank*")))
    if len(rows) != iterations or any(row.moe_backward_cpu_ms is None for row in rows):
        raise RunFailedError(f"{log} and the probe's files beside it do not hold all {iterations} iterations")
    return Run(name, ("torchrun", *launcher, *megatron_flags), tuple(rows))


def _follow(process: subprocess.Popen[str], log: Path, name: str, iterations: int) -> None:
    with (
        log.open("w") as out,
        tqdm(total=iterations, desc=f"{name}, starting", unit="it", dynamic_ncols=True) as bar,
    ):
        for line in process.stdout or ():
            out.write(line)
            if row := parse_iteration(line):
                bar.set_description(f"{name}, train loss {row.train_loss:.3f}", refresh=False)
                bar.update(row.iteration - bar.n)


@contextmanager
def _process(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a process group of its own, which has ended when the context is left."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield process
        process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
