"""Products of many rows with a weight in 8 or 4 bit: it is expanded to 16 bit in scratch memory first.

Where scratch.EXPANDED_WEIGHT_BYTES limits that memory, a larger weight is expanded and multiplied in pieces
of its outputs, one after another. That doubles the launches, which the host takes longer for than the GPU up
to about 1,500 rows. cuBLAS multiplies pieces, and on Hopper all that is expanded: our kernels for it load
weights before their predecessor has finished, and here the predecessor writes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tridecode.kernels.cuda_base import DTYPES
from tridecode.kernels.cuda_int4 import CudaInt4
from tridecode.kernels.gemm_table import Plan
from tridecode.kernels.library import current_stream
from tridecode.kernels.ops import Heads, Linear, Norm
from tridecode.kernels.packed_weight import GRANULE_ROWS, PackedWeight
from tridecode.kernels.quantized import QuantizedWeight
from tridecode.kernels.scratch import expanded_rows, expanded_weight_bytes, weight_pieces


class CudaExpanded(CudaInt4):
    """_gemm of a weight that is expanded for it."""

    def _reserve_expanded(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        """Scratch memory for an expanded weight, outside of graph capture."""
        self._arena("expanded_weight", expanded_weight_bytes(rows, columns, dtype.itemsize))

    def _expanded_gemm(
        self,
        x: Tensor,
        linear: Linear,
        norm: Norm | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
        heads: Heads | None,
        head_fields: dict[str, float] | None,
    ) -> Plan:
        """As _gemm. cuBLAS' plan fuses no heads."""
        weight = linear.weight
        assert not isinstance(weight, Tensor)
        rows, columns = weight.shape
        fits = expanded_rows(rows, columns, x.dtype.itemsize) == rows
        if norm is not None and not (fits and self.capability != 90):
            x = self._normed(x, norm)
        if fits:
            whole = Linear(self._expanded(weight, x.dtype, slice(0, rows)), linear.bias)
            if self.capability != 90:
                return self._gemm(x, whole, norm, activation, residual, out, heads, head_fields)
            self._gemm_library(x, whole, activation, residual, out)
        elif activation != "swiglu":
            self._gemm_in_pieces(x, linear, activation, residual, out)
        elif linear.bias is None and rows % (2 * GRANULE_ROWS) == 0:
            self._gated_gemm_in_pieces(x, weight, residual, out)
        else:  # a piece of gate and up would need its biases side by side, and up to begin with a granule
            product = self._temporary("product", x.shape[0], rows, out.dtype)
            self._gemm_in_pieces(x, Linear(weight), None, None, product)
            self._library_epilogue(product, linear.bias, activation, residual, out, x.dtype)
        return Plan("gemm_library", "the weight is expanded")

    def _gemm_in_pieces(
        self, x: Tensor, linear: Linear, activation: str | None, residual: Tensor | None, out: Tensor
    ) -> None:
        """Each piece of rows of the weight gives its columns of out. activation: not gated."""
        weight = linear.weight
        assert not isinstance(weight, Tensor)
        for rows in weight_pieces(*weight.shape, x.dtype.itemsize):
            bias = None if linear.bias is None else linear.bias[rows]
            piece = Linear(self._expanded(weight, x.dtype, rows), bias)
            more = None if residual is None else residual[:, rows]
            self._gemm_library(x, piece, activation, more, out[:, rows])

    def _gated_gemm_in_pieces(
        self, x: Tensor, weight: QuantizedWeight | PackedWeight, residual: Tensor | None, out: Tensor
    ) -> None:
        """SwiGLU: each piece has rows of the gate, and below them the same rows of up."""
        inner = weight.shape[0] // 2
        for gate in weight_pieces(*weight.shape, x.dtype.itemsize, gated=True):
            up = slice(inner + gate.start, inner + gate.stop)
            piece = Linear(self._expanded(weight, x.dtype, gate, up))
            more = None if residual is None else residual[:, gate]
            self._gemm_library(x, piece, "swiglu", more, out[:, gate])

    def _expanded(self, weight: QuantizedWeight | PackedWeight, dtype: torch.dtype, *parts: slice) -> Tensor:
        """(rows, in) in scratch memory, until the next call: these rows of the weight, part by part. A part
        of a packed weight begins at a multiple of GRANULE_ROWS."""
        sizes = [part.stop - part.start for part in parts]
        out = self._temporary("expanded_weight", sum(sizes), weight.shape[1], dtype)
        for part, rows in zip(parts, out.split(sizes)):
            self._expand(weight, part, rows)
        return out

    def _expand(self, weight: QuantizedWeight | PackedWeight, rows: slice, out: Tensor) -> None:
        """out = these rows of the weight. One that is not packed is int8 with a scale for each row."""
        if isinstance(weight, PackedWeight):
            part = weight.part(rows)
            self.library.expand_weight(
                current_stream(self.device),
                out=out.data_ptr(),
                out_stride=out.stride(0),
                inputs=part.columns,
                outputs=part.rows,
                dtype=DTYPES[part.dtype],
                **part.fields(),
            )
            return
        self.library.expand_rows(
            out.data_ptr(),
            weight.values[rows].data_ptr(),
            weight.scales[rows].data_ptr(),
            *out.shape,
            DTYPES[out.dtype],
            current_stream(self.device),
        )

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        raise NotImplementedError

    def _gemm(
        self,
        x: Tensor,
        linear: Linear,
        norm: Norm | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
        heads: Heads | None = None,
        head_fields: dict[str, float] | None = None,
    ) -> Plan:
        raise NotImplementedError

    def _gemm_library(
        self, x: Tensor, linear: Linear, activation: str | None, residual: Tensor | None, out: Tensor
    ) -> None:
        raise NotImplementedError

    def _library_epilogue(
        self,
        product: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
        dtype: torch.dtype,
    ) -> None:
        raise NotImplementedError
