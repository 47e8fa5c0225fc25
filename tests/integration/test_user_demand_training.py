"""What users of MoE training have run into, as in tests/dist/test_user_demand.py, in whole training runs."""

import hashlib
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import layers, training
from tests.gloo import Pool
from tests.integration.launch import tiny_args
from tests.training import TrainingRun

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def flags_of(folder: Path, **flags: Any) -> list[str]:
    usual = {
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "moe_ffn_hidden_size": 32,
        "seq_length": 32,
        "max_position_embeddings": 32,
        # Other layouts drop out other elements.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "expert_model_parallel_size": 2,
        "eval_iters": 0,
        "lr_decay_iters": 100,
    }
    return tiny_args(folder, **{**usual, **flags})


def train(pool: Pool, folder: Path, plugin: bool = True, **flags: Any) -> list[TrainingRun]:
    return pool(training.run, flags_of(folder, **flags), plugin, limit_s=180)


def train_and_hash(flags: list[str]) -> tuple[TrainingRun, list[str], bool]:
    """A run, a hash of the pairs that each call has kept, and whether torch was to be deterministic in it."""
    flows: list[Any] = []
    was = torch.are_deterministic_algorithms_enabled()
    try:
        with layers.watching_flows(flows):
            run = training.run(flags)
        deterministic = torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(was)
    kept = [
        torch.stack([flow.token_P[sent.rows_M], flow.expert_P[sent.rows_M], sent.weight_M.view(torch.int32).long()])
        for flow, sent in flows
    ]
    return run, [hashlib.sha256(pairs.numpy().tobytes()).hexdigest() for pairs in kept], deterministic


def test_a34_deterministic_mode_repeats_losses_and_kept_pairs(gloo2: Pool, folder: Path) -> None:
    flags = flags_of(folder, train_iters=10, moe_lrm_retention=0.5, deterministic_mode=True)
    first, second = (gloo2(train_and_hash, flags, limit_s=180) for _ in range(2))
    for (run, kept, deterministic), (again, kept_again, _) in zip(first, second, strict=True):
        assert deterministic and len(run.losses) == 10
        assert torch.equal(torch.stack(run.losses), torch.stack(again.losses)) and run.weights == again.weights
        # 10 steps of 2 microbatches and 2 layers: no call keeps what another has kept.
        assert kept == kept_again and len(set(kept)) == len(kept) == 10 * 2 * 2
    other = flags_of(folder, train_iters=10, moe_lrm_retention=0.5, deterministic_mode=True, seed=4321)
    assert gloo2(train_and_hash, other, limit_s=180)[0][1] != first[0][1]


SAVED_AT = 5


@pytest.fixture(scope="module")
def saved(gloo2: Pool, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[TrainingRun]]:
    """Checkpoint of step 5 of a run at retention 0.8 and EP2, and the run, which goes on to step 7."""
    path = tmp_path_factory.mktemp("checkpoint")
    run = train(
        gloo2, folder, train_iters=7, moe_lrm_retention=0.8, save=path, save_interval=SAVED_AT, ckpt_format="torch_dist"
    )
    return path, run


def keys_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a distributed checkpoint's tensors."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = FileSystemReader(path / f"iter_{SAVED_AT:07d}").read_metadata().state_dict_metadata
    return {key: tuple(getattr(entry, "size", ())) for key, entry in metadata.items()}


def test_a38_the_checkpoint_has_stock_megatrons_keys_and_replays_the_next_step(
    stock2: Pool, gloo2: Pool, folder: Path, saved: tuple[Path, list[TrainingRun]], tmp_path: Path
) -> None:
    path, whole = saved
    train(stock2, folder, plugin=False, train_iters=SAVED_AT, save=tmp_path, save_interval=SAVED_AT)
    assert keys_of(path) == keys_of(tmp_path)
    resumed = train(gloo2, folder, train_iters=7, moe_lrm_retention=0.8, load=path, ckpt_step=SAVED_AT)
    assert torch.equal(torch.stack(resumed[0].losses), torch.stack(whole[0].losses[SAVED_AT:]))
    assert [rank.weights for rank in resumed] == [rank.weights for rank in whole]


def test_a38_a_checkpoint_of_ep2_goes_on_at_ep4(
    gloo4: Pool, folder: Path, saved: tuple[Path, list[TrainingRun]]
) -> None:
    """The same global batch in twice as many ranks: the first loss is that of the loaded weights."""
    path, whole = saved
    resumed = train(
        gloo4,
        folder,
        train_iters=7,
        moe_lrm_retention=0.8,
        load=path,
        ckpt_step=SAVED_AT,
        expert_model_parallel_size=4,
        micro_batch_size=1,
    )
    assert all(len(rank.losses) == 2 for rank in resumed)
    assert resumed[0].classes[0] == "LRMoELayer"
    torch.testing.assert_close(resumed[0].losses[0], whole[0].losses[SAVED_AT], rtol=1e-5, atol=0)
    assert resumed[0].losses[0] != whole[0].losses[0]


SAID = "on the command line, 0.8 in the checkpoint; the command line counts"


def train_and_listen(flags: list[str]) -> tuple[TrainingRun, list[str]]:
    """A run, and what the adaptor has said of it."""
    from megatron_lrmoe.mcore import adaptor

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    heard: list[str] = []
    adaptor.logger.addHandler(listener := Listener())
    before, adaptor._active = adaptor._active, False
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

    # What the first config of a process puts in place, it would put in place twice.
    places = MoELayer.__init__, MoEMetricsTracker.report
    if before:
        MoELayer.__init__, MoEMetricsTracker.report = (place.__wrapped__ for place in places)
    try:
        return training.run(flags), heard
    finally:
        if before and not adaptor._active:
            # A run without the plugin has put nothing back, and later runs in this worker need it.
            MoELayer.__init__, MoEMetricsTracker.report = places
            adaptor._active = True
        adaptor.logger.removeHandler(listener)


def kept_shares(run: TrainingRun) -> list[float]:
    return [float(match[1]) for line in run.console if (match := re.search(r"moe-lrm/kept_share: ([0-9.]+)", line))]


def resume_with_its_arguments(
    pool: Pool, folder: Path, path: Path, retention: float | None
) -> tuple[TrainingRun, list[str]]:
    flags = flags_of(
        folder, train_iters=7, load=path, ckpt_step=SAVED_AT, use_checkpoint_args=True, moe_lrm_retention=retention
    )
    return pool(train_and_listen, flags, limit_s=180)[0]


@pytest.fixture(scope="module")
def resumed_at_07(gloo2: Pool, folder: Path, saved: tuple[Path, list[TrainingRun]]) -> tuple[TrainingRun, list[str]]:
    return resume_with_its_arguments(gloo2, folder, saved[0], 0.7)


def test_a38_the_command_lines_retention_counts_whatever_the_checkpoint_was_trained_with(
    saved: tuple[Path, list[TrainingRun]], resumed_at_07: tuple[TrainingRun, list[str]]
) -> None:
    (run, heard), (_, whole) = resumed_at_07, saved
    assert torch.equal(run.losses[0], whole[0].losses[SAVED_AT])
    assert kept_shares(whole[0]) == [pytest.approx(0.8, abs=8 / 128)] * 7 and min(kept_shares(whole[0])) > 0.75
    assert kept_shares(run) == [pytest.approx(0.7, abs=8 / 128)] * 2 and max(kept_shares(run)) < 0.72
    assert len([line for line in heard if "retention=0.7" in line]) == 1


def test_a38_without_the_flag_the_checkpoints_arguments_do_not_turn_the_plugin_on_and_it_says_so(
    gloo2: Pool, folder: Path, saved: tuple[Path, list[TrainingRun]]
) -> None:
    run, heard = resume_with_its_arguments(gloo2, folder, saved[0], None)
    assert torch.equal(run.losses[0], saved[1][0].losses[SAVED_AT])
    assert run.classes[0] == "MoELayer" and kept_shares(run) == []
    assert heard == [
        "--moe-lrm-retention: not given on the command line, 0.8 in the checkpoint; the command line counts"
    ]


def test_a38_another_retention_than_the_checkpoints_is_named(resumed_at_07: tuple[TrainingRun, list[str]]) -> None:
    assert f"--moe-lrm-retention: 0.7 {SAID}" in resumed_at_07[1]
