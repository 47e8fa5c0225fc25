"""From experts to instances: which copy of its expert each routed pair goes to.

An instance is a column of the physical routing map: each rank's own experts, then its replica slots, rank by rank. The
dispatcher moves rows to columns as it would to experts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Columns:
    """The instances of one layer call.

    Args:
        expert_C: expert of each column; an empty slot has the number of its rank's first expert, and no rows.
        rows_SC: pairs that each source sends to each column.
        kept_C: of all of a column's pairs, those that keep their backward.
        masters: columns of a rank that are its own experts; the others are slots.
    """

    expert_C: Sequence[int]
    rows_SC: Sequence[Sequence[int]]
    kept_C: Sequence[int]
    masters: int

    @property
    def per_rank(self) -> int:
        """Columns of one rank."""
        return len(self.expert_C) // len(self.rows_SC)


@dataclass(frozen=True)
class Rerouted:
    """Where a source's pairs go, as the dispatcher wants it.

    Args:
        map_TC: (T, C) bool, the physical routing map.
        token_P, expert_P, column_P: of each pair, by expert, then token.
    """

    map_TC: torch.Tensor
    token_P: torch.Tensor
    expert_P: torch.Tensor
    column_P: torch.Tensor

    def probs(self, probs_TE: torch.Tensor) -> torch.Tensor:
        """(T, C) combine weights of the instances that do the work, zeros elsewhere."""
        probs_TC = probs_TE.new_zeros(self.map_TC.shape)
        probs_TC[self.token_P, self.column_P] = probs_TE[self.token_P, self.expert_P]
        return probs_TC


def reroute(map_TE: torch.Tensor, columns: Columns, source: int, shift: int) -> Rerouted:
    """Send each pair to an instance of its expert, exactly as many to each as planned.

    Which of an expert's pairs go where is spread over the tokens: pair k of n takes place (k * stride + shift) mod n
    of a line on which the instances lie one after the other. A stride without a divisor in common with n meets every
    place once.

    Args:
        map_TE: (T, E) bool, this source's routing.
        columns: of the call; its row for this source sums to the map's for every expert.
        source: this rank's number.
        shift: any whole number, so that the same places do not always go to the same instance.
    """
    num_experts = map_TE.shape[1]
    line_E: list[list[tuple[int, int]]] = [[] for _ in range(num_experts)]
    for column, (expert, rows) in enumerate(zip(columns.expert_C, columns.rows_SC[source], strict=True)):
        if rows:
            line_E[expert].append((column, rows))
    load_E = [sum(rows for _, rows in line) for line in line_E]
    flat = torch.nonzero_static(map_TE.t(), size=sum(load_E), fill_value=-1)
    expert_P, token_P = flat.unbind(1)
    device = map_TE.device
    table = torch.tensor([load_E, [_stride(n) for n in load_E], [shift % max(n, 1) for n in load_E]]).to(device)
    start_E = table[0].cumsum(0) - table[0]
    n_P, stride_P, shift_P = table[:, expert_P]
    first_P = start_E[expert_P]
    place_P = (torch.arange(len(expert_P), device=device) - first_P) * stride_P + shift_P
    line = torch.tensor([part for line in line_E for part in line], dtype=torch.int64).view(-1, 2).to(device)
    column_of_place = torch.repeat_interleave(line[:, 0], line[:, 1], output_size=sum(load_E))
    column_P = column_of_place[first_P + place_P % n_P.clamp_min(1)]
    map_TC = map_TE.new_zeros(len(map_TE), len(columns.expert_C))
    map_TC[token_P, column_P] = True
    return Rerouted(map_TC, token_P, expert_P, column_P)


def _stride(n: int) -> int:
    """A number near n / golden ratio without a divisor in common with n: neighbours come to lie far apart."""
    stride = max(1, round(n * 0.618))
    while math.gcd(stride, n) > 1:
        stride += 1
    return stride
