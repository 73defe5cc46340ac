"""The CPU path: the reference, with products through oneDNN's packed weights where it has them.

Measured on two AVX2 cores, 576 x 1536 float32, GB/s of weight bytes at 1 / 4 / 16 rows: torch.mm 24 / 13 /
11, packed 42 / 43 / 31, whichever the number of rows, out of 52 for a plain sum over memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from tridecode.kernels.ops import Batch, CacheLayer, Heads, Linear
from tridecode.kernels.reference import Reference, cached_keys, causal_attention

#: the batch that oneDNN packs for; its layout serves one row as well; without the hint it may be slow
_PACKED_ROWS = 16
#: Numbers of rows that a product runs at. oneDNN generates code for each number of rows that it is given and
#: keeps it for ever, 0.1 to 0.4 MiB a number and weight shape: with these, what it keeps is bounded.
_TILES = (512, 256, 128, 64)
_SMALL_TILES = (*range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64)
#: queries of a prompt that are scored together where results must not depend on how a prompt is cut
_QUERY_TILE = 64


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
    are.

    batch_invariant: the bits of a sequence's float32 results depend neither on the other sequences of its
    steps nor on how its prompt is cut into chunks; see docs/numerics.md.
    """

    def __init__(self, batch_invariant: bool = False) -> None:
        super().__init__()
        self.batch_invariant = batch_invariant
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

    def decode_attention(
        self, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, *, out: Tensor
    ) -> None:
        with _one_thread() if self.batch_invariant else nullcontext():
            super().decode_attention(qkv, heads, batch, cache, out=out)

    def prefill_attention(
        self, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, *, out: Tensor
    ) -> None:
        if not self.batch_invariant:
            super().prefill_attention(qkv, heads, batch, cache, out=out)
            return
        base, queries = batch.num_decodes, heads.num_heads * heads.head_size
        starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
        for row in range(base, batch.num_rows):
            first, last = starts[row] - base, starts[row + 1] - base
            if first < last:
                k, v = cached_keys(cache, batch.block_tables[row], lens[row])
                q = qkv[first:last, :queries].unflatten(1, (-1, heads.head_size)).transpose(0, 1)
                with _one_thread():
                    attended = _tiled_attention(q, k, v, heads)
                out[first:last].copy_(attended.transpose(0, 1).reshape(last - first, queries))

    def _padded(self, x: Tensor, rows: int) -> Tensor:
        """x and zeros after it, `rows` together, in a buffer that the next product uses again."""
        key = (x.shape[1], x.dtype)
        if key not in self._padding:
            self._padding[key] = x.new_zeros(_SMALL_TILES[-1], x.shape[1])
        padded = self._padding[key][:rows]
        padded[: x.shape[0]] = x
        return padded


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch's attention divides its work by the number of threads and rows; with one thread it does not."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _tiled_attention(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
    """Causal attention of q (H, T, D), the last T positions of k, v: (K, L, D), in tiles of positions.

    A tile begins at a multiple of _QUERY_TILE, whole or not: its products have the same shapes however the
    positions came into steps.
    """
    tokens, length = q.shape[1], k.shape[1]
    before = (length - tokens) % _QUERY_TILE  # positions of the first tile that are not ours
    after = -length % _QUERY_TILE
    q = F.pad(q, (0, 0, before, after))
    k, v = F.pad(k, (0, 0, 0, after)), F.pad(v, (0, 0, 0, after))
    origin = length - tokens - before
    parts = []
    for first in range(0, q.shape[1], _QUERY_TILE):
        end = origin + first + _QUERY_TILE
        parts.append(causal_attention(q[:, first : first + _QUERY_TILE], k[:, :end], v[:, :end], heads))
    return torch.cat(parts, dim=1)[:, before : before + tokens]
