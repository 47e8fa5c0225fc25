"""Quotas that spare the busiest ranks, in exact integers: the same on every rank.

What every expert keeps at least is its floor, and no policy here goes below it. Letters beside those of
``megatron_lrmoe.pairs``: R ranks, as owners of experts. Arrays are int64.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

JOINT_AIM = Fraction(101, 100)
"""Row limit of the joint policy where none is given, as a multiple of the mean of the routed rows."""


@dataclass(frozen=True)
class RowBytes:
    """Memory of one row in a layer call, in bytes; G is 2F with a gated activation, else F, b the size of a number.

    A routed row saves x (D b), fc1's output (G b), alpha and one norm (4 each), and index maps: its place on the
    wire, its expert and its token (8 each). The last two lie on its source, counted here as if that were the owner.
    So does what the router's baseline keeps: alpha once more, and a token's output over its K pairs (D b / K).

    A kept row holds, from its arrival to the end of the experts' backward, g and dX (2 D b), alpha and dalpha (4
    each), and on both ends its number (8) and weight (4) and its place on the wire (8). On top of that comes the
    larger of

    - the activation's backward, in numbers of c = max(b, 4) bytes: z and dz (2 G), da, silu, phi, dphi and two
      temporaries (6 F), and where b < 4 the b-byte z and da they were made from;
    - the last GEMM: z and dz (2 G b), da and a (2 F b), gathered x and the product before it is copied (2 D b).

    Where pairs are chosen in forward, x, fc1's output, alpha and the norm are saved of kept rows only and are not
    gathered again; each of those then also keeps 1/probability (4). A routed row's source keeps a byte instead.

    This is the grouped back end with SwiGLU; the loop back end, which takes one expert at a time, and other
    activations need no more.

    Args:
        saved: by each routed row, from forward to backward.
        work: by each kept row, at the peak of backward.
    """

    saved: int
    work: int

    @classmethod
    def of(
        cls,
        hidden: int,
        ffn: int,
        gated: bool,
        item: int,
        baseline_top_k: int | None = None,
        chosen_in_forward: bool = False,
    ) -> "RowBytes":
        """Bytes of a row with D = ``hidden``, F = ``ffn``, numbers of ``item`` bytes; K if there is a baseline."""
        fc1 = 2 * ffn if gated else ffn
        exact = max(item, 4)
        activation = (2 * fc1 + 6 * ffn) * exact + ((fc1 + ffn) * item if item < exact else 0)
        gemm = 2 * (hidden + ffn + fc1) * item
        activations = (hidden + fc1) * item + 2 * 4
        saved = 3 * 8 + (1 if chosen_in_forward else activations)
        if baseline_top_k is not None:
            saved += 4 - (-hidden * item // baseline_top_k)
        if chosen_in_forward:
            activation += activations + 4 - fc1 * item
            gemm += activations + 4 - (hidden + fc1) * item
        work = 2 * hidden * item + max(activation, gemm) + 2 * 4 + 2 * (8 + 4) + 8
        return cls(saved, work)

    def row_limit(self, budget: int, rows_R: IntArray) -> IntArray:
        """(R,) kept rows that fit beside what the routed rows save; 0 where those alone fill the budget.

        Args:
            budget: bytes of each rank.
            rows_R: routed rows of each rank.
        """
        return np.maximum(min(budget, 2**62) - rows_R * self.saved, 0) // self.work


def floor_rows(load_E: IntArray, even_E: IntArray, share: Fraction, min_rows: int = 0) -> IntArray:
    """(E,) rows that each expert keeps at least: ceil(share * load), at least 1, at most its proportional quota.

    That upper end keeps the total of the proportional policy within reach of the others.

    Args:
        load_E: rows of each expert.
        even_E: its proportional quota.
        share: in [0, 1], exact.
        min_rows: an expert with no more rows than this keeps them all.
    """
    part, whole = share.numerator, share.denominator
    # A ramp makes long fractions: where 64 bits do not hold the product, Python's integers do.
    exact = np.int64 if int(load_E.max(initial=0)) * whole < 2**62 else object
    share_E = -(-part * load_E.astype(exact) // whole)
    floor_E = np.minimum(even_E, np.maximum(share_E, 1)).astype(np.int64)
    return np.where(load_E <= min_rows, even_E, floor_E)


def joint_limit(rows_R: IntArray) -> IntArray:
    """(R,) row limit of the joint policy where none is given: 1.01 times the mean of the routed rows, rounded up."""
    rows, ranks = int(rows_R.sum()), len(rows_R)
    return np.full(ranks, -(-rows * JOINT_AIM.numerator // (ranks * JOINT_AIM.denominator)), np.int64)


def balanced_quota(load_E: IntArray, floor_E: IntArray, owner_E: IntArray, ranks: int, total: int) -> IntArray:
    """(E,) quotas with a given total whose busiest rank keeps as few rows as floors allow.

    Rank r keeps clamp(L, its floors, its load) rows, with the level L at which the ranks keep ``total``; the rows
    left over at the level go to the lowest ranks, one each. A rank's rows are shared in proportion to load.

    Args:
        load_E: rows of each expert.
        floor_E: at most the load.
        owner_E: rank of each expert.
        ranks: R.
        total: rows to keep; a total below the sum of the floors, or above that of the loads, counts as that sum.

    Raises:
        ValueError: a floor above its load, an owner out of range, or lengths that differ.
    """
    _check(load_E, floor_E, owner_E, ranks)
    kept_R = _levelled(per_rank(floor_E, owner_E, ranks), per_rank(load_E, owner_E, ranks), total)
    return _shared_out(kept_R, load_E, floor_E, owner_E)


def capped_quota(quota_E: IntArray, floor_E: IntArray, owner_E: IntArray, limit_R: IntArray) -> IntArray:
    """(E,) quotas of which no rank keeps more than its limit, or than its floors where they are above the limit.

    The experts of a rank above its limit give up rows in proportion to their quotas. Other ranks keep theirs.

    Args:
        quota_E: quotas to lower.
        floor_E: at most the quota.
        owner_E: rank of each expert.
        limit_R: largest number of kept rows of each rank.

    Raises:
        ValueError: a floor above its quota, an owner out of range, or lengths that differ.
    """
    ranks = len(limit_R)
    _check(quota_E, floor_E, owner_E, ranks)
    within_R = np.maximum(limit_R, per_rank(floor_E, owner_E, ranks))
    kept_R = np.minimum(per_rank(quota_E, owner_E, ranks), within_R)
    return _shared_out(kept_R, quota_E, floor_E, owner_E)


def joint_quotas(
    load_E: IntArray, floor_E: IntArray, owner_E: IntArray, limit_R: IntArray, allowance: int, k: int = 0
) -> IntArray:
    """(E,) quotas that drop rows only on ranks above their limit, none below it, and at most ``allowance`` in all.

    First the k ranks that need to drop fewest are brought exactly to their limits. What is left of the allowance
    goes to the other ranks above theirs, those with most rows first (a level as in ``balanced_quota``). So with
    k = 0 every rank comes to its limit where the allowance suffices, and otherwise the highest ranks are levelled;
    with replicas, other k leave fewer ranks above their limits. Ranks whose floors are above their limits stop at
    the floors and come last among the k.

    Args:
        load_E: rows of each expert.
        floor_E: at most the load.
        owner_E: rank of each expert.
        limit_R: rows each rank may hold.
        allowance: rows that may be dropped in all.
        k: from 0 to the number of ranks whose load is above their limit.

    Raises:
        ValueError: k or the allowance out of range, or what ``balanced_quota`` refuses.
    """
    ranks = len(limit_R)
    _check(load_E, floor_E, owner_E, ranks)
    load_R, floor_R = (per_rank(value_E, owner_E, ranks) for value_E in (load_E, floor_E))
    above = np.flatnonzero(load_R > limit_R)
    if not 0 <= k <= len(above) or allowance < 0:
        raise ValueError(f"found k={k} and allowance={allowance}, allowed are 0 to {len(above)} and >= 0")
    least_R = np.maximum(np.minimum(load_R, limit_R), floor_R)
    drop_R = load_R - least_R
    chosen = above[np.lexsort((drop_R[above], (floor_R > limit_R)[above]))[:k]]
    spent = np.minimum(np.cumsum(drop_R[chosen]), allowance)
    most_R = load_R.copy()
    most_R[chosen] -= np.diff(spent, prepend=0)
    least_R[chosen] = most_R[chosen]
    kept_R = _levelled(least_R, most_R, int(load_R.sum()) - allowance)
    return _shared_out(kept_R, load_E, floor_E, owner_E)


def per_rank(value_n: IntArray, rank_n: IntArray, ranks: int) -> IntArray:
    """(R,) sum of the values of each rank: of its experts, or of its instances.

    Args:
        value_n: rows of each expert or instance.
        rank_n: its rank.
        ranks: R.
    """
    total_R = np.zeros(ranks, np.int64)
    np.add.at(total_R, rank_n, value_n)
    return total_R


def _levelled(low_R: IntArray, high_R: IntArray, total: int) -> IntArray:
    """(R,) clamp(L, low, high) with the level L at which the sum is the total or the nearest possible to it.

    Rows left over at the level go to the lowest of the ranks that have room there, one each.
    """
    total = min(max(total, int(low_R.sum())), int(high_R.sum()))
    points = np.concatenate([low_R, high_R])
    order = np.argsort(points, kind="stable")
    points = points[order]
    # Between one point and the next, this many ranks rise with the level.
    rising = np.cumsum(np.repeat([1, -1], len(low_R))[order])
    rows = low_R.sum() + np.concatenate([[0], np.cumsum(rising[:-1] * np.diff(points))])
    i = np.searchsorted(rows, total, side="right") - 1
    level = points[i] + (total - rows[i]) // max(rising[i], 1)
    kept_R = np.clip(level, low_R, high_R)
    with_room = np.flatnonzero((low_R <= level) & (level < high_R))
    kept_R[with_room[: total - kept_R.sum()]] += 1
    return kept_R


def _shared_out(kept_R: IntArray, most_E: IntArray, floor_E: IntArray, owner_E: IntArray) -> IntArray:
    """(E,) each rank's rows among its experts, in proportion to ``most_E``, from ``floor_E`` to ``most_E`` each.

    What rounding down leaves over goes to the largest remainders, then to the lowest experts.
    """
    ranks = len(kept_R)
    sharing_E = np.ones(len(owner_E), np.bool_)
    rest_R, weight_R = kept_R.copy(), per_rank(most_E, owner_E, ranks)
    while True:
        product_E, weight_E = rest_R[owner_E] * most_E, weight_R[owner_E]
        short = np.flatnonzero(sharing_E & (product_E < floor_E * weight_E))
        if not len(short):
            break
        # An expert whose share is below its floor gets the floor; that lowers the others' shares, so look again.
        sharing_E[short] = False
        rest_R -= per_rank(floor_E[short], owner_E[short], ranks)
        weight_R -= per_rank(most_E[short], owner_E[short], ranks)
    share_E, remainder_E = np.divmod(product_E, np.maximum(weight_E, 1))
    quota_E = np.where(sharing_E, share_E, floor_E)
    left_R = kept_R - per_rank(quota_E, owner_E, ranks)
    # Fewer rows are left over than experts have a remainder, so an expert at its floor, the last here, gets none.
    order = np.lexsort((np.where(sharing_E, -remainder_E, 1), owner_E))
    owners = owner_E[order]
    place = np.arange(len(order)) - np.searchsorted(owners, owners)
    quota_E[order[place < left_R[owners]]] += 1
    return quota_E


def _check(most_E: IntArray, floor_E: IntArray, owner_E: IntArray, ranks: int) -> None:
    if not len(most_E) == len(floor_E) == len(owner_E):
        raise ValueError(
            f"found {len(most_E)} rows, {len(floor_E)} floors and {len(owner_E)} owners, allowed is one each"
        )
    for e in np.flatnonzero((floor_E < 0) | (floor_E > most_E))[:1]:
        raise ValueError(f"floor_E[{e}]: found {floor_E[e]}, allowed is 0 to {most_E[e]}")
    for e in np.flatnonzero((owner_E < 0) | (owner_E >= ranks))[:1]:
        raise ValueError(f"owner_E[{e}]: found {owner_E[e]}, allowed are ranks 0 to {ranks - 1}")
