"""Mean rows in the place of dropped pairs: exact and conserved sums, unbiasedness beside a draw, and the table."""

import pytest
import torch

from benchmarks import bucket_centroids, gradient_error
from benchmarks.bucket_centroids import bucket_codes, centroids, estimate, with_centroids
from benchmarks.layer_gradients import gradients
from benchmarks.recorded_layers import LayerBatch
from tests import cases

TOKENS, EXPERTS, HIDDEN, WIDTH = 40, 4, 8, 8
TOPK = {"selection": "topk"}


@pytest.fixture(scope="module")
def batches() -> list[LayerBatch]:
    generator = torch.Generator().manual_seed(0)
    fc1 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator)
    fc2 = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator)
    found = []
    for _ in range(2):
        routing = cases.route("balanced", TOKENS, EXPERTS, top_k=2)
        x, g = torch.randn(2, TOKENS, HIDDEN, generator=generator)
        found.append(LayerBatch(1, x, routing.probs_TE, routing.map_TE, g, fc1, fc2))
    return found


@pytest.mark.parametrize("lrm", [TOPK, {}], ids=["topk", "unbiased"])
def test_a_bucket_for_each_pair_gives_the_exact_gradients(batches, lrm):
    exact = gradients(batches[0], 1.0, {})
    found = with_centroids(batches[0], gradients(batches[0], 0.5, lrm), torch.arange(TOKENS), TOKENS)
    for name in ("dW1", "dW2"):
        assert gradient_error.error(found[name], exact[name]) < 1e-10


def test_one_bucket_adds_the_product_of_means_and_keeps_the_sums(batches):
    batch, got = batches[0], gradients(batches[0], 0.5, TOPK)
    found = estimate(batch, 0.5, TOPK, buckets=1)
    for expert in range(EXPERTS):
        token_n = (batch.map_TE[:, expert] & (got["weight"][:, expert] == 0)).nonzero().flatten()
        ag_nD = (batch.probs_TE[token_n, expert, None] * batch.g_TD[token_n]).double()
        gate_nF, linear_nF = (batch.x_TD[token_n] @ batch.fc1[expert].t()).double().chunk(2, dim=1)
        phi_nF = torch.nn.functional.silu(gate_nF) * linear_nF
        expected = torch.outer(ag_nD.sum(0), phi_nF.sum(0)) / len(token_n)
        torch.testing.assert_close(found["dW2"][expert] - got["dW2"][expert], expected, rtol=1e-4, atol=1e-4)
        means = centroids(batch, expert, token_n, torch.arange(len(token_n)) % 3, 3)
        for mean, rows in ((means.ag_BD, ag_nD), (means.phi_BF, phi_nF), (means.x_BD, batch.x_TD[token_n].double())):
            torch.testing.assert_close((means.count_B[:, None] * mean).sum(0), rows.sum(0), rtol=1e-5, atol=1e-5)
    assert found["pseudo_rows"] == EXPERTS
    assert torch.equal(found["dX"], got["dX"])


def test_beside_a_draw_the_gradients_stay_unbiased(batches):
    batch, draws = batches[0], 200
    exact, code_T = gradients(batch, 1.0, {}), bucket_codes(batch.x_TD, 8)
    found = [with_centroids(batch, gradients(batch, 0.5, {}, draw), code_T, 8) for draw in range(draws)]
    generator = torch.Generator().manual_seed(1)
    for name in ("dW1", "dW2"):
        direction_kV = torch.randn(4, exact[name].numel(), dtype=torch.float64, generator=generator)
        off_dk = torch.stack([(one[name] - exact[name]).flatten() for one in found]) @ direction_kV.t()
        standard_error_k = off_dk.std(0) / draws**0.5
        assert (off_dk.mean(0).abs() < 3 * standard_error_k).all()


def test_codes_of_more_buckets_refine_those_of_fewer():
    x_TD = torch.randn(500, 64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(bucket_codes(x_TD, 1), torch.zeros(500, dtype=torch.long))
    code_T = bucket_codes(x_TD, 32)
    assert sorted(set(code_T.tolist())) == list(range(32))
    assert torch.equal(code_T % 8, bucket_codes(x_TD, 8))
    assert torch.equal(bucket_codes(2 * x_TD[7:9], 32), code_T[7:9])


@pytest.mark.parametrize("buckets", [0, 6, -2])
def test_buckets_are_a_power_of_two(buckets):
    with pytest.raises(ValueError, match=f"power of two, found {buckets}"):
        bucket_codes(torch.zeros(1, 2), buckets)


def test_table_has_the_errors_of_each_selection(batches):
    exact = [[gradients(batch, 1.0, {}) for batch in batches]]
    titles, lines = bucket_centroids.centroid_table([batches], exact, 0.5, gradient_error.error)
    assert [len(line) for line in lines] == [len(titles)] * 9
    by_name = {str(line[0]): line[1:] for line in lines}
    kept = [gradients(batch, 0.5, TOPK) for batch in batches]
    error = gradient_error.error(kept[0]["dW2"] + kept[1]["dW2"], exact[0][0]["dW2"] + exact[0][1]["dW2"])
    assert by_name["topk"][4] == pytest.approx(error, rel=1e-5)
    assert by_name["topk"][7] == 0
    assert by_name["topk + 1 centroid"][2] == by_name["topk"][2]
    assert by_name["topk + 1 centroid"][7] == pytest.approx(EXPERTS / (0.5 * 2 * TOKENS))
    # 32 more rows are more than an expert has here.
    assert max(by_name["topk, 32 more rows per expert kept"][:7]) < 1e-10
