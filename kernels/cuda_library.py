"""Products by cuBLAS on an NVIDIA GPU, and a kernel of ours behind them for what cuBLAS does not fuse."""

from __future__ import annotations

import torch
from torch import Tensor

from tridecode.kernels.cuda_base import ACTIVATIONS, DTYPES, CudaBase, pointer
from tridecode.kernels.library import current_stream
from tridecode.kernels.ops import Linear
from tridecode.kernels.packed_weight import PackedWeight
from tridecode.kernels.quantized import QuantizedWeight

#: of gemm_library_epilogue, of other products than of its dtype
_PRODUCT_FORMATS = {torch.float32: 1, torch.int32: 2}


class CudaLibrary(CudaBase):
    """_gemm_library; cuda_expanded.py adds weights in 8 or 4 bit."""

    def _gemm_library(
        self, x: Tensor, linear: Linear, activation: str | None, residual: Tensor | None, out: Tensor
    ) -> None:
        """out = activation(x @ weight^T + bias) + residual"""
        fuses = activation in (None, "gelu_tanh", "relu")
        if residual is not None:
            fuses = activation is None
        if residual is not None or linear.bias is not None:  # of 16 bit, beside a result in float32
            fuses = fuses and out.dtype == x.dtype
        if fuses and self._cublas_lt(x, linear.weight, linear.bias, activation, residual, out):
            return
        product = out
        if activation == "swiglu" or residual is not None:  # out may be the residual
            product = self._temporary("product", x.shape[0], linear.weight.shape[0], out.dtype)
        if not self._cublas_lt(x, linear.weight, None, None, None, product):
            self._torch_product(x, linear.weight, product)
        if linear.bias is not None or activation is not None or residual is not None:
            self._library_epilogue(product, linear.bias, activation, residual, out, x.dtype)

    def _cublas_lt(
        self,
        x: Tensor,
        weight: Tensor | QuantizedWeight | PackedWeight,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
    ) -> bool:
        """out = activation(x @ weight^T + bias) + residual, rounded once. False: cuBLASLt does not do it."""
        assert isinstance(weight, Tensor)
        if x.dtype == torch.float32:
            return False
        return self._library_products.run(
            current_stream(self.device),
            x.shape[0],
            weight=weight.data_ptr(),
            weight_stride=weight.stride(0),
            inputs=weight.shape[1],
            outputs=weight.shape[0],
            **product_fields(x, bias, activation, residual, out),
        )

    def _torch_product(self, x: Tensor, weight: Tensor | QuantizedWeight | PackedWeight, out: Tensor) -> None:
        """out = x @ weight^T"""
        assert isinstance(weight, Tensor)
        if out.dtype == x.dtype:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)

    def _library_epilogue(
        self,
        product: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
        dtype: torch.dtype,
        scales: Tensor | None = None,
        row_scales: Tensor | None = None,
    ) -> None:
        """out = activation(product + bias) + residual, of x in dtype. scales, row_scales: float32, of the
        columns and rows of a product of 8-bit operands, which is int32 or float32."""
        self.library.gemm_library_epilogue(
            out.data_ptr(),
            product.data_ptr(),
            pointer(bias),
            pointer(residual),
            pointer(scales),
            pointer(row_scales),
            out.shape[0],
            out.shape[1],
            out.stride(0),
            product.stride(0),
            0 if residual is None else residual.stride(0),
            ACTIVATIONS[activation],
            _PRODUCT_FORMATS.get(product.dtype, 0),
            int(out.dtype == torch.float32),
            DTYPES[dtype],
            current_stream(self.device),
        )


def product_fields(
    x: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None, out: Tensor
) -> dict[str, float]:
    """The fields of tridecode_library_task and tridecode_expanded_task but those of the weight."""
    return {
        "out": out.data_ptr(),
        "x": x.data_ptr(),
        "bias": pointer(bias),
        "residual": pointer(residual),
        "x_stride": x.stride(0),
        "residual_stride": 0 if residual is None else residual.stride(0),
        "out_stride": out.stride(0),
        "activation": ACTIVATIONS[activation],
        "out_float32": out.dtype == torch.float32,
        "dtype": DTYPES[x.dtype],
    }
