"""The way back of one layer call whose dispatcher moves every row: its experts alone are compacted.

The stages of ``compute/flow.py`` make Megatron's all-to-all dispatcher carry kept rows only. The other dispatchers
keep their own backward: gradients of all rows arrive, those of all rows leave. In between, the owner, which has every
row of its experts, chooses by itself; dgrad, activation and wgrad run over kept rows, and dX and dalpha of dropped
rows are zeros. Nothing is exchanged, and as the loads are known in forward nothing waits for the device.
"""

from collections.abc import Callable

import torch

from megatron_lrmoe.compute.bias import BiasProbe
from megatron_lrmoe.compute.compaction import pack_rows, spread_rows, weigh_rows
from megatron_lrmoe.compute.exchange import taken
from megatron_lrmoe.pairs import KeptRows
from megatron_lrmoe.recalibration.plan import KeepPlan, PairFacts
from megatron_lrmoe.recalibration.quality import sums_of_kept
from megatron_lrmoe.recalibration.score import gradient_statistic, row_norm_sq


class LocalFlow:
    """What the experts' forward leaves for their backward; for ``expert_mlp`` it stands in for a PairFlow.

    Args:
        plan: loads and quotas of the call.
        report: as PairFlow's.

    Raises:
        ValueError: the plan's settings need what only a pair's source knows.
    """

    def __init__(self, plan: KeepPlan, report: Callable[[str, torch.Tensor], None] | None = None):
        for name, allowed in (("scope", "expert"), ("router_grad", "drop")):
            if (found := getattr(plan.config, name)) != allowed:
                raise ValueError(f"{name}: found {found!r}, allowed is {allowed!r} where the owners choose alone")
        self.plan, self.report = plan, report
        self.counts_e = plan.counts_e
        self.kept: KeptRows | None = None
        self._chooses_early, self._topk = plan.config.when == "forward", plan.config.selection == "topk"
        self._act_norm_sq: torch.Tensor | None = None
        self._alpha_N: torch.Tensor | None = None
        self._inverse_M: torch.Tensor | None = None

    def attach_experts(self, act_norm_sq_N: torch.Tensor, alpha_N: torch.Tensor) -> KeptRows | None:
        """Told by the experts in forward: squared row norms of fc2's input, and combine weights, (N,) each.

        Returns:
            The rows whose activations are to be saved, where they are chosen now; None for all.
        """
        alpha_N = alpha_N.detach()
        if not self._chooses_early:
            self._act_norm_sq, self._alpha_N = act_norm_sq_N, alpha_N
            return None
        self.kept, self._inverse_M = self.plan.select_in_forward(act_norm_sq_N, alpha_N)
        self._act_norm_sq = act_norm_sq_N[self.kept.rows_M]
        return self.kept

    def take_kept_gradient(self, g_ND: torch.Tensor) -> tuple[KeptRows, torch.Tensor]:
        """Kept rows and their (M, D) gradient, weights already multiplied in.

        Args:
            g_ND: (N, D) gradient of every row, in expert order; left as it is.
        """
        if not self._chooses_early:
            stat_N = gradient_statistic(self.plan.config.score, g_ND)
            facts = PairFacts(stat_N, taken(self._act_norm_sq), self._alpha_N)
            chosen = self.plan.select_as_owner(facts)
            self.kept = chosen.kept
            self._tell("selection", chosen.sums)
            return self.kept, pack_rows(g_ND, self.kept.rows_M, None if self._topk else self.kept.weight_M)
        kept = taken(self.kept)
        g_MD = pack_rows(g_ND, kept.rows_M, None)
        mass_M = row_norm_sq(g_MD) * taken(self._act_norm_sq)
        self._tell("selection", sums_of_kept(mass_M, kept, self._inverse_M, self.plan.config.max_weight))
        return kept, g_MD if self._topk else weigh_rows(g_MD, kept.weight_M)

    def bias_probe(self, g_MD: torch.Tensor) -> BiasProbe | None:
        """In a call that probes, what the experts measure with; its rows are all rows, in expert order."""
        if not self.plan.probes:
            return None
        return BiasProbe(self.plan, row_norm_sq(g_MD) * taken(self._act_norm_sq))

    def give_probe(self, probe: BiasProbe) -> None:
        """From the experts: the probe, with every expert's dropped gradient counted."""
        self._tell("probe", probe.sums)

    def give_row_gradients(
        self, dx_MD: torch.Tensor | None, dalpha_M: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """From the experts: gradients of the kept rows' input and combine weight.

        Returns:
            (N, D) and (N,) for the dispatcher's own backward, zeros where a row was dropped.
        """
        return None if dx_MD is None else self._spread(dx_MD), self._spread(dalpha_M)

    def _spread(self, value_M: torch.Tensor) -> torch.Tensor:
        return spread_rows(value_M, taken(self.kept).rows_M, sum(self.counts_e))

    def _tell(self, kind: str, sums: torch.Tensor) -> None:
        if self.report is not None:
            self.report(kind, sums)
