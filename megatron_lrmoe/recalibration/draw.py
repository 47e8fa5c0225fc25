"""Counter-based randomness: a draw is a pure function of its key, so it needs no generator state.

Every number comes from chained SplitMix64 finalizers. Each step is a bijection of 64-bit words, so changing
one part of a key always changes the 64-bit word that the draw is made from.
"""

from collections.abc import Sequence

import torch

from megatron_lrmoe.pairs import DrawKey

PROBABILITY_BITS = 40
"""Probabilities, and the offsets of systematic draws, are whole multiples of 2^-40."""
CERTAIN = 1 << PROBABILITY_BITS

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
# Keeps the words behind offsets and behind row seeds apart, though both come from the same key.
_FOR_OFFSETS, _FOR_ROWS = 1, 2


def _mixed(word: int) -> int:
    """SplitMix64's finalizer: a bijection of 64-bit words; every input bit reaches every output bit."""
    for shift, factor in _MULTIPLIERS:
        word = ((word ^ (word >> shift)) * factor) & _MASK64
    return word ^ (word >> _LAST_SHIFT)


def _words(key: DrawKey, purpose: int, experts: Sequence[int], source: int | None) -> list[int]:
    """One 64-bit word per expert."""
    # No source and source 0 are different draws.
    of_source = 0 if source is None else source + 1
    state = 0
    for part in (purpose, key.seed, key.iteration, key.microbatch, key.layer, key.data_parallel, of_source):
        state = _mixed((state + _GOLDEN + part) & _MASK64)
    return [_mixed((state + _GOLDEN + expert) & _MASK64) for expert in experts]


def offsets(key: DrawKey, experts: Sequence[int], source: int | None = None) -> list[int]:
    """Offset of the systematic draw of each expert, uniform in [0, 2^40).

    Args:
        key: what the draw depends on.
        experts: numbers of the experts in the whole layer.
        source: rank whose rows are drawn from, when the quota is filled per source. A draw among the sources
            themselves, and a draw over all of them, takes None; its offset is independent of every source's.
    """
    return [word >> (64 - PROBABILITY_BITS) for word in _words(key, _FOR_OFFSETS, experts, source)]


def row_seeds(key: DrawKey, experts: Sequence[int], source: int | None = None) -> list[int]:
    """Each expert's 64-bit seed for ``uniform_N``, independent of its offset. Arguments as in ``offsets``."""
    return _words(key, _FOR_ROWS, experts, source)


def uniform_N(seeds: Sequence[int], counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """A number per row from its segment's seed and its index in the segment, the same on every device.

    Args:
        seeds: of each segment, from ``row_seeds``.
        counts: rows of each segment.
        device: where the result is to be.

    Returns:
        (N,) fp32 in [0, 1), multiples of 2^-24.
    """
    starts, rows = [], 0
    for count in counts:
        starts.append(rows)
        rows += count
    # Row i of a segment has the word mix(seed + (i + 1) * golden); int64 arithmetic wraps as uint64 does.
    firsts = [_as_int64(seed + (1 - start) * _GOLDEN) for seed, start in zip(seeds, starts, strict=True)]
    table = host_ints([firsts, counts], device)
    first_N = torch.repeat_interleave(table[0], table[1], output_size=rows)
    word_N = first_N + torch.arange(rows, device=device) * _as_int64(_GOLDEN)
    for shift, factor in _MULTIPLIERS:
        word_N = (word_N ^ _shifted(word_N, shift)) * _as_int64(factor)
    word_N = word_N ^ _shifted(word_N, _LAST_SHIFT)
    return _shifted(word_N, 40).float() * 2.0**-24


def host_ints(values: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """A table of host integers as int64 on the device, without making the host wait for the device."""
    table = torch.tensor([list(row) for row in values], dtype=torch.int64)
    if device.type == "cuda":
        return table.pin_memory().to(device, non_blocking=True)
    return table.to(device)


def _as_int64(word: int) -> int:
    """The signed integer with the same low 64 bits."""
    word &= _MASK64
    return word - (1 << 64) if word >> 63 else word


def _shifted(word_N: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift: torch's own shift of int64 copies the sign bit in."""
    return (word_N >> bits) & ((1 << (64 - bits)) - 1)
