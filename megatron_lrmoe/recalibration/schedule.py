"""Retention over the course of training."""

from fractions import Fraction

from megatron_lrmoe.config import LrmConfig


def retention_at(config: LrmConfig, iteration: int) -> Fraction:
    """Share of the pairs that keep their backward in one iteration.

    It is 1 before ``first_iteration``, then falls in ``ramp_iters`` equal steps, the first at that iteration. It
    depends on the iteration number alone: a resumed run continues the ramp where it was.

    Args:
        config: the settings.
        iteration: number of the iteration, from 0.
    """
    target = config.retention_fraction
    if iteration < config.first_iteration:
        return Fraction(1)
    steps = iteration - config.first_iteration + 1
    if steps >= config.ramp_iters:
        return target
    return 1 - (1 - target) * Fraction(steps, config.ramp_iters)
