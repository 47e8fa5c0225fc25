"""LLEP: each expert spills what does not fit at home to the least loaded rank.

Faithful to: "Least-Loaded Expert Parallelism" (arXiv 2601.17111; repository SalesforceAIResearch/LeastLoadedEP).
Experts from the largest on: home keeps what fits below alpha times the mean beside its own experts that are yet to
come; the rest goes, in pieces, to the rank with the fewest rows, those of its own experts to come included. A piece
of fewer than ``min_rows`` rows is not made unless it is the last. Where nothing fits, the rest is forced onto the
least loaded other rank. Masters do not move.

``slots`` is not honoured: LLEP has no limit. Simplified: the least loaded rank is looked for anew for each piece; the
code does not do so where home has no room at all, which matters only once all ranks are full. A second piece of an
expert on one rank is merged with the first. The code's own default of alpha is 1.1.
"""

from dataclasses import dataclass
from fractions import Fraction

from megatron_lrmoe.recalibration.balance import per_rank
from megatron_lrmoe.replicas.peers.finish import Placed, check_option, rows_at
from megatron_lrmoe.replicas.plan import IntArray


@dataclass(frozen=True, kw_only=True)
class LlepOptions:
    """Constants of LLEP.

    Raises:
        ValueError: a value that is not allowed.
    """

    alpha: Fraction = Fraction(1)
    """Rows that a rank may take, times the mean."""
    min_rows: int = 1024
    """Fewest rows of a piece that is not the last."""
    skip_below: Fraction = Fraction(0)
    """No replicas while max/mean is below this; 0 to plan always. The code's comments name 1.3."""

    def __post_init__(self) -> None:
        check_option("alpha", self.alpha, "a number > 0", self.alpha > 0)
        check_option("min_rows", self.min_rows, "a whole number >= 0", self.min_rows >= 0)


DEFAULTS = LlepOptions()


def place(loads_SE: IntArray, owner_E: IntArray, slots: int, options: LlepOptions = DEFAULTS) -> Placed:
    """Least loaded ranks take what overloaded ones cannot.

    Args:
        loads_SE: (S, E) routed rows.
        owner_E: (E,) rank of each master.
        slots: not used.
        options: constants.
    """
    ranks = len(loads_SE)
    load_E = loads_SE.sum(axis=0)
    load_R = per_rank(load_E, owner_E, ranks).tolist()
    if max(load_R) * ranks < options.skip_below * sum(load_R):
        return Placed(rows_at(owner_E, load_E, ranks), owner_E)
    full = max(1, int(options.alpha * (sum(load_R) // ranks)) or sum(load_R))
    rows_ER = rows_at(owner_E, load_E * 0, ranks)
    for e in sorted(range(len(load_E)), key=lambda e: -int(load_E[e])):
        home, load = int(owner_E[e]), int(load_E[e])
        load_R[home] -= load
        stays = load if ranks == 1 else min(load, max(0, full - load_R[home]))
        rows_ER[e, home] = stays
        load_R[home] += stays
        for rank, rows in _pieces(load - stays, home, load_R, full, options.min_rows):
            rows_ER[e, rank] += rows
    return Placed(rows_ER, owner_E)


def _pieces(rows: int, home: int, load_R: list[int], full: int, min_rows: int) -> list[tuple[int, int]]:
    """(rank, rows) of each piece of a spill; ``load_R`` grows by them."""
    pieces = []
    while rows > 0:
        rank = min((r for r in range(len(load_R)) if r != home), key=load_R.__getitem__)
        free = full - load_R[rank]
        # The least loaded rank has the most room: if its piece is too small, so is any other.
        take = min(rows, free) if free > 0 and (free >= min_rows or free >= rows) else rows
        pieces.append((rank, take))
        load_R[rank] += take
        rows -= take
    return pieces
