"""Megatron's options against each other: every pair of values in some run, and its gradients against the reference."""

import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from allpairspy import AllPairs

from megatron_lrmoe.recalibration.quota import proportional_quota
from megatron_lrmoe.reference import ReferenceLayer
from tests import recording
from tests.gloo import Pool
from tests.integration.launch import tiny_args
from tests.recording import Call, RecordedRun

pytestmark = [pytest.mark.dist, pytest.mark.slow]

RETENTION, STEPS, RECORDED = Fraction(7, 10), 3, 1
RUNS = 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 4e-3}
"""Relative Frobenius error of a gradient: a few roundings of the run's dtype."""

MANY = {"num_layers": 4, "pipeline_model_parallel_size": 2}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "layout": {
        "EP2": {"ranks": 2},
        "EP2 x DP2": {"ranks": 4},
        "EP2 x PP2": {"ranks": 4, "pipeline_model_parallel_size": 2},
        "EP2 x PP2, interleaved": {"ranks": 4, **MANY, "num_virtual_stages_per_pipeline_rank": 2},
        "EP2 x PP2, first stage dense": {"ranks": 4, **MANY, "moe_layer_freq": "[0,0,1,1]"},
        "EP2 x PP2, uneven": {
            **{"ranks": 4, "num_layers": 3, "pipeline_model_parallel_size": 2},
            "decoder_first_pipeline_num_layers": 1,
        },
        "EP4": {"ranks": 4, "expert_model_parallel_size": 4},
    },
    "dispatcher": {"alltoall": {}, "allgather": {"moe_token_dispatcher_type": "allgather"}},
    "dtype": {
        "fp32": {},
        "bf16": {"bf16": True},
        "fp16": {"fp16": True, "initial_loss_scale": 1024},
    },
    "recompute": {
        "none": {},
        "full, uniform": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        "full, block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        **{
            name: {"recompute_granularity": "selective", "recompute_modules": [name]}
            # Not moe_act: Megatron has it for grouped GEMMs alone, and those need Transformer Engine.
            for name in ("moe", "layernorm", "shared_experts")
        },
    },
    "selection": {"unbiased": {}, "topk": {"moe_lrm_selection": "topk"}},
    "scope": {"expert": {}, "source": {"moe_lrm_scope": "source"}},
    "when": {"backward": {}, "forward": {"moe_lrm_when": "forward"}},
    "quota": {"proportional": {}, "balanced": {"moe_lrm_quota": "balanced"}, "joint": {"moe_lrm_quota": "joint"}},
    "router": {
        "softmax, aux": {},
        "sigmoid, expert bias": {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "none",
        },
        "seq_aux, z": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_z_loss_coeff": 1e-3},
        "global_aux": {"moe_router_load_balancing_type": "global_aux_loss"},
        "groups, pre-softmax": {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_pre_softmax": True},
    },
    "optimizer": {
        "plain": {},
        "distributed": {"use_distributed_optimizer": True},
        "distributed, overlapped": {
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    },
    "microbatches": {"1": {"each": 1}, "2": {"each": 2}},
    "shared expert": {
        "none": {},
        "one": {"moe_shared_expert_intermediate_size": 32},
        "overlapped": {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_overlap": True},
    },
    "width": {"hidden": {}, "latent": {"moe_latent_size": 16}},
    "capacity": {"none": {}, "1.0": {"moe_expert_capacity_factor": 1.0}},
    "depth": {"plain": {}, "multi-token prediction": {"mtp_num_layers": 1}},
    "router gradient": {"drop": {}, "baseline": {"moe_lrm_router_grad": "baseline"}},
    "gemm": {"loop": {}, "grouped": {"moe_lrm_gemm": "grouped"}},
    "replicas": {
        "none": {},
        "lrm": {"moe_lrm_replica_policy": "lrm", "moe_lrm_replica_min_rows": 0},
        "lrm, backward": {
            "moe_lrm_replica_policy": "lrm",
            "moe_lrm_replica_limits": "backward",
            "moe_lrm_replica_min_rows": 0,
            "moe_lrm_replica_interval": 2,
            # A little more than the mean of the kept rows.
            "moe_lrm_rank_rows": 23,
        },
        "ultraep": {"moe_lrm_replica_policy": "ultraep", "moe_lrm_replica_min_rows": 1},
        "symi": {"moe_lrm_replica_policy": "symi", "moe_lrm_replica_slots": 1},
    },
}


def goes_together(values: Sequence[str]) -> bool:
    """Whether Megatron and the plugin allow these values, of which only the first may be given."""
    chosen = dict(zip(OPTIONS, values, strict=False))
    has = chosen.get
    pipeline = "PP2" in has("layout", "")
    refused = (
        has("dispatcher") == "allgather" and (has("scope") == "source" or has("router gradient") == "baseline"),
        has("recompute") == "shared_experts" and has("shared expert") in ("none", "overlapped"),
        # Megatron overlaps shared experts with the all-to-all and flex dispatchers, and not with latent experts.
        has("shared expert") == "overlapped" and (has("dispatcher") == "allgather" or has("width") == "latent"),
        # Megatron takes virtual stages only with as many microbatches as stages.
        pipeline and has("microbatches") == "1",
        # It refuses capacity with these routers (transformer_config.py).
        has("capacity") == "1.0" and has("router") in ("sigmoid, expert bias", "global_aux", "groups, pre-softmax"),
        has("depth") == "multi-token prediction" and pipeline,
        has("dispatcher") == "allgather" and has("replicas", "none") != "none",
    )
    return not any(refused)


def combinations() -> list[dict[str, str]]:
    """Enough for every pair of values that goes together, and evenly drawn ones up to ``RUNS``."""
    names = [list(values) for values in OPTIONS.values()]
    rows = [list(values) for values in AllPairs(names, goes_together)]
    draw = random.Random(0)
    while len(rows) < RUNS:
        row = [draw.choice(values) for values in names]
        if goes_together(row) and row not in rows:
            rows.append(row)
    return [dict(zip(OPTIONS, row, strict=True)) for row in rows]


COMBINATIONS = combinations()


def flags_of(combination: dict[str, str], folder: Path) -> tuple[int, list[str]]:
    """Ranks, and Megatron's flags."""
    settings: dict[str, Any] = {"expert_model_parallel_size": 2}
    for option, value in combination.items():
        settings |= OPTIONS[option][value]
    ranks, each = settings.pop("ranks"), settings.pop("each")
    data_parallel = ranks // settings.get("pipeline_model_parallel_size", 1)
    usual = {
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "moe_ffn_hidden_size": 48,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "micro_batch_size": 1,
        "global_batch_size": data_parallel * each,
        "train_iters": STEPS,
        "eval_iters": 0,
        "lr_decay_iters": 100,
        "clip_grad": 1.0,
        # At Megatron's 0.02 so narrow a layer's outputs are subnormal in fp16.
        "init_method_std": 0.1,
        "moe_lrm_retention": float(RETENTION),
    }
    return ranks, tiny_args(folder, **{**usual, **settings})


@pytest.mark.parametrize("number", range(len(COMBINATIONS)))
def test_gradients_of_a_step_equal_the_reference(number: int, gloo2: Pool, gloo4: Pool, folder: Path) -> None:
    combination = COMBINATIONS[number]
    ranks, flags = flags_of(combination, folder)
    pool = gloo2 if ranks == 2 else gloo4
    runs: list[RecordedRun] = pool(recording.run_recorded, flags, RECORDED, limit_s=120)
    try:
        check(combination, runs)
    except AssertionError as error:
        raise AssertionError(f"{combination}: {error}") from error


def check(combination: dict[str, str], runs: list[RecordedRun]) -> None:
    """Losses, and every recorded layer call of every expert-parallel group."""
    losses = [run.run.losses for run in runs if run.run.losses]
    assert losses and all(len(of_rank) == STEPS for of_rank in losses)
    assert all(torch.isfinite(loss).all() for of_rank in losses for loss in of_rank)
    by_group = groupby(sorted(runs, key=lambda run: (run.group, run.rank_in_group)), key=lambda run: run.group)
    groups = [list(members) for _, members in by_group]
    assert sum(len(run.calls) for run in runs) > 0
    if combination["replicas"] in ("lrm", "symi"):
        assert any(call.replicas for run in runs for call in run.calls)
    for members in groups:
        assert len({len(run.calls) for run in members}) == 1
        for calls in zip(*(run.calls for run in members), strict=True):
            check_call(combination, calls)


def check_call(combination: dict[str, str], calls: Sequence[Call]) -> None:
    """One layer call, as the ranks of an expert-parallel group saw it."""
    whole = {name: torch.cat([call.values[name] for call in calls]) for name in calls[0].values}
    whole = {name: x if x.dtype == torch.bool else x.double() for name, x in whole.items()}
    fc1, fc2 = (torch.cat([taken(call.weights)[i] for call in calls]).double() for i in (0, 1))
    weight_TE = kept_weights(calls, whole["map_TE"])
    reference = ReferenceLayer(fc1, fc2, swiglu)
    exact = reference.backward(whole["x_TD"], whole["probs_TE"], whole["g_TD"], weight_TE)
    dprobs_TE, rounding = exact.dprobs_TE, 0.0
    if combination["router gradient"] == "baseline":
        tensors = [whole[name] for name in ("x_TD", "probs_TE", "map_TE", "g_TD")]
        dprobs_TE = reference.baseline_dprobs(*tensors, weight_TE > 0)
        rounding = baseline_rounding(combination, reference.forward(*tensors[:3]), whole, weight_TE) / dprobs_TE.norm()
    dfc1, dfc2 = (torch.cat([taken(call.grads)[i] for call in calls]).double() for i in (0, 1))
    usual = TOLERANCE[combination["dtype"]]
    for name, got, expected, limit in (
        ("dX", whole["dx_TD"], exact.dx_TD, usual),
        ("dprobs", whole["dprobs_TE"], dprobs_TE, usual + rounding),
        ("dfc1", dfc1, exact.dfc1, usual),
        ("dfc2", dfc2, exact.dfc2, usual),
    ):
        error = ((got - expected).norm() / expected.norm()).item()
        assert error <= limit, f"layer {calls[0].layer}, {name}: relative error {error:.1e}, allowed {limit:.0e}"
    check_counts(combination, weight_TE, whole["map_TE"])


def baseline_rounding(
    combination: dict[str, str], out_TD: torch.Tensor, whole: dict[str, torch.Tensor], weight_TE: torch.Tensor
) -> float:
    """Norm of what the output's rounding to the run's dtype may do to the baseline's <g, o> over the dropped alphas."""
    eps = torch.finfo(DTYPES[combination["dtype"]]).eps
    dropped_TE = whole["map_TE"] & (weight_TE == 0)
    alpha_T = (whole["probs_TE"] * dropped_TE).sum(1)
    of_pair_T = eps * (whole["g_TD"] * out_TD).abs().sum(1) / alpha_T.where(alpha_T > 0, torch.inf)
    return (of_pair_T * dropped_TE.sum(1).sqrt()).norm().item()


def check_counts(combination: dict[str, str], weight_TE: torch.Tensor, map_TE: torch.Tensor) -> None:
    """Kept pairs by expert, or with quotas that look at ranks, in all."""
    kept_E, load_E = (weight_TE > 0).sum(0).tolist(), map_TE.sum(0).tolist()
    quota_E = proportional_quota(load_E, RETENTION)
    assert not ((weight_TE > 0) & ~map_TE).any()
    if combination["quota"] == "proportional":
        assert kept_E == quota_E
    elif combination["quota"] == "balanced":
        assert sum(kept_E) == sum(quota_E)
    else:
        assert sum(quota_E) <= sum(kept_E) <= sum(load_E)
    if combination["selection"] == "topk":
        assert set(weight_TE[weight_TE > 0].tolist()) == {1.0}


def kept_weights(calls: Sequence[Call], map_TE: torch.Tensor) -> torch.Tensor:
    """(T, E) weight of each pair of the group, 0 for dropped ones."""
    weight_TE = torch.zeros(map_TE.shape, dtype=torch.float64)
    tokens, experts = map_TE.shape[0] // len(calls), map_TE.shape[1] // len(calls)
    for rank, call in enumerate(calls):
        where, expert, weight = taken(call.kept)
        if not call.by_owner:
            weight_TE[rank * tokens + where, expert] = weight.double()
            continue
        # Rows of an expert lie in the order of their sources, and of their tokens in those.
        for e in range(experts):
            routed = map_TE[:, rank * experts + e].nonzero().flatten()
            weight_TE[routed[where[expert == e]], rank * experts + e] = weight[expert == e].double()
    return weight_TE


def swiglu(z: torch.Tensor) -> torch.Tensor:
    """(G,) to (F,)."""
    gate, linear = z.chunk(2, dim=-1)
    return F.silu(gate) * linear


def taken(value: Any) -> Any:
    """What a finished backward has left."""
    assert value is not None, "no backward of this call"
    return value
