"""LrmConfig: what it refuses, how it says so, and what it reads from its own docstrings."""

import math
from dataclasses import fields
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe.config import ADVANCED, REPLICAS, USUAL, LrmConfig, dest_of, field_help, flag_of, parse_layers


def test_defaults_are_off_and_valid() -> None:
    config = LrmConfig()
    assert config.problems() == []
    assert not config.enabled
    assert config.retention_fraction == 1


def test_all_violations_come_in_one_error_with_flag_value_and_what_is_allowed() -> None:
    bad = {
        "retention": 1.5,
        "selection": "best",
        "start_iter": -1,
        "ramp_iters": -2,
        "layers": "5-2",
        "quota": "even",
        "rank_rows": 0,
        "budget_gib": 0.0,
        "router_grad": "keep",
        "when": "later",
        "score": "lrmoe",
        "scope": "rank",
        "max_weight": 0.5,
        "shrink": -0.5,
        "min_retention": 1.5,
        "min_rows": -3,
        "probe_interval": -1,
        "gemm": "cutlass",
    }
    with pytest.raises(ValueError) as caught:
        LrmConfig(**bad)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(bad)
    for name, value in bad.items():
        (line,) = [line for line in lines if line.startswith(flag_of(name) + ":")]
        assert f"found {value!r}" in line and "allowed" in line


@pytest.mark.parametrize("value", [0, 0.0, -0.0, -0.1, 1.0000001, math.nan, math.inf, -math.inf])
def test_retention_out_of_range_is_refused_and_zero_is_not_unset(value: float) -> None:
    with pytest.raises(ValueError, match=rf"^--moe-lrm-retention: found {value!r}, allowed is 0 < retention <= 1$"):
        LrmConfig(retention=value)


@pytest.mark.parametrize("value", [0.0, 0.999, -1.0, math.nan, math.inf])
def test_max_weight_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=rf"^--moe-lrm-max-weight: found {value!r}, allowed is a number >= 1$"):
        LrmConfig(max_weight=value)


@pytest.mark.parametrize("value", [-0.001, 1.001, math.nan, math.inf])
def test_shrink_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=rf"^--moe-lrm-shrink: found {value!r}, allowed is 0 <= shrink <= 1$"):
        LrmConfig(shrink=value)


@pytest.mark.parametrize("score", ["grad-sq", "grad-abs"])
def test_scores_of_gradients_are_refused_in_forward_naming_both_flags(score: str) -> None:
    with pytest.raises(ValueError, match=r"^--moe-lrm-when: found 'forward', allowed is 'backward' with") as caught:
        LrmConfig(when="forward", score=score)
    assert f"--moe-lrm-score {score}" in str(caught.value)
    for known in ("lrm", "alpha", "random"):
        LrmConfig(when="forward", score=known)


def test_alpha_is_kept_at_the_source_only_where_backward_needs_it() -> None:
    assert not LrmConfig().needs_alpha_at_source and not LrmConfig(score="alpha").needs_alpha_at_source
    assert LrmConfig(score="alpha", scope="source").needs_alpha_at_source
    assert not LrmConfig(score="alpha", scope="source", when="forward").needs_alpha_at_source
    assert LrmConfig(router_grad="baseline").needs_alpha_at_source


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_budget_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=rf"^--moe-lrm-budget-gib: found {value!r}, allowed is a number > 0$"):
        LrmConfig(budget_gib=value)


@pytest.mark.parametrize("value", [-0.1, 1.01, math.nan, math.inf])
def test_min_retention_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=rf"^--moe-lrm-min-retention: found {value!r}, allowed is 0 <= share <= 1$"):
        LrmConfig(retention=0.5, min_retention=value)


def test_min_retention_above_retention_is_refused_naming_both() -> None:
    allowed = "allowed is at most --moe-lrm-retention, which is 0.6"
    with pytest.raises(ValueError, match=rf"^--moe-lrm-min-retention: found 0.7, {allowed}$"):
        LrmConfig(retention=0.6, min_retention=0.7)
    LrmConfig(retention=0.6, min_retention=0.6)
    LrmConfig(min_retention=0.7)


def test_min_retention_not_given_is_a_half_or_the_retention_where_that_is_less() -> None:
    assert LrmConfig(retention=0.8).least_share == LrmConfig().least_share == Fraction(1, 2)
    assert LrmConfig(retention=0.3).least_share == Fraction(3, 10)
    assert LrmConfig(retention=0.8, min_retention=0.7).least_share == Fraction(7, 10)


def test_values_at_the_edges_are_allowed() -> None:
    LrmConfig(
        retention=1.0, max_weight=1.0, start_iter=0, ramp_iters=0, min_rows=0, min_retention=1.0, rank_rows=1, shrink=1
    )
    LrmConfig(retention=1e-9, min_retention=0.0, budget_gib=1e-9)


def test_either_limit_limits_rows() -> None:
    assert LrmConfig(rank_rows=9).limits_rows and LrmConfig(budget_gib=0.5).limits_rows
    assert not LrmConfig(quota="joint").limits_rows


@pytest.mark.parametrize(("retention", "enabled"), [(None, False), (1.0, False), (0.999, True), (0.1, True)])
def test_enabled_only_below_one(retention: float | None, enabled: bool) -> None:
    assert LrmConfig(retention=retention).enabled is enabled


@given(st.integers(1, 10**6))
def test_retention_fraction_is_the_decimal_that_was_written(millionths: int) -> None:
    written = Fraction(millionths, 10**6)
    assert LrmConfig(retention=float(f"{millionths / 10**6:.6f}")).retention_fraction == written


def test_seven_tenths_is_not_the_nearest_float() -> None:
    assert LrmConfig(retention=0.7).retention_fraction == Fraction(7, 10) != Fraction(0.7)


@pytest.mark.parametrize(
    ("text", "chosen"),
    [("3", {3}), ("2-5,9", {2, 3, 4, 5, 9}), (" 1 , 3-3 ", {1, 3}), ("1-2,2-4", {1, 2, 3, 4}), (None, None)],
)
def test_layers_are_read(text: str | None, chosen: set[int] | None) -> None:
    assert parse_layers(text) == chosen


@pytest.mark.parametrize("text", ["", "0", "0-3", "5-2", "2-", "-3", "1,,2", "1,", "a", "1.5", "1-2-3", "all"])
def test_layers_that_are_no_rising_ranges_from_one_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--moe-lrm-layers: found .*, allowed are "):
        LrmConfig(layers=text)


def test_covers_layer() -> None:
    some = LrmConfig(layers="2-3,7")
    assert [number for number in range(1, 9) if some.covers_layer(number)] == [2, 3, 7]
    assert not some.covers_layer(None)
    assert LrmConfig().covers_layer(1) and LrmConfig().covers_layer(None)


def test_every_field_has_a_help_text_and_a_group() -> None:
    texts = field_help()
    assert set(texts) == {field.name for field in fields(LrmConfig)}
    for field in fields(LrmConfig):
        assert len(texts[field.name]) > 20 and "\n" not in texts[field.name]
        assert field.metadata["group"] in (USUAL, REPLICAS, ADVANCED)
    assert texts["max_weight"].startswith("Largest 1/probability that 'unbiased' may give a pair")


def test_flag_and_attribute_names() -> None:
    assert flag_of("max_weight") == "--moe-lrm-max-weight"
    assert dest_of("max_weight") == "moe_lrm_max_weight"
    assert dest_of("retention") == flag_of("retention").removeprefix("--").replace("-", "_")


def test_settings_cannot_be_changed_after_the_check() -> None:
    with pytest.raises(AttributeError):
        LrmConfig(retention=0.8).retention = 7.0  # type: ignore[misc]
