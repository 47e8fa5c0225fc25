"""Whole training runs with replicas: they change where rows are computed and nothing of what is learnt."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gloo import Pool
from tests.integration.test_training import equal
from tests.integration.test_user_demand_training import SAVED_AT, flags_of, keys_of, train, train_and_hash
from tests.training import TrainingRun

pytestmark = [pytest.mark.dist, pytest.mark.slow]

REPLICAS = {"moe_lrm_replica_policy": "lrm", "moe_lrm_replica_min_rows": 0}
DROPPING = {**REPLICAS, "moe_lrm_retention": 0.8}
ONE_GROUP: dict[str, Any] = {"train_iters": 20, "expert_model_parallel_size": 4}
"""On four ranks, which share the experts."""
TWO_GROUPS: dict[str, Any] = {"train_iters": 6, "expert_model_parallel_size": 2, "micro_batch_size": 1}
"""On four ranks: 0 and 1 share the experts, and so do 2 and 3."""


def replicas_of(run: TrainingRun) -> list[float]:
    """Replicas of a layer call, by iteration."""
    found = [re.search(r"moe-lrm/replicas: ([0-9.]+)", line) for line in run.console]
    return [float(match[1]) if match else 0.0 for match in found]


@pytest.fixture(scope="module")
def stock_of_two(stock2: Pool, folder: Path) -> list[TrainingRun]:
    return train(stock2, folder, plugin=False, train_iters=20)


@pytest.fixture(scope="module")
def stock_of_four(gloo4: Pool, folder: Path) -> list[TrainingRun]:
    return train(gloo4, folder, **ONE_GROUP)


@pytest.mark.parametrize("policy", ["lrm", "ultraep", "symi"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_without_dropping_the_losses_are_stock_megatrons(
    request: pytest.FixtureRequest, folder: Path, ranks: int, policy: str
) -> None:
    stock = request.getfixturevalue("stock_of_two" if ranks == 2 else "stock_of_four")
    assert stock[0].classes[0] == "MoELayer" and len(stock[0].losses) == 20
    pool = request.getfixturevalue(f"gloo{ranks}")
    usual: dict[str, Any] = {"train_iters": 20} if ranks == 2 else ONE_GROUP
    run = train(pool, folder, **usual, **{**REPLICAS, "moe_lrm_replica_policy": policy})
    assert run[0].classes[0] == "LRMoELayer"
    # SYMI goes by the iteration before.
    assert min(replicas_of(run[0])[policy == "symi" :]) > 0
    torch.testing.assert_close(torch.stack(run[0].losses), torch.stack(stock[0].losses), rtol=1e-5, atol=0)


@pytest.fixture(scope="module")
def usual(gloo2: Pool, folder: Path) -> list[TrainingRun]:
    return train(gloo2, folder, train_iters=4, **DROPPING)


@pytest.mark.parametrize(
    "flags",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ],
    ids=["full", "selective moe"],
)
def test_recompute_changes_no_bit(gloo2: Pool, folder: Path, usual: list[TrainingRun], flags: dict[str, Any]) -> None:
    run = train(gloo2, folder, train_iters=4, **DROPPING, **flags)
    assert min(replicas_of(run[0])) > 0
    assert replicas_of(run[0]) == replicas_of(usual[0])
    assert equal(run, usual)


def test_two_deterministic_runs_are_equal(gloo2: Pool, folder: Path) -> None:
    flags = flags_of(folder, train_iters=6, **DROPPING, deterministic_mode=True)
    first, second = (gloo2(train_and_hash, flags, limit_s=180) for _ in range(2))
    assert min(replicas_of(first[0][0])) > 0
    for (run, kept, deterministic), (again, kept_again, _) in zip(first, second, strict=True):
        assert deterministic and len(run.losses) == 6
        assert kept == kept_again and len(set(kept)) == len(kept) == 6 * 2 * 2
        assert torch.equal(torch.stack(run.losses), torch.stack(again.losses)) and run.weights == again.weights


@pytest.fixture(scope="module")
def two_groups(gloo4: Pool, folder: Path) -> list[TrainingRun]:
    return train(gloo4, folder, **TWO_GROUPS, **DROPPING)


def test_data_parallel_peers_end_with_the_same_weights(two_groups: list[TrainingRun]) -> None:
    runs = two_groups
    assert min(replicas_of(runs[0])) > 0
    assert runs[0].weights == runs[2].weights and runs[1].weights == runs[3].weights
    experts = {name for name in runs[0].weights if ".experts." in name}
    differing = {name for name, digest in runs[0].weights.items() if runs[1].weights[name] != digest}
    assert differing == experts and len(experts) == 2 * 2 * 4


def test_both_overlaps_of_the_distributed_optimizer_change_no_loss(
    gloo4: Pool, folder: Path, two_groups: list[TrainingRun]
) -> None:
    """Weights that go to replicas are those of this iteration, gathered by then."""
    overlaps = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    run = train(gloo4, folder, **TWO_GROUPS, **DROPPING, **overlaps)
    assert replicas_of(run[0]) == replicas_of(two_groups[0])
    torch.testing.assert_close(torch.stack(run[0].losses), torch.stack(two_groups[0].losses), rtol=1e-6, atol=0)


def test_a_checkpoint_has_stock_megatrons_keys_and_goes_on_with_and_without_replicas(
    stock2: Pool, gloo2: Pool, folder: Path, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    saving = {"save_interval": SAVED_AT, "ckpt_format": "torch_dist"}
    whole = train(gloo2, folder, train_iters=7, **DROPPING, save=ours, **saving)
    train(stock2, folder, plugin=False, train_iters=SAVED_AT, save=theirs, **saving)
    assert keys_of(ours) == keys_of(theirs)
    loading = {"train_iters": 7, "load": ours, "ckpt_step": SAVED_AT}
    resumed = train(gloo2, folder, **loading, **DROPPING)
    assert [run.weights for run in resumed] == [run.weights for run in whole]
    in_stock = train(stock2, folder, plugin=False, **loading)
    assert in_stock[0].classes[0] == "MoELayer"
    torch.testing.assert_close(in_stock[0].losses[0], whole[0].losses[SAVED_AT], rtol=1e-6, atol=0)
