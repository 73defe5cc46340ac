"""The CPU implementation: the reference, with float32 GEMMs on oneDNN's packed weights.

Measured on two AVX2 cores, 576 x 1536 float32, GB/s of weight bytes at 1 / 4 / 16 rows: torch.mm 24 / 13 /
11, packed 42 / 43 / 31; a plain sum over memory reaches 52.

int8 weights stay in 8 bit. They are dequantised at each call, _INT8_ROWS outputs at a time, which fit in the
caches. If the CPU has VNNI and there are enough rows, oneDNN multiplies them with x in three int8 parts, 24
bits: sums are exact, and errors are those of float32. Time over that of packed float32, on a shared core of a
Zen 5, weights that no cache holds, medians of 3 rounds in turns, at 1 / 2 / 4 / 8 / 16 / 64 rows:
  576 x 1536: expanded 0.96 / 0.83 / 1.48 / 1.57 / 1.78 / 2.15
    three parts        1.29 / 1.48 / 1.18 / 1.17 / 1.10 / 1.11
  2048 x 2048: expanded 0.98 / 1.04 / 1.62 / 1.49 / 1.93 / 1.68
    three parts         1.23 / 0.84 / 0.94 / 0.61 / 1.04 / 0.72
Two parts, as on a GPU, take 0.91 / 0.90 / 0.77 / 0.66 at 1 / 4 / 16 / 64 rows of the latter, with errors of
3e-5, enough only for x in 16 bit. On an AVX-512 core without VNNI expanded takes 0.74 / 1.43 / 1.31 at 1 / 4
/ 16 rows of the first size and 0.46 / 1.54 / 1.69 of the second, oneDNN's int8 product 200 times as long.
torch._weight_int8pack_mm works row by row: 5.6 times at one row. torch's dynamic products (x86) took 0.24
to 0.42 of float32 with the weight in the caches, but have one scale for all rows of x and 8 bits: 1 % off,
and a row depends on its neighbours. int4 and fp8 are dequantised at load: unpacking them takes longer than
reading float32.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tridecode.kernels.formats.quantized import LOW_STEPS, QuantizedWeight
from tridecode.kernels.operands import Batch, CacheLayer, Heads, Linear
from tridecode.kernels.reference import Reference
from tridecode.kernels.reference.attention import cached_keys, causal_attention

log = logging.getLogger("tridecode.engine")

#: number of rows that oneDNN packs for; the layout is as fast for one row, and may be slow without this hint
_PACKED_ROWS = 16
#: Row counts at which a GEMM runs: each up to 16, then in growing steps. oneDNN generates code for each row
#: count and never frees it, 0.1 to 0.4 MiB per row count and weight shape.
_STEPS = ((16, 1), (64, 4), (128, 8), (256, 16), (512, 32))  # up to this many rows, in steps of
_LARGEST = _STEPS[-1][0]
#: outputs of an int8 weight that are dequantised together; 128 to 2048 were tried
_INT8_ROWS = 512
#: rows from which an int8 GEMM splits x into parts instead of dequantising the weight
_PARTS_ROWS = 3
#: queries that are scored together if results must not depend on the chunks of a prompt
_QUERY_TILE = 64


def rounded_rows(rows: int) -> int:
    """Return the row count, at least `rows`, at which a GEMM over 1 to _LARGEST rows runs."""
    step = next(step for most, step in _STEPS if rows <= most)
    return -(-rows // step) * step


class Cpu(Reference):
    """kernels.ops.Ops on a CPU. float32 GEMMs use packed weights; 16-bit GEMMs are torch's. batch_invariant:
    the bits of a sequence's float32 results depend neither on the other sequences of its steps, nor on the
    chunks of its prompt, nor on which of its tokens were prompts; see docs/design/numerics.md.
    """

    def __init__(self, batch_invariant: bool = False) -> None:
        super().__init__()
        self.batch_invariant = batch_invariant

    def pack(self, linear: Linear, dtype: torch.dtype = torch.float32, is_head: bool = False) -> Linear:
        weight = linear.weight
        if isinstance(weight, QuantizedWeight):
            if keeps_int8(weight, self.batch_invariant):
                return linear
            _say_expanded(weight.format, dtype)
            dense, group = weight.expanded(dtype), weight.activation_group
            linear = Linear(dense, linear.bias, weight.activations, group)
            weight = linear.dense
        if weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
            return linear
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.dense.contiguous(), _PACKED_ROWS)
        return replace(linear, weight=packed)

    def _product(self, x: Tensor, linear: Linear, residual: Tensor | None, out: Tensor) -> None:
        if isinstance(linear.weight, QuantizedWeight):
            _int8_product(x, linear.weight, linear.bias, residual, out)
            return
        if not linear.dense.is_mkldnn:
            super()._product(x, linear, residual, out)
            return
        for first in range(0, x.shape[0], _LARGEST):
            part = slice(first, first + _LARGEST)
            _packed_product(x[part], linear, None if residual is None else residual[part], out[part])

    def decode_attention(
        self,
        qkv: Tensor,
        heads: Heads,
        batch: Batch,
        cache: CacheLayer,
        *,
        out: Tensor,
        unfinished: Linear | None = None,
    ) -> None:
        if not self.batch_invariant:
            super().decode_attention(qkv, heads, batch, cache, out=out, unfinished=unfinished)
            return
        if unfinished is not None:
            self.finish_qkv(qkv, heads, batch, cache)
        out.zero_()  # padding, and rows without a context
        _attend_in_tiles(qkv, heads, batch, cache, range(batch.num_decodes), out)

    def prefill_attention(
        self, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, *, out: Tensor
    ) -> None:
        if not self.batch_invariant:
            super().prefill_attention(qkv, heads, batch, cache, out=out)
            return
        _attend_in_tiles(qkv, heads, batch, cache, range(batch.num_decodes, batch.num_rows), out)


def _attend_in_tiles(
    qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, rows: range, out: Tensor
) -> None:
    """Compute the attention of some rows of a batch, whose first token is the first of qkv and of out.

    Tokens of a decode step and of a prompt have the same bits, so that a preempted sequence, whose tokens are
    computed again as a prompt, continues with the same results.
    """
    base, queries = batch.decode_tokens if rows.start else 0, heads.num_heads * heads.head_size
    starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    for row in rows:
        last = starts[row + 1] - base
        first = max(starts[row] - base, last - lens[row])
        if first < last:
            k, v = cached_keys(cache, batch.block_tables[row], lens[row], qkv.dtype)
            q = qkv[first:last, :queries].unflatten(1, (-1, heads.head_size)).transpose(0, 1)
            with _one_thread():
                attended = _tiled_attention(q, k, v, heads)
            out[first:last].copy_(attended.transpose(0, 1).reshape(last - first, queries))


def keeps_int8(weight: QuantizedWeight, batch_invariant: bool = False) -> bool:
    """Return whether a weight stays in int8; the others are dequantised at load.

    torch.mm, which is used for few rows or without VNNI, is not batch invariant: a row's bits depend on the
    number of rows.
    """
    return weight.format == "int8" and weight.group_size == 0 and not batch_invariant


def _int8_product(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor | None, out: Tensor
) -> None:
    """Compute x @ weight.T (+ bias) (+ residual) in float32; the scale of an output multiplies its finished
    sum.
    """
    in_parts = x.shape[0] >= _PARTS_ROWS and multiplies_int8()
    product = _product_in_parts(x, weight) if in_parts else _expanded_product(x, weight)
    product *= weight.scales.t()
    if bias is not None:
        product += bias
    out.copy_(product if residual is None else product.add_(residual))


@cache
def multiplies_int8() -> bool:
    """Return whether this CPU has int8 instructions (VNNI); without them oneDNN's int8 GEMMs are slow."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


def _product_in_parts(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """Return (T, out) float32, without the weight's scales. No row depends on another."""
    values, scales = _int8_parts(x)
    sums = torch._int_mm(values.flatten(0, 1), weight.values.t()).unflatten(0, values.shape[:2])  # exact
    product = sums[-1].float()
    for part in sums.flip(0)[1:]:
        product = product.div_(LOW_STEPS).add_(part)
    return product.mul_(scales)


def _int8_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (P, T, C) int8 and (T, 1) float32 scales: x is the sum over p of parts[p] / 254**p, times the
    scale.

    Two parts have 16 bits relative to a row's largest number, enough for 16-bit x; three have 24.
    """
    scales = x.float().abs().amax(-1, keepdim=True) / 127
    rest = (x / torch.where(scales == 0, 1.0, scales)).nan_to_num_(0.0)  # the scale is NaN, too
    parts = torch.empty(3 if x.dtype == torch.float32 else 2, *x.shape, dtype=torch.int8)
    for part in parts:
        rounded = rest.round()
        part.copy_(rounded)
        rest.sub_(rounded).mul_(LOW_STEPS)
    return parts, scales


def _expanded_product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """(T, out) float32, without the weight's scales."""
    x32 = x.float()
    product = torch.empty(x.shape[0], weight.shape[0])
    expanded = torch.empty(min(_INT8_ROWS, weight.shape[0]), weight.columns)
    for first in range(0, weight.shape[0], _INT8_ROWS):
        values = weight.values[first : first + _INT8_ROWS]
        rows = expanded[: values.shape[0]].copy_(values)
        torch.mm(x32, rows.t(), out=product[:, first : first + _INT8_ROWS])
    return product


@cache
def _say_expanded(format: str, dtype: torch.dtype) -> None:
    """Log once per format."""
    log.warning("%s weights are expanded to %s at load: a CPU computes faster with them", format, dtype)


def _packed_product(x: Tensor, linear: Linear, residual: Tensor | None, out: Tensor) -> None:
    rows, product = x.shape[0], torch.ops.mkldnn._linear_pointwise
    size = rounded_rows(rows)
    x = _with_rows(x, size)
    if residual is None:
        out.copy_(product(x, linear.weight, linear.bias, "none", [], "")[:rows])
    elif size == rows:
        out.copy_(product.binary(x, residual, linear.weight, linear.bias, "add"))
    else:
        torch.add(product(x, linear.weight, linear.bias, "none", [], "")[:rows], residual, out=out)


def _with_rows(x: Tensor, size: int) -> Tensor:
    """Return x padded with arbitrary rows to `size` rows; no row of a GEMM depends on another.

    If x is the front of a larger buffer, as in a model's step, the padding is the rest of the buffer.
    """
    rows, columns = x.shape
    if size == rows:
        return x
    end = 4 * (x.storage_offset() + (size - 1) * x.stride(0) + columns)
    if x.stride(1) == 1 and end <= x.untyped_storage().nbytes():
        return x.as_strided((size, columns), x.stride())
    return torch.cat([x, x.new_zeros(size - rows, columns)])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread within the block: torch's attention divides its work by the numbers of threads and
    rows.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _tiled_attention(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
    """Return causal attention of q (H, T, D), the last T positions of k, v: (K, L, D), in tiles of positions.

    Every tile begins at a multiple of _QUERY_TILE, so the shapes of its GEMMs do not depend on how steps
    divided the positions.
    """
    tokens, length = q.shape[1], k.shape[1]
    before = (length - tokens) % _QUERY_TILE  # positions of the first tile that precede q
    after = -length % _QUERY_TILE
    q = F.pad(q, (0, 0, before, after))
    k, v = F.pad(k, (0, 0, 0, after)), F.pad(v, (0, 0, 0, after))
    origin = length - tokens - before
    parts = []
    for first in range(0, q.shape[1], _QUERY_TILE):
        end = origin + first + _QUERY_TILE
        parts.append(causal_attention(q[:, first : first + _QUERY_TILE], k[:, :end], v[:, :end], heads))
    return torch.cat(parts, dim=1)[:, before : before + tokens]
