"""Megatron's own training loop with the plugin: nothing without the flag, and what the flags promise with it."""

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import training
from tests.gloo import Pool
from tests.integration.launch import tiny_args
from tests.training import TrainingRun

pytestmark = [pytest.mark.dist, pytest.mark.slow]

OURS = ["LRMoELayer", "LRMAlltoAllTokenDispatcher", "LRMSequentialMLP"]
MEGATRONS = ["MoELayer", "MoEAlltoAllTokenDispatcher", "SequentialMLP"]


def train(pool: Pool, folder: Path, plugin: bool = True, **flags: Any) -> list[TrainingRun]:
    usual = {"expert_model_parallel_size": 2, "eval_iters": 0, "lr_decay_iters": 100}
    args = tiny_args(folder, **{**usual, **flags})
    return pool(training.run, args, plugin, limit_s=120)


def equal(one: list[TrainingRun], other: list[TrainingRun]) -> bool:
    """Whether all ranks ended with the same bits."""
    return all(
        a.weights == b.weights
        and len(a.losses) == len(b.losses)
        and all(torch.equal(x, y) for x, y in zip(a.losses, b.losses, strict=True))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("expert_parallel", [1, 2])
def test_off_is_off(stock2, gloo2, folder, expert_parallel):
    flags = {"train_iters": 20, "expert_model_parallel_size": expert_parallel}
    stock = train(stock2, folder, plugin=False, **flags)
    assert len(stock[0].losses) == 20

    for absent in ({}, {"moe_lrm_retention": 1.0}):
        run = train(gloo2, folder, **flags, **absent)
        assert run[0].classes == MEGATRONS
        assert equal(run, stock)
    waiting = train(gloo2, folder, **flags, moe_lrm_retention=0.5, moe_lrm_start_iter=20)
    assert waiting[0].classes == OURS
    assert equal(waiting, stock)

    started = train(gloo2, folder, **flags, moe_lrm_retention=0.5, moe_lrm_start_iter=19)
    assert torch.equal(torch.stack(started[0].losses), torch.stack(stock[0].losses))
    assert not equal(started, stock)


def kept_shares(run: TrainingRun) -> list[float | None]:
    found = [re.search(r"moe-lrm/kept_share: ([0-9.]+)", line) for line in run.console]
    return [float(match[1]) if match else None for match in found]


def test_retention_falls_from_start_along_the_ramp(gloo2, folder):
    run = train(gloo2, folder, train_iters=6, moe_lrm_retention=0.4, moe_lrm_start_iter=1, moe_lrm_ramp_iters=3)
    shares = kept_shares(run[0])
    # Floors take up to one row per expert and microbatch off the share: 8 experts of 256 pairs a layer.
    assert shares[0] is None
    assert shares[1:] == pytest.approx([0.8, 0.6, 0.4, 0.4, 0.4], abs=8 / 256)
    assert all(share <= retention for share, retention in zip(shares[1:], [0.8, 0.6, 0.4, 0.4, 0.4], strict=True))


def test_only_chosen_layers_drop(gloo2, folder, usual):
    run = train(gloo2, folder, train_iters=4, moe_lrm_retention=0.5, moe_lrm_layers="2")
    rows = [float(re.search(r"moe-lrm/rows_kept: ([0-9.]+)", r[0].console[0])[1]) for r in (run, usual)]
    # Figures are of the layers that drop, and both layers route as many pairs.
    assert rows[0] == pytest.approx(rows[1], rel=0.02)
    assert not equal(run, usual)
    both = train(gloo2, folder, train_iters=4, moe_lrm_retention=0.5, moe_lrm_layers="1-2")
    assert equal(both, usual)


@pytest.mark.parametrize(
    "flags",
    [
        {"moe_lrm_selection": "topk", "moe_lrm_scope": "source"},
        {"moe_lrm_score": "random", "moe_lrm_min_rows": 8, "moe_lrm_max_weight": 4},
        {"bf16": True, "moe_lrm_gemm": "grouped"},
        {"moe_lrm_when": "forward", "moe_lrm_router_grad": "baseline", "bf16": True, "moe_lrm_gemm": "grouped"},
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk": 1,
            "moe_shared_expert_intermediate_size": 32,
        },
    ],
    ids=lambda flags: " ".join(f"{k}={v}" for k, v in flags.items()),
)
def test_a_run_trains_and_is_reproducible(gloo2, folder, flags):
    first, second = (train(gloo2, folder, train_iters=4, moe_lrm_retention=0.5, **flags) for _ in range(2))
    assert equal(first, second)
    assert first[0].losses[-1] < first[0].losses[0]
    assert kept_shares(first[0])[-1] == pytest.approx(0.5, abs=8 / 128)


@pytest.fixture(scope="module")
def usual(gloo2, folder) -> list[TrainingRun]:
    """Four steps at retention 0.5 without anything else."""
    return train(gloo2, folder, train_iters=4, moe_lrm_retention=0.5)


@pytest.fixture(scope="module")
def chosen_early(gloo2, folder) -> list[TrainingRun]:
    """The same with pairs chosen in forward."""
    return train(gloo2, folder, train_iters=4, moe_lrm_retention=0.5, moe_lrm_when="forward")


@pytest.mark.parametrize(
    "flags",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ],
    ids=["full", "selective moe"],
)
@pytest.mark.parametrize("when", ["backward", "forward"])
def test_recompute_changes_no_bit(gloo2, folder, usual, chosen_early, flags, when):
    run = train(gloo2, folder, train_iters=4, moe_lrm_retention=0.5, moe_lrm_when=when, **flags)
    assert equal(run, usual if when == "backward" else chosen_early)


def test_choosing_early_keeps_as_much_and_changes_no_first_loss(usual, chosen_early):
    assert kept_shares(chosen_early[0]) == pytest.approx(kept_shares(usual[0]), abs=8 / 128)
    assert torch.equal(chosen_early[0].losses[0], usual[0].losses[0])
    assert not equal(chosen_early, usual)


def test_distributed_optimizer_with_overlap_changes_no_loss(gloo2, folder):
    flags = {"train_iters": 4, "moe_lrm_retention": 0.5, "expert_model_parallel_size": 1}
    usual = train(gloo2, folder, **flags)
    sharded = train(
        gloo2,
        folder,
        **flags,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    torch.testing.assert_close(sharded[0].losses, usual[0].losses, rtol=1e-6, atol=0)


def test_resume_and_checkpoints_both_ways(stock2, gloo2, folder, tmp_path):
    lrm = {"moe_lrm_retention": 0.5}
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    whole = train(gloo2, folder, train_iters=8, **lrm, save=ours, save_interval=5)
    resumed = train(gloo2, folder, train_iters=8, **lrm, load=ours, ckpt_step=5)
    assert len(resumed[0].losses) == 3
    assert [r.weights for r in resumed] == [r.weights for r in whole]
    assert all(torch.equal(a, b) for a, b in zip(resumed[0].losses, whole[0].losses[5:], strict=True))

    # The first loss after loading is that of the loaded weights, whoever loads them.
    in_stock = train(stock2, folder, plugin=False, train_iters=8, load=ours, ckpt_step=5)
    assert torch.equal(in_stock[0].losses[0], whole[0].losses[5])
    saved_by_stock = train(stock2, folder, plugin=False, train_iters=8, save=theirs, save_interval=5)
    in_ours = train(gloo2, folder, train_iters=8, **lrm, load=theirs, ckpt_step=5)
    assert torch.equal(in_ours[0].losses[0], saved_by_stock[0].losses[5])


def retentions(run: TrainingRun) -> list[float]:
    return [float(re.search(r"moe-lrm/retention: ([0-9.]+)", line)[1]) for line in run.console]


def test_adaptive_retention_goes_down_and_survives_a_resume_and_stock_megatron(stock2, gloo2, folder, tmp_path):
    lrm = {"moe_lrm_retention": 0.97, "moe_lrm_adaptive": True, "moe_lrm_adaptive_tau": 0.05}
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    whole = train(gloo2, folder, train_iters=8, **lrm, save=ours, save_interval=4)
    first, second, *later = retentions(whole[0])
    assert (first, second) == (1, 0.99) and 0.97 <= min(later) < 0.99
    resumed = train(gloo2, folder, train_iters=8, **lrm, load=ours, ckpt_step=4)
    assert retentions(resumed[0]) == retentions(whole[0])[4:]
    assert [r.weights for r in resumed] == [r.weights for r in whole]
    # Without adapting, the same checkpoint is as good as any, and so it is to Megatron without us.
    fixed = train(gloo2, folder, train_iters=8, moe_lrm_retention=0.97, load=ours, ckpt_step=4)
    stock = train(stock2, folder, plugin=False, train_iters=8, load=ours, ckpt_step=4, save=theirs, save_interval=6)
    for run in (fixed, stock):
        assert torch.equal(run[0].losses[0], whole[0].losses[4])
    # What was saved without it starts at 1.0.
    anew = train(gloo2, folder, train_iters=8, **lrm, load=theirs, ckpt_step=6)
    assert retentions(anew[0]) == [1, 0.99]


def test_bad_flags_are_listed_at_once_before_a_model_exists(gloo2, folder):
    messages = gloo2(
        refused,
        tiny_args(
            folder,
            moe_lrm_retention=0.5,
            moe_lrm_max_weight=0.5,
            moe_lrm_layers="3",
            moe_lrm_scope="source",
            moe_token_dispatcher_type="allgather",
            expert_model_parallel_size=2,
        ),
    )
    for message in messages:
        for flag in ("--moe-lrm-max-weight", "--moe-lrm-layers", "--moe-lrm-scope"):
            assert flag in message


def refused(flags: list[str]) -> str:
    with pytest.raises(ValueError) as caught:
        training.run(flags)
    return str(caught.value)


def train_and_listen(flags: list[str]) -> tuple[TrainingRun, list[str]]:
    """A run, and what the metrics have warned of."""
    import logging

    from megatron_lrmoe.mcore import metrics

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    heard: list[str] = []
    listener = Listener()
    metrics._has_advised = False
    metrics.logger.addHandler(listener)
    try:
        return training.run(flags), heard
    finally:
        metrics.logger.removeHandler(listener)


def test_a_probe_every_second_iteration_is_reported_and_topk_advised_against_once(gloo2, folder):
    """From scratch the dropped gradients point the same way: kappa is far above 1 in every layer."""
    flags = {"expert_model_parallel_size": 2, "eval_iters": 0, "lr_decay_iters": 100, "train_iters": 5}
    flags |= {"moe_lrm_retention": 0.8, "moe_lrm_selection": "topk", "moe_lrm_probe_interval": 2}
    flags |= {"moe_lrm_router_grad": "baseline"}
    ranks = gloo2(train_and_listen, tiny_args(folder, **flags), limit_s=120)
    for run, _ in ranks:
        kappas = [re.search(r"moe-lrm/kappa: ([0-9.]+)", line) for line in run.console]
        assert [match is not None for match in kappas] == [True, False, True, False, True]
        assert all(float(match[1]) > 1 for match in kappas if match)
        shares = kept_shares(run)
        # One of the two microbatches of a rank runs in full.
        assert shares[0] > shares[1] + 0.03
        assert all("moe-lrm/dropped_mass: " in line for line in run.console)
    (_, first), (_, second) = ranks
    assert len(first) == 1 and "--moe-lrm-selection unbiased" in first[0] and second == []


def run_and_count(flags: list[str]) -> tuple[TrainingRun, float, list[tuple[float, float]]]:
    """A run; Megatron's count of an iteration's operations; our count of a pair's backward and Megatron's of its all.

    The last two without and with latent experts, which only Transformer Engine builds.
    """
    run = training.run(flags)
    from megatron.training import get_args
    from megatron.training.training import num_floating_point_operations

    from megatron_lrmoe.mcore import throughput

    args: Any = get_args()
    pairs = args.global_batch_size * args.seq_length * args.moe_router_topk * args.num_layers

    def count(**changed: Any) -> float:
        return num_floating_point_operations(Namespace(**{**vars(args), **changed}), args.global_batch_size)

    of_a_pair = []
    for latent in (None, 32):
        routed = count(moe_latent_size=latent) - count(moe_latent_size=latent, moe_router_topk=0)
        own = throughput.backward_flops(Namespace(**{**vars(args), "moe_latent_size": latent}))
        of_a_pair.append((own, routed / pairs))
    return run, count(), of_a_pair


def test_throughput_is_corrected_by_the_backward_that_was_not_run(gloo2, folder):
    usual = {"expert_model_parallel_size": 2, "eval_iters": 0, "lr_decay_iters": 100, "train_iters": 2}
    flags = tiny_args(folder, **usual, moe_lrm_retention=0.5, log_throughput=True)
    for run, whole, of_a_pair in gloo2(run_and_count, flags, limit_s=120):
        for backward, forward_and_backward in of_a_pair:
            assert backward == pytest.approx(forward_and_backward * 2 / 3)
        pairs = 8 * 64 * 2 * 2
        for line in run.console:
            kept, share = (
                float(re.search(rf"moe-lrm/{name}: ([0-9.]+)", line)[1]) for name in ("kept_share", "flops_share")
            )
            assert share == pytest.approx(1 - (1 - kept) * pairs * of_a_pair[0][0] / whole, abs=2e-4)
            assert share < 0.95


def test_throughput_is_not_spoken_of_where_megatron_does_not_log_it(gloo2, folder):
    run = train(gloo2, folder, train_iters=1, moe_lrm_retention=0.5)[0]
    assert run.console and "flops_share" not in run.console[0]
