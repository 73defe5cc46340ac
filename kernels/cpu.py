"""The CPU path: the reference, with products through oneDNN's packed weights where it has them.

Measured on two AVX2 cores, 576 x 1536 float32, GB/s of weight bytes at 1 / 4 / 16 rows: torch.mm 24 / 13 /
11, packed 42 / 43 / 31, whichever the number of rows, out of 52 for a plain sum over memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tridecode.kernels.ops import Linear
from tridecode.kernels.reference import Reference

#: the batch that oneDNN packs for; its layout serves one row as well; without the hint it may be slow
_PACKED_ROWS = 16


class Cpu(Reference):
    """kernels.ops.Ops on a CPU. Packed weights are used for float32; 16-bit products go through torch as they
    are."""

    def pack(self, linear: Linear) -> Linear:
        if linear.weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
            return linear
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.contiguous(), _PACKED_ROWS)
        return Linear(packed, linear.bias)

    def _product(self, x: Tensor, linear: Linear, residual: Tensor | None, out: Tensor) -> None:
        if not linear.weight.is_mkldnn:
            super()._product(x, linear, residual, out)
            return
        product = torch.ops.mkldnn._linear_pointwise
        if residual is None:
            out.copy_(product(x, linear.weight, linear.bias, "none", [], ""))
        else:
            out.copy_(product.binary(x, residual, linear.weight, linear.bias, "add"))
