"""How far dropped gradients are from the exact ones, on the activations of a tiny MoE in training.

    .venv/bin/megatron-lrmoe data corpus --output runs/shakespeare
    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.gradient_error runs/shakespeare

Megatron's own loop trains the model of ``benchmarks/from_scratch.py`` without dropping anything and pauses after some
numbers of steps; there the plugin's own stages compute recorded microbatches again, in full and under each policy.
Errors are relative squared Frobenius norms, means over layers and microbatches. Prints Markdown tables.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from benchmarks import from_scratch
from benchmarks.bucket_centroids import centroid_table
from benchmarks.layer_gradients import SWIGLU, Gradients, gradients, router_gradients
from benchmarks.pair_statistics import draw_table, pair_variance, ranking_table
from benchmarks.recorded_layers import LayerBatch, record
from megatron_lrmoe.compute.bias import PROBE_SUMS
from megatron_lrmoe.mcore.metrics import MOMENTUM_STEPS
from tests.gloo import Pool

POLICIES: dict[str, dict[str, Any]] = {
    "topk (the paper)": {"selection": "topk"},
    "unbiased": {},
    "unbiased, shrink 0.5": {"shrink": 0.5},
    "unbiased, shrink 0": {"shrink": 0.0},
    "random, weighted": {"score": "random"},
    "random, unweighted": {"score": "random", "shrink": 0.0},
    "grad-sq topk": {"selection": "topk", "score": "grad-sq"},
    "grad-sq unbiased": {"score": "grad-sq"},
    "alpha topk": {"selection": "topk", "score": "alpha"},
    "alpha unbiased": {"score": "alpha"},
}
ONE_BATCH = ("dW1", "dW2", "dX", "dalpha", "dlogits")
MEAN = ("dW1", "dW2", "dWr")


def main() -> None:
    """Train, record, and print every table."""
    options = parse()
    print(f"`python -m benchmarks.gradient_error {' '.join(sys.argv[1:])}`\n", flush=True)
    pool = Pool(1)
    try:
        recorded = pool(record, flags(options), options.steps, options.batches, limit_s=3600)[0]
    finally:
        pool.close()
    for step, batches in zip(options.steps, recorded, strict=True):
        tokens, experts = batches[0][0].map_TE.shape
        print(f"## After {step} steps: {tokens} tokens, {experts} experts, retention {options.retention}\n")
        by_layer = list(zip(*batches, strict=True))
        exact = [[gradients(batch, 1.0, {}) for batch in layer] for layer in by_layer]
        print(policy_table(by_layer, exact, options), router_table(by_layer, exact, options), sep="\n")
        first = batches[0]
        print(probe_table(by_layer, exact, options))
        print("Mean rows for dropped pairs\n\n" + markdown(*centroid_table(by_layer, exact, options.retention, error)))
        print(draw_table(first, SWIGLU, Fraction(str(options.retention))))
        print(ranking_table(first, SWIGLU, Fraction(str(options.retention))), flush=True)


def parse() -> argparse.Namespace:
    """Length of training, what to record, and what to drop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path, help="prefix of a byte-level indexed dataset")
    parser.add_argument("--steps", type=int, nargs="+", default=[40, 300], help="when to record")
    parser.add_argument("--batches", type=int, default=16, help="microbatches to record")
    parser.add_argument("--draws", type=int, default=32, help="draws of one microbatch to average")
    parser.add_argument("--retention", type=float, default=0.8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def flags(options: argparse.Namespace) -> list[str]:
    """Megatron's flags: the model of ``benchmarks/from_scratch.py``, with data for the pauses too."""
    last = options.steps[-1]
    return from_scratch.flags(
        "gradient_error",
        options.data,
        steps=last,
        lr=options.lr,
        seed=options.seed,
        train_iters=last + len(options.steps) * options.batches + 1,
        lr_decay_iters=last,
    )


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative squared Frobenius error."""
    return ((got - exact).square().sum() / exact.square().sum()).item()


def mean(values: list[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def average(many: list[Gradients]) -> Gradients:
    """Mean of each gradient."""
    return {name: torch.stack([one[name] for one in many]).mean(0) for name in many[0]}


def errors(got: list[list[Gradients]], exact: list[list[Gradients]], names: Sequence[str]) -> list[float]:
    """Mean over layers and microbatches of the error of each named gradient."""
    pairs = [pair for gs, es in zip(got, exact, strict=True) for pair in zip(gs, es, strict=True)]
    return [mean([error(g[name], e[name]) for g, e in pairs]) for name in names]


def policy_table(by_layer: list[Any], exact: list[list[Gradients]], options: argparse.Namespace) -> str:
    """Errors of one microbatch, of the mean over all microbatches, and of the mean over draws of one."""
    lines = []
    for name, lrm in POLICIES.items():
        got = [[gradients(b, options.retention, lrm, draw) for draw, b in enumerate(layer)] for layer in by_layer]
        of_mean = errors([[average(gs)] for gs in got], [[average(es)] for es in exact], MEAN)
        repeats = 1 if lrm.get("selection") == "topk" else options.draws
        drawn = [
            [average([gradients(layer[0], options.retention, lrm, draw) for draw in range(repeats)])]
            for layer in by_layer
        ]
        of_draws = errors(drawn, [es[:1] for es in exact], ("dW2", "dX"))
        lines.append([name, *errors(got, exact, ONE_BATCH), *of_mean, *of_draws])
    titles = ["policy", *ONE_BATCH]
    titles += [f"{n}, mean of {options.batches} batches" for n in MEAN]
    titles += [f"{n}, mean of {options.draws} draws of one" for n in ("dW2", "dX")]
    return "Error of each policy\n\n" + markdown(titles, lines)


def router_table(by_layer: list[Any], exact: list[list[Gradients]], options: argparse.Namespace) -> str:
    """Errors of the combine weights' gradients under each treatment of dropped pairs."""
    lines = []
    for name, (lrm, treat) in ROUTER.items():
        got = [[gradients(b, options.retention, lrm, draw) for draw, b in enumerate(layer)] for layer in by_layer]
        if treat is not None:
            got = [
                [router_gradients(b, treat(b, g, e)) for b, g, e in zip(layer, gs, es, strict=True)]
                for layer, gs, es in zip(by_layer, got, exact, strict=True)
            ]
        of_mean = errors([[average(gs)] for gs in got], [[average(es)] for es in exact], ("dWr",))
        lines.append([name, *errors(got, exact, ("dalpha", "dlogits", "dWr")), *of_mean])
    titles = ["selection, router", "dalpha", "dlogits", "dWr", f"dWr, mean of {options.batches} batches"]
    return "Error of the router's gradients\n\n" + markdown(titles, lines)


def unweighted(batch: LayerBatch, got: Gradients, exact: Gradients) -> torch.Tensor:
    """Kept pairs' own dalpha, dropped pairs' 0."""
    return exact["dalpha"] * (got["weight"] > 0)


def calibrated(batch: LayerBatch, got: Gradients, exact: Gradients) -> torch.Tensor:
    """Weighted as with drop, plus the token's missing <g, o> - sum alpha dalpha, shared by the variance of each pair.

    Unbiased, because the shares (1/pi - 1) R of a token do not depend on the draw.
    """
    share_TE = pair_variance(batch, SWIGLU, Fraction(str(got["retention"].item()))).float()
    dalpha_TE = got["weight"] * exact["dalpha"]
    missing_T1 = (batch.probs_TE * (exact["dalpha"] - dalpha_TE)).sum(1, keepdim=True)
    part_TE = share_TE / share_TE.sum(1, keepdim=True) / batch.probs_TE
    return dalpha_TE + (missing_T1 * part_TE).where(share_TE > 0, 0.0)


ROUTER: dict[str, tuple[dict[str, Any], Callable[..., torch.Tensor] | None]] = {
    "unbiased, drop, weighted": ({}, None),
    "unbiased, drop, unweighted": ({}, unweighted),
    "unbiased, baseline": ({"router_grad": "baseline"}, None),
    "unbiased, calibrated": ({}, calibrated),
    "random, drop, weighted": ({"score": "random"}, None),
    "random, baseline": ({"score": "random", "router_grad": "baseline"}, None),
    "topk, drop": ({"selection": "topk"}, None),
    "topk, baseline": ({"selection": "topk", "router_grad": "baseline"}, None),
}


def probe_table(by_layer: list[Any], exact: list[list[Gradients]], options: argparse.Namespace) -> str:
    """What a probe reports, whether topk's bias is what kappa says, and from which kappa on topk is advised against.

    Of topk's squared error a share of ((kappa - 1) + 1/n) / kappa should be left in the mean of n microbatches.
    """
    lines = []
    for layer, es in zip(by_layer, exact, strict=True):
        probes = torch.tensor([probe(batch, options.retention) for batch in layer], dtype=torch.float64)
        sums = dict(zip(PROBE_SUMS, probes.sum(0).tolist(), strict=True))
        off = [
            gradients(batch, options.retention, {"selection": "topk"})["dW2"] - e["dW2"]
            for batch, e in zip(layer, es, strict=True)
        ]
        n = len(off)
        left = torch.stack(off).mean(0).square().sum() / mean([x.square().sum().item() for x in off])
        kappa, rest = sums["bias"] / sums["dropped"], sums["variance"] / sums["dropped"]
        figures = [kappa, sums["dropped"] / sums["mass"], sums["variance"] / sums["mass"]]
        figures += [((kappa - 1) + 1 / n) / kappa, left.item(), 1 + (rest - 1) / MOMENTUM_STEPS]
        lines.append([str(layer[0].layer), *figures])
    titles = ["layer", "kappa", "topk_dropped_mass", "unbiased_variance"]
    titles += [f"error left in the mean of {len(es)} batches, from kappa", "the same, measured"]
    titles.append(f"kappa from which topk costs more over {MOMENTUM_STEPS} gradients")
    return "Bias of topk beside the noise of unbiased\n\n" + markdown(titles, lines)


def probe(batch: LayerBatch, retention: float) -> list[float]:
    """``PROBE_SUMS`` of one microbatch."""
    found: list[float] = []

    def report(kind: str, values: torch.Tensor) -> None:
        if kind == "probe":
            found.extend(values.tolist())

    gradients(batch, retention, {"probe_interval": 1}, report=report)
    return found


def markdown(titles: list[str], lines: list[list[Any]]) -> str:
    """A table; numbers with three significant digits."""
    rows = [titles, ["---"] * len(titles)]
    rows += [[x if isinstance(x, str) else f"{x:.3g}" for x in line] for line in lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


if __name__ == "__main__":
    main()
