"""FasterMoE: broadcast the hottest experts to all ranks, while that pays.

Faithful to: "FasterMoE: Modeling and Optimizing Training of Large-Scale Dynamic Pre-Trained Models" (PPoPP 2022), the
shadowing policy of repository laekov/fastmoe. With B rows at the largest expert that is not shadowed and n shadowed
ones, a layer is taken to last 3 B row_flops / flops + 4 B row_bytes / bandwidth + n expert_bytes / bandwidth. The
hottest expert is shadowed as long as that falls. A shadowed expert is on every rank that has rows for it, and each
rank computes its own. Masters do not move.

``slots`` is not honoured: a shadowed expert takes a slot on every rank. The cost model counts the rows of experts, not
of ranks, so it can leave ranks with several warm experts as they are; that is the policy. A source without rows of a
shadowed expert would still receive its weights; here it is no instance.
"""

from dataclasses import dataclass

import numpy as np

from megatron_lrmoe.replicas.peers.finish import Placed, check_option, rows_at
from megatron_lrmoe.replicas.plan import IntArray


@dataclass(frozen=True, kw_only=True)
class FasterMoeCost:
    """Constants of the cost model; defaults as in the repository (two-layer fp32 experts, 50 Gb/s, 11.5 TFLOP/s).

    Raises:
        ValueError: a value that is not above 0.
    """

    hidden: int = 2048
    """D, hidden size of a token."""
    width: int = 4096
    """F, width of an expert."""
    value_bytes: int = 4
    """Bytes of a weight and of an activation."""
    matrices: int = 2
    """Weight matrices of D x F values: 2, or 3 with a gated activation."""
    bandwidth: float = 50e9 / 8
    """Bytes per second that a rank sends."""
    flops: float = 11.5e12
    """Floating-point operations per second of an expert's matrix products."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_option(name, value, "a number > 0", value > 0)

    @property
    def row_seconds(self) -> float:
        """Time of a row of the largest expert: forward and twice as much in backward, and four exchanges."""
        compute = 2 * self.matrices * self.hidden * self.width / self.flops
        send = self.hidden * self.value_bytes / self.bandwidth
        return 3 * compute + 4 * send

    @property
    def expert_seconds(self) -> float:
        """Time to broadcast an expert's weights, as the repository counts it: once."""
        return self.matrices * self.hidden * self.width * self.value_bytes / self.bandwidth


DEFAULTS = FasterMoeCost()


def place(loads_SE: IntArray, owner_E: IntArray, slots: int, options: FasterMoeCost = DEFAULTS) -> Placed:
    """Shadowed experts where their rows come from, the others at their owners.

    Args:
        loads_SE: (S, E) routed rows.
        owner_E: (E,) rank of each master.
        slots: not used.
        options: constants of the cost model.
    """
    load_E = loads_SE.sum(axis=0)
    rows_ER = rows_at(owner_E, load_E, len(loads_SE))
    shadowed = shadowed_experts(load_E, options)
    rows_ER[shadowed] = loads_SE.T[shadowed]
    return Placed(rows_ER, owner_E)


def shadowed_experts(load_E: IntArray, cost: FasterMoeCost) -> IntArray:
    """Experts to broadcast, hottest first.

    Args:
        load_E: rows of each expert.
        cost: constants of the cost model.
    """
    order = np.argsort(-load_E, kind="stable")
    best = float("inf")
    for shadowed, expert in enumerate(order):
        seconds = cost.row_seconds * int(load_E[expert]) + cost.expert_seconds * shadowed
        if seconds >= best:
            return order[: shadowed - 1]
        best = seconds
    return order[: max(len(order) - 1, 0)]
