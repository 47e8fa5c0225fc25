"""How many pairs of each expert keep their backward, in exact integers: the same on every rank."""

from collections.abc import Sequence
from fractions import Fraction


def proportional_quota(loads: Sequence[int], retention: Fraction, min_rows: int = 0) -> list[int]:
    """Quota of each expert: floor(retention * load), but at least 1 where there is any load.

    Args:
        loads: rows of each expert.
        retention: share to keep, 0 < retention <= 1; exact, since floor(0.7 * 90) is 62 in binary floats.
        min_rows: an expert with no more rows than this keeps them all.

    Raises:
        RuntimeError: a retention out of range or a negative load.
    """
    if not 0 < retention <= 1:
        raise RuntimeError(f"retention must be in (0, 1], found {retention}")
    if any(load < 0 for load in loads):
        raise RuntimeError(f"loads must not be negative, found {list(loads)}")
    part, whole = retention.numerator, retention.denominator
    return [load if load <= min_rows else max(1, part * load // whole) for load in loads]
