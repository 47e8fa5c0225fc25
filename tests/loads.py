"""Hypothesis strategy of small loads and owner maps, shared by the tests of replicas."""

import numpy as np
from hypothesis import strategies as st

from megatron_lrmoe.replicas.plan import IntArray

MAX_RANKS = 6
MAX_EXPERTS_PER_RANK = 4


@st.composite
def small_loads(draw: st.DrawFn) -> tuple[IntArray, IntArray]:
    """(loads_SE, owner_E) of 1 to 6 ranks with 1 to 4 experts per rank on average.

    Counts are up to 60, now and then up to 5000, and often 0; some sources have nothing; now and then one expert is
    hot. Owners are contiguous blocks, or any map at all, so that a rank may own nothing. Shrinks to zeros.
    """
    ranks = draw(st.integers(1, MAX_RANKS))
    if draw(st.booleans()):
        owner_E = draw(st.lists(st.integers(0, ranks - 1), min_size=ranks, max_size=MAX_EXPERTS_PER_RANK * ranks))
    else:
        owner_E = np.repeat(np.arange(ranks), draw(st.integers(1, MAX_EXPERTS_PER_RANK)))
    experts = len(owner_E)
    most = draw(st.sampled_from([60, 3, 60, 5000]))
    row_E = st.lists(st.just(0) | st.integers(0, most), min_size=experts, max_size=experts)
    loads_SE = np.array([draw(row_E | st.just([0] * experts)) for _ in range(ranks)], np.int64)
    if draw(st.sampled_from([False, False, True])):
        hot_S = st.lists(st.just(0) | st.integers(0, 10 * most), min_size=ranks, max_size=ranks)
        loads_SE[:, draw(st.integers(0, experts - 1))] += np.array(draw(hot_S), np.int64)
    return loads_SE, np.asarray(owner_E, np.int64)
