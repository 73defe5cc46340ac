"""Brings masks to the device while the forward runs whose rows they are for."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tridecode.kernels.sampling_state import SamplingState


class LateMasks:
    """Pinned buffers for the masks of one step, and a stream of their own for the copies.

    A step's masks depend on the tokens of the step before, so the copies of that step have ended when the
    buffers are written again.
    """

    def __init__(self, rows: int, words: int, device: torch.device):
        """rows: of a step. words: of a mask. Nothing is allocated before the first mask."""
        self._rows, self._words, self._device = rows, words, device
        self._stream: torch.cuda.Stream | None = None
        self._host: tuple[Tensor, Tensor, Tensor] | None = None

    def _allocate(self) -> tuple[Tensor, Tensor, Tensor]:
        """Allocate the slots of the samples, the slots of the masks, and the masks, on the host."""
        is_cuda, rows = self._device.type == "cuda", self._rows
        self._slots = torch.empty((rows,), dtype=torch.int32, device=self._device)
        if is_cuda:
            self._stream = torch.cuda.Stream(self._device)
            # launched work may still use the memory that the slots have got
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return (
            torch.empty((rows,), dtype=torch.int32, pin_memory=is_cuda),
            torch.empty((rows,), dtype=torch.int64, pin_memory=is_cuda),
            torch.empty((rows, self._words), dtype=torch.int32, pin_memory=is_cuda),
        )

    def upload(
        self, state: SamplingState, all_slots: np.ndarray, rows: list[int], masks: np.ndarray, count: int
    ) -> Tensor:
        """Write the masks of some rows of a step to the sampling state, and return (count,) int32, the slots
        of its samples: -1 except for these rows.

        all_slots: (B,) int32, of the rows. masks: (n, W) int32. The current stream waits for the copies.
        """
        if self._host is None:
            self._host = self._allocate()
        slots, places, host = self._host[0][:count], self._host[1][: len(rows)], self._host[2][: len(rows)]
        slots.fill_(-1)
        slots.numpy()[rows] = places.numpy()[:] = all_slots[rows]
        host.numpy()[:] = masks
        if self._stream is None:
            self._copy(state, slots, places, host)
            return self._slots[:count]
        with torch.cuda.stream(self._stream):
            self._copy(state, slots, places, host)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return self._slots[:count]

    def _copy(self, state: SamplingState, slots: Tensor, places: Tensor, masks: Tensor) -> None:
        self._slots[: len(slots)].copy_(slots, non_blocking=True)
        device = self._device
        state.masks[places.to(device, non_blocking=True)] = masks.to(device, non_blocking=True)
