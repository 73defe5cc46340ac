"""GEMMs by cuBLAS, followed by our own kernel for epilogues that cuBLAS does not fuse."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tridecode.kernels.gemm.call import Call
from tridecode.kernels.gpu import ACTIVATIONS, DTYPES, FUSED_GATES, Gpu, pointer
from tridecode.kernels.operands import Linear

#: product_format of gemm_library_epilogue for a product whose dtype differs from X
_PRODUCT_FORMATS = {torch.float32: 1, torch.int32: 2}


class Source(Protocol):
    """Supplies the weight of a GEMM to cuBLAS."""

    def by_cublas_lt(self, call: Call) -> bool:
        """Compute out = activation(x @ weight^T + bias) + residual, rounded once.

        Returns False if cuBLASLt cannot.
        """
        ...

    def by_torch(self, x: Tensor, out: Tensor) -> None:
        """Compute out = x @ weight^T."""
        ...


class Rows:
    """Supplies a weight in 16 bit or float32 as it is."""

    def __init__(self, gpu: Gpu, weight: Tensor):
        self._gpu, self._weight = gpu, weight

    def by_cublas_lt(self, call: Call) -> bool:
        weight = self._weight
        if call.x.dtype == torch.float32:
            return False
        return self._gpu.library_products.run(
            self._gpu.stream,
            call.tokens,
            weight=weight.data_ptr(),
            weight_stride=weight.stride(0),
            inputs=weight.shape[1],
            outputs=weight.shape[0],
            **call.fields(),
        )

    def by_torch(self, x: Tensor, out: Tensor) -> None:
        if out.dtype == x.dtype:
            torch.mm(x, self._weight.t(), out=out)
        else:
            torch.mm(x, self._weight.t(), out_dtype=out.dtype, out=out)


class CublasProducts:
    """GEMM calls without a norm and without heads."""

    def __init__(self, gpu: Gpu):
        self._gpu = gpu

    def multiply(self, call: Call, weight: Tensor) -> None:
        """Compute the call with this weight."""
        self.multiply_source(call, Rows(self._gpu, weight))

    def multiply_source(self, call: Call, source: Source) -> None:
        activation, residual, bias = call.activation, call.residual, call.linear.bias
        fuses = activation in (None, "gelu_tanh", "relu")
        if residual is not None:
            fuses = activation is None
        if residual is not None or bias is not None:  # cuBLASLt accepts neither with a float32 result
            fuses = fuses and not call.out_float32
        if fuses and source.by_cublas_lt(call):
            return
        product = call.out
        if activation in FUSED_GATES or residual is not None:  # out may be the residual
            rows = call.linear.weight.shape[0]
            product = self._gpu.temporary("product", call.tokens, rows, call.out.dtype)
        bare = Call(call.x, call.linear if bias is None else Linear(call.linear.weight), product)
        if not source.by_cublas_lt(bare):
            source.by_torch(call.x, product)
        if bias is not None or activation is not None or residual is not None:
            self.epilogue(product, call)

    def epilogue(
        self,
        product: Tensor,
        call: Call,
        scales: Tensor | None = None,
        row_scales: Tensor | None = None,
    ) -> None:
        """Compute call.out = activation(product * scales * row_scales + bias) + residual.

        scales (outputs,), row_scales (tokens,): float32, for an int32 or float32 product of 8-bit operands.
        """
        out, residual = call.out, call.residual
        self._gpu.library.gemm_library_epilogue(
            out.data_ptr(),
            product.data_ptr(),
            pointer(call.linear.bias),
            pointer(residual),
            pointer(scales),
            pointer(row_scales),
            out.shape[0],
            out.shape[1],
            out.stride(0),
            product.stride(0),
            0 if residual is None else residual.stride(0),
            ACTIVATIONS[call.activation],
            _PRODUCT_FORMATS.get(product.dtype, 0),
            int(out.dtype == torch.float32),
            DTYPES[call.x.dtype],
            self._gpu.stream,
        )
