"""Memory-mapped parts of weight files that make up the shard of a tensor rank."""

from __future__ import annotations

import ctypes
import math
import mmap
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

_COPY_BYTES = 8 << 20
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Piece:
    """A part of one file that fills a part of one rank's shard.

    path, file_shape: the file and the shape of what it holds. source: (start, stop) within the file, and
    destination: (start, stop) within the shard, both along `axis`; every other axis is taken whole.
    """

    path: Path
    file_shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int
    source: tuple[int, int]
    destination: tuple[int, int]

    @property
    def byte_range(self) -> tuple[int, int]:
        """Return (offset, length) of the file's bytes from the first to the last that this piece needs."""
        inner = math.prod(self.file_shape[self.axis + 1 :]) * self.dtype.itemsize
        outer = math.prod(self.file_shape[: self.axis])
        stride = self.file_shape[self.axis] * inner
        start, stop = self.source
        return start * inner, (outer - 1) * stride + (stop - start) * inner

    def view(self) -> Tensor:
        """The part of the file as a memory-mapped CPU tensor; strided where axis is not the first."""
        whole = _map_file(self.path, self.file_shape, self.dtype)
        return whole.narrow(self.axis, self.source[0], self.source[1] - self.source[0])

    def slot(self, shard: Tensor) -> Tensor:
        """The part of `shard` that this piece fills."""
        return shard.narrow(self.axis, self.destination[0], self.destination[1] - self.destination[0])

    def fill(self, shard: Tensor) -> None:
        """Copy the piece into its slot, a few MiB at a time; pages that were read do not stay resident."""
        view, slot = self.view(), self.slot(shard)
        step = max(_COPY_BYTES // max(view.stride(0) * view.element_size(), 1), 1)
        for start in range(0, view.shape[0], step):
            rows = view[start : start + step]
            slot[start : start + step].copy_(rows)
            _release_pages(rows)


def _map_file(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # copy on write, and torch keeps no descriptor open: a model on the CPU maps hundreds of files permanently
    size = math.prod(shape) * dtype.itemsize  # as bytes: from_file does not support every dtype
    whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    return whole.view(dtype).view(shape)


def _release_pages(rows: Tensor) -> None:
    """Release the pages of rows of a read-only _map_file tensor; a later read maps them again."""
    page = mmap.PAGESIZE
    first = -(-rows.data_ptr() // page) * page
    last = (rows.data_ptr() + rows.shape[0] * rows.stride(0) * rows.element_size()) // page * page
    if last > first:
        _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def join_neighbours(pieces: list[Piece]) -> list[Piece]:
    """Merge pieces that are neighbours in file and shard, so that an unsplit tensor is one piece."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.path == piece.path
            and (last.source[1], last.destination[1]) == (piece.source[0], piece.destination[0])
        ):
            source, destination = last.source[0], last.destination[0]
            joined[-1] = replace(
                last, source=(source, piece.source[1]), destination=(destination, piece.destination[1])
            )
        else:
            joined.append(piece)
    return joined
