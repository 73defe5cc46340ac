"""Cache blocks between slots of host memory and the caches of all layers, through a buffer on the device.

A slot holds one block: the parts of all tensors behind each other. A column range of the slots is a group of
layers. Each block has a checksum, the sum of its words times odd weights modulo 2**64, to which every range
adds its share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tridecode.kernels.checks import LayoutError, ShapeError
from tridecode.kernels.library import Library, current_stream

#: bytes of a slot are a multiple of this, and column ranges begin at one
UNIT_BYTES = 512
_COLUMNS = UNIT_BYTES // 8
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # of the golden ratio, as int64
_VECTOR_BYTES = 16  # bytes that a thread of the kernel moves at a time


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

    def of(self, data: Tensor, first: int = 0) -> Tensor:
        """Return (n,) int64 for (n, bytes) uint8, bytes `first` and following of each row. It allocates and
        does not synchronise.

        first: a multiple of UNIT_BYTES, like the number of bytes.
        """
        unit, count = first // UNIT_BYTES, data.shape[1] // UNIT_BYTES
        words = data.view(torch.int64).view(len(data), count, _COLUMNS)
        columns = (words.sum(1) * self._by_column).sum(1)
        rows = (words.sum(2) * self._by_row[unit : unit + count]).sum(1)
        return columns * 2 + rows  # each word has an odd weight, so that any change of one word counts


class BlockCopies:
    """The copies in torch, on any device. tensors: (N, n) words of N blocks each, for each tensor of the
    caches. starts: first byte of its part in a slot.
    """

    def __init__(self, tensors: Sequence[Tensor], starts: Sequence[int], checksums: Checksums):
        self.tensors, self.starts, self.checksums = tensors, starts, checksums

    def move(self, slots: Tensor, runs: Sequence[tuple[int, int, int]], first: int, staged: Tensor) -> None:
        """Copy bytes `first` and following of slots to rows of `staged`, (rows, bytes) uint8, in the current
        stream.

        slots: (S, slot bytes) uint8 on the host. runs: (first row, first slot, count) of consecutive slots,
        in pinned memory that was pinned in one piece if the copy does not block.
        """
        for row, slot, count in runs:
            for i in range(count):
                source = slots[slot + i, first : first + staged.shape[1]]
                staged[row + i].copy_(source, non_blocking=True)

    def place(self, staged: Tensor, first: int, blocks: Tensor, sums: Tensor) -> None:
        """Write rows of `staged` to the blocks of their tensors in the current stream, and add their
        checksums to sums.

        first: of the rows' bytes in a slot. blocks, sums: (rows,) int64 on the device.
        """
        for tensor, columns in self.columns(staged, first):
            tensor.index_copy_(0, blocks, columns)
        sums += self.checksums.of(staged, first)

    def columns(self, staged: Tensor, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor that lies in a column range of the slots, and its part of the rows of words."""
        end = first + staged.shape[1]
        for tensor, start in zip(self.tensors, self.starts):
            if first <= start < end:
                place = start - first
                size = tensor.shape[1] * tensor.itemsize
                yield tensor, staged[:, place : place + size].view(tensor.dtype)


class FastBlockCopies(BlockCopies):
    """The copies with the kernel library, on a GPU: one call for all runs, and one launch per range, so that
    copies keep up with a step that occupies all multiprocessors.
    """

    def __init__(
        self, library: Library, tensors: Sequence[Tensor], starts: Sequence[int], checksums: Checksums
    ):
        super().__init__(tensors, starts, checksums)
        self._library, self._device = library, tensors[0].device
        sizes = [tensor.shape[1] * tensor.itemsize for tensor in tensors]
        parts = [[one.data_ptr(), size, start] for one, size, start in zip(tensors, sizes, starts)]
        self._parts = torch.tensor(parts, dtype=torch.int64).to(self._device)

    @staticmethod
    def fits(tensors: Sequence[Tensor], starts: Sequence[int]) -> bool:
        """Return whether the kernel can place blocks of these tensors."""
        sizes = [tensor.shape[1] * tensor.itemsize for tensor in tensors]
        addresses = [tensor.data_ptr() for tensor in tensors if tensor.is_cuda]
        return len(addresses) == len(sizes) > 0 and all(
            number % _VECTOR_BYTES == 0 for number in [*sizes, *starts, *addresses]
        )

    def move(self, slots: Tensor, runs: Sequence[tuple[int, int, int]], first: int, staged: Tensor) -> None:
        width = staged.shape[1]
        if slots.stride(1) != 1 or not staged.is_contiguous() or first + width > slots.shape[1]:
            raise LayoutError(f"move: bytes {first} to {first + width} of slots of {slots.shape[1]}")
        table = torch.tensor(runs, dtype=torch.int64)
        self._library.copy_columns(
            staged.data_ptr(), width, slots.data_ptr() + first, slots.stride(0), table.data_ptr(), len(runs),
            width, current_stream(self._device),
        )  # fmt: skip

    def place(self, staged: Tensor, first: int, blocks: Tensor, sums: Tensor) -> None:
        rows, width = staged.shape
        if len(blocks) != rows or len(sums) != rows or width % _VECTOR_BYTES or first % _VECTOR_BYTES:
            raise ShapeError(f"place: {rows} rows of {width} bytes, {len(blocks)} blocks, {len(sums)} sums")
        self._library.place_blocks(
            current_stream(self._device),
            staged=staged.data_ptr(),
            blocks=blocks.data_ptr(),
            sums=sums.data_ptr(),
            parts=self._parts.data_ptr(),
            row_bytes=width,
            first=first,
            num_blocks=rows,
            num_parts=len(self._parts),
        )
