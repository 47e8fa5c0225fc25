"""Megatron flags that the CPU device needs."""

import logging
import os
from collections.abc import Sequence

log = logging.getLogger(__name__)

_CPU_FLAGS: dict[str, list[str]] = {
    # NCCL is between GPUs.
    "--distributed-backend": ["gloo"],
    # Transformer Engine computes on GPUs only.
    "--transformer-impl": ["local"],
    # These are CUDA extensions of Apex or Transformer Engine.
    "--no-gradient-accumulation-fusion": [],
    "--no-persist-layer-norm": [],
    "--no-masked-softmax-fusion": [],
    "--no-rope-fusion": [],
    # As the fused softmax does by itself; without it a bf16 run takes the softmax in bf16.
    "--attention-softmax-in-fp32": [],
    # Worker processes would compete with training for the cores.
    "--num-workers": ["0"],
}


def cpu_flags() -> list[str]:
    """Megatron's flags that a run on the CPU device needs, as they stand on a command line.

    Fusions that run on the CPU as well stay as the user has them: Megatron has no flags to turn them on.
    """
    return [word for flag, values in _CPU_FLAGS.items() for word in (flag, *values)]


def with_cpu_flags(args: Sequence[str]) -> list[str]:
    """The arguments, followed by those of :func:`cpu_flags` whose flag is not among them."""
    given = {arg.partition("=")[0] for arg in args}
    added = [word for flag, values in _CPU_FLAGS.items() if flag not in given for word in (flag, *values)]
    if added and os.environ.get("RANK", "0") == "0":
        log.warning("flags added for the CPU device: %s", " ".join(added))
    return [*args, *added]
