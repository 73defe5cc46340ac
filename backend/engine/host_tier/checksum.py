"""Checksums of cache blocks, on the device that has them."""

from __future__ import annotations

import torch
from torch import Tensor

#: bytes of a slot are a multiple of this
UNIT_BYTES = 512
_COLUMNS = UNIT_BYTES // 8
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # of the golden ratio, as int64


class Checksums:
    """Checksums of rows of `row_bytes` bytes, a multiple of UNIT_BYTES: sums modulo 2**64 of 64-bit words,
    weighted by their column and by their row, so that exchanged words are noticed, too.
    """

    def __init__(self, row_bytes: int, device: torch.device):
        self._rows = row_bytes // UNIT_BYTES
        self._by_column = self._weights(_COLUMNS, device)
        self._by_row = self._weights(self._rows, device)

    @staticmethod
    def _weights(count: int, device: torch.device) -> Tensor:
        return (torch.arange(1, count + 1, dtype=torch.int64) * _ODD | 1).to(device)

    def of(self, data: Tensor) -> Tensor:
        """Return (n,) int64 for (n, row_bytes) uint8. It allocates and does not synchronise."""
        words = data.view(torch.int64).view(len(data), self._rows, _COLUMNS)
        columns = (words.sum(1) * self._by_column).sum(1)
        rows = (words.sum(2) * self._by_row).sum(1)
        return columns * 2 + rows  # each word has an odd weight, so that any change of one word counts
