"""``make demo``: train a small MoE on Shakespeare, stock and with dropped backward work, and compare."""

import importlib.metadata
import math
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

from megatron_lrmoe import __version__
from megatron_lrmoe.report.comparison import WARM_UP, Run, table, write_csv, write_plot
from megatron_lrmoe.report.training import RunFailedError, train
from megatron_lrmoe.report.training_log import failure_tail

RANKS = 2
SEED = 1234
ITERATIONS = 120
# Megatron wants more iterations than the 10 over which the learning rate rises.
LEAST_ITERATIONS = 2 * WARM_UP + 1
CORPUS = "shakespeare"

MODEL_FLAGS = """
--num-layers 2 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512
--seq-length 256 --max-position-embeddings 256 --position-embedding-type rope
--normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 512
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
--moe-token-dispatcher-type alltoall
"""
TRAINING_FLAGS = f"""
--expert-model-parallel-size {RANKS} --micro-batch-size 4 --global-batch-size 8 --seed {SEED}
--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 10
--weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
--split 95,5,0 --eval-iters 10 --log-interval 1
--tokenizer-type NullTokenizer --vocab-size 257
"""


def run(output: Path, *, retention: float = 0.8, iterations: int | None = None) -> int:
    """Prepare the corpus, train both runs, and write ``report.md``, ``loss.png`` and ``metrics.csv``.

    Args:
        output: directory for everything; the corpus in it is made once.
        retention: ``--moe-lrm-retention`` of the second run.
        iterations: of each run; None is a number that suits 2 cores.

    Returns:
        0, or 1 when a run failed (the end of its log is on stderr).

    Raises:
        ValueError: retention or iterations out of range.
    """
    iterations = ITERATIONS if iterations is None else iterations
    if not (math.isfinite(retention) and 0 < retention < 1):
        raise ValueError(f"--retention: found {retention}, allowed is 0 < retention < 1 (1 is the stock run)")
    if iterations < LEAST_ITERATIONS:
        raise ValueError(f"--iterations: found {iterations}, allowed is a whole number >= {LEAST_ITERATIONS}")
    output.mkdir(parents=True, exist_ok=True)
    size = {"ranks": RANKS, "iterations": iterations}
    stock_flags = flags(output / CORPUS, iterations)
    lrm_flags = [*stock_flags, "--moe-lrm-retention", str(retention)]
    try:
        prepare_corpus(output / CORPUS)
        stock = train("stock", stock_flags, output / "stock", **size)
        lrm = train(f"retention {retention}", lrm_flags, output / "lrm", **size)
    except RunFailedError as error:
        print(f"megatron-lrmoe: error: {error}", file=sys.stderr)
        return 1
    write_report(output, [stock, lrm])
    print(f"\n{table([stock, lrm])}\n\n{caveats()}\n\nwritten: {output}/report.md, loss.png, metrics.csv")
    return 0


def flags(corpus: Path, iterations: int) -> list[str]:
    """Megatron's flags of the stock run."""
    schedule = ["--train-iters", str(iterations), "--eval-interval", str(iterations // 5)]
    return [*shlex.split(MODEL_FLAGS + TRAINING_FLAGS), *schedule, "--data-path", str(corpus)]


def prepare_corpus(prefix: Path) -> None:
    """Write the corpus unless it is there.

    Raises:
        RunFailedError: the data command failed.
    """
    if all(Path(f"{prefix}{suffix}").exists() for suffix in (".bin", ".idx")):
        return
    print("preparing the corpus", flush=True)
    # A process of its own, because only mcore may import megatron.
    command = [sys.executable, "-m", "megatron_lrmoe.cli", "data", "corpus", "--output", str(prefix)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RunFailedError(f"preparing the corpus failed:\n{failure_tail(done.stderr)}")


def write_report(output: Path, runs: list[Run]) -> None:
    """Write ``metrics.csv``, ``loss.png`` and ``report.md``, each renamed into place when whole."""
    for name, write in (
        ("metrics.csv", lambda path: write_csv(path, runs)),
        ("loss.png", lambda path: write_plot(path, runs)),
        ("report.md", lambda path: path.write_text(report(runs))),
    ):
        part = output / f"{name}.part"
        write(part)
        part.replace(output / name)


def report(runs: list[Run]) -> str:
    """The whole report as Markdown."""
    commands = "\n\n".join(f"{run.name}:\n\n```\n{_a_flag_a_line(run.command)}\n```" for run in runs)
    return "\n\n".join(
        [
            "# Megatron-LM, stock and with dropped backward work",
            table(runs),
            "![training loss](loss.png)",
            caveats(),
            f"## Machine and versions\n\n{machine()}",
            f"## Exact flags\n\n{commands}\n",
        ]
    )


def caveats() -> str:
    """What the figures mean, and what they do not show."""
    return (
        f"Times and bytes are medians per iteration after the first {WARM_UP}; those of the MoE layers are\n"
        f"summed over both ranks. CPU time of the MoE backward is what the {RANKS} processes spent between\n"
        "the arrival of a layer's output gradient and that of its input gradient; waiting does not count.\n"
        "The runs follow each other, so whatever else the machine did in one of them shows in its times.\n\n"
        f"One seed ({SEED}) is shown, so the difference in loss is one draw: it cannot rank the two settings.\n"
        "Both runs used Megatron's own training loop on the CPU device (gloo, fp32): they show that the work\n"
        "shrinks, not what a GPU would gain."
    )


def machine() -> str:
    """Cores, processor and versions, as a Markdown list."""
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("megatron-core", "torch", "numpy"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"- {cores} cores, {platform.machine()}, {platform.system()}\n"
        f"- megatron_lrmoe {__version__}, Python {platform.python_version()}, {versions}"
    )


def _a_flag_a_line(command: tuple[str, ...]) -> str:
    return shlex.join(command).replace(" --", " \\\n  --")
