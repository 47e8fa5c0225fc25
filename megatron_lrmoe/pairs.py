"""The words of this package as small frozen dataclasses, and the letters that tensor names end in.

T  tokens on a rank                      D  hidden size
K  experts per token (top-k)             F  expert width
E  experts of the layer                  G  fc1 output width: 2F with a gated activation, else F
e  experts on this rank                  S  source ranks of the expert-parallel group
N  routed pairs held by this rank's experts, in expert order: expert, then source, then token
P  routed pairs of this rank's tokens, in wire order: expert of the whole layer, then token
M  kept pairs, in the order of whichever of N or P they were chosen from

A pair u = (t, e) is one token at one of its experts. Its source is the rank whose token it is; its owner is the
rank that holds the expert. ``alpha`` is the final combine weight, ``phi`` the activation before it is applied,
``a = alpha * phi`` the saved fc2 input, ``g`` the gradient of the layer's combined output row.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DrawKey:
    """What a random draw depends on: equal keys give equal draws on any rank and in recompute.

    ``data_parallel`` is the index of the expert-parallel group among its data-parallel peers, so that groups
    that average their gradients draw differently.
    """

    seed: int
    iteration: int
    microbatch: int
    layer: int
    data_parallel: int = 0


@dataclass(frozen=True)
class KeptRows:
    """Which rows keep their backward.

    Args:
        rows_M: (M,) int64, ascending row numbers.
        weight_M: (M,) fp32, factor on each kept row's gradient: 1 with topk, 1/probability with unbiased, between
            the two with a shrink below 1.
        counts_e: kept rows of each segment (expert, or source and expert) the rows were chosen from.
    """

    rows_M: torch.Tensor
    weight_M: torch.Tensor
    counts_e: tuple[int, ...]
