"""Counter-based randomness."""

import dataclasses
from itertools import combinations

import pytest
import torch

from megatron_lrmoe.pairs import DrawKey
from megatron_lrmoe.recalibration.draw import offsets, row_seeds, uniform_N

KEY = DrawKey(seed=1234, iteration=7, microbatch=3, layer=11, data_parallel=2)
CPU = torch.device("cpu")


def test_equal_keys_draw_equal_values():
    again = DrawKey(**dataclasses.asdict(KEY))
    assert offsets(KEY, range(64)) == offsets(again, range(64))
    assert offsets(KEY, [5, 60], source=1) == [offsets(again, range(64), source=1)[e] for e in (5, 60)]


def test_offsets_have_the_values_of_the_first_release():
    """A resumed run, and ranks with another version, must draw the same."""
    assert offsets(KEY, [0, 1]) == [936929371651, 1008723355665]
    assert row_seeds(KEY, [0], source=4) == [10212584749332279587]


def test_any_changed_part_changes_every_value():
    names = [field.name for field in dataclasses.fields(DrawKey)]
    changed = [dataclasses.replace(KEY, **{name: getattr(KEY, name) + 1}) for name in names]
    # Swapped values must not give the same draw either.
    changed += [dataclasses.replace(KEY, iteration=KEY.layer, layer=KEY.iteration)]
    draws = [offsets(key, range(100)) for key in [KEY, *changed]]
    draws += [offsets(KEY, range(100), source=source) for source in range(4)]
    draws += [[seed >> 24 for seed in row_seeds(KEY, range(100))]]
    for one, other in combinations(draws, 2):
        assert not set(one) & set(other)
    assert all(len(set(draw)) == 100 for draw in draws)


@pytest.mark.parametrize("seed", [-1, 2**64 + 3, 0])
def test_any_seed_gives_offsets_in_range(seed):
    assert all(0 <= offset < 2**40 for offset in offsets(dataclasses.replace(KEY, seed=seed), range(10)))


def test_offsets_are_uniform_over_experts_and_over_iterations():
    by_expert = offsets(KEY, range(20_000))
    by_iteration = [offsets(dataclasses.replace(KEY, iteration=i), [0])[0] for i in range(20_000)]
    for values in (by_expert, by_iteration):
        share = torch.tensor(values, dtype=torch.float64) / 2**40
        found = torch.histc(share, bins=20, min=0, max=1)
        chi_sq = ((found - 1000) ** 2 / 1000).sum()
        assert chi_sq < 43.8  # 0.999 quantile of chi squared with 19 degrees of freedom
        assert abs(torch.corrcoef(torch.stack([share[:-1], share[1:]]))[0, 1]) < 3 / 20_000**0.5


def uniform_by_hand(seed: int, index: int) -> float:
    word = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    word ^= word >> 31
    return (word >> 40) / 2**24


def test_row_numbers_equal_the_same_in_python_integers():
    counts, seeds = [3, 0, 1, 50], [2**64 - 1, 5, 0, 2**63]
    expected = [uniform_by_hand(seed, i) for seed, n in zip(seeds, counts, strict=True) for i in range(n)]
    found = uniform_N(seeds, counts, CPU)
    assert found.dtype == torch.float32
    assert found.tolist() == expected


def test_row_numbers_depend_on_the_segment_not_on_what_lies_before_it():
    alone = uniform_N([77], [9], CPU)
    assert torch.equal(uniform_N([1, 77, 2], [4, 9, 5], CPU)[4:13], alone)
    assert uniform_N([], [], CPU).shape == (0,)


def test_row_numbers_are_uniform():
    values = uniform_N(row_seeds(KEY, range(20)), [1000] * 20, CPU)
    assert values.min() >= 0 and values.max() < 1
    chi_sq = ((torch.histc(values, bins=20, min=0, max=1) - 1000) ** 2 / 1000).sum()
    assert chi_sq < 43.8
