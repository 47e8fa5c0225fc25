"""Megatron-LM without replicas: each expert's rows are computed by its owner.

Faithful to: Megatron-core, whose releases have no replicas. ``slots`` is not used.
"""

from megatron_lrmoe.replicas.peers.finish import Placed, rows_at
from megatron_lrmoe.replicas.plan import IntArray


def place(loads_SE: IntArray, owner_E: IntArray, slots: int) -> Placed:
    """All rows at their expert's owner.

    Args:
        loads_SE: (S, E) routed rows.
        owner_E: (E,) rank of each master.
        slots: not used.
    """
    return Placed(rows_at(owner_E, loads_SE.sum(axis=0), len(loads_SE)), owner_E)
