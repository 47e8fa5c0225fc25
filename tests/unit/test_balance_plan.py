"""A KeepPlan's quota policy, and the memory of a row that a limit in GiB counts with."""

import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_lrmoe.compute.activation import Activation
from megatron_lrmoe.compute.experts import ExpertWeights, expert_mlp
from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.pairs import DrawKey, KeptRows
from megatron_lrmoe.recalibration.balance import RowBytes
from megatron_lrmoe.recalibration.plan import KeepPlan
from megatron_lrmoe.recalibration.schedule import retention_at

# Rank 0 owns experts 0 and 1, rank 1 experts 2 and 3.
LOADS = [[40, 20, 5, 5], [40, 0, 5, 5]]


def plan(now: Fraction | None = None, row_bytes: RowBytes | None = None, **lrm: Any) -> KeepPlan:
    config = LrmConfig(**{"retention": 0.75, **lrm})
    key = DrawKey(seed=0, iteration=0, microbatch=0, layer=1)
    return KeepPlan(config, key, config.retention_fraction if now is None else now, LOADS, 0, row_bytes)


def test_proportional_without_a_limit_is_the_papers_quota():
    assert plan().quota_E == [60, 15, 7, 7]
    assert plan().limit_R is None
    assert plan().rows_R.tolist() == [100, 20] and plan().kept_R.tolist() == [75, 14]


def test_balanced_keeps_the_same_total_and_takes_it_from_the_busy_rank():
    assert plan(quota="balanced").quota_E == [55, 14, 10, 10]
    assert plan(quota="balanced").limit_R is None


def test_a_limit_takes_more_from_the_ranks_above_it_whatever_the_policy():
    for policy, others in (("proportional", [7, 7]), ("balanced", [10, 10]), ("joint", [10, 10])):
        capped = plan(quota=policy, rank_rows=60)
        assert capped.quota_E == [48, 12, *others]
        assert capped.kept_R.tolist() == [60, sum(others)] and capped.limit_R.tolist() == [60, 60]


def test_an_unreachable_limit_ends_at_the_floors():
    assert plan(rank_rows=5).quota_E == [40, 10, 5, 5]
    assert plan(rank_rows=5, min_retention=0.25).quota_E == [20, 5, 3, 3]
    assert plan(rank_rows=1, min_retention=0).quota_E == [1, 1, 1, 1]
    assert plan(rank_rows=5, retention=0.3).quota_E == plan(retention=0.3).quota_E == [24, 6, 3, 3]


def test_joint_drops_only_what_the_limit_asks_for():
    assert plan(quota="joint", rank_rows=90).quota_E == [72, 18, 10, 10]
    assert plan(quota="joint", rank_rows=100).quota_E == [80, 20, 10, 10]


def test_joint_without_a_limit_aims_at_101_hundredths_of_the_mean_as_far_as_retention_allows():
    aimed = plan(quota="joint")
    assert aimed.limit_R.tolist() == [61, 61]
    assert aimed.quota_E == plan(quota="balanced").quota_E and sum(aimed.quota_E) == 89
    enough = plan(quota="joint", retention=0.5)
    assert enough.kept_R.tolist() == [61, 20] and sum(enough.quota_E) > 60


def test_experts_with_few_rows_keep_all_under_every_policy():
    for policy in ("proportional", "balanced", "joint"):
        assert plan(quota=policy, rank_rows=1, min_rows=20).quota_E == [40, 20, 10, 10]


def test_while_retention_ramps_the_floor_ramps_from_one():
    lrm = {"retention": 0.75, "min_retention": 0.5, "start_iter": 2, "ramp_iters": 5, "rank_rows": 5}
    config = LrmConfig(**lrm)
    shares = []
    for iteration in range(2, 8):
        now = plan(retention_at(config, iteration), **lrm)
        shares.append(now.least_share)
        for load, quota in zip(now.demand_E, now.quota_E, strict=True):
            assert now.least_share * load <= quota + 1
            assert quota <= now.retention * load
    assert shares == [Fraction(text) for text in ("0.9", "0.8", "0.7", "0.6", "0.5", "0.5")]
    before = plan(Fraction(1), **lrm)
    assert before.least_share == 1 and before.quota_E == before.demand_E


def test_the_default_floor_is_a_half_or_the_retention_where_that_is_less():
    assert plan().least_share == Fraction(1, 2)
    assert plan(retention=0.3).least_share == Fraction(3, 10)
    assert plan(min_retention=0.0).least_share == 0


def test_both_scopes_keep_the_quotas():
    shifted = plan(quota="balanced", rank_rows=50, scope="source")
    assert [sum(kept_S) for kept_S in zip(*shifted.kept_SE, strict=True)] == shifted.quota_E


# limits in bytes


def test_bytes_of_a_row_of_qwen3_30b_in_bf16():
    row = RowBytes.of(hidden=2048, ffn=768, gated=True, item=2)
    assert row.saved == 2 * 2048 + 2 * 1536 + 32 == 7200
    assert row.work == 4 * 2048 + 4 * (2 * 1536 + 6 * 768) + 2 * (1536 + 768) + 40 == 43560


def test_a_budget_pays_for_what_all_routed_rows_save_first():
    row = RowBytes(saved=10, work=100)
    assert row.row_limit(2000, np.array([100, 20, 200, 201])).tolist() == [10, 18, 0, 0]
    assert row.row_limit(10**30, np.array([100])).tolist() == [(2**62 - 1000) // 100]


def test_with_both_limits_the_smaller_counts():
    row = RowBytes(saved=2**20, work=2**24)
    budget = {"budget_gib": 1.0, "row_bytes": row}
    assert plan(**budget).limit_R.tolist() == [57, 62]  # (1024 - 100) / 16 and (1024 - 20) / 16
    assert plan(**budget, rank_rows=60).limit_R.tolist() == [57, 60]
    assert plan(**budget, quota="balanced").kept_R.tolist() == [57, 20]
    assert plan(**budget, quota="joint").kept_R.tolist() == [57, 20]


def test_a_budget_without_the_bytes_of_a_row_is_an_error():
    with pytest.raises(RuntimeError, match="row_bytes"):
        _ = plan(budget_gib=1.0).quota_E


@pytest.mark.parametrize(("gib", "expected"), [(0.1, 107374182), (2.0, 2**31), (1e-9, 1)])
def test_a_budget_is_the_decimal_that_was_written(gib: float, expected: int):
    assert LrmConfig(budget_gib=gib).budget_bytes == expected


def run_experts(rows: int, hidden: int, ffn: int, dtype: torch.dtype, saved: list[int], early: bool) -> torch.Tensor:
    """The output of one expert with grouped GEMMs whose backward will keep all rows but the last; and what it saves."""
    fc1, fc2 = (torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((2 * ffn, hidden), (hidden, ffn)))
    kept = KeptRows(torch.arange(rows - 1), torch.ones(rows - 1), (rows - 1,))
    g_MD = torch.randn(rows - 1, hidden).to(dtype)
    flow: Any = SimpleNamespace(
        counts_e=[rows],
        attach_experts=lambda norm_N, alpha_N: saved.append(norm_N.nbytes) or (kept if early else None),
        bias_probe=lambda g_MD: None,
        take_kept_gradient=lambda _: (kept, g_MD),
        give_row_gradients=lambda dx_MD, dalpha_M: (None, None),
    )
    x_ND = torch.randn(rows, hidden).to(dtype).requires_grad_()
    alpha_N = torch.rand(rows).requires_grad_()
    weights = ExpertWeights([fc1], [fc2])
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.nbytes), x)[1], lambda x: x):
        return expert_mlp(x_ND, alpha_N, weights, Activation(F.silu, gated=True), flow, "grouped")


def peak_of_backward(y_ND: torch.Tensor, trace: Path) -> int:
    """Largest number of bytes that the experts' backward holds at once, from the allocator's own record."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        y_ND.backward(torch.zeros((), dtype=y_ND.dtype).expand(y_ND.shape))
    profile.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event["args"]["Ev Idx"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("hidden", "ffn", "dtype"),
    [(64, 64, torch.bfloat16), (192, 64, torch.bfloat16), (64, 64, torch.float32), (256, 64, torch.float32)],
)
def test_bytes_of_a_row_are_those_that_the_experts_save_and_allocate(
    hidden: int, ffn: int, dtype: torch.dtype, early: bool, tmp_path: Path
):
    """The difference between two row counts: weight gradients and the like fall out of it.

    Chosen in forward, what kept rows save counts with what they need in backward, and so does 1/probability.
    """
    saved, peak = [], []
    for rows in (512, 1024):
        bytes_saved: list[int] = []
        y_ND = run_experts(rows, hidden, ffn, dtype, bytes_saved, early)
        saved.append(sum(bytes_saved))
        peak.append(peak_of_backward(y_ND, tmp_path / "trace.json"))
    row = RowBytes.of(hidden, ffn, gated=True, item=dtype.itemsize, chosen_in_forward=early)
    index_maps, wire, gradient = 3 * 8, 2 * (8 + 4) + 8, hidden * dtype.itemsize
    saved_by_row, needed_by_row = (saved[1] - saved[0]) / 512, (peak[1] - peak[0]) / 512
    if early:
        assert row.saved == index_maps + 1
        needed_by_row += saved_by_row + 4
    else:
        assert saved_by_row == row.saved - index_maps
    assert needed_by_row == pytest.approx(row.work - wire - gradient, rel=0.01)
