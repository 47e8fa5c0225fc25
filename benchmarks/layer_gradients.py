"""Gradients of one recorded layer, by the plugin's own stages on one process."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.recorded_layers import LayerBatch
from megatron_lrmoe.compute.activation import Activation
from megatron_lrmoe.compute.compaction import add_rows
from megatron_lrmoe.compute.experts import ExpertWeights, expert_mlp
from megatron_lrmoe.compute.flow import PairFlow
from megatron_lrmoe.compute.stage import OutputStage, Stage
from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.pairs import DrawKey
from megatron_lrmoe.recalibration.plan import KeepPlan

SWIGLU = Activation(F.silu, gated=True)
Gradients = dict[str, torch.Tensor]


def gradients(
    batch: LayerBatch, retention: float, lrm: dict[str, Any], draw: int = 0, report: Callable[..., None] | None = None
) -> Gradients:
    """Every gradient of one layer on one microbatch, by the plugin's stages; the pairs' 'weight', and 'retention'.

    Args:
        batch: recorded.
        retention: share to keep; 1 gives the exact gradients.
        lrm: other fields of LrmConfig.
        draw: number of the random draw.
        report: as PairFlow's.
    """
    config = LrmConfig(retention=retention, **lrm)
    key = DrawKey(seed=1, iteration=draw, microbatch=0, layer=batch.layer)
    loads = [batch.map_TE.sum(0).tolist()]
    flow = PairFlow(None, report)  # type: ignore[arg-type]  # a single rank exchanges nothing
    flow.settle(KeepPlan(config, key, config.retention_fraction, loads, rank=0), batch.map_TE)
    weight_TE = torch.zeros(batch.map_TE.shape)

    def unpermute_backward(*rows_TD: torch.Tensor) -> Any:
        result = flow.unpermute_backward(*rows_TD)
        assert flow.sent is not None
        weight_TE[flow.token_P[flow.sent.rows_M], flow.expert_P[flow.sent.rows_M]] = flow.sent.weight_M
        return result

    x_TD, probs_TE = batch.x_TD.clone().requires_grad_(), batch.probs_TE.clone().requires_grad_()
    fc1, fc2 = ([torch.nn.Parameter(w.clone()) for w in stack] for stack in (batch.fc1, batch.fc2))
    _layer(flow, x_TD, probs_TE, ExpertWeights(fc1, fc2), unpermute_backward).backward(batch.g_TD)
    found = {"dX": _gradient(x_TD)}
    found |= {name: torch.stack([_gradient(w) for w in weights]) for name, weights in (("dW1", fc1), ("dW2", fc2))}
    found |= {"weight": weight_TE, "retention": torch.tensor(retention, dtype=torch.float64)}
    return found | router_gradients(batch, _gradient(probs_TE))


def router_gradients(batch: LayerBatch, dalpha_TE: torch.Tensor) -> Gradients:
    """From the combine weights' gradients to those of the logits and of the router's weight."""
    dlogits_TE = batch.probs_TE * (dalpha_TE - (batch.probs_TE * dalpha_TE).sum(1, keepdim=True))
    return {"dalpha": dalpha_TE, "dlogits": dlogits_TE, "dWr": dlogits_TE.t() @ batch.x_TD}


def _layer(
    flow: PairFlow,
    x_TD: torch.Tensor,
    probs_TE: torch.Tensor,
    weights: ExpertWeights,
    last_backward: Callable[..., Any],
) -> torch.Tensor:
    """The layer's stages as the dispatcher strings them together."""
    x_PD, alpha_P = Stage.apply(
        lambda x, probs: (x[flow.token_P], probs[flow.token_P, flow.expert_P]), flow.permute_backward, x_TD, probs_TE
    )
    flow.attach_alpha(alpha_P)
    x_ND, alpha_N = Stage.apply(lambda x, a: (x.clone(), a.clone()), flow.sort_backward, x_PD, alpha_P)
    y_ND = expert_mlp(x_ND, alpha_N, weights, SWIGLU, flow, "loop")
    flow.share_norms()
    y_PD = Stage.apply(torch.clone, flow.unsort_backward, y_ND)
    stage = OutputStage if flow.plan.config.router_grad == "baseline" else Stage
    return stage.apply(lambda y: add_rows(y, flow.token_P, x_TD.shape[0]), last_backward, y_PD)


def _gradient(x: torch.Tensor) -> torch.Tensor:
    assert x.grad is not None
    return x.grad
