"""How much of the work that Megatron's ``--log-throughput`` counts was done."""

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron_lrmoe.config import flag_of

logger = logging.getLogger(__name__)

NAME = "moe-lrm/flops_share"

_has_warned = False


def figures(table: Sequence[dict[str, float]]) -> dict[str, float]:
    """``flops_share`` where Megatron logs throughput: by this its TFLOP/s are to be multiplied.

    Megatron counts a whole backward (training.py:605). A dropped pair saves its dgrad and wgrad, twice its forward's
    floating-point operations. Iterations of the interval that did not drop yet are not told apart.

    Args:
        table: sums of each layer number, from ``metrics.reduced``; ``rows`` and ``kept`` are used.

    Returns:
        One scalar by name; none without ``--log-throughput``, and outside Megatron's training loop.
    """
    try:
        from megatron.training import get_args
        from megatron.training.training import num_floating_point_operations

        args: Any = get_args()
    except (ImportError, AssertionError):
        return {}
    dropped = sum(1 - layer["kept"] / layer["rows"] for layer in table if layer["rows"])
    if not getattr(args, "log_throughput", False) or not dropped:
        return {}
    _warn()
    pairs = args.global_batch_size * args.seq_length * args.moe_router_topk
    spared = dropped * pairs * backward_flops(args)
    return {NAME: 1 - spared / num_floating_point_operations(args, args.global_batch_size)}


def backward_flops(args: Any) -> int:
    """Floating-point operations of one pair's dgrad and wgrad in fc1 and fc2, as Megatron counts them."""
    width = getattr(args, "moe_latent_size", None) or args.hidden_size
    return 2 * 2 * width * args.moe_ffn_hidden_size * (3 if args.swiglu else 2)


def _warn() -> None:
    """Once, on the first rank."""
    global _has_warned
    if not _has_warned and dist.get_rank() == 0:
        logger.warning(
            "--log-throughput: Megatron's TFLOP/s count a full backward and are too high with %s; multiply them by %s",
            flag_of("retention"),
            NAME,
        )
    _has_warned = True
