"""Recorded pairs: variance of the systematic draw by order of rows, and what the score for fc2 says of fc1."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch

from benchmarks.recorded_layers import LayerBatch
from megatron_lrmoe.compute.activation import Activation
from megatron_lrmoe.recalibration.draw import CERTAIN
from megatron_lrmoe.recalibration.quota import proportional_quota
from megatron_lrmoe.recalibration.selection import inclusion_probabilities, select_topk, select_unbiased

DRAWS = 64


@dataclass(frozen=True)
class ExpertPairs:
    """One expert's pairs in token order, fp64.

    Args:
        number: of the expert.
        x_nD, g_nD: token and output gradient.
        a_nF: fc2 input, combine weight in it.
        dz_nG: gradient of fc1's output.
        quota: rows to keep.
    """

    number: int
    x_nD: torch.Tensor
    g_nD: torch.Tensor
    a_nF: torch.Tensor
    dz_nG: torch.Tensor
    quota: int

    @property
    def fc2_n(self) -> torch.Tensor:
        """Squared norm of each pair's fc2 gradient: R."""
        return self.g_nD.square().sum(1) * self.a_nF.square().sum(1)

    @property
    def fc1_n(self) -> torch.Tensor:
        """Squared norm of each pair's fc1 gradient."""
        return self.x_nD.square().sum(1) * self.dz_nG.square().sum(1)

    @property
    def gram_nn(self) -> torch.Tensor:
        """Inner products of the pairs' fc2 gradients."""
        return (self.g_nD @ self.g_nD.t()) * (self.a_nF @ self.a_nF.t())


def experts_of(batch: LayerBatch, activation: Activation, retention: Fraction) -> list[ExpertPairs]:
    """The experts that drop anything."""
    quotas = proportional_quota(batch.map_TE.sum(0).tolist(), retention)
    found = []
    for e, quota in enumerate(quotas):
        token_n = batch.map_TE[:, e].nonzero().flatten()
        if quota == len(token_n):
            continue
        x, g = batch.x_TD[token_n].double(), batch.g_TD[token_n].double()
        fc1, fc2 = batch.fc1[e].double(), batch.fc2[e].double()
        a, dz, _ = activation.backward(x @ fc1.t(), batch.probs_TE[token_n, e].double(), g @ fc2)
        found.append(ExpertPairs(e, x, g, a, dz, quota))
    return found


def pair_variance(batch: LayerBatch, activation: Activation, retention: Fraction) -> torch.Tensor:
    """(T, E) variance (1/pi - 1) R that the unbiased draw adds by each pair; 0 for certain ones."""
    variance_TE = torch.zeros(batch.map_TE.shape, dtype=torch.float64)
    for expert in experts_of(batch, activation, retention):
        pi_n = _probabilities(expert.fc2_n, expert.quota)
        variance_TE[batch.map_TE[:, expert.number], expert.number] = _added(expert.fc2_n, pi_n)
    return variance_TE


def _probabilities(score_n: torch.Tensor, quota: int) -> torch.Tensor:
    return inclusion_probabilities(score_n.sqrt(), [len(score_n)], [quota]).double() / CERTAIN


def _added(mass_n: torch.Tensor, pi_n: torch.Tensor) -> torch.Tensor:
    return ((1 / pi_n - 1) * mass_n).where(pi_n > 0, 0.0)


def draw_table(layers: list[LayerBatch], activation: Activation, retention: Fraction) -> str:
    """Squared error of the systematic draw's fc2 gradient over Poisson's sum (1/pi - 1) R, by order of rows."""
    rows = ["| layer | " + " | ".join(ORDERS) + " |", "|---" * (len(ORDERS) + 1) + "|"]
    for batch in layers:
        poisson, error = 0.0, dict.fromkeys(ORDERS, 0.0)
        for expert in experts_of(batch, activation, retention):
            gram_nn, size_n = expert.gram_nn, expert.fc2_n.sqrt()
            poisson += _added(expert.fc2_n, _probabilities(expert.fc2_n, expert.quota)).sum().item()
            for name, order in ORDERS.items():
                error[name] += drawn_error(gram_nn, size_n, expert.quota, order)
        rows.append(f"| {batch.layer} | " + " | ".join(f"{error[name] / poisson:.3f}" for name in ORDERS) + " |")
    title = "Variance of the systematic draw over that of independent draws, by order of an expert's rows"
    return f"{title}\n\n" + "\n".join(rows) + "\n"


def drawn_error(
    gram_nn: torch.Tensor, size_n: torch.Tensor, quota: int, order: Callable[[torch.Tensor], torch.Tensor]
) -> float:
    """Mean of the squared norm of (drawn - exact) over evenly spaced offsets."""
    n = len(size_n)
    row_dn = order(gram_nn).expand(DRAWS, n)
    where = [(CERTAIN // DRAWS) * draw + CERTAIN // (2 * DRAWS) for draw in range(DRAWS)]
    drawn = select_unbiased(size_n[row_dn].flatten(), [n] * DRAWS, [quota] * DRAWS, where)
    excess_dn = torch.full((DRAWS, n), -1.0, dtype=torch.float64)
    excess_dn[drawn.rows_M // n, row_dn.flatten()[drawn.rows_M]] += drawn.weight_M
    return ((excess_dn @ gram_nn) * excess_dn).sum(1).mean().item()


def _token_order(gram_nn: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(gram_nn))


def _random_order(gram_nn: torch.Tensor) -> torch.Tensor:
    """Another one for each draw: (d, n)."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(len(gram_nn), generator=generator) for _ in range(DRAWS)])


def _alike_order(gram_nn: torch.Tensor) -> torch.Tensor:
    """By the gradients' coordinate along their leading direction, over their norm."""
    vector_n = torch.ones(len(gram_nn), dtype=torch.float64)
    for _ in range(30):
        vector_n = torch.nn.functional.normalize(gram_nn @ vector_n, dim=0)
    return (vector_n / gram_nn.diagonal().sqrt().clamp_min(1e-300)).argsort()


def _alternating_order(gram_nn: torch.Tensor) -> torch.Tensor:
    """Neighbours from the two halves of the order in which neighbours are alike."""
    alike_n = _alike_order(gram_nn)
    half = len(alike_n) // 2
    interleaved = torch.stack([alike_n[:half], alike_n[half : 2 * half]], 1).flatten()
    return torch.cat([interleaved, alike_n[2 * half :]])


def _halves_shuffled(gram_nn: torch.Tensor) -> torch.Tensor:
    """Neighbours from the two halves as well, but at random within each half."""
    alike_n = _alike_order(gram_nn)
    half = len(alike_n) // 2
    generator = torch.Generator().manual_seed(0)
    orders = []
    for _ in range(DRAWS):
        low, high = (part[torch.randperm(half, generator=generator)] for part in alike_n[: 2 * half].split(half))
        orders.append(torch.cat([torch.stack([low, high], 1).flatten(), alike_n[2 * half :]]))
    return torch.stack(orders)


ORDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "token order": _token_order,
    "random order": _random_order,
    "neighbours alike": _alike_order,
    "alternating": _alternating_order,
    "alternating, shuffled": _halves_shuffled,
}


def ranking_table(layers: list[LayerBatch], activation: Activation, retention: Fraction) -> str:
    """What scores from fc2, fc1 and both keep of each's squared norms, and the noise of draws by their roots."""
    lines = ["| layer | Spearman of fc2 and fc1 norms | score | fc2 mass kept by topk | fc1 mass kept by topk |"]
    lines[0] += " fc2 variance ratio of a draw | fc1 variance ratio of a draw |"
    lines.append("|---" * 7 + "|")
    for batch in layers:
        experts = experts_of(batch, activation, retention)
        rows = sum(len(expert.fc2_n) for expert in experts)
        rank = sum(spearman(expert.fc2_n, expert.fc1_n) * len(expert.fc2_n) for expert in experts) / rows
        for name, score in SCORES.items():
            figures = _kept_and_noise(experts, score)
            lines.append(f"| {batch.layer} | {rank:.3f} | {name} | " + " | ".join(f"{x:.4f}" for x in figures) + " |")
    return "How the score for fc2 serves fc1\n\n" + "\n".join(lines) + "\n"


SCORES: dict[str, Callable[[ExpertPairs], torch.Tensor]] = {
    "fc2": lambda expert: expert.fc2_n,
    "fc1": lambda expert: expert.fc1_n,
    "both": lambda expert: expert.fc2_n + expert.fc1_n,
}


def _kept_and_noise(experts: list[ExpertPairs], score: Callable[[ExpertPairs], torch.Tensor]) -> list[float]:
    mass, kept, noise = torch.zeros(3, 2, dtype=torch.float64)
    for expert in experts:
        value_n = score(expert)
        both_2n = torch.stack([expert.fc2_n, expert.fc1_n])
        rows_M = select_topk(value_n, [len(value_n)], [expert.quota]).rows_M
        pi_n = _probabilities(value_n, expert.quota)
        mass += both_2n.sum(1)
        kept += both_2n[:, rows_M].sum(1)
        noise += _added(both_2n, pi_n).sum(1)
    return [*(kept / mass).tolist(), *(noise / mass).tolist()]


def spearman(a_n: torch.Tensor, b_n: torch.Tensor) -> float:
    """Rank correlation; continuous values, so no ties."""
    ranks = torch.stack([x.argsort().argsort().double() for x in (a_n, b_n)])
    return torch.corrcoef(ranks)[0, 1].item()
