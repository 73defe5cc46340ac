"""Inputs of a drafter for the rows of a step, sent to the device in one transfer.

The arrays lie at fixed addresses, so that a CUDA graph reads those of the newest step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.step.results import empty_host

_ALIGN = 4  # int32 words: every array is aligned to 16 bytes
_TYPES: dict[type, tuple[int, torch.dtype]] = {np.int32: (1, torch.int32), np.int64: (2, torch.int64)}


class RowInputs:
    """Arrays by name. The caller fills those that `next` returns; `send` copies them to `device`.

    sizes: elements and type of each array, in the order of the transfer. turns: host buffers, used in turns,
    more than the steps in flight.
    """

    def __init__(self, sizes: Mapping[str, tuple[int, type]], device: torch.device, turns: int):
        places, words = {}, 0
        for name, (size, kind) in sizes.items():
            width, dtype = _TYPES[kind]
            places[name] = (words, words + width * size, kind, dtype)
            words += -(-width * size // _ALIGN) * _ALIGN
        self._host = [empty_host((words,), torch.int32, device).zero_() for _ in range(turns)]
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        self._turn = 0
        self._firsts = {name: place[0] for name, place in places.items()}
        self._arrays: list[dict[str, np.ndarray]] = [
            {name: host.numpy()[first:end].view(kind) for name, (first, end, kind, _) in places.items()}
            for host in self._host
        ]
        self.device: dict[str, Tensor] = {
            name: self._device[first:end].view(dtype) for name, (first, end, _, dtype) in places.items()
        }

    def next(self) -> dict[str, np.ndarray]:
        """Return the arrays of the next host buffer, with what an earlier step left there."""
        self._turn = (self._turn + 1) % len(self._host)
        return self._arrays[self._turn]

    def send(self, last: str = "", words: int = 0) -> None:
        """Start the transfer of the newest host buffer: all of it, or up to the first `words` int32 words of
        the array `last`."""
        end = self._firsts[last] + words if last else len(self._device)
        self._device[:end].copy_(self._host[self._turn][:end], non_blocking=True)
