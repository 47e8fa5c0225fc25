"""Mean rows that stand for dropped pairs in the weight gradients: an estimate the plugin does not make.

An expert's uncertain pairs (topk's dropped ones; those of probability below 1 in a draw) fall into buckets by the
signs of their tokens' products with fixed random vectors. A bucket gives one pseudo-row with the means of x,
alpha * g and phi, weighted by n_b - W_b: its number of pairs less the sum of the weights of those kept.

- topk keeps none of them, so the weight is n_b: mean rows in the place of the dropped ones. What stays missing is
  the covariance within buckets.
- A draw stays unbiased, because E[W_b] = n_b: the kept rows' deviations from their bucket's product of means are
  weighted by 1/pi, and the products are added in full (a control variate).

dX and dalpha gain nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.layer_gradients import SWIGLU, Gradients, gradients
from benchmarks.recorded_layers import LayerBatch

SELECTIONS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "topk": ({"selection": "topk"}, (1, 8, 32)),
    "unbiased": ({}, (8, 32)),
}
LARGE = 16_384
"""Rows of an expert for which the share of pseudo-rows is printed too."""


def bucket_codes(x_TD: torch.Tensor, buckets: int) -> torch.Tensor:
    """(T,) bucket of each token: one bit for the sign of the product with each random vector.

    Rows of one token have one code wherever it is computed; a code of more buckets refines one of fewer.

    Raises:
        ValueError: buckets not a power of two.
    """
    if buckets < 1 or buckets & (buckets - 1):
        raise ValueError(f"buckets must be a power of two, found {buckets}")
    bits = buckets.bit_length() - 1
    normal_bD = torch.randn(bits, x_TD.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positive_Tb = (x_TD.double() @ normal_bD.t() > 0).long()
    return (positive_Tb << torch.arange(bits)).sum(1)


@dataclass(frozen=True)
class Centroids:
    """Means of one expert's rows by bucket, fp64; 0 for an empty bucket.

    Args:
        count_B: rows of each bucket.
        x_BD, ag_BD, phi_BF: means of tokens, of combine weight times output gradient, and of the activation.
    """

    count_B: torch.Tensor
    x_BD: torch.Tensor
    ag_BD: torch.Tensor
    phi_BF: torch.Tensor

    def fc2_gradient(self, weight_B: torch.Tensor) -> torch.Tensor:
        """(D, F) sum of weighted products of the means."""
        return (weight_B[:, None] * self.ag_BD).t() @ self.phi_BF

    def fc1_gradient(self, weight_B: torch.Tensor, fc1: torch.Tensor, fc2: torch.Tensor) -> torch.Tensor:
        """(G, D) the same for fc1: the mean of dz is not known, so the activation runs backward on the mean row.

        Args:
            weight_B: of each bucket.
            fc1: (G, D) weight of the expert.
            fc2: (D, F) likewise.
        """
        ones_B = torch.ones_like(weight_B)
        _, dz_BG, _ = SWIGLU.backward(self.x_BD @ fc1.double().t(), ones_B, self.ag_BD @ fc2.double())
        return (weight_B[:, None] * dz_BG).t() @ self.x_BD


def centroids(batch: LayerBatch, expert: int, token_n: torch.Tensor, code_n: torch.Tensor, buckets: int) -> Centroids:
    """Of the expert's pairs with these tokens.

    Args:
        batch: recorded.
        expert: number.
        token_n: tokens of the pairs.
        code_n: bucket of each.
        buckets: how many there are.
    """
    x_nD = batch.x_TD[token_n].double()
    ag_nD = batch.probs_TE[token_n, expert, None].double() * batch.g_TD[token_n].double()
    phi_nF = SWIGLU(x_nD @ batch.fc1[expert].double().t())
    count_B = torch.bincount(code_n, minlength=buckets).double()
    means = [
        torch.zeros(buckets, rows.shape[1], dtype=torch.float64).index_add(0, code_n, rows)
        / count_B.clamp_min(1)[:, None]
        for rows in (x_nD, ag_nD, phi_nF)
    ]
    return Centroids(count_B, *means)


def with_centroids(batch: LayerBatch, got: Gradients, code_T: torch.Tensor, buckets: int) -> Gradients:
    """Add the pseudo-rows to dW1 and dW2, and their number as 'pseudo_rows'.

    Args:
        batch: recorded.
        got: gradients of that batch with something dropped.
        code_T: bucket of each token.
        buckets: how many there are.
    """
    dfc1, dfc2, rows = got["dW1"].double(), got["dW2"].double(), 0
    for expert in range(batch.map_TE.shape[1]):
        # A kept row of weight 1 is one that is always kept.
        token_n = (batch.map_TE[:, expert] & (got["weight"][:, expert] != 1)).nonzero().flatten()
        code_n = code_T[token_n]
        means = centroids(batch, expert, token_n, code_n, buckets)
        kept_B = torch.zeros_like(means.count_B).index_add(0, code_n, got["weight"][token_n, expert].double())
        dfc2[expert] += means.fc2_gradient(means.count_B - kept_B)
        dfc1[expert] += means.fc1_gradient(means.count_B - kept_B, batch.fc1[expert], batch.fc2[expert])
        rows += int((means.count_B > 0).sum())
    return got | {"dW1": dfc1, "dW2": dfc2, "pseudo_rows": torch.tensor(rows)}


def joined(batches: Sequence[LayerBatch]) -> LayerBatch:
    """One microbatch of the tokens of several, all of the same layer and weights."""
    rows = {name: torch.cat([getattr(b, name) for b in batches]) for name in ("x_TD", "probs_TE", "map_TE", "g_TD")}
    return LayerBatch(batches[0].layer, **rows, fc1=batches[0].fc1, fc2=batches[0].fc2)


def centroid_table(
    by_layer: Sequence[Sequence[LayerBatch]],
    exact: Sequence[Sequence[Gradients]],
    retention: float,
    error: Callable[[torch.Tensor, torch.Tensor], float],
) -> tuple[list[str], list[list[Any]]]:
    """Titles and lines: errors without and with pseudo-rows, and with as many more rows kept instead.

    Args:
        by_layer: recorded microbatches of each layer.
        exact: their gradients with nothing dropped.
        retention: share to keep.
        error: of a gradient, relative to the exact one.
    """
    layers = list(zip(by_layer, exact, [joined(layer) for layer in by_layer], strict=True))
    lines: list[list[Any]] = []
    for name, (lrm, choices) in SELECTIONS.items():
        most = max(choices)
        variants = [(name, 0, 0), *((f"{name} + {b} centroid{'s' * (b > 1)}", b, 0) for b in choices)]
        for title, buckets, more in [*variants, (f"{name}, {most} more rows per expert kept", 0, most)]:
            of_layers = [_layer_figures(*layer, retention, lrm, buckets, more, error) for layer in layers]
            figures = [sum(column) / len(column) for column in zip(*of_layers, strict=True)]
            lines.append([title, *figures, (buckets + more) / (retention * LARGE)])
    batches = len(by_layer[0])
    titles = ["selection", "dW1", "dW2", "dX", f"dW1, mean of {batches} batches", f"dW2, mean of {batches} batches"]
    titles += [f"{name}, one batch of {batches} times the tokens" for name in ("dW1", "dW2")]
    return [*titles, "added rows over kept rows", f"the same at {LARGE} rows per expert"], lines


def _layer_figures(
    batches: Sequence[LayerBatch],
    exact: Sequence[Gradients],
    large: LayerBatch,
    retention: float,
    lrm: dict[str, Any],
    buckets: int,
    more: int,
    error: Callable[[torch.Tensor, torch.Tensor], float],
) -> list[float]:
    """One layer's figures in the order of the table."""
    found = [estimate(batch, retention, lrm, buckets, more, draw) for draw, batch in enumerate(batches)]
    alone = [[error(f[name], e[name]) for f, e in zip(found, exact, strict=True)] for name in ("dW1", "dW2", "dX")]
    sums, exact_sums = (
        {name: torch.stack([one[name] for one in many]).sum(0) for name in ("dW1", "dW2")} for many in (found, exact)
    )
    together = estimate(large, retention, lrm, buckets, more)
    added = sum(int(f.get("pseudo_rows", more * len(batches[0].fc1))) for f in found)
    kept = retention * sum(int(batch.map_TE.sum()) for batch in batches)
    return [
        *(sum(errors) / len(errors) for errors in alone),
        *(error(sums[name], exact_sums[name]) for name in sums),
        *(error(together[name], exact_sums[name]) for name in exact_sums),
        added / kept,
    ]


def estimate(
    batch: LayerBatch, retention: float, lrm: dict[str, Any], buckets: int = 0, more: int = 0, draw: int = 0
) -> Gradients:
    """Gradients of a batch with pairs dropped, and pseudo-rows added if there are buckets.

    Args:
        batch: recorded.
        retention: share to keep.
        lrm: other fields of LrmConfig.
        buckets: of each expert; 0 adds no pseudo-rows.
        more: rows of an average expert to keep beyond that share.
        draw: number of the random draw.
    """
    kept = retention + more * batch.map_TE.shape[1] / int(batch.map_TE.sum())
    got = gradients(batch, min(kept, 1.0), lrm, draw)
    return with_centroids(batch, got, bucket_codes(batch.x_TD, buckets), buckets) if buckets else got
