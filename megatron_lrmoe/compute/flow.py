"""What the stages of one forward call share, so that backward moves and computes kept rows only.

Autograd takes no gradient with fewer rows than its tensor. So compact rows travel in a PairFlow, one object per
forward call that the autograd contexts of all stages hold, and autograd itself is handed a phantom: a stride-0 zero of
the right shape that nobody reads. The stages of a layer, in forward order, and what each does in backward::

    permute      (source)  sum kept dX rows into dX_TD, dalpha into dprobs_TE
    dispatch               send dX rows and dalpha home
    sort         (owner)   bring dX rows and dalpha from expert to wire order
    experts      (owner)   dgrad and wgrad on kept rows                          compute/experts.py
    unsort       (owner)   bring kept g rows from wire to expert order
    combine                send kept g rows to the owners
    unpermute    (source)  score, select, pack the kept rows of g_TD

Between two stages there must be nothing but shape changes: any other operation would read the phantom.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_lrmoe.compute.compaction import (
    add_rows,
    compact_positions,
    pack_rows,
    rows_where,
    wire_of_expert_order,
)
from megatron_lrmoe.pairs import KeptRows
from megatron_lrmoe.recalibration.plan import KeepPlan
from megatron_lrmoe.recalibration.score import row_abs_sum, row_norm_sq
from megatron_lrmoe.recalibration.selection import keep_all


def phantom(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A gradient for autograd to carry that occupies one element and that nobody reads."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


class PairFlow:
    """One layer call's way back; see the module. Made when the call begins, settled when its loads are known.

    Args:
        group: the expert-parallel process group.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.act_norm_sq_N: torch.Tensor | None = None
        self.act_norm_sq_P: torch.Tensor | None = None
        self._reset()

    def _reset(self) -> None:
        self.sent: KeptRows | None = None
        self.kept: KeptRows | None = None
        self.kept_from: list[int] = []
        self.home_M: torch.Tensor | None = None
        self.g_MD: torch.Tensor | None = None
        self.dx_MD: torch.Tensor | None = None
        self.dalpha_M: torch.Tensor | None = None

    def settle(self, plan: KeepPlan, routing_map_TE: torch.Tensor) -> None:
        """Fix loads, quotas and index maps, in forward, before the experts run.

        Args:
            plan: loads and quotas of this call.
            routing_map_TE: (T, E) bool, this rank's routing.
        """
        self.plan = plan
        self.map_shape = routing_map_TE.shape
        self.counts_e = plan.counts_e
        sent_E = plan.loads_SE[plan.rank]
        flat = torch.nonzero_static(routing_map_TE.t(), size=sum(sent_E))
        self.expert_P, self.token_P = flat[:, 0].contiguous(), flat[:, 1].contiguous()
        self.sent_splits = [sum(sent_E[i] for i in plan.experts_of(r)) for r in range(plan.num_ranks)]
        self.received_splits = [sum(loads_e) for loads_e in plan.loads_Se]
        device = routing_map_TE.device
        self.wire_of_N = None if plan.num_ranks == 1 else wire_of_expert_order(plan.loads_Se, device)

    @property
    def experts_compact(self) -> bool:
        """Whether the experts of this call are ours; if not, gradients across them are ordinary dense ones."""
        return self.act_norm_sq_N is not None

    def attach_experts(self, act_norm_sq_N: torch.Tensor) -> None:
        """Told by the experts in forward: (N,) squared row norms of fc2's input. 4 bytes a pair are kept."""
        self.act_norm_sq_N = act_norm_sq_N

    def share_norms(self) -> None:
        """In scope 'source', give each source the norms of its own pairs: one 4-byte-a-pair exchange in forward."""
        if self.experts_compact and self.plan.config.scope == "source":
            self.act_norm_sq_P = self._to_sources(_taken(self.act_norm_sq_N))

    # backward, in the order in which it runs

    def unpermute_backward(self, g_TD: torch.Tensor) -> tuple[None]:
        """Score, select and pack: g_TD becomes kept rows, in this source's wire order."""
        self._reset()
        g_TD = g_TD.reshape(self.map_shape[0], g_TD.shape[-1])
        self._select(g_TD)
        all_ones = self.plan.config.selection == "topk" or not self.experts_compact
        self.g_MD = pack_rows(g_TD, self._token_M, None if all_ones else _taken(self.sent).weight_M)
        return (None,)

    def combine_backward(self, _: torch.Tensor) -> tuple[None]:
        """Send each owner the kept rows of its experts."""
        self.g_MD = self._all_to_all(self.g_MD, _taken(self.sent).counts_e, self.kept_from)
        return (None,)

    def unsort_backward(self, _: torch.Tensor) -> tuple[torch.Tensor | None]:
        """Bring the received rows into expert order, where those of an expert are neighbours."""
        if self.home_M is not None:
            self.g_MD = _taken(self.g_MD).index_select(0, self.home_M)
        if self.experts_compact:
            return (None,)
        dense, self.g_MD = self.g_MD, None
        return (dense,)

    def take_kept_gradient(self) -> tuple[KeptRows, torch.Tensor]:
        """Kept rows of expert order and their (M, D) gradient, weights already multiplied in."""
        g_MD, self.g_MD = _taken(self.g_MD), None
        return _taken(self.kept), g_MD

    def give_row_gradients(self, dx_MD: torch.Tensor | None, dalpha_M: torch.Tensor) -> None:
        """From the experts: gradients of the kept rows' input and combine weight, in expert order."""
        self.dx_MD, self.dalpha_M = dx_MD, dalpha_M

    def sort_backward(self, dx_ND: torch.Tensor, dalpha_N: torch.Tensor) -> tuple[None, None]:
        """Bring rows from expert to wire order; dense ones if they come from experts that are not ours."""
        if not self.experts_compact:
            self.dx_MD, self.dalpha_M = dx_ND, dalpha_N
        if self.home_M is not None:
            self.dx_MD = None if self.dx_MD is None else _scattered(self.dx_MD, self.home_M)
            self.dalpha_M = None if self.dalpha_M is None else _scattered(self.dalpha_M, self.home_M)
        return None, None

    def dispatch_backward(self, *_: torch.Tensor) -> tuple[None, None]:
        """Send dX rows and dalpha of the kept pairs home."""
        if self.dx_MD is not None:
            self.dx_MD = self._all_to_all(self.dx_MD, self.kept_from, _taken(self.sent).counts_e)
        if self.dalpha_M is not None:
            self.dalpha_M = self._all_to_all(self.dalpha_M, self.kept_from, _taken(self.sent).counts_e)
        return None, None

    def permute_backward(self, *_: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Sum the kept dX rows of each token; put dalpha where the router's weight came from.

        Returns:
            dX_TD and dprobs_TE, zero for dropped pairs; None for one that nothing downstream depends on.
        """
        dx_TD = None if self.dx_MD is None else add_rows(self.dx_MD, self._token_M, self.map_shape[0])
        dprobs_TE = None
        if self.dalpha_M is not None:
            dprobs_TE = self.dalpha_M.new_zeros(self.map_shape)
            dprobs_TE[self._token_M, self.expert_P[_taken(self.sent).rows_M]] = self.dalpha_M
        self._reset()
        return dx_TD, dprobs_TE

    # selection

    @property
    def _token_M(self) -> torch.Tensor:
        return self.token_P[_taken(self.sent).rows_M]

    def _select(self, g_TD: torch.Tensor) -> None:
        """Fix ``sent``, what this source keeps by owner, and ``kept``, what this owner keeps by expert."""
        if not self.experts_compact:
            self._keep_everything(g_TD)
            return
        statistic = row_abs_sum if self.plan.config.score == "grad-abs" else row_norm_sq
        stat_P = statistic(g_TD)[self.token_P]
        if self.plan.config.scope == "source":
            self._select_on_source(stat_P)
        else:
            self._select_on_owner(stat_P)

    def _keep_everything(self, g_TD: torch.Tensor) -> None:
        self.sent = keep_all(self.sent_splits, g_TD.device, torch.float32)
        self.kept = keep_all(self.counts_e, g_TD.device, torch.float32)
        self.kept_from = self.received_splits
        self.home_M = self.wire_of_N

    def _select_on_owner(self, stat_P: torch.Tensor) -> None:
        """Scope 'expert': statistics go to the owners, which choose and return each row's weight, 0 if dropped."""
        stat_N = self._to_owners(stat_P)
        kept = self.kept = self.plan.select_as_owner(stat_N, _taken(self.act_norm_sq_N))
        if self.wire_of_N is None:
            self.sent = KeptRows(kept.rows_M, kept.weight_M, (len(kept.rows_M),))
            return
        weight_N = kept.weight_M.new_zeros(len(stat_N)).index_copy_(0, kept.rows_M, kept.weight_M)
        weight_P = self._to_sources(weight_N)
        mask_wire = _scattered(weight_N, self.wire_of_N) > 0
        counts, self.kept_from = self._kept_splits(weight_P > 0, mask_wire)
        rows_M = rows_where(weight_P > 0, sum(counts))
        self.sent = KeptRows(rows_M, weight_P[rows_M], tuple(counts))
        self.home_M = compact_positions(mask_wire, self.wire_of_N[kept.rows_M])

    def _kept_splits(self, mask_P: torch.Tensor, mask_wire: torch.Tensor) -> tuple[list[int], list[int]]:
        """Rows to send and to receive in backward: the one wait for the device that scope 'expert' costs."""
        per_rank = [part.sum() for part in mask_P.split(self.sent_splits)]
        per_rank += [part.sum() for part in mask_wire.split(self.received_splits)]
        counts = torch.stack(per_rank).tolist()
        return counts[: self.plan.num_ranks], counts[self.plan.num_ranks :]

    def _select_on_source(self, stat_P: torch.Tensor) -> None:
        """Scope 'source': each source chooses among its rows and tells the owners which; counts are known."""
        plan = self.plan
        chosen = plan.select_as_source(stat_P, _taken(self.act_norm_sq_P))
        to_owner = [sum(chosen.counts_e[e] for e in plan.experts_of(r)) for r in range(plan.num_ranks)]
        self.sent = KeptRows(chosen.rows_M, chosen.weight_M, tuple(to_owner))
        mine = plan.experts_of(plan.rank)
        self.kept_from = [sum(kept_E[e] for e in mine) for kept_E in plan.kept_SE]
        counts_e = tuple(sum(kept_E[e] for kept_E in plan.kept_SE) for e in mine)
        mask_P = torch.zeros_like(self.token_P, dtype=torch.uint8).index_fill_(0, chosen.rows_M, 1)
        mask_wire = self._all_to_all(mask_P, self.sent_splits, self.received_splits).bool()
        rows_M = rows_where(mask_wire if self.wire_of_N is None else mask_wire[self.wire_of_N], sum(counts_e))
        self.kept = KeptRows(rows_M, torch.ones_like(rows_M, dtype=stat_P.dtype), counts_e)
        if self.wire_of_N is not None:
            self.home_M = compact_positions(mask_wire, self.wire_of_N[rows_M])

    # exchange

    def _to_owners(self, value_P: torch.Tensor) -> torch.Tensor:
        """One scalar per pair, from the sources (wire order) to the owners (expert order)."""
        if self.wire_of_N is None:
            return value_P
        return self._all_to_all(value_P, self.sent_splits, self.received_splits)[self.wire_of_N]

    def _to_sources(self, value_N: torch.Tensor) -> torch.Tensor:
        """One scalar per pair, from the owners (expert order) to the sources (wire order)."""
        if self.wire_of_N is None:
            return value_N
        wire = _scattered(value_N, self.wire_of_N)
        return self._all_to_all(wire, self.received_splits, self.sent_splits)

    def _all_to_all(self, rows: torch.Tensor | None, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        rows = _taken(rows)
        if self.wire_of_N is None:
            return rows
        arrived = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), list(receive), list(send), group=self.group)
        return arrived


class Stage(torch.autograd.Function):
    """One step of the dispatcher: Megatron's own forward, our backward.

    ``Stage.apply(run, back, *inputs)``: ``run(*inputs)`` gives the outputs without recording them, and
    ``back(*grads)`` one gradient per input, where None stands for a phantom. ``back`` belongs to the PairFlow of the
    call, so whatever it needs lives exactly as long as the graph does, however many microbatches are in flight.
    """

    @staticmethod
    def forward(ctx: Any, run: Any, back: Any, *inputs: torch.Tensor) -> Any:
        """Run Megatron's step; autograd does not record inside a Function."""
        ctx.back = back
        ctx.like = [(x.shape, x.dtype, x.device) for x in inputs]
        ctx.set_materialize_grads(False)
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Hand over to the flow."""
        given = zip(ctx.back(*grads), ctx.like, ctx.needs_input_grad[2:], strict=True)
        passed_on = [(phantom(*like) if g is None else g) if needed else None for g, like, needed in given]
        return None, None, *passed_on


def _scattered(value_M: torch.Tensor, index_M: torch.Tensor) -> torch.Tensor:
    """The inverse of ``value[index]`` for a permutation."""
    return torch.empty_like(value_M).index_copy_(0, index_M, value_M)


def _taken[T](value: T | None) -> T:
    """A value that an earlier stage must have left here."""
    if value is None:
        raise RuntimeError("a backward stage of the MoE layer ran before the stage that feeds it")
    return value
