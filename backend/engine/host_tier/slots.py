"""The layout of a block in a slot of the host tier, and of blocks in the buffers on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

#: bytes of the buffer on the device through which blocks pass, in each direction, by type of device; on a GPU
#: 2.5 ms of a PCIe 5 link
_BUFFER_BYTES = {"cuda": 128 << 20, "cpu": 8 << 20}
_WORD_BYTES = 8
#: slots are aligned to pages, so that pieces can be pinned; a multiple of UNIT_BYTES
_PAGE_BYTES = 4096


def blocks_of_buffer(slot_bytes: int, num_slots: int, device_type: str) -> int:
    """Return the number of blocks that pass a buffer at once. A rank has two buffers."""
    return max(min(_BUFFER_BYTES[device_type] // slot_bytes, num_slots), 1)


def parts_of_slot(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where each tensor's part of a slot begins, and the size of a slot, in bytes.

    sizes: bytes of a block in each tensor.
    """
    ends = np.cumsum([-(-size // _WORD_BYTES) * _WORD_BYTES for size in sizes]).tolist()
    return [0, *ends[:-1]], -(-ends[-1] // _PAGE_BYTES) * _PAGE_BYTES


def words(tensor: Tensor) -> Tensor:
    """Return (N, n) of a tensor whose first axis is the blocks, in the widest words that divide a block."""
    rows = tensor.flatten(1)
    size = rows.shape[1] * rows.itemsize
    for word in (torch.int64, torch.int32, torch.int16):
        if size % word.itemsize == 0:
            return rows.view(word)
    return rows.view(torch.int8)
