"""Every replica policy on the same loads: how even, how many replicas, what dropping saves, how long it takes.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.planner            # the tables of docs/planner.md
    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.planner --seeds 4  # a quick look
    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.planner --trace DIR  # the first table on recorded loads

Prints Markdown. Loads are routed token by token (top-8, without replacement); seeds from 1000 on, which were not used
while the planner was tuned.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from pathlib import Path

import numpy as np

from megatron_lrmoe.replicas import compiled, workloads
from megatron_lrmoe.replicas.joint import Retention, plan_with_policy
from megatron_lrmoe.replicas.peers import POLICIES, ultraep_compiled
from megatron_lrmoe.replicas.peers.ultraep import DEFAULTS as ULTRAEP
from megatron_lrmoe.replicas.plan import Limits, Plan, limit_rows
from megatron_lrmoe.replicas.planner import plan
from megatron_lrmoe.replicas.traces import read_trace
from tests.milp import Case, fewest_replicas, fewest_rows

LIMIT = Fraction(101, 100)
FIRST_SEED = 1000
PLANNERS = {"lrm": plan, **POLICIES}


@dataclass(frozen=True)
class Setting:
    """Loads of one kind on one layout; ``cut`` divides the number of seeds, as big layouts take longer."""

    name: str
    shape: workloads.Shape
    make: Callable[..., np.ndarray]
    cut: int = 1

    def seeds(self, seeds: int) -> range:
        """Seeds of this setting, if the smallest layouts get ``seeds`` of them."""
        return range(FIRST_SEED, FIRST_SEED + max(1, seeds // self.cut))


EP8_128 = workloads.Shape(experts=128, ranks=8, tokens=32768, top_k=8)
EP8_32 = workloads.Shape(experts=32, ranks=8, tokens=32768, top_k=8)
EP64 = workloads.Shape(experts=256, ranks=64, tokens=4096, top_k=8)
E128 = Setting("E128 EP8, log-normal 1.0", EP8_128, partial(workloads.log_normal, sigma=1.0))
E32 = Setting("E32 EP8, log-normal 0.7", EP8_32, partial(workloads.log_normal, sigma=0.7))
MILD = Setting("E256 EP64, log-normal 0.7", EP64, partial(workloads.log_normal, sigma=0.7), cut=2)
HEAVY = Setting("E256 EP64, log-normal 1.0", EP64, partial(workloads.log_normal, sigma=1.0), cut=2)
ZIPF = Setting("E256 EP64, Zipf 2.0", EP64, partial(workloads.zipf, ratio=2.0), cut=2)
REACH = ((E128, 1), (E128, 2), (E32, 1), (E32, 2), (MILD, 1), (MILD, 2), (HEAVY, 2), (ZIPF, 2))


@cache
def loads_of(setting: Setting, seed: int) -> np.ndarray:
    """(S, E) routed rows; many tables use the same."""
    return setting.make(setting.shape, seed=seed)


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40, help="of EP8; EP64 gets half (default: 40)")
    parser.add_argument("--cases", type=int, default=60, help="compared with the integer program (default: 60)")
    parser.add_argument(
        "--trace", type=Path, metavar="PATH", help="recorded loads, a Parquet file or a folder of them, instead of all"
    )
    options = parser.parse_args()
    if options.trace:
        return reach_of_trace(options.trace)
    reach(options.seeds)
    readme_of_ultraep()
    after_dropping(options.seeds)
    optimum(options.cases)
    solve_time(options.seeds)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table."""
    print(f"### {title}\n")
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)
    print()


def over_mean(found: Plan) -> float:
    """Rows of the busiest rank over the mean."""
    return float(found.rows_R.max() / found.rows_R.mean())


def reach(seeds: int) -> None:
    """Max/mean and replicas of every policy, limit 1.01 x mean or the nearest reachable."""
    for setting, slots in REACH:
        loads = [loads_of(setting, seed) for seed in setting.seeds(seeds)]
        what = f"{setting.shape.tokens} tokens a rank, {len(loads)} seeds"
        reach_table(setting.name, what, loads, setting.shape.owner_E, slots)


def reach_of_trace(path: Path) -> None:
    """The same on the routed rows of recorded layer calls; owners are contiguous blocks of equal size."""
    records = read_trace(path)
    loads = [record.routed_SE for record in records if record.routed_SE.any()]
    if not loads:
        raise ValueError(f"{path}: found no routed rows, allowed is at least one")
    ranks, experts = loads[0].shape
    if experts % ranks:
        raise ValueError(f"{path}: found {experts} experts on {ranks} ranks, allowed is a multiple of the ranks")
    for slots in (1, 2):
        reach_table(str(path), f"{len(loads)} layer calls", loads, np.arange(experts) // (experts // ranks), slots)


def reach_table(name: str, what: str, loads: Sequence[np.ndarray], owner_E: np.ndarray, slots: int) -> None:
    """A row for each policy, over all loads."""
    rows = []
    for policy, planner in PLANNERS.items():
        plans = [planner(loads_SE, None, owner_E, slots, Limits(forward=LIMIT)) for loads_SE in loads]
        ratios = [over_mean(found) for found in plans]
        rows.append(
            [
                policy,
                f"{np.mean(ratios):.4f}",
                f"{np.percentile(ratios, 95):.4f}",
                f"{max(ratios):.4f}",
                f"{np.mean([found.replicas for found in plans]):.2f}",
                max(int(found.slots_R.max()) for found in plans),
                f"{np.mean([found.pushes_R.max() for found in plans]):.1f}",
                f"{np.mean([found.migrations for found in plans]):.1f}",
            ]
        )
    before = np.mean([float(workloads.skew(loads_SE, owner_E)) for loads_SE in loads])
    table(
        f"Reach: {name}, {slots} slot{'s' * (slots > 1)}, {what}, {before:.2f} before",
        ("policy", "max/mean", "p95", "worst", "replicas", "most slots", "pushes of one rank", "masters moved"),
        rows,
    )


def readme_of_ultraep() -> None:
    """The three cases of UltraEP's README with its rule and with ours."""
    shape = workloads.Shape(experts=256, ranks=64, tokens=8192, top_k=8)
    rows = []
    for ratio, published in ((1.5, 38), (2.0, 46), (3.0, 51)):
        loads = [workloads.zipf(shape, ratio=ratio, seed=seed) for seed in range(FIRST_SEED, FIRST_SEED + 5)]
        row = [ratio, published]
        for name in ("ultraep", "lrm"):
            plans = [PLANNERS[name](one, None, shape.owner_E, 2, Limits(forward=LIMIT)) for one in loads]
            row.append(f"{np.mean([over_mean(p) for p in plans]):.3f}; {np.mean([p.replicas for p in plans]):.1f}")
        rows.append(row)
    table(
        f"UltraEP's README: Zipf, EP64, 2 slots, {shape.tokens} tokens a rank, 5 seeds",
        ("initial max/mean", "published replicas at 1.01", "ultraep: max/mean; replicas", "lrm: max/mean; replicas"),
        rows,
    )


def after_dropping(seeds: int) -> None:
    """Replicas by quota policy, backward limit 1.01 x the mean before dropping, 2 slots."""
    rows = []
    for setting in (ZIPF, HEAVY, MILD, E128):
        for drop in (0, 10, 20):
            count, kept = {}, {}
            for policy in ("proportional", "balanced", "joint"):
                found = []
                for seed in setting.seeds(seeds):
                    loads, owner_E = loads_of(setting, seed), setting.shape.owner_E
                    limit_R = limit_rows(LIMIT, np.full(len(loads), loads.sum() // len(loads)))
                    retention = Retention(share=1 - Fraction(drop, 100))
                    limits = Limits(backward=limit_R.tolist())
                    found.append(plan_with_policy(loads, owner_E, 2, limits, retention, policy))
                count[policy] = [one.plan.replicas for one in found]
                kept[policy] = np.mean([one.quota_E.sum() for one in found]) / loads.sum()
                assert all(one.plan.certificate.within_limits for one in found)
            least = [min(pair) for pair in zip(count["proportional"], count["balanced"], strict=True)]
            worse = sum(j > other for j, other in zip(count["joint"], least, strict=True))
            rows.append(
                [
                    setting.name,
                    f"{drop} %",
                    *(f"{np.mean(count[policy]):.2f}" for policy in count),
                    f"{100 * (1 - kept['joint']):.1f} %",
                    worse,
                ]
            )
    table(
        "After dropping: replicas, backward limit 1.01 x the mean before it, no forward limit, 2 slots, floor 0.5",
        ("loads", "may drop", "proportional", "balanced", "joint", "joint drops", "seeds where joint needs more"),
        rows,
    )


def optimum(cases: int) -> None:
    """Our plans against the mixed-integer program on small cases."""
    generator = np.random.default_rng(FIRST_SEED)
    gaps, more = [], []
    for _ in range(cases):
        ranks, per_rank, slots = (int(generator.integers(low, high)) for low, high in ((2, 7), (1, 5), (1, 3)))
        load_E = np.exp(generator.uniform(0.5, 1.3) * generator.standard_normal(ranks * per_rank)) * 200
        case = Case(load_E.astype(np.int64), np.repeat(np.arange(ranks), per_rank), ranks, slots)
        loads_SE = np.zeros((ranks, ranks * per_rank), np.int64)
        loads_SE[0] = case.load_E
        best = fewest_rows(case)
        finest = plan(loads_SE, None, case.owner_E, slots, Limits(forward="finest"))
        gaps.append(finest.rows_R.max() / best)
        limit = max(best, int(limit_rows(LIMIT, finest.rows_R)[0]))
        more.append(
            plan(loads_SE, None, case.owner_E, slots, Limits(forward=limit)).replicas - fewest_replicas(case, limit)
        )
    table(
        f"Against the optimum: {cases} cases of 2-6 ranks with 1-4 experts each, 1-2 slots, about 200 rows an expert",
        ("largest rows / optimum", "equal replicas", "one more", "two or more"),
        [[f"{max(gaps):.4f}", sum(m == 0 for m in more), sum(m == 1 for m in more), sum(m > 1 for m in more)]],
    )


def solve_time(seeds: int) -> None:
    """Median and p95 of the compiled solvers, interleaved; cases that end above the limit are apart."""
    rows = []
    none = np.empty((0, 2), np.int64)
    for setting, slots in REACH:
        ours, theirs, strong, whole = [], [], [], []
        ranks, owner_E = setting.shape.ranks, setting.shape.owner_E
        for seed in setting.seeds(seeds):
            load_E = loads_of(setting, seed).sum(axis=0)
            rows_R = np.bincount(owner_E, load_E, ranks).astype(np.int64)
            balance_R = limit_rows(LIMIT, rows_R) - rows_R
            free_R = np.full(ranks, slots, np.int64)
            solve = partial(compiled.solve, load_E, owner_E, balance_R, free_R, none, 0, False)
            rival = partial(
                ultraep_compiled.solve_kernel,
                *(load_E, owner_E, ranks, slots, *ULTRAEP.thresholds(int(load_E.sum()), ranks)),
                *(ULTRAEP.min_rows, ULTRAEP.master_rows),
            )
            _, above, _ = solve()
            rival()
            times = [(_microseconds(solve), _microseconds(rival)) for _ in range(5)]
            (ours if above == 0 else strong).append(statistics.median(one for one, _ in times))
            theirs.append(statistics.median(other for _, other in times))
            all_of_it = partial(plan, loads_of(setting, seed), None, owner_E, slots, Limits(forward=LIMIT))
            if above == 0:
                whole.append(statistics.median(_microseconds(all_of_it) for _ in range(5)))
        rows.append(
            [
                f"{setting.name}, {slots} slot{'s' * (slots > 1)}",
                f"{np.median(ours):.0f} / {np.percentile(ours, 95):.0f}",
                f"{np.median(theirs):.0f} / {np.percentile(theirs, 95):.0f}",
                f"{np.median(strong) / 1000:.1f} ms in {len(strong)}" if strong else "-",
                f"{np.median(whole):.0f}",
            ]
        )
    table(
        "Solve time, compiled, one thread: median / p95 in microseconds",
        ("loads", "lrm", "ultraep", "lrm, strong search for the finest limit", "lrm, all of plan() in Python"),
        rows,
    )


def _microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


if __name__ == "__main__":
    main()
