"""Which iteration is running, and the seed of the run."""

from collections.abc import Callable
from typing import Any


def _args() -> Any:
    # Here, because a framework with a loop of its own calls follow() and may have no megatron.training.
    from megatron.training import global_vars

    return global_vars.get_args()


def _training_loop_iteration() -> int:
    # Megatron's loop sets args.curr_iteration before every step (training.py:3811), counting from 0.
    args = _args()
    if not hasattr(args, "curr_iteration"):
        raise RuntimeError("this Megatron's training loop does not say which iteration runs (args.curr_iteration)")
    return args.curr_iteration


def _training_loop_seed() -> int:
    return _args().seed


_iteration: Callable[[], int] = _training_loop_iteration
_seed: Callable[[], int] = _training_loop_seed


def iteration() -> int:
    """Iterations completed before this one."""
    return _iteration()


def seed() -> int:
    """Seed of the run, part of every draw's key."""
    return _seed()


def follow(iteration_source: Callable[[], int] | None = None, seed_source: Callable[[], int] | None = None) -> None:
    """Take iteration and seed from elsewhere than Megatron's training loop; None goes back to it."""
    global _iteration, _seed
    _iteration = iteration_source or _training_loop_iteration
    _seed = seed_source or _training_loop_seed
