"""8-bit cache formats, defined in numpy, and transformers with such a cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers.cache_utils import Cache

#: largest value of each format
LARGEST = {"int8": 127.0, "fp8": 448.0}


def stored(x: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the stored values of x (..., D) float32, as float32, and their scales (..., 1).

    fp8: E4M3 of Micikevicius et al. 2022: 4 significant bits from 2^-6 on, steps of 2^-9 below it.
    """
    scales = np.abs(x).max(-1, keepdims=True) / np.float32(LARGEST[format])
    shares = x / np.where(scales == 0, np.float32(1), scales)
    if format == "int8":
        return np.rint(shares), scales
    exponents = np.maximum(np.frexp(shares)[1] - 1, -6)
    steps = np.exp2(exponents - 3.0)
    return (np.rint(shares / steps) * steps).astype(np.float32), scales


def read_back(x: np.ndarray, format: str) -> np.ndarray:
    """Return x (..., D) float32 as read back from the cache, in float64."""
    values, scales = stored(x, format)
    return values.astype(np.float64) * scales


@contextmanager
def transformers_rounds(format: str) -> Iterator[None]:
    """Make every cache of transformers round keys and values, (B, K, T, D) after rotation, to `format`."""
    update = Cache.update

    def rounding(self: Cache, keys: torch.Tensor, values: torch.Tensor, *rest: Any, **named: Any) -> Any:
        both = (torch.from_numpy(read_back(x.detach().numpy(), format)).to(x.dtype) for x in (keys, values))
        return update(self, *both, *rest, **named)

    with patch.object(Cache, "update", rounding):
        yield
