"""From a recipe and a launch script's variables to torchrun's command line."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_lrmoe.config import flag_of
from megatron_lrmoe.launch.recipes import Flags, Recipe, moe_layers, words
from megatron_lrmoe.launch.settings import Settings

RECIPE_SETTINGS = {
    "TP": "--tensor-model-parallel-size",
    "PP": "--pipeline-model-parallel-size",
    "EP": "--expert-model-parallel-size",
    "SEQ": "--seq-length",
    "MICRO_BATCH": "--micro-batch-size",
    "GLOBAL_BATCH": "--global-batch-size",
    "ITERATIONS": "--train-iters",
}
"""Variables that replace a value of the recipe."""

NOT_ON_A_CPU = ("--moe-permute-fusion", "--moe-grouped-gemm", "--transformer-impl")
"""Kernels of Transformer Engine; left out of a smoke run."""


@dataclass(frozen=True)
class Launch:
    """A job.

    Args:
        environment: variables of its processes, beside those that are there.
        entry: what torchrun starts.
        flags: of Megatron and the plugin.
        settings: of torchrun.
        notes: lines for the reader.
    """

    environment: dict[str, str]
    entry: tuple[str, ...]
    flags: Flags
    settings: Settings
    notes: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """What follows ``torchrun``."""
        s = self.settings
        torchrun = [f"--nproc-per-node={s.GPUS}", f"--nnodes={s.NNODES}", f"--node-rank={s.NODE_RANK}"]
        torchrun += [f"--master-addr={s.MASTER_ADDR}", f"--master-port={s.MASTER_PORT}"]
        return [*torchrun, *self.entry, *words(self.flags)]


def launch(recipe: Recipe, settings: Settings) -> Launch:
    """The job that a recipe and its variables describe.

    Args:
        recipe: model and training.
        settings: what replaces its values, and what it leaves open.
    """
    flags: Flags = dict(recipe.flags)
    for name, flag in RECIPE_SETTINGS.items():
        if value := getattr(settings, name):
            flags[flag] = value
    if flags["--tensor-model-parallel-size"] != "1":
        flags["--sequence-parallel"] = True
    flags |= _data(settings, flags) | _outputs(settings) | _plugin(settings)
    script = ("-m", "megatron_lrmoe.pretrain_gpt")
    if settings.MEGATRON_PATH:
        script = ("-m", "megatron_lrmoe.run", str(Path(settings.MEGATRON_PATH) / "pretrain_gpt.py"))
    return Launch(recipe.environment, script, flags, settings)


def with_flags(job: Launch, given: Sequence[str]) -> Launch:
    """The job with a user's own flags, which win over everything.

    Args:
        job: the job.
        given: words of a command line; several values after a flag stay together.

    Raises:
        ValueError: the first word is no flag.
    """
    flags: Flags = {}
    for word in given:
        if word.startswith("--"):
            last, _, value = word.partition("=")
            flags[last] = value or True
        elif not flags:
            raise ValueError(f"after --: found {word!r}, allowed are Megatron's flags, such as --log-interval 10")
        else:
            last = next(reversed(flags))
            before = flags[last]
            flags[last] = word if before is True else [*(before if isinstance(before, list) else [str(before)]), word]
    return replace(job, flags=job.flags | flags)


def _data(settings: Settings, flags: Flags) -> Flags:
    data: Flags = {"--data-path": settings.DATA_PATH.split()} if settings.DATA_PATH else {"--mock-data": True}
    if settings.TOKENIZER:
        return data | {"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": settings.TOKENIZER}
    # The models' own sizes are 128 times the recipe's multiple.
    multiple = int(str(flags.get("--make-vocab-size-divisible-by", 128)))
    size = 128 * multiple if multiple > 1000 else 257
    return data | {"--tokenizer-type": "NullTokenizer", "--vocab-size": str(size)}


def _outputs(settings: Settings) -> Flags:
    flags: Flags = {}
    if settings.SAVE:
        flags |= {"--save": settings.SAVE, "--load": settings.SAVE, "--save-interval": settings.SAVE_INTERVAL}
    if settings.TENSORBOARD:
        flags["--tensorboard-dir"] = settings.TENSORBOARD
    if settings.WANDB_PROJECT:
        flags |= {"--wandb-project": settings.WANDB_PROJECT, "--wandb-exp-name": settings.POLICY}
    return flags


def _plugin(settings: Settings) -> Flags:
    if settings.POLICY == "stock":
        return {}
    flags: Flags = {flag_of("retention"): settings.RETENTION}
    if settings.POLICY == "lrm+replicas":
        flags[flag_of("replica_policy")] = "lrm"
    return flags


def smoke(job: Launch) -> Launch:
    """The same job at toy widths, two iterations on two processes of this machine's CPU, on mock data."""
    kept = {flag: value for flag, value in job.flags.items() if flag not in NOT_ON_A_CPU and "pipeline" not in flag}
    dense = 1 - min(moe_layers(str(job.flags.get("--moe-layer-freq", "1")), int(str(job.flags["--num-layers"]))))
    small: Flags = {
        "--num-layers": "2",
        "--hidden-size": "64",
        "--ffn-hidden-size": "128",
        "--num-attention-heads": "4",
        "--num-query-groups": "2",
        "--kv-channels": "16",
        "--num-experts": "8",
        "--moe-router-topk": "2",
        "--moe-ffn-hidden-size": "32",
        "--moe-shared-expert-intermediate-size": "32",
        "--moe-layer-freq": "[0]*1+[1]*1" if dense else "1",
        "--seq-length": "64",
        "--max-position-embeddings": "64",
        "--make-vocab-size-divisible-by": "128",
        "--micro-batch-size": "1",
        "--global-batch-size": "4",
        "--train-iters": "2",
        "--lr-warmup-iters": "0",
        "--eval-iters": "1",
        "--tensor-model-parallel-size": "1",
        "--expert-model-parallel-size": "2",
    }
    kept.pop("--sequence-parallel", None)
    kept.pop("--data-path", None)
    kept.pop("--tokenizer-model", None)
    # Widths that the recipe does not give stay Megatron's.
    flags = kept | {flag: value for flag, value in small.items() if flag in kept}
    flags |= {"--mock-data": True, "--tokenizer-type": "NullTokenizer", "--vocab-size": "256"}
    left_out = [flag for flag in job.flags if flag not in flags]
    notes = (
        f"smoke: {len(small)} sizes are small, left out on a CPU: {' '.join(left_out)}",
        "smoke: two processes on this machine, mock data, two iterations",
    )
    settings = replace(job.settings, GPUS="2", NNODES="1", NODE_RANK="0", MASTER_ADDR="localhost")
    return replace(job, flags=flags, settings=settings, notes=notes)


def dry_run(job: Launch) -> int:
    """Print the command, and what ``megatron-lrmoe check`` says of its flags; its exit status."""
    shown = [*(f"{name}={value}" for name, value in job.environment.items()), "torchrun", *job.arguments]
    print(*job.notes, shlex.join(shown), sep="\n", end="\n\n", flush=True)
    environment = {"WORLD_SIZE": str(job.settings.ranks)}
    if job.settings.MEGATRON_PATH:
        environment["MEGATRON_LM_PATH"] = job.settings.MEGATRON_PATH
    return _run(["-m", "megatron_lrmoe.cli", "check", *words(job.flags)], environment)


def start(job: Launch) -> int:
    """Run the job here; its exit status."""
    print(*job.notes, shlex.join(["torchrun", *job.arguments]), sep="\n", flush=True)
    return _run(["-m", "torch.distributed.run", *job.arguments], job.environment)


def _run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    # What the user has set wins over the recipe.
    return subprocess.run([sys.executable, *arguments], env={**environment, **os.environ}).returncode
