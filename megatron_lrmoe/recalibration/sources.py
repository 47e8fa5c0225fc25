"""An expert's quota over the ranks its rows come from, in exact integers: the same on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_lrmoe.recalibration.draw import CERTAIN


@dataclass(frozen=True)
class SourceSplit:
    """One expert's quota split over the ranks its rows come from.

    Args:
        rows_S: quota of each source.
        probability_S: probability that a source has any quota in this split, exact; a row kept at source s
            with probability pi given that split weighs 1 / (probability_S[s] * pi). 0 for empty sources.
    """

    rows_S: tuple[int, ...]
    probability_S: tuple[Fraction, ...]


def split_over_sources(quota: int, loads_S: Sequence[int], offset: int) -> SourceSplit:
    """Split an expert's quota over its sources so that no row's probability of being kept is zero.

    With at least as much quota as non-empty sources the split is fixed: each of those gets one row or more,
    and otherwise its share. With less, ``quota`` of them are drawn and get one row each.

    Args:
        quota: rows to keep, at most the sum of the loads.
        loads_S: the expert's rows from each source.
        offset: of the draw among sources, in [0, 2^40); the same on every rank.

    Raises:
        RuntimeError: a quota or offset out of range, or a negative load.
    """
    if min(loads_S, default=0) < 0 or not 0 <= quota <= sum(loads_S):
        raise RuntimeError(f"quota must be in [0, sum of loads], found {quota} of {list(loads_S)}")
    if not 0 <= offset < CERTAIN:
        raise RuntimeError(f"offset must be in [0, 2^40), found {offset}")
    if quota >= sum(load > 0 for load in loads_S):
        fixed = tuple(Fraction(load > 0) for load in loads_S)
        return SourceSplit(_shared_out(quota, loads_S), fixed)
    units_S = _inclusion_units(quota, loads_S)
    return SourceSplit(
        _systematic_draw(units_S, offset),
        tuple(Fraction(units, CERTAIN) for units in units_S),
    )


def _shared_out(quota: int, loads_S: Sequence[int]) -> tuple[int, ...]:
    """Shares in proportion to the loads, 1 at least; what is left by largest remainder, then lower source."""
    rows_S = [0] * len(loads_S)
    sharing = [s for s, load in enumerate(loads_S) if load > 0]
    total = sum(loads_S)
    # A source whose share is below one row gets one; that lowers the others' shares, so look again.
    while small := [s for s in sharing if quota * loads_S[s] < total]:
        for s in small:
            rows_S[s] = 1
        quota -= len(small)
        total -= sum(loads_S[s] for s in small)
        sharing = [s for s in sharing if rows_S[s] == 0]
    remainder_S = {}
    for s in sharing:
        rows_S[s], remainder_S[s] = divmod(quota * loads_S[s], total)
    left = quota - sum(rows_S[s] for s in sharing)
    for s in sorted(sharing, key=lambda s: -remainder_S[s])[:left]:
        rows_S[s] += 1
    return tuple(rows_S)


def _inclusion_units(quota: int, loads_S: Sequence[int]) -> list[int]:
    """Probabilities min(1, c * load) in units of 2^-40, with sum quota; quota < non-empty sources."""
    units_S = [0] * len(loads_S)
    falling = sorted((s for s, load in enumerate(loads_S) if load > 0), key=lambda s: -loads_S[s])
    rest, certain = sum(loads_S), 0
    while certain < quota and loads_S[falling[certain]] * (quota - certain) >= rest:
        units_S[falling[certain]] = CERTAIN
        rest -= loads_S[falling[certain]]
        certain += 1
    drawn, budget = falling[certain:], (quota - certain) * CERTAIN
    for s in drawn:
        units_S[s] = loads_S[s] * budget // rest
    # Rounding down left less than one unit per source, and each is short of certainty by one unit or more.
    for s in drawn[: budget - sum(units_S[s] for s in drawn)]:
        units_S[s] += 1
    return units_S


def _systematic_draw(units_S: Sequence[int], offset: int) -> tuple[int, ...]:
    """1 for each source whose stretch of the line of units holds a point offset + k * 2^40, else 0."""
    rows_S, end = [], 0
    for units in units_S:
        start, end = end, end + units
        rows_S.append(-((offset - end) // CERTAIN) + ((offset - start) // CERTAIN))
    return tuple(rows_S)
