"""Time in MoE layers until a loss is reached: no replicas, SYMI's, UltraEP's, and ours with dropping.

    .venv/bin/megatron-lrmoe data corpus --output runs/shakespeare
    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.time_to_loss runs/shakespeare

Four gloo processes, EP4, a byte-level model of 2 layers with 16 experts, top-4, without a balancing loss. A constant
bias in the routers' choice makes the first rank's experts hot; which tokens go to them is learnt. All have equal
weights and data. The time is CPU seconds in the MoE layers, of the busiest rank of each layer's forward and backward.
The loss to reach is what stock reaches at the end, a mean over the last tenth of the iterations; each run's loss is a
running mean over as many.
"""

import argparse
import re
from pathlib import Path
from typing import Any

from benchmarks.from_scratch import flags
from benchmarks.moe_seconds import TimedRun, timed_run
from tests.gloo import Pool

RANKS = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "symi": {"moe_lrm_replica_policy": "symi"},
    "ultraep": {"moe_lrm_replica_policy": "ultraep", "moe_lrm_replica_min_rows": 64},
    "lrm 0.8": {"moe_lrm_replica_policy": "lrm", "moe_lrm_replica_min_rows": 64, "moe_lrm_retention": 0.8},
}


def main() -> None:
    """Train every variant, and print how long each took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path, help="prefix of a byte-level indexed dataset")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--extra", type=float, default=0.1, help="share of further steps for those who need them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skew", type=float, default=0.25, help="bias of the first rank's experts, in sigmoid scores")
    parser.add_argument("--trace", type=Path, help="folder for the loads of the last variant")
    options = parser.parse_args()
    pool = Pool(RANKS)
    try:
        if options.trace is not None:
            VARIANTS["lrm 0.8"] |= {"moe_lrm_trace": options.trace, "moe_lrm_trace_interval": 10}
        runs = {name: _train(pool, options, lrm) for name, lrm in VARIANTS.items()}
    finally:
        pool.close()
    show(runs, options.steps)


def _train(pool: Pool, options: argparse.Namespace, lrm: dict[str, Any]) -> TimedRun:
    steps = options.steps + round(options.extra * options.steps)
    settings = {
        "expert_model_parallel_size": RANKS,
        "hidden_size": 256,
        "ffn_hidden_size": 512,
        "moe_ffn_hidden_size": 256,
        "micro_batch_size": 4,
        "global_batch_size": 4 * RANKS,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": None,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0,
        "lr_decay_iters": steps,
        "lr_warmup_iters": options.steps // 20,
    }
    args = flags("time_to_loss", options.data, steps=steps, lr=1e-3, seed=options.seed, **(settings | lrm))
    return pool(timed_run, args, options.skew, limit_s=3600)[0]


def show(runs: dict[str, TimedRun], steps: int) -> None:
    """Steps and seconds of each variant until its running mean is at stock's loss of step ``steps``."""
    window = max(1, steps // 10)
    goal = sum(runs["fixed"].losses[steps - window : steps]) / window
    print(f"loss to reach {goal:.4f}, running mean of {window} iterations")
    print(
        f"{'variant':10} {'steps':>6} {'seconds':>8} {'to symi':>8} {'forward':>8} {'backward':>9}  of all iterations"
    )
    seconds = {name: _seconds_to(run, goal, window) for name, run in runs.items()}
    for name, run in runs.items():
        reached, total, forward, backward = seconds[name]
        figures = " ".join(f"{key} {value:.3g}" for key, value in _means(run).items())
        against = total / seconds["symi"][1]
        print(
            f"{name:10} {reached or 'never':>6} {total:8.2f} {against:8.3f} {forward:8.2f} {backward:9.2f}  {figures}"
        )


def _seconds_to(run: TimedRun, goal: float, window: int) -> tuple[int, float, float, float]:
    """Steps (0: never), and seconds in all, in forward and in backward until then."""
    reached = 0
    for step in range(window, len(run.losses) + 1):
        if sum(run.losses[step - window : step]) / window <= goal:
            reached = step
            break
    forward, backward = (sum(column) for column in zip(*run.seconds[: reached or None], strict=True))
    return reached, forward + backward, forward, backward


def _means(run: TimedRun) -> dict[str, float]:
    """Means over the iterations of what the console lines say of imbalance and replicas."""
    names = ("imbalance", "imbalance_placed", "imbalance_kept", "replicas")
    found = {
        name: [float(v) for line in run.console for v in re.findall(rf"lrm/{name}: ([\d.]+)", line)] for name in names
    }
    return {name: sum(values) / len(values) for name, values in found.items() if values}


if __name__ == "__main__":
    main()
