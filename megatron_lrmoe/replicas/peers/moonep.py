"""MoonEP: exactly equal rows on all ranks; each rank receives from one donor at most.

Faithful to: the planner of MoonEP (Moonshot AI, 2026; repository MoonEP, torch reference of its planning kernel).
Ranks: the largest surplus hands the rank with the largest deficit that whole deficit, until no surplus is left; a
donor may fall below its capacity and receive later. Experts: a donor serves its largest outstanding receiver from
its largest remaining expert, again and again. All ties go to the lowest index.

``slots`` is not honoured. A rank receives from one donor only, so it holds at most as many replicas as that donor
has masters (E / R). MoonEP pushes weights of as many into slots and reads any others from the donor's memory as it
computes; both are replicas here.

Simplified: MoonEP wants equally many rows from all sources, so a rank's capacity is exactly theirs. Here the
capacity is the mean, rounded up for as many of the fullest ranks as needed. It pads each expert's rows to a
multiple (128); this does not.
"""

import numpy as np

from megatron_lrmoe.recalibration.balance import per_rank
from megatron_lrmoe.replicas.peers.finish import Placed, rows_at
from megatron_lrmoe.replicas.plan import IntArray


def place(loads_SE: IntArray, owner_E: IntArray, slots: int) -> Placed:
    """Every rank computes the mean, to within one row.

    Args:
        loads_SE: (S, E) routed rows.
        owner_E: (E,) rank of each master.
        slots: not used.
    """
    ranks = len(loads_SE)
    load_E = loads_SE.sum(axis=0)
    rows_ER = rows_at(owner_E, load_E, ranks)
    moved_RR = rank_moves(per_rank(load_E, owner_E, ranks))
    for donor in np.flatnonzero(moved_RR.any(axis=1)):
        experts = np.flatnonzero(owner_E == donor)
        left_e, due_R = load_E[experts].copy(), moved_RR[donor].copy()
        while due_R.any():
            receiver, most = due_R.argmax(), left_e.argmax()
            take = min(due_R[receiver], left_e[most])
            rows_ER[experts[most], receiver] += take
            rows_ER[experts[most], donor] -= take
            left_e[most] -= take
            due_R[receiver] -= take
    return Placed(rows_ER, owner_E)


def rank_moves(rows_R: IntArray) -> IntArray:
    """(R, R) rows that each donor hands to each receiver, which make all ranks equal to within one row.

    Args:
        rows_R: rows of each rank before.
    """
    ranks = len(rows_R)
    mean, fuller = divmod(int(rows_R.sum()), ranks)
    surplus_R = rows_R - mean
    surplus_R[np.argsort(-rows_R, kind="stable")[:fuller]] -= 1
    moved_RR = np.zeros((ranks, ranks), np.int64)
    while surplus_R.max() > 0:
        donor, receiver = surplus_R.argmax(), surplus_R.argmin()
        moved_RR[donor, receiver] = -surplus_R[receiver]
        surplus_R[donor] += surplus_R[receiver]
        surplus_R[receiver] = 0
    return moved_RR
