"""Replicas that recorded loads need under one row budget, with more and more backward work dropped.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.replica_budget DIR --ranks 4 --experts 16

``DIR`` is a folder that ``--moe-lrm-trace`` has written. The budget of a rank is 1.01 times the mean of the routed
rows: it stays the same whatever is dropped. Bytes are those of one expert's bf16 weights, pushed in forward and again
in backward, and of its fp32 gradient coming home.
"""

import argparse
from fractions import Fraction
from pathlib import Path

import numpy as np

from megatron_lrmoe.recalibration.balance import balanced_quota, floor_rows
from megatron_lrmoe.recalibration.quota import proportional_quota
from megatron_lrmoe.replicas.joint import Policy, Retention
from megatron_lrmoe.replicas.plan import Plan
from megatron_lrmoe.replicas.traces import RecordedLoads, read_trace
from megatron_lrmoe.replicas.training import TrainingPolicy, training_plan

RETENTIONS = (Fraction(1), Fraction(9, 10), Fraction(4, 5))
QUOTAS: tuple[Policy, ...] = ("proportional", "balanced", "joint")


def main() -> None:
    """Plan every recorded call, and print means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--experts", type=int, required=True)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=2048, help="of the model, for bytes")
    parser.add_argument("--width", type=int, default=768, help="of an expert, for bytes")
    options = parser.parse_args()
    calls = read_trace(options.trace, sources=options.ranks, experts=options.experts)
    rows_CR = np.array([call.routed_SE.sum(0).reshape(options.ranks, -1).sum(1) for call in calls])
    imbalance = (rows_CR.max(axis=1) / rows_CR.mean(axis=1)).mean()
    print(f"{len(calls)} layer calls, busiest rank {imbalance:.2f} x mean on average, {options.slots} slots")
    print(f"{'retention':>9} {'quota':13} {'replicas':>8} {'within':>7} {'slot MiB':>9} {'moved MiB':>10}")
    weights = 3 * options.hidden * options.width * 2 / 2**20
    for retention in RETENTIONS:
        for quota in QUOTAS[:1] if retention == 1 else QUOTAS:
            plans = [_plan(call, options, retention, quota) for call in calls]
            slots = np.mean([plan.slots_R.max() for plan in plans])
            # Forward, backward, and twice as many bytes home.
            moved = np.mean([plan.replicas for plan in plans]) * 4 * weights
            within = np.mean([plan.certificate.within_limits for plan in plans])
            replicas = np.mean([plan.replicas for plan in plans])
            print(
                f"{float(retention):9.1f} {quota:13} {replicas:8.2f} {within:7.2f} {slots * weights:9.1f} {moved:10.1f}"
            )


def _plan(call: RecordedLoads, options: argparse.Namespace, retention: Fraction, quota: Policy) -> Plan:
    load_E = call.routed_SE.sum(axis=0)
    owner_E = np.repeat(np.arange(options.ranks), options.experts // options.ranks)
    even_E = np.array(proportional_quota(load_E.tolist(), retention), np.int64)
    if quota == "balanced":
        floor_E = floor_rows(load_E, even_E, min(Fraction(1, 2), retention), 0)
        even_E = balanced_quota(load_E, floor_E, owner_E, options.ranks, int(even_E.sum()))
    policy = TrainingPolicy(name="lrm", slots=options.slots, limits="backward")
    return training_plan(
        policy, call.routed_SE, owner_E, even_E, Retention(share=retention, least=min(Fraction(1, 2), retention)), quota
    )


if __name__ == "__main__":
    main()
