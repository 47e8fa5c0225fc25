"""What dropping costs, as it is summed up on the device and reported; the advice to runs that select by top-k."""

from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

from megatron_lrmoe.compute.bias import PROBE_SUMS
from megatron_lrmoe.mcore import metrics
from megatron_lrmoe.recalibration.quality import SELECTION_SUMS
from tests.unit.test_metrics import plan, stock_report


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No other ranks and nothing recorded or advised."""
    monkeypatch.setattr(metrics.dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(metrics.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(metrics, "_has_advised", False)
    metrics.forget()
    yield
    metrics.forget()


def selection(**values: float) -> torch.Tensor:
    return torch.tensor([values.get(name, 0.0) for name in SELECTION_SUMS], dtype=torch.float64)


def probe(**values: float) -> torch.Tensor:
    return torch.tensor([values.get(name, 0.0) for name in PROBE_SUMS], dtype=torch.float64)


def test_costs_are_quotients_of_sums_over_calls_and_layers() -> None:
    metrics.record_cost(1, False, "selection", selection(mass=10, dropped=1, variance=2, kept=8, capped=2))
    metrics.record_cost(1, False, "selection", selection(mass=30, dropped=1, variance=4, kept=8, capped=0))
    metrics.record_cost(2, False, "selection", selection(mass=60, dropped=18, variance=4, kept=4, capped=3))
    assert metrics.collect(2, "cpu", per_layer=True) == {
        "moe-lrm/dropped_mass": 0.2,
        "moe-lrm/variance_ratio": 0.1,
        "moe-lrm/cap_hits": 0.25,
        "moe-lrm/dropped_mass_layer_1": 0.05,
        "moe-lrm/variance_ratio_layer_1": 0.15,
        "moe-lrm/cap_hits_layer_1": 0.125,
        "moe-lrm/dropped_mass_layer_2": 0.3,
        "moe-lrm/variance_ratio_layer_2": pytest.approx(4 / 60),
        "moe-lrm/cap_hits_layer_2": 0.75,
    }
    assert metrics.collect(2, "cpu", per_layer=True) == {}


def test_a_probe_is_reported_beside_the_calls_that_drop() -> None:
    metrics.record(plan(1, [[4, 4]]))
    metrics.record_cost(1, False, "probe", probe(mass=100, dropped=4, bias=10, variance=7))
    figures = metrics.collect(1, "cpu", per_layer=False)
    assert list(figures)[:4] == [f"moe-lrm/{x}" for x in ("kept_share", "rows_kept", "imbalance", "imbalance_kept")]
    assert {k: v for k, v in figures.items() if k not in list(figures)[:4]} == {
        "moe-lrm/kappa": 2.5,
        "moe-lrm/topk_dropped_mass": 0.04,
        "moe-lrm/unbiased_variance": 0.07,
    }


def test_retention_is_the_mean_over_layers_and_calls() -> None:
    for layer, retention in ((1, Fraction(1)), (1, Fraction(9, 10)), (2, Fraction(7, 10)), (2, Fraction(7, 10))):
        metrics.record_retention(layer, retention)
    assert metrics.collect(2, "cpu", per_layer=True) == {
        "moe-lrm/retention": pytest.approx(0.825),
        "moe-lrm/retention_layer_1": pytest.approx(0.95),
        "moe-lrm/retention_layer_2": pytest.approx(0.7),
    }
    assert metrics.collect(2, "cpu", per_layer=True) == {}


def test_scores_without_a_mass_and_draws_without_a_cap_report_neither() -> None:
    metrics.record_cost(1, False, "selection", selection(kept=8))
    assert metrics.collect(1, "cpu", per_layer=True) == {}


def test_recording_does_not_read_the_device() -> None:
    """Meta tensors have no values: whatever would read one raises."""
    for kind, names in (("selection", SELECTION_SUMS), ("probe", PROBE_SUMS)):
        for _ in range(2):
            metrics.record_cost(1, True, kind, torch.zeros(len(names), dtype=torch.float64, device="meta"))


def table(*layers: dict[str, float]) -> list[dict[str, float]]:
    """Layer 0, which does not exist, and the given ones."""
    return [dict.fromkeys(metrics._NAMES, 0.0) | layer for layer in ({}, *layers)]


def probed(kappa: float, dropped: float, variance: float, topk: int = 1) -> dict[str, float]:
    sums = {"probe_mass": 1.0, "probe_dropped": dropped, "probe_bias": kappa * dropped, "probe_variance": variance}
    return sums | {"topk_probes": topk}


def test_topk_is_advised_against_where_its_bias_outlasts_a_draws_noise() -> None:
    """Over 19 draws, V / D is 5 here, so the bound is 1 + 4 / 19."""
    worse, better = (probed(kappa, dropped=0.02, variance=0.1) for kappa in (1.22, 1.20))
    assert metrics.topk_advice(table(better), 1) is None
    advice = metrics.topk_advice(table(better, worse), 1)
    assert advice is not None
    for words in ("--moe-lrm-selection topk: in layer 2", "kappa 1.22", "above 1.21", "--moe-lrm-selection unbiased"):
        assert words in advice
    # More gradients in the average: noise counts less.
    assert metrics.topk_advice(table(better), 8) is not None
    # The worst layer is named.
    assert "layer 1 " in (metrics.topk_advice(table(probed(9.0, 0.02, 0.1), worse), 1) or "")


def test_the_bound_is_where_both_errors_are_equal() -> None:
    """Total squared error of the mean over h gradients, written out."""
    dropped, variance, draws = 0.03, 0.2, 4
    h = metrics.MOMENTUM_STEPS * draws
    bound = 1 + (variance / dropped - 1) / h
    for kappa in (bound - 1e-6, bound + 1e-6):
        bias = (kappa - 1) * dropped
        worse = bias + dropped / h > variance / h
        assert (metrics.topk_advice(table(probed(kappa, dropped, variance)), draws) is not None) is worse


def test_other_selections_and_layers_that_drop_nothing_get_no_advice() -> None:
    assert metrics.topk_advice(table(probed(9.0, 0.02, 0.1, topk=0)), 1) is None
    assert metrics.topk_advice(table(probed(9.0, 0.0, 0.0)), 1) is None
    assert metrics.topk_advice(table({}), 1) is None


def test_advice_is_given_once_and_on_the_first_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "topk_advice", lambda table, draws: f"advice for {draws}")
    monkeypatch.setattr(metrics, "_draws_per_iteration", lambda: 6)
    report = metrics.reporting(stock_report, per_layer=False)
    for rank in (1, 0, 0):
        monkeypatch.setattr(metrics.dist, "get_rank", lambda rank=rank: rank)
        metrics.record_cost(1, True, "probe", probe(mass=1, dropped=0.1, bias=1, variance=0.1))
        report(None, 1.0, 1, num_layers=1)
        assert len(caplog.records) == (rank == 0)
    assert caplog.messages == ["advice for 6"]
