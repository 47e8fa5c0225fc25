"""What the stages of one forward call share, so that backward moves and computes kept rows only.

Autograd takes no gradient with fewer rows than its tensor. So compact rows travel in a PairFlow, one object per
forward call that the autograd contexts of all stages hold, and autograd itself is handed a phantom
(``compute/stage.py``). The stages of a layer, in forward order, and what each does in backward::

    permute      (source)  sum kept dX rows into dX_TD, dalpha into dprobs_TE
    dispatch               send dX rows and dalpha home
    sort         (owner)   bring dX rows and dalpha from expert to wire order
    experts      (owner)   dgrad and wgrad on kept rows                          compute/experts.py
    unsort       (owner)   bring kept g rows from wire to expert order
    combine                send kept g rows to the owners
    unpermute    (source)  score, select, pack the kept rows of g_TD

Between two stages there must be nothing but shape changes: any other operation would read the phantom.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_lrmoe.compute.bias import BiasProbe
from megatron_lrmoe.compute.compaction import add_rows, compact_positions, pack_rows, rows_where, weigh_rows
from megatron_lrmoe.compute.exchange import Exchange, scattered, taken
from megatron_lrmoe.compute.forward_choice import ForwardChoice
from megatron_lrmoe.compute.replicas import Replication
from megatron_lrmoe.compute.reroute import Columns
from megatron_lrmoe.compute.router import dprobs_with_baseline
from megatron_lrmoe.pairs import KeptRows
from megatron_lrmoe.recalibration.plan import Chosen, KeepPlan, PairFacts
from megatron_lrmoe.recalibration.score import gradient_statistic, row_dot, row_norm_sq
from megatron_lrmoe.recalibration.selection import keep_all


class PairFlow:
    """One layer call's way back; see the module. Made when the call begins, settled when its loads are known.

    Args:
        group: the expert-parallel process group.
        report: is given, in backward, what the selection cost (``quality.SELECTION_SUMS``) under the name
            'selection', and of a call that probes ``bias.PROBE_SUMS`` under 'probe'; tensors on the device.
    """

    def __init__(self, group: dist.ProcessGroup, report: Callable[[str, torch.Tensor], None] | None = None):
        self.group, self.report = group, report
        self.act_norm_sq_N: torch.Tensor | None = None
        self.act_norm_sq_P: torch.Tensor | None = None
        self.alpha_N: torch.Tensor | None = None
        self.experts_compact, self.chooses_early = False, False
        self.early: ForwardChoice | None = None
        self.alpha_P: torch.Tensor | None = None
        self.replicas: Replication | None = None
        self.has_backward = True
        self._reset()

    def _reset(self) -> None:
        self.sent: KeptRows | None = None
        self.kept: KeptRows | None = None
        self.kept_from: list[int] = []
        self.home_M: torch.Tensor | None = None
        self.g_MD: torch.Tensor | None = None
        self.dx_MD: torch.Tensor | None = None
        self.dalpha_M: torch.Tensor | None = None
        self.dot_T: torch.Tensor | None = None
        self.rounding = 0.0

    def settle(self, plan: KeepPlan, routing_map: torch.Tensor, columns: Columns | None = None) -> None:
        """Fix loads, quotas and index maps, in forward, before the experts run.

        Args:
            plan: loads and quotas of this call's experts, or of its instances.
            routing_map: this rank's routing, (T, E) bool, or (T, C) with replicas.
            columns: with replicas, the instances.
        """
        self.plan = plan
        self.counts_e, self.chooses_early = plan.counts_e, plan.config.when == "forward"
        flat = torch.nonzero_static(routing_map.t(), size=sum(plan.loads_SE[plan.rank]))
        self.expert_P, self.token_P = flat[:, 0].contiguous(), flat[:, 1].contiguous()
        self.map_shape = routing_map.shape
        if columns is not None:
            expert_C = torch.tensor(columns.expert_C).to(routing_map.device, non_blocking=True)
            self.expert_P = expert_C[self.expert_P]
            self.map_shape = torch.Size((len(routing_map), plan.num_ranks * columns.masters))
        self.exchange = Exchange(self.group, plan, routing_map.device)

    def attach_alpha(self, alpha_P: torch.Tensor) -> None:
        """Told by the source in forward: (P,) combine weights in wire order. 4 bytes a pair are kept."""
        self.alpha_P = alpha_P.detach()

    def attach_experts(self, act_norm_sq_N: torch.Tensor, alpha_N: torch.Tensor) -> KeptRows | None:
        """Told by the experts in forward: squared row norms of fc2's input, and combine weights, (N,) each.

        The norms are 4 bytes a pair; the weights are saved by the experts anyway.

        Returns:
            The rows whose activations are to be saved, where they are chosen now; None for all.
        """
        self.experts_compact = True
        if not self.has_backward:
            return None
        if self.chooses_early:
            self.early = ForwardChoice(self.plan, self.exchange, act_norm_sq_N, alpha_N.detach())
            return self.early.kept
        self.act_norm_sq_N, self.alpha_N = act_norm_sq_N, alpha_N.detach()
        return None

    def share_norms(self) -> None:
        """In scope 'source', give each source the norms of its own pairs: one 4-byte-a-pair exchange in forward."""
        if self.act_norm_sq_N is not None and self.plan.config.scope == "source":
            self.act_norm_sq_P = self.exchange.to_sources(self.act_norm_sq_N)

    def share_choice(self) -> None:
        """Where pairs are chosen in forward, tell each source which of its own: one byte a pair."""
        if self.early is not None:
            self.early.share()

    # backward, in the order in which it runs

    def unpermute_backward(self, g_TD: torch.Tensor, out_TD: torch.Tensor | None = None) -> tuple[None]:
        """Score, select and pack: g_TD becomes kept rows, in this source's wire order.

        Args:
            g_TD: gradient of the summed rows.
            out_TD: the summed rows themselves, where dropped pairs' dalpha comes from the baseline.
        """
        self._reset()
        if self.replicas is not None:
            self.replicas.restore()
        g_TD = g_TD.reshape(self.map_shape[0], g_TD.shape[-1])
        if out_TD is not None:
            self.dot_T = row_dot(g_TD, out_TD.reshape(g_TD.shape))
            self.rounding = torch.finfo(out_TD.dtype).eps
        self._take_up(g_TD, self.token_P)
        return (None,)

    def _take_up(self, g: torch.Tensor, row_P: torch.Tensor | None) -> None:
        """Score, select and pack.

        Args:
            g: gradient rows.
            row_P: which of them is each pair's; None where there is one for each, in wire order.
        """
        self._select(g, row_P)
        sent = taken(self.sent)
        all_ones = self.plan.config.selection == "topk" or not self.experts_compact or self.early is not None
        rows_M = sent.rows_M if row_P is None else row_P[sent.rows_M]
        self.g_MD = pack_rows(g, rows_M, None if all_ones else sent.weight_M)

    def combine_backward(self, _: torch.Tensor) -> tuple[None]:
        """Send each owner the kept rows of its experts."""
        self.g_MD = self.exchange.all_to_all(self.g_MD, taken(self.sent).counts_e, self.kept_from)
        return (None,)

    def unsort_backward(self, _: torch.Tensor) -> tuple[torch.Tensor | None]:
        """Bring the received rows into expert order, where those of an expert are neighbours."""
        if self.home_M is not None:
            self.g_MD = taken(self.g_MD).index_select(0, self.home_M)
        if self.early is not None:
            self.g_MD = self._weighed_late(self.early, taken(self.g_MD))
        if self.experts_compact:
            return (None,)
        dense, self.g_MD = self.g_MD, None
        return (dense,)

    def _weighed_late(self, early: ForwardChoice, g_MD: torch.Tensor) -> torch.Tensor:
        if self.report is not None:
            self.report("selection", early.costs(g_MD))
        return g_MD if self.plan.config.selection == "topk" else weigh_rows(g_MD, early.kept.weight_M)

    def take_kept_gradient(self, _: torch.Tensor) -> tuple[KeptRows, torch.Tensor]:
        """Kept rows of expert order and their (M, D) gradient, weights multiplied in; autograd's is a phantom."""
        g_MD, self.g_MD = taken(self.g_MD), None
        return taken(self.kept), g_MD

    def bias_probe(self, g_MD: torch.Tensor) -> BiasProbe | None:
        """In a call that probes, what the experts measure with; its rows are all rows, in expert order."""
        if not self.plan.probes:
            return None
        norm_sq_N = self.act_norm_sq_N if self.early is None else self.early.act_norm_sq_M
        return BiasProbe(self.plan, row_norm_sq(g_MD) * taken(norm_sq_N))

    def give_probe(self, probe: BiasProbe) -> None:
        """From the experts: the probe, with every expert's dropped gradient counted."""
        if self.report is not None:
            self.report("probe", probe.sums)

    def give_row_gradients(self, dx_MD: torch.Tensor | None, dalpha_M: torch.Tensor) -> tuple[None, None]:
        """From the experts: gradients of the kept rows' input and combine weight, in expert order.

        Returns:
            What autograd is to be handed for them: phantoms.
        """
        if self.early is not None and self.plan.config.router_grad == "baseline":
            # The source, which takes the weights out of dalpha for the baseline, does not have these.
            dalpha_M = (dalpha_M / self.early.kept.weight_M).to(dalpha_M.dtype)
        self.dx_MD, self.dalpha_M = dx_MD, dalpha_M
        return None, None

    def sort_backward(self, dx_ND: torch.Tensor, dalpha_N: torch.Tensor) -> tuple[None, None]:
        """Bring rows from expert to wire order; dense ones if they come from experts that are not ours."""
        if not self.experts_compact:
            self.dx_MD, self.dalpha_M = dx_ND, dalpha_N
        if self.home_M is not None:
            self.dx_MD = None if self.dx_MD is None else scattered(self.dx_MD, self.home_M)
            self.dalpha_M = None if self.dalpha_M is None else scattered(self.dalpha_M, self.home_M)
        return None, None

    def dispatch_backward(self, *_: torch.Tensor) -> tuple[None, None]:
        """Send dX rows and dalpha of the kept pairs home."""
        if self.dx_MD is not None:
            self.dx_MD = self.exchange.all_to_all(self.dx_MD, self.kept_from, taken(self.sent).counts_e)
        if self.dalpha_M is not None:
            self.dalpha_M = self.exchange.all_to_all(self.dalpha_M, self.kept_from, taken(self.sent).counts_e)
        return None, None

    def permute_backward(self, *_: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Sum the kept dX rows of each token; put dalpha where the router's weight came from.

        Returns:
            dX_TD, and dprobs_TE: zero for dropped pairs, or what the baseline gives them. None for one that nothing
            downstream depends on.
        """
        dx_TD = None if self.dx_MD is None else add_rows(self.dx_MD, self._token_M, self.map_shape[0])
        dprobs_TE = None if self.dalpha_M is None else self._dprobs(self.dalpha_M, taken(self.sent))
        self._reset()
        return dx_TD, dprobs_TE

    def _dprobs(self, dalpha_M: torch.Tensor, sent: KeptRows) -> torch.Tensor:
        if self.dot_T is None:
            dprobs_TE = dalpha_M.new_zeros(self.map_shape)
            dprobs_TE[self._token_M, self.expert_P[sent.rows_M]] = dalpha_M
            return dprobs_TE
        pairs, alpha_P = (self.token_P, self.expert_P), taken(self.alpha_P)
        return dprobs_with_baseline(dalpha_M, sent, alpha_P, pairs, self.dot_T, self.map_shape[1], self.rounding)

    # selection

    @property
    def _token_M(self) -> torch.Tensor:
        return self.token_P[taken(self.sent).rows_M]

    def _select(self, g: torch.Tensor, row_P: torch.Tensor | None) -> None:
        """Fix ``sent``, what this source keeps by owner, and ``kept``, what this owner keeps by expert."""
        if not self.experts_compact:
            self._keep_everything(g.device)
            return
        if self.early is not None:
            self.kept, self.home_M = self.early.kept, self.early.home_M
            self.sent, self.kept_from = self.early.route()
            return
        stat_P = gradient_statistic(self.plan.config.score, g)
        if row_P is not None:
            stat_P = stat_P[row_P]
        if self.plan.config.scope == "source":
            self._select_on_source(stat_P)
        else:
            self._select_on_owner(stat_P)

    def _keep_everything(self, device: torch.device) -> None:
        self.sent = keep_all(self.exchange.sent_splits, device, torch.float32)
        self.kept = keep_all(self.counts_e, device, torch.float32)
        self.kept_from = self.exchange.received_splits
        self.home_M = self.exchange.wire_of_N

    def _select_on_owner(self, stat_P: torch.Tensor) -> None:
        """Scope 'expert': statistics go to the owners, which choose and return each row's weight, 0 if dropped."""
        wire_of_N = self.exchange.wire_of_N
        stat_N = self.exchange.to_owners(stat_P)
        facts = PairFacts(stat_N, taken(self.act_norm_sq_N), self.alpha_N)
        kept = self.kept = self._reported(self.plan.select_as_owner(facts))
        if wire_of_N is None:
            self.sent = KeptRows(kept.rows_M, kept.weight_M, (len(kept.rows_M),))
            return
        weight_N = kept.weight_M.new_zeros(len(stat_N)).index_copy_(0, kept.rows_M, kept.weight_M)
        weight_P = self.exchange.to_sources(weight_N)
        mask_wire = scattered(weight_N, wire_of_N) > 0
        counts, self.kept_from = self._kept_splits(weight_P > 0, mask_wire)
        rows_M = rows_where(weight_P > 0, sum(counts))
        self.sent = KeptRows(rows_M, weight_P[rows_M], tuple(counts))
        self.home_M = compact_positions(mask_wire, wire_of_N[kept.rows_M])

    def _reported(self, chosen: Chosen) -> KeptRows:
        if self.report is not None:
            self.report("selection", chosen.sums)
        return chosen.kept

    def _kept_splits(self, mask_P: torch.Tensor, mask_wire: torch.Tensor) -> tuple[list[int], list[int]]:
        """Rows to send and to receive in backward: the one wait for the device that scope 'expert' costs."""
        per_rank = [part.sum() for part in mask_P.split(self.exchange.sent_splits)]
        per_rank += [part.sum() for part in mask_wire.split(self.exchange.received_splits)]
        counts = torch.stack(per_rank).tolist()
        return counts[: self.plan.num_ranks], counts[self.plan.num_ranks :]

    def _select_on_source(self, stat_P: torch.Tensor) -> None:
        """Scope 'source': each source chooses among its rows and tells the owners which; counts are known."""
        plan, exchange, wire_of_N = self.plan, self.exchange, self.exchange.wire_of_N
        facts = PairFacts(stat_P, taken(self.act_norm_sq_P), self.alpha_P)
        chosen = self._reported(plan.select_as_source(facts))
        self.sent = KeptRows(chosen.rows_M, chosen.weight_M, tuple(plan.kept_by_owner(plan.rank)))
        self.kept_from, counts_e = plan.kept_from_sources, tuple(plan.kept_e)
        mask_P = torch.zeros_like(self.token_P, dtype=torch.uint8).index_fill_(0, chosen.rows_M, 1)
        mask_wire = exchange.all_to_all(mask_P, exchange.sent_splits, exchange.received_splits).bool()
        rows_M = rows_where(mask_wire if wire_of_N is None else mask_wire[wire_of_N], sum(counts_e))
        self.kept = KeptRows(rows_M, torch.ones_like(rows_M, dtype=stat_P.dtype), counts_e)
        if wire_of_N is not None:
            self.home_M = compact_positions(mask_wire, wire_of_N[rows_M])
