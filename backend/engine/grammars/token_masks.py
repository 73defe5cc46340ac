"""The mask of a set of token ids. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mask_of(ids: Sequence[int], words: int) -> np.ndarray:
    """Return (words,) int32, the mask of these token ids: see SamplingState.masks."""
    mask, tokens = np.zeros(words, np.uint32), np.asarray(ids, np.int64)
    np.bitwise_or.at(mask, tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))
    return mask.view(np.int32)


def allows(mask: np.ndarray, token: int) -> bool:
    """Return whether a mask (W,) int32 has the bit of a token id within its words."""
    return bool(mask.item(token // 32) >> token % 32 & 1)
