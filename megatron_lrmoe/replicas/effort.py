"""How long the planner's solver looks; shared by its readable and its compiled form."""

from typing import NamedTuple


class Effort(NamedTuple):
    """Bounds of one search.

    Args:
        budget: steps of each depth-first search.
        tries: groups that may fail to settle, with few ranks.
        attempts: partings looked at, with many ranks.
    """

    budget: int
    tries: int
    attempts: int


FAST = Effort(budget=200, tries=30, attempts=80)
STRONG = Effort(budget=2000, tries=300, attempts=600)

SMALL_RANKS = 10
"""Up to here every set of ranks is looked at: 2^10 of them, in 3^10 / 2 pairs."""

FINE = 2048
"""Where the limit cannot be reached, the smallest one is sought to 1/2048 of the mean."""
