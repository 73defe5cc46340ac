"""Copies tensors to a device without delaying its steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGN = 256  # bytes
_PIECE = 8 << 20  # bytes of the pinned buffer


class Upload:
    """Copies to one device. Used by a single thread other than the thread that runs steps.

    On a GPU the tensors of a call share one allocation and are copied through a pinned buffer on a separate
    stream: copying pageable memory on the stream of the steps would stall them.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pinned: Tensor | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous copies on the device after the copy has completed. Steps on the default stream
        may still read them when they are freed."""
        if self._device.type != "cuda":
            return [tensor.to(self._device) for tensor in tensors]
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
            self._pinned = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True)
        sizes = [-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in tensors]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            held = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            held.record_stream(torch.cuda.default_stream(self._device))
            copies, start = [], 0
            for tensor, size in zip(tensors, sizes):
                part = held[start : start + tensor.nbytes]
                self._copy(tensor.contiguous().view(-1).view(torch.uint8), part)
                copies.append(part.view(tensor.dtype).view(tensor.shape))
                start += size
        return copies

    def write(self, tensor: Tensor, to: Tensor) -> None:
        """Overwrite a contiguous tensor on the device that no step in flight reads."""
        if self._stream is None:
            to.copy_(tensor)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._copy(tensor.view(-1).view(torch.uint8), to.view(-1).view(torch.uint8))

    def _copy(self, data: Tensor, to: Tensor) -> None:
        assert self._stream is not None and self._pinned is not None
        for first in range(0, len(data), _PIECE):
            piece = data[first : first + _PIECE]
            self._pinned[: len(piece)].copy_(piece)
            to[first : first + len(piece)].copy_(self._pinned[: len(piece)], non_blocking=True)
            self._stream.synchronize()
