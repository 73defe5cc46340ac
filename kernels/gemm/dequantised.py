"""GEMMs of many tokens with an 8- or 4-bit weight, which is first dequantised to 16 bit in scratch memory.

scratch.EXPANDED_WEIGHT_BYTES limits that memory: a larger weight is dequantised and multiplied in pieces of
its outputs, which gemm_expanded.cu launches in one call. cuBLAS multiplies the pieces and, on Hopper, every
dequantised weight: our Hopper kernels prefetch weights before their predecessor has finished, and here the
predecessor writes the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tridecode.kernels.formats.packed_weight import PackedWeight
from tridecode.kernels.formats.quantized import QuantizedWeight
from tridecode.kernels.gemm.call import Call
from tridecode.kernels.gemm.cublas_products import CublasProducts, Rows
from tridecode.kernels.gemm.kind import WeightKind
from tridecode.kernels.gemm.packed_table import PACKED_TOKENS
from tridecode.kernels.gpu import DTYPES, Gpu
from tridecode.kernels.operands import Linear
from tridecode.kernels.scratch import expanded_rows


class Dequantiser:
    """Writes rows of a quantised weight to scratch memory in 16 bit."""

    def __init__(self, gpu: Gpu):
        self._gpu = gpu

    def rows(self, weight: QuantizedWeight | PackedWeight, rows: slice, dtype: torch.dtype) -> Tensor:
        """Return (rows, in), valid until the next call.

        Packed rows must begin at a multiple of GRANULE_ROWS.
        """
        gpu, part = self._gpu, weight.part(rows)
        out = gpu.temporary("expanded_weight", part.shape[0], part.shape[1], dtype)
        fields = part.fields
        if fields["weight_format"]:
            gpu.library.expand_weight(
                gpu.stream,
                out=out.data_ptr(),
                out_stride=out.stride(0),
                inputs=out.shape[1],
                outputs=out.shape[0],
                dtype=DTYPES[dtype],
                **fields,
            )
        else:
            values, scales = fields["weight"], fields["weight_scales"]
            gpu.library.expand_rows(out.data_ptr(), values, scales, *out.shape, DTYPES[dtype], gpu.stream)
        return out


class Pieces:
    """Source of CublasProducts for a quantised weight that is dequantised one piece at a time."""

    def __init__(self, gpu: Gpu, dequantiser: Dequantiser, weight: QuantizedWeight | PackedWeight):
        self._gpu, self._dequantiser, self._weight = gpu, dequantiser, weight

    def by_cublas_lt(self, call: Call) -> bool:
        (rows, columns), itemsize = self._weight.shape, call.x.dtype.itemsize
        piece = expanded_rows(rows, columns, itemsize)
        packed = dict(self._weight.fields)
        packed["packed"] = packed.pop("weight")
        return self._gpu.library_products.run_pieces(
            self._gpu.stream,
            call.tokens,
            piece,
            packed,
            weight=self._gpu.arena("expanded_weight", piece * columns * itemsize).data_ptr(),
            inputs=columns,
            outputs=rows,
            **call.fields(),
        )

    def by_torch(self, x: Tensor, out: Tensor) -> None:
        rows, columns = self._weight.shape
        piece = expanded_rows(rows, columns, x.dtype.itemsize)
        for first in range(0, rows, piece):
            part = slice(first, min(first + piece, rows))
            weight = self._dequantiser.rows(self._weight, part, x.dtype)
            Rows(self._gpu, weight).by_torch(x, out[:, part])


class DequantisedProducts:
    """Computes any call whose weight kind is one of packing.DEQUANTISED."""

    def __init__(self, gpu: Gpu, dense: WeightKind, cublas: CublasProducts):
        self._gpu, self._dense, self._cublas = gpu, dense, cublas
        self.dequantiser = Dequantiser(gpu)

    def launch(self, call: Call, weight: QuantizedWeight | PackedWeight) -> bool:
        """Launch a call, see WeightKind.launch."""
        gpu, (rows, columns) = self._gpu, weight.shape
        if gpu.capability != 90 and expanded_rows(rows, columns, call.x.dtype.itemsize) == rows:
            whole = self.dequantiser.rows(weight, slice(0, rows), call.x.dtype)
            return self._dense.launch(call._replace(linear=Linear(whole, call.linear.bias)))
        if call.norm is not None:
            call = call._replace(x=gpu.normed(call.x, call.norm), norm=None)
        self._cublas.multiply_source(call, Pieces(gpu, self.dequantiser, weight))
        return False

    def has_room(self, weight: QuantizedWeight | PackedWeight, dtype: torch.dtype) -> bool:
        """Return whether scratch memory holds the whole weight in 16 bit."""
        held, (rows, columns) = self._gpu.arenas.get("expanded_weight"), weight.shape
        return held is not None and held.numel() >= rows * columns * dtype.itemsize


class DequantisedKind(WeightKind):
    """A weight kind that is dequantised for GEMMs of many tokens."""

    def __init__(self, gpu: Gpu, products: DequantisedProducts):
        super().__init__(gpu)
        self.products = products

    def linear(self, call: Call) -> None:
        """Compute the call; a head without scratch memory processes PACKED_TOKENS tokens at a time."""
        if call.tokens <= PACKED_TOKENS or not self._stays_quantised(call):
            super().linear(call)
            return
        for first in range(0, call.tokens, PACKED_TOKENS):
            super().linear(call.rows(slice(first, first + PACKED_TOKENS)))

    def _stays_quantised(self, call: Call) -> bool:
        weight = call.linear.weight
        assert not isinstance(weight, Tensor)
        return call.linear.is_head and not self.products.has_room(weight, call.x.dtype)
