"""Retention that falls while the noise of dropping stays small: VCAS's rule (arXiv 2402.17227), for one layer.

VCAS keeps the variance that sampling adds below a share tau of the variance that stochastic gradients have anyway, and
moves its keep ratios by a fixed step from 1. Here a layer's retention is 1 less a whole number of steps, so it is exact
and the same wherever it is worked out from the same numbers.
"""

from fractions import Fraction

STEP = Fraction(1, 100)


def retention_after(steps: int, target: Fraction) -> Fraction:
    """Retention after so many steps down from 1, never below the target.

    Args:
        steps: at least 0.
        target: lowest retention, exact.
    """
    return max(1 - steps * STEP, target)


def next_steps(steps: int, target: Fraction, ratio: float | None, tau: float) -> int:
    """Steps below 1 for the next iteration.

    Args:
        steps: of the last iteration.
        target: lowest retention.
        ratio: variance that sampling added in it / the gradient's own; None where it is not known.
        tau: largest ratio wanted.

    Returns:
        One more where the ratio is below tau and the target is not reached; one less where it is above or no number;
        the same where it is tau or not known. At 0 steps nothing is dropped, so the first step is taken without a
        ratio.
    """
    fewest_at_target = -((target - 1) // STEP)
    steps = min(steps, fewest_at_target)
    if steps == 0 or (ratio is not None and ratio < tau):
        return min(steps + 1, fewest_at_target)
    if ratio is None or ratio == tau:
        return steps
    return steps - 1
