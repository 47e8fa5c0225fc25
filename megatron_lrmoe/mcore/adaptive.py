"""Each layer's retention under ``--moe-lrm-adaptive``: the same on every rank, and saved with the checkpoint.

Asked for in forward, it costs a look into a table. At the end of an iteration one all-reduce over all ranks sums up
what the layers' draws cost, and every rank takes the same step from the same sums. Megatron's loop does that after it
has written its log; another loop calls ``end_iteration``.
"""

import logging
from argparse import Namespace
from fractions import Fraction
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from megatron_lrmoe.config import LrmConfig, flag_of
from megatron_lrmoe.mcore import clock
from megatron_lrmoe.recalibration.controller import next_steps, retention_after
from megatron_lrmoe.recalibration.quality import SELECTION_SUMS

logger = logging.getLogger(__name__)

SAVED_AS = "moe_lrm_adaptive_state"
"""Attribute of Megatron's namespace, which its checkpoints hold: steps below 1.0 by layer number."""

_MASS, _VARIANCE = SELECTION_SUMS.index("mass"), SELECTION_SUMS.index("variance")
_steps: dict[int, int] = {}
_costs: dict[int, torch.Tensor] = {}
_asked: set[int] = set()
_running: int | None = None


def restart() -> None:
    """Every layer is at retention 1.0; called when a layer is built."""
    global _running
    for table in (_steps, _costs, _asked):
        table.clear()
    _running = None


def retention_of(config: LrmConfig, layer: int, iteration: int) -> Fraction:
    """Share of a layer's pairs that keep their backward, the same throughout an iteration.

    Raises:
        RuntimeError: the last iteration has not been ended, so retention would never change.
    """
    global _running
    if iteration < config.first_iteration:
        return Fraction(1)
    if _running not in (None, iteration):
        raise RuntimeError(
            f"{flag_of('adaptive')}: iteration {iteration} began before iteration {_running} was ended; a training "
            "loop that is not Megatron's calls megatron_lrmoe.mcore.adaptive.end_iteration after each"
        )
    _running = iteration
    _asked.add(layer)
    return retention_after(_steps.get(layer, 0), config.retention_fraction)


def observe(layer: int, sums: torch.Tensor) -> None:
    """Add what the draw of one layer call cost: ``SELECTION_SUMS`` on the device, where they stay until the end."""
    old = _costs.get(layer)
    _costs[layer] = sums if old is None else old + sums


def end_iteration(config: LrmConfig, num_layers: int, device: torch.device | str | int) -> None:
    """Take every layer's step; one all-reduce over all ranks, which all have to call this.

    Args:
        config: with ``adaptive``.
        num_layers: layers of the whole model, so that every pipeline stage brings a tensor of one size.
        device: that the process group communicates on.

    Raises:
        RuntimeError: a layer has a number above ``num_layers``.
    """
    global _running
    if beyond := sorted(layer for layer in _asked if layer > num_layers):
        raise RuntimeError(f"found MoE layers {beyond}, allowed are numbers up to {num_layers}")
    sums = torch.zeros(num_layers + 1, 3, dtype=torch.float64)
    for layer in _asked:
        sums[layer, 0] = 1
    sums = sums.to(device)
    for layer, cost in _costs.items():
        sums[layer, 1:] = torch.stack([cost[_VARIANCE], cost[_MASS]]).to(sums)
    _asked.clear()
    _costs.clear()
    _running = None
    dist.all_reduce(sums)
    for layer, (asked, variance, mass) in enumerate(sums.tolist()):
        if asked:
            ratio = variance / mass if mass else None
            _steps[layer] = next_steps(_steps.get(layer, 0), config.retention_fraction, ratio, config.adaptive_tau)


def restore(checkpoint_args: Namespace) -> None:
    """Go on where the run that saved these arguments was."""
    restart()
    saved = getattr(checkpoint_args, SAVED_AS, None)
    if saved is None:
        logger.warning("%s: the checkpoint says nothing of it, so every layer starts at 1.0", flag_of("adaptive"))
        return
    _steps.update(saved)


def install() -> None:
    """Let Megatron's loop end iterations, and its checkpoints bring the steps back."""
    from megatron.training import checkpointing, training

    training.training_log = _ending_iterations(training.training_log)
    checkpointing.check_checkpoint_args = _restoring(checkpointing.check_checkpoint_args)


def _ending_iterations(stock: Any) -> Any:
    # It runs in every iteration, on every rank, before a checkpoint is saved.
    @wraps(stock)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        settings, run = _settings()
        if settings is not None and clock.iteration() >= settings.first_iteration:
            layers = run.num_layers + (getattr(run, "mtp_num_layers", None) or 0)
            end_iteration(settings, layers, torch.cuda.current_device() if torch.cuda.is_available() else "cpu")
            # A new one each time: a checkpoint may still be being written in the background.
            setattr(run, SAVED_AS, dict(_steps))
        return result

    return training_log


def _restoring(stock: Any) -> Any:
    # Called when a checkpoint is loaded to go on with its run, not to start another from its weights.
    @wraps(stock)
    def check_checkpoint_args(checkpoint_args: Namespace, *args: Any, **kwargs: Any) -> Any:
        settings, run = _settings()
        if settings is not None:
            restore(checkpoint_args)
            setattr(run, SAVED_AS, dict(_steps))
        return stock(checkpoint_args, *args, **kwargs)

    return check_checkpoint_args


def _settings() -> tuple[LrmConfig | None, Any]:
    """The running training's settings if it adapts retention."""
    from megatron.training import get_args

    from megatron_lrmoe.mcore.arguments import config_from_args

    run: Any = get_args()
    if not getattr(run, "moe_lrm_adaptive", False):
        return None, run
    return config_from_args(run), run
