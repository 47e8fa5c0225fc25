"""Work of the busiest rank in an MoE layer with uneven experts: dropping, and replicas, against Megatron's own layer.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.hot_rank
    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.hot_rank --trace DIR
    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.hot_rank --memory

Four gloo processes. The router is Megatron's own, biased by its ``moe_router_force_biased`` until the busiest rank has
about 2.3 times the mean of the rows; with ``--trace`` experts are as popular as in a recorded layer call instead. All
variants share weights and input and take turns within every round. Times are CPU seconds of each process, medians over
the rounds, and then of the rank where they are largest: what the others wait for.
"""

import argparse
from pathlib import Path

import numpy as np

from benchmarks.uneven_layer import RANKS, VARIANTS, Measured, Memory, Options, measure, memory
from megatron_lrmoe.replicas.traces import read_trace
from tests.gloo import Pool


def main() -> None:
    """Measure and print a table."""
    given = parse()
    popularity_E = None if given.trace is None else popularity(given.trace, given.experts)
    options = Options(
        given.tokens, given.hidden, given.width, given.experts, given.top_k, given.rounds, given.bias, popularity_E
    )
    pool = Pool(RANKS)
    try:
        if given.memory:
            show_memory(pool(memory, options, limit_s=600))
        else:
            show(options, pool(measure, options, limit_s=1800))
    finally:
        pool.close()


def parse() -> argparse.Namespace:
    """Sizes; ``--bias`` is the standard deviation of the logits' bias, which decides the imbalance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    sizes = (("tokens", 1024), ("hidden", 512), ("width", 512), ("experts", 16), ("top-k", 4), ("rounds", 9))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bias", type=float, default=1.0)
    parser.add_argument("--memory", action="store_true", help="bytes instead of times")
    parser.add_argument("--trace", type=Path, help="folder of a recorded run, as --moe-lrm-trace writes it")
    return parser.parse_args()


def popularity(trace: Path, experts: int) -> tuple[float, ...]:
    """Loads by expert of the recorded layer call whose busiest rank is nearest to 2.3 times the mean."""
    calls = [call.routed_SE.sum(axis=0) for call in read_trace(trace, experts=experts)]

    def imbalance(load_E: np.ndarray) -> float:
        rows_R = load_E.reshape(RANKS, -1).sum(axis=1)
        return float(rows_R.max() / rows_R.mean())

    nearest = min(calls, key=lambda load_E: abs(imbalance(load_E) - 2.3))
    return tuple(float(load) for load in nearest)


def show(options: Options, ranks: list[Measured]) -> None:
    """The busiest rank of each variant, and its ratio to stock's busiest rank."""
    rows = [rank.rows for rank in ranks]
    source = f"router biased by {options.bias:g}" if options.popularity_E is None else "recorded popularity"
    print(
        f"{RANKS} ranks, {options.tokens} tokens each, hidden {options.hidden}, F {options.width}, {options.experts} "
        f"experts, top-{options.top_k}, fp32, {options.rounds} rounds, {source}: busiest rank "
        f"{max(rows) * len(rows) / sum(rows):.2f} x mean"
    )
    busiest = {
        name: [max(getattr(rank, way)[name] for rank in ranks) for way in ("forward", "backward")] for name in VARIANTS
    }
    base = busiest["stock"]
    print(f"{'variant':24} {'forward ms':>10} {'ratio':>6} {'backward ms':>12} {'ratio':>6} {'both':>6}")
    for name, (forward, backward) in busiest.items():
        both = (forward + backward) / sum(base)
        print(
            f"{name:24} {forward:10.1f} {forward / base[0]:6.3f} {backward:12.1f} {backward / base[1]:6.3f} {both:6.3f}"
        )


def show_memory(ranks: list[dict[str, Memory]]) -> None:
    """MiB of the rank that needs most in all."""
    print(
        f"{'variant':28} {'rows':>6} {'experts':>8} {'slots':>6} {'tokens':>7} {'in all':>7}  MiB of the largest rank"
    )
    for name in ranks[0]:
        most = max((rank[name] for rank in ranks), key=lambda m: m.experts + m.slots + m.saved)
        parts = [part / 2**20 for part in (most.experts, most.slots, most.saved)]
        print(f"{name:28} {most.rows:6} {parts[0]:8.1f} {parts[1]:6.1f} {parts[2]:7.1f} {sum(parts):7.1f}")


if __name__ == "__main__":
    main()
