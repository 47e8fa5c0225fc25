"""The benchmark of gradient errors on a small made-up layer: what it compares and what it computes."""

from fractions import Fraction

import pytest
import torch

from benchmarks import gradient_error, pair_statistics
from benchmarks.layer_gradients import SWIGLU, gradients
from benchmarks.recorded_layers import LayerBatch
from megatron_lrmoe.reference import ReferenceLayer
from tests import cases, layers

TOKENS, EXPERTS, HIDDEN, WIDTH = 40, 4, 8, 8
HALF = Fraction(1, 2)


@pytest.fixture(scope="module")
def batch() -> LayerBatch:
    generator = torch.Generator().manual_seed(0)
    routing = cases.route("balanced", TOKENS, EXPERTS, top_k=2)
    shapes = ((TOKENS, HIDDEN), (TOKENS, HIDDEN), (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
    x, g, fc1, fc2 = (torch.randn(shape, generator=generator) for shape in shapes)
    return LayerBatch(1, x, routing.probs_TE, routing.map_TE, g, fc1, fc2)


def test_at_retention_one_gradients_are_the_references(batch):
    found = gradients(batch, 1.0, {})
    reference = ReferenceLayer(batch.fc1, batch.fc2, layers.ACTIVATIONS["swiglu"])
    exact = reference.backward(batch.x_TD, batch.probs_TE, batch.g_TD, batch.map_TE.float())
    for name, expected in (("dW1", exact.dfc1), ("dW2", exact.dfc2), ("dX", exact.dx_TD), ("dalpha", exact.dprobs_TE)):
        assert gradient_error.error(found[name], expected) < 1e-10
    assert torch.equal(found["weight"], batch.map_TE.float())


def test_logits_are_differentiated_through_a_softmax_of_the_chosen(batch):
    found = gradients(batch, 1.0, {})
    logits_TE = batch.probs_TE.log().requires_grad_()
    (expected,) = torch.autograd.grad(logits_TE.softmax(1), logits_TE, found["dalpha"])
    torch.testing.assert_close(found["dlogits"], expected.nan_to_num(), rtol=1e-4, atol=1e-5)


def test_calibrated_is_unbiased_and_exact_in_sum(batch):
    exact = gradients(batch, 1.0, {})
    mean_TE, draws = torch.zeros_like(batch.probs_TE), 25
    for draw in range(draws):
        dalpha_TE = gradient_error.calibrated(batch, gradients(batch, 0.5, {}, draw), exact)
        sums = [(x * batch.probs_TE).sum(1) for x in (dalpha_TE, exact["dalpha"])]
        torch.testing.assert_close(*sums, rtol=1e-3, atol=1e-3)
        mean_TE += dalpha_TE / draws
    one = gradient_error.error(dalpha_TE, exact["dalpha"])
    assert gradient_error.error(mean_TE, exact["dalpha"]) < 5 * one / draws


def test_errors_of_draws_are_those_written_out(batch):
    (expert, *_) = pair_statistics.experts_of(batch, SWIGLU, HALF)
    size_n = expert.fc2_n.sqrt()
    found = pair_statistics.drawn_error(expert.gram_nn, size_n, expert.quota, pair_statistics.ORDERS["token order"])
    gradient_nDF = torch.einsum("nd,nf->ndf", expert.g_nD, expert.a_nF)
    torch.testing.assert_close(gradient_nDF.square().sum((1, 2)), expert.fc2_n)
    total = 0.0
    for draw in range(pair_statistics.DRAWS):
        offset = pair_statistics.CERTAIN // pair_statistics.DRAWS * draw + pair_statistics.CERTAIN // (
            2 * pair_statistics.DRAWS
        )
        kept = pair_statistics.select_unbiased(size_n, [len(size_n)], [expert.quota], [offset])
        drawn = (kept.weight_M[:, None, None] * gradient_nDF[kept.rows_M]).sum(0)
        total += (drawn - gradient_nDF.sum(0)).square().sum().item()
    assert found == pytest.approx(total / pair_statistics.DRAWS, rel=1e-6)


def test_every_order_is_an_order(batch):
    (expert, *_) = pair_statistics.experts_of(batch, SWIGLU, HALF)
    n = len(expert.fc2_n)
    for name, order in pair_statistics.ORDERS.items():
        rows = order(expert.gram_nn).expand(pair_statistics.DRAWS, n)
        assert torch.equal(rows.sort(dim=1).values, torch.arange(n).expand_as(rows)), name


def test_fc1_norms_are_those_of_each_pairs_gradient(batch):
    reference = ReferenceLayer(batch.fc1.double(), batch.fc2.double(), layers.ACTIVATIONS["swiglu"])
    x, probs, g = batch.x_TD.double(), batch.probs_TE.double(), batch.g_TD.double()
    for expert in pair_statistics.experts_of(batch, SWIGLU, HALF)[:2]:
        tokens = batch.map_TE[:, expert.number].nonzero().flatten().tolist()
        for row, t in list(enumerate(tokens))[:3]:
            alone_TE = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64)
            alone_TE[t, expert.number] = 1
            got = reference.backward(x, probs, g, alone_TE)
            assert expert.fc1_n[row].item() == pytest.approx(got.dfc1.square().sum().item())
            assert expert.fc2_n[row].item() == pytest.approx(got.dfc2.square().sum().item())


def test_rank_correlation():
    a_n = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert pair_statistics.spearman(a_n, a_n.exp()) == pytest.approx(1)
    assert pair_statistics.spearman(a_n, -a_n) == pytest.approx(-1)
    assert pair_statistics.spearman(a_n, torch.tensor([2.0, 1.0, 4.0, 3.0])) == pytest.approx(0.6)
