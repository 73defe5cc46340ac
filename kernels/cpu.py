"""The CPU path: the reference, with products through oneDNN's packed weights where it has them.

Measured on two AVX2 cores, 576 x 1536 float32, GB/s of weight bytes at 1 / 4 / 16 rows: torch.mm 24 / 13 /
11, packed 42 / 43 / 31, whichever the number of rows, out of 52 for a plain sum over memory.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tridecode.kernels.ops import Linear
from tridecode.kernels.reference import Reference

#: the batch that oneDNN packs for; its layout serves one row as well; without the hint it may be slow
_PACKED_ROWS = 16
#: Numbers of rows that a product runs at. oneDNN generates code for each number of rows that it is given and
#: keeps it for ever, 0.1 to 0.4 MiB a number and weight shape: with these, what it keeps is bounded.
_TILES = (512, 256, 128, 64)
_SMALL_TILES = (*range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64)


@functools.lru_cache(maxsize=4096)
def row_tiles(rows: int) -> tuple[tuple[int, int], ...]:
    """(rows taken, rows that the product runs at) of each tile of a product over `rows` rows, in order.

    The second is the first, or a little more: then the tile is padded.
    """
    tiles: list[tuple[int, int]] = []
    for size in _TILES:
        count, rows = divmod(rows, size)
        tiles += [(size, size)] * count
    if rows:
        tiles.append((rows, min(size for size in _SMALL_TILES if size >= rows)))
    return tuple(tiles)


class Cpu(Reference):
    """kernels.ops.Ops on a CPU. Packed weights are used for float32; 16-bit products go through torch as they
    are."""

    def __init__(self) -> None:
        super().__init__()
        self._padding: dict[tuple[int, torch.dtype], Tensor] = {}  # (_SMALL_TILES[-1], columns)

    def pack(self, linear: Linear) -> Linear:
        if linear.weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
            return linear
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.contiguous(), _PACKED_ROWS)
        return Linear(packed, linear.bias)

    def _product(self, x: Tensor, linear: Linear, residual: Tensor | None, out: Tensor) -> None:
        first = 0
        for rows, size in row_tiles(x.shape[0]):
            mine = slice(first, first + rows)
            first += rows
            added = None if residual is None else residual[mine]
            if rows == size:
                self._tile(x[mine], linear, added, out[mine])
                continue
            product = out.new_empty(size, out.shape[1])
            self._tile(self._padded(x[mine], size), linear, None, product)
            if added is None:
                out[mine] = product[:rows]
            else:
                torch.add(product[:rows], added, out=out[mine])

    def _tile(self, x: Tensor, linear: Linear, residual: Tensor | None, out: Tensor) -> None:
        if not linear.weight.is_mkldnn:
            super()._product(x, linear, residual, out)
            return
        product = torch.ops.mkldnn._linear_pointwise
        if residual is None:
            out.copy_(product(x, linear.weight, linear.bias, "none", [], ""))
        else:
            out.copy_(product.binary(x, residual, linear.weight, linear.bias, "add"))

    def _padded(self, x: Tensor, rows: int) -> Tensor:
        """x and zeros after it, `rows` together, in a buffer that the next product uses again."""
        key = (x.shape[1], x.dtype)
        if key not in self._padding:
            self._padding[key] = x.new_zeros(_SMALL_TILES[-1], x.shape[1])
        padded = self._padding[key][:rows]
        padded[: x.shape[0]] = x
        return padded
