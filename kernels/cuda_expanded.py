"""Products of many rows with a weight in 8 or 4 bit: it is expanded to 16 bit in scratch memory first.

scratch.EXPANDED_WEIGHT_BYTES limits that memory: a larger weight is expanded and multiplied in pieces of its
outputs, all of which gemm_expanded.cu launches in one call. cuBLAS multiplies pieces, and on Hopper all
that is expanded: our kernels for it load weights before their predecessor has finished, and here the
predecessor writes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tridecode.kernels.cuda_base import DTYPES
from tridecode.kernels.cuda_library import CudaLibrary, product_fields
from tridecode.kernels.gemm_table import Plan
from tridecode.kernels.library import current_stream
from tridecode.kernels.ops import Heads, Linear, Norm
from tridecode.kernels.packed_weight import PackedWeight
from tridecode.kernels.quantized import QuantizedWeight
from tridecode.kernels.scratch import expanded_rows, expanded_weight_bytes

#: it fuses no heads
_EXPANDED = Plan("gemm_library", "the weight is expanded")


class CudaExpanded(CudaLibrary):
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
        """As _gemm."""
        weight = linear.weight
        assert not isinstance(weight, Tensor)
        rows, columns = weight.shape
        if self.capability != 90 and expanded_rows(rows, columns, x.dtype.itemsize) == rows:
            whole = Linear(self._expanded(weight, slice(0, rows), x.dtype), linear.bias)
            return self._gemm(x, whole, norm, activation, residual, out, heads, head_fields)
        if norm is not None:
            x = self._normed(x, norm)
        self._gemm_library(x, linear, activation, residual, out)
        return _EXPANDED

    def _cublas_lt(
        self,
        x: Tensor,
        weight: Tensor | QuantizedWeight | PackedWeight,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
    ) -> bool:
        if isinstance(weight, Tensor):
            return super()._cublas_lt(x, weight, bias, activation, residual, out)
        (rows, columns), itemsize = weight.shape, x.dtype.itemsize
        piece = expanded_rows(rows, columns, itemsize)
        return self._library_products.run_pieces(
            current_stream(self.device),
            x.shape[0],
            piece,
            _packed_fields(weight),
            weight=self._arena("expanded_weight", piece * columns * itemsize).data_ptr(),
            inputs=columns,
            outputs=rows,
            **product_fields(x, bias, activation, residual, out),
        )

    def _torch_product(self, x: Tensor, weight: Tensor | QuantizedWeight | PackedWeight, out: Tensor) -> None:
        if isinstance(weight, Tensor):
            super()._torch_product(x, weight, out)
            return
        rows, columns = weight.shape
        piece = expanded_rows(rows, columns, x.dtype.itemsize)
        for first in range(0, rows, piece):
            part = slice(first, min(first + piece, rows))
            super()._torch_product(x, self._expanded(weight, part, x.dtype), out[:, part])

    def _expanded(self, weight: QuantizedWeight | PackedWeight, rows: slice, dtype: torch.dtype) -> Tensor:
        """(rows, in) in scratch memory, until the next call: these rows of the weight, of a packed one from a
        multiple of GRANULE_ROWS on. One that is not packed is int8 with a scale for each row."""
        out = self._temporary("expanded_weight", rows.stop - rows.start, weight.shape[1], dtype)
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
            return out
        self.library.expand_rows(
            out.data_ptr(),
            weight.values[rows].data_ptr(),
            weight.scales[rows].data_ptr(),
            *out.shape,
            DTYPES[dtype],
            current_stream(self.device),
        )
        return out

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


def _packed_fields(weight: QuantizedWeight | PackedWeight) -> dict[str, float]:
    """The fields of tridecode_expanded_task that describe a weight."""
    if isinstance(weight, PackedWeight):
        fields = weight.fields()
        fields["packed"] = fields.pop("weight")
        return fields
    return {"packed": weight.values.data_ptr(), "weight_scales": weight.scales.data_ptr()}
