"""A loss mask beside an indexed dataset: tokens of a prompt are read, and not learnt.

Megatron's indexed datasets have no mask. ``megatron-lrmoe data alpaca`` writes one as a second dataset with the same
documents; where it lies beside the first, Megatron's GPTDataset multiplies its own loss mask by it.
"""

import copy
from functools import wraps
from pathlib import Path
from typing import Any


def mask_of(prefix: Path | str) -> Path:
    """Prefix of the loss mask that belongs to a dataset: uint16 in the same documents, 1 where a token is learnt."""
    return Path(f"{prefix}.loss_mask")


def masked(stock_getitem: Any) -> Any:
    """Wrap ``GPTDataset.__getitem__``; a dataset without a mask beside it gives what it gave."""

    @wraps(stock_getitem)
    def getitem(self: Any, idx: int | None) -> dict[str, Any]:
        item = stock_getitem(self, idx)
        reader = _reader(self)
        # Without an index it is padding of a batch, which Megatron has masked already.
        if reader is not None and idx is not None:
            # Not in place: the first sample's mask is the one that the dataset keeps for all (cached_loss_mask).
            item["loss_mask"] = item["loss_mask"] * _learnt(reader, idx)
        return item

    return getitem


def _reader(dataset: Any) -> Any:
    """The dataset once more, over its mask; None without one."""
    if not hasattr(dataset, "_lrmoe_mask"):
        dataset._lrmoe_mask = None
        prefix = getattr(dataset.dataset, "path_prefix", None)
        if prefix is not None and Path(f"{mask_of(prefix)}.idx").exists():
            dataset._lrmoe_mask = copy.copy(dataset)
            dataset._lrmoe_mask.dataset = _open(dataset.dataset, str(mask_of(prefix)))
    return dataset._lrmoe_mask


def _open(tokens: Any, prefix: str) -> Any:
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    mask = IndexedDataset(prefix)
    if not np.array_equal(mask.sequence_lengths, tokens.sequence_lengths):
        raise ValueError(f"{prefix}: found documents of other lengths than {tokens.path_prefix}, allowed are the same")
    return mask


def _learnt(reader: Any, idx: int) -> Any:
    """(S,) float32 of the tokens that are to be predicted: position i predicts the token after it."""
    import torch

    mask = torch.from_numpy(reader._query_document_sample_shuffle_indices(idx)[0] == 1).float()
    if reader.config.add_extra_token_to_sequence:
        return mask[1:]
    mask = mask.roll(-1)
    mask[-1] = 0
    return mask
