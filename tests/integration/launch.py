"""Whole training runs as a user starts them: torchrun on this machine, and the losses that it printed."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WHEEL_ENTRY = "megatron_lrmoe.pretrain_gpt"
SCRIPT_ENTRY = "megatron_lrmoe.run"

_TRAIN_LOSS = re.compile(r"iteration +(\d+)/.*?\| lm loss: ([^ ]+) ")
_VALIDATION_LOSS = re.compile(r"validation loss at iteration \d+[^|]*\| lm loss value: ([^ ]+) ")


@dataclass(frozen=True)
class Run:
    """What a finished run printed."""

    stdout: str
    """Standard output and standard error of all ranks."""
    losses: list[float]
    """'lm loss' of each iteration, as printed (7 digits)."""
    validation_losses: list[float]
    """Validation losses in order: at each eval-interval, then the validation and the test set at the end."""


class RunError(AssertionError):
    """A run failed or ran out of time; the message ends with what it printed."""


def tiny_args(tmp_path: Path, **overrides: Any) -> list[str]:
    """Flags of a 2-layer MoE, hidden 64, 8 experts top-2, sequence 64, on mock data.

    Args:
        tmp_path: folder for caches.
        overrides: flags by name with underscores: True for a flag without a value, None to leave one out, a
            list for several values. ``data_path`` replaces the mock data.
    """
    flags: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "seq_length": 64,
        "max_position_embeddings": 64,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
        "num_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 64,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "train_iters": 5,
        "lr": 1e-3,
        "lr_decay_style": "constant",
        "mock_data": True if overrides.get("data_path") is None else None,
        "split": "90,5,5",
        "data_cache_path": tmp_path / "cache",
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 256,
        "log_interval": 1,
        "eval_interval": 5,
        "eval_iters": 1,
        **overrides,
    }
    words: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += ["--" + name.replace("_", "-"), *map(str, values)]
    return words


def torchrun(nproc: int, entry: str | Path, args: list[str], timeout: float = 300.0) -> Run:
    """Run ``torchrun -m entry args``, or ``torchrun entry args`` for a script, on processes of one thread each.

    Raises:
        RunError: it failed, or was killed at ``timeout`` seconds with every process that it had started.
    """
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    command += [*(["-m"] if isinstance(entry, str) else []), str(entry), *args]
    # As in an activated environment: a checkout compiles its index builder with the python3 that PATH names.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    # After a Megatron that the tests are run against.
    python_path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path, "PATH": path}
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        stdout, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        stdout, _ = process.communicate()
        raise RunError(f"no end after {timeout} s: {' '.join(command)}\n{stdout[-5000:]}") from None
    except BaseException:
        kill_tree(process.pid)
        raise
    if process.returncode != 0:
        raise RunError(f"exit status {process.returncode}: {' '.join(command)}\n{stdout[-5000:]}")
    losses = {int(iteration): float(loss) for iteration, loss in _TRAIN_LOSS.findall(stdout)}
    return Run(stdout, list(losses.values()), [float(loss) for loss in _VALIDATION_LOSS.findall(stdout)])


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def kill_tree(pid: int) -> None:
    """Kill a process and all below it; torchrun puts each worker into a process group of its own."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    with contextlib.suppress(OSError):
        # Stopped first, or it would start and miss children between the two steps.
        os.kill(pid, signal.SIGSTOP)
        for child in children.read_text().split():
            kill_tree(int(child))
        os.kill(pid, signal.SIGKILL)
