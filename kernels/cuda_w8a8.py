"""Products of an NVIDIA GPU with both operands in 8 bit: W8A8, and on compute capability 9.0 int8 weights.

W8A8: quantize_rows rounds the rows of x, after the norm, to int8 or E4M3 with a scale for each, as
kernels/quantized.py says; the wgmma kernels with 8-bit operands multiply them with the weight's values and
the sums with both scales. Of E4M3 in blocks of 128 x 128, rows of x have a scale for each 128 inputs, too,
and each sum of 128 inputs is multiplied by both, as in DeepGEMM. What the epilogues do not have is left to
gemm_library_epilogue or torch. On other GPUs gemm_mma_tiles_8bit computes products of up to 64 tokens, cuBLAS
by way of torch those of more, whose sums gemm_library_epilogue multiplies with the scales; without blocks.

int8 weights whose x is not rounded: the same with x in two int8 parts, which hold 16 bits of a row's largest
number (two_parts of kernels/quantized.py). The sums of both parts are exact, so a product is off by at most
max|x| / 64,516 of the row times the sum of the weight row's magnitudes, which rounding x to bfloat16 exceeds
unless max|x| is above about 100 times the root mean square of the row. Many tokens: the weight is expanded.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tridecode.kernels.checks import match, same_dtype
from tridecode.kernels.cuda_base import ACTIVATIONS, DTYPES, aligned, pointer
from tridecode.kernels.cuda_gemm import (
    CudaGemm,
    _activate,
    _check_linear,
    _check_qkv,
    _rotation,
    fields_of_heads,
)
from tridecode.kernels.gemm_table import (
    ROUNDED_HEADS,
    ROUNDED_TOKENS,
    Gemm,
    choose,
    fuses_heads_sm90,
    library_rows,
)
from tridecode.kernels.library import current_stream
from tridecode.kernels.ops import Batch, CacheLayer, Heads, Linear, Norm
from tridecode.kernels.packed_table import PACKED_TOKENS
from tridecode.kernels.quantized import SCALE_BLOCK, QuantizedWeight, operand, stays_in_8_bit
from tridecode.kernels.reference import GATED
from tridecode.kernels.scratch import row_scale_bytes

#: `operand` of csrc/api.h; "two_parts": x is rounded to int8 in two parts, the weight is int8;
#: "two_parts_int4": with the inputs in the order of granules of 4-bit weights
OPERANDS = {"int8": 1, "fp8": 2, "fp8_blocks": 2, "two_parts": 3, "two_parts_int4": 4}
#: and of the rounding of rows, and of cuBLASLt
_ROUNDED_AS = {**OPERANDS, "fp8_blocks": 5}


class CudaW8A8(CudaGemm):
    """pack, and linear and project_qkv of weights that `stays_in_8_bit` keeps."""

    def pack(self, linear: Linear, dtype: torch.dtype = torch.float32, is_head: bool = False) -> Linear:
        """As CudaPacked, but a weight whose product rounds x stays in rows."""
        weight = linear.weight
        if isinstance(weight, QuantizedWeight) and stays_in_8_bit(weight, dtype, self.capability):
            if operand(weight) == "two_parts" and not is_head:
                self._reserve_expanded(*weight.shape, dtype)
            return Linear(_in_rows(weight), linear.bias, is_head=is_head)
        return super().pack(linear, dtype, is_head)

    def linear(
        self,
        x: Tensor,
        linear: Linear,
        *,
        norm: Norm | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor,
    ) -> None:
        if x.shape[0] > PACKED_TOKENS and self._stays_packed(linear, x.dtype):
            for first in range(0, x.shape[0], PACKED_TOKENS):
                rows = slice(first, first + PACKED_TOKENS)
                more = None if residual is None else residual[rows]
                self.linear(x[rows], linear, norm=norm, activation=activation, residual=more, out=out[rows])
            return
        weight = linear.weight
        if not isinstance(weight, QuantizedWeight) or self._expands(x, weight):
            super().linear(x, linear, norm=norm, activation=activation, residual=residual, out=out)
            return
        _check_linear("linear", x, linear, residual, out, activation in GATED)
        if x.shape[0] == 0:
            return
        most = self._rows_of_library(x.shape[0], weight)
        if most:
            for rows in (slice(most), slice(most, None)):
                more = None if residual is None else residual[rows]
                self.linear(x[rows], linear, norm=norm, activation=activation, residual=more, out=out[rows])
            return
        if self._fuses(weight, activation, residual, out, x.dtype):
            self._8_bit_gemm(x, weight, linear.bias, norm, activation, residual, out)
            return
        product = self._temporary("product", x.shape[0], weight.shape[0], x.dtype)
        if activation in ACTIVATIONS:
            self._8_bit_gemm(x, weight, None, norm, None, None, product)
            self._library_epilogue(product, linear.bias, activation, residual, out, x.dtype)
            return
        assert activation is not None
        self._8_bit_gemm(x, weight, linear.bias, norm, None, None, product)
        _activate(product, activation, residual, out)

    def project_qkv(
        self,
        x: Tensor,
        linear: Linear,
        norm: Norm | None,
        heads: Heads,
        batch: Batch,
        cache: CacheLayer,
        *,
        out: Tensor,
    ) -> None:
        weight = linear.weight
        if not isinstance(weight, QuantizedWeight) or self._expands(x, weight):
            super().project_qkv(x, linear, norm, heads, batch, cache, out=out)
            return
        fused = self.capability == 90 and fuses_heads_sm90(*_rotation(heads))
        fused = fused and aligned(out) and x.dtype == out.dtype
        fused = fused and not self._rows_of_library(x.shape[0], weight)
        if cache.scales is not None:
            fused = fused and heads.head_size in ROUNDED_HEADS and x.shape[0] <= ROUNDED_TOKENS
        if not fused or heads.changes_qkv:
            self.linear(x, linear, norm=norm, out=out)
            self.finish_qkv(out, heads, batch, cache)
            return
        _check_linear("project_qkv", x, linear, None, out, False)
        _check_qkv("project_qkv", out, heads, batch, cache)
        if x.shape[0] > 0:
            fields = fields_of_heads(heads, batch, cache)
            self._8_bit_gemm(x, weight, linear.bias, norm, None, None, out, heads, fields)

    def _rows_of_library(self, tokens: int, weight: QuantizedWeight) -> int:
        """gemm_table.library_rows of a product with this weight. Every product asks: most ask no table."""
        if operand(weight) != "fp8_blocks":
            return 0
        gemm = Gemm(tokens, weight.columns, weight.shape[0], operand=operand(weight))
        return library_rows(gemm, self.gemm_device)

    def _stays_packed(self, linear: Linear, dtype: torch.dtype) -> bool:
        """Whether it is the head's weight, and there is no scratch memory to expand it in."""
        weight = linear.weight
        if not linear.is_head or isinstance(weight, Tensor):
            return False
        if isinstance(weight, QuantizedWeight) and weight.activations:
            return False
        held, (rows, columns) = self._arenas.get("expanded_weight"), weight.shape
        return held is None or held.numel() < rows * columns * dtype.itemsize

    def _expands(self, x: Tensor, weight: QuantizedWeight) -> bool:
        """Whether gemm_table.choose plans to expand the weight to 16 bit for this product."""
        if operand(weight) != "two_parts" or x.dtype == torch.float32:
            return False
        gemm = Gemm(x.shape[0], weight.columns, weight.shape[0], operand="two_parts")
        return self.choose_gemm(gemm).kernel == "expand_rows"

    def _fuses(
        self,
        weight: QuantizedWeight,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
        dtype: torch.dtype,
    ) -> bool:
        """Whether the epilogue of the kernels is all of it."""
        in_float32 = out.dtype != dtype
        if activation not in ACTIVATIONS or (residual is not None and in_float32):
            return False
        whole = 2 * weight.block_rows if weight.block_rows > 1 else 16
        if activation == "swiglu" and (residual is not None or in_float32 or weight.shape[0] % whole):
            return False
        return (in_float32 or aligned(out)) and (residual is None or aligned(residual))

    def _8_bit_gemm(
        self,
        x: Tensor,
        weight: QuantizedWeight,
        bias: Tensor | None,
        norm: Norm | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
        heads: Heads | None = None,
        head_fields: dict[str, float] | None = None,
    ) -> None:
        """out = epilogue(rounded(norm(x)) @ weight.T), by what gemm_table.choose plans."""
        (tokens, inputs), outputs = x.shape, weight.shape[0]
        gemm = Gemm(
            tokens,
            inputs,
            outputs,
            "swiglu" if activation == "swiglu" else "qkv" if heads else "linear",
            operand=operand(weight),
            **({} if heads is None else dict(zip(_ROTATION, _rotation(heads)))),  # type: ignore[arg-type]
        )
        plan = self.choose_gemm(gemm)
        values, scales = self._rounded(x, norm, operand(weight))
        if plan.kernel == "gemm_library":
            if self._fp8_library(values, scales, x, weight, bias, activation, residual, out):
                if heads is not None:
                    self._finish_qkv(out, heads, head_fields or {})
                return
            without = self.gemm_device._replace(fp8_library=False, fp8_block_library=False)
            plan = choose(gemm, without)
        if plan.kernel == "library_8_bit":
            self._library_8_bit(values, scales, x, weight, bias, activation, residual, out)
            return
        getattr(self.library, plan.kernel)(
            current_stream(self.device),
            out=out.data_ptr(),
            x=values.data_ptr(),
            weight=weight.values.data_ptr(),
            bias=pointer(bias),
            residual=pointer(residual),
            x_stride=inputs,
            weight_stride=inputs,
            residual_stride=0 if residual is None else residual.stride(0),
            out_stride=out.stride(0),
            tokens=tokens,
            inputs=inputs,
            outputs=outputs,
            activation=ACTIVATIONS[activation],
            out_float32=out.dtype != x.dtype,
            dtype=DTYPES[x.dtype],
            operand=OPERANDS[operand(weight)],
            **{_scales_of(weight): weight.scales.data_ptr()},
            x_scales=scales.data_ptr(),
            **self._plan_fields(plan),
            **(head_fields or {}),
        )

    def _fp8_library(
        self,
        values: Tensor,
        scales: Tensor,
        x: Tensor,
        weight: QuantizedWeight,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
    ) -> bool:
        """out = activation(values * scales @ weight.T + bias) + residual by cuBLASLt, with a pass behind it
        for an activation or a float32 out with a bias. values, scales: of _rounded, for x. False: cuBLASLt
        has no such product."""
        (tokens, inputs), outputs = x.shape, weight.shape[0]
        fuses = activation is None and (bias is None or out.dtype == x.dtype)
        if weight.block_rows > 1:  # cuBLASLt has no other epilogue for blocks
            fuses = fuses and bias is None
        product = out if fuses else self._temporary("product", tokens, outputs, x.dtype)
        done = self._library_products.run(
            current_stream(self.device),
            tokens,
            out=product.data_ptr(),
            x=values.data_ptr(),
            weight=weight.values.data_ptr(),
            bias=pointer(bias) if fuses else 0,
            residual=pointer(residual) if fuses else 0,
            x_stride=inputs,
            weight_stride=inputs,
            residual_stride=residual.stride(0) if fuses and residual is not None else 0,
            out_stride=product.stride(0),
            inputs=inputs,
            outputs=outputs,
            out_float32=product.dtype != x.dtype,
            dtype=DTYPES[x.dtype],
            operand=_ROUNDED_AS[operand(weight)],
            x_scales=scales.data_ptr(),
            weight_scales=weight.scales.data_ptr(),
        )
        if done and not fuses:
            self._library_epilogue(product, bias, activation, residual, out, x.dtype)
        return done

    def _library_8_bit(
        self,
        values: Tensor,
        scales: Tensor,
        x: Tensor,
        weight: QuantizedWeight,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
    ) -> None:
        """out = activation(values * scales @ weight.T + bias) + residual by cuBLAS, as many rows at a time as
        the memory for partial sums has room for. values, scales: of _rounded, for x."""
        (tokens, inputs), outputs = x.shape, weight.shape[0]
        rounded = values.view(weight.values.dtype)[: tokens * inputs].view(tokens, inputs)
        row_scales = scales.view(torch.float32)[:tokens]
        kind = torch.int32 if weight.format == "int8" else torch.float32
        pieces = -(-4 * tokens * outputs // self._sums.numel())
        size = -(-tokens // pieces)  # so that none has few rows
        for first in range(0, tokens, size):
            rows = slice(first, min(first + size, tokens))
            count = rows.stop - first
            sums = self._sums.view(kind)[: count * outputs].view(count, outputs)
            _multiply_8_bit(rounded[rows], weight.values, sums)
            more = None if residual is None else residual[rows]
            self._library_epilogue(
                sums, bias, activation, more, out[rows], x.dtype, weight.scales, row_scales[rows]
            )

    def _rounded(
        self, x: Tensor, norm: Norm | None, format: str, order: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The values and scales (4 * T bytes) of kernels.quantized.rounded_activations, of x or of norm(x)
        rounded to X, its columns in `order`; valid until the next operation.

        The values are T * C bytes, or in "two_parts" those of rows_of_two_parts. In "fp8_blocks" the scales
        are (ceil(C / 128), T)."""
        tokens, columns = x.shape
        groups = -(-columns // SCALE_BLOCK) if format == "fp8_blocks" else 1
        rows = -(-tokens // 8) * 16 if format.startswith("two_parts") else tokens
        weight = bias = None
        if norm is not None:
            weight, bias = norm.weight, norm.bias
            match("norm", ("TC", "x", x), ("C", "weight", weight))
            same_dtype("norm", ("x", x), ("weight", weight))
            if bias is not None:
                match("norm", ("TC", "x", x), ("C", "bias", bias))
                same_dtype("norm", ("x", x), ("bias", bias))
        values = self._arena("normed", rows * columns)
        scales = self._arena("row_scales", row_scale_bytes(tokens, groups))
        self.library.quantize_rows(
            values.data_ptr(),
            scales.data_ptr(),
            x.data_ptr(),
            pointer(order),
            pointer(weight),
            pointer(bias),
            0.0 if norm is None else norm.eps,
            tokens,
            columns,
            x.stride(0),
            _ROUNDED_AS[format],
            DTYPES[x.dtype],
            current_stream(self.device),
        )
        return values, scales


def _multiply_8_bit(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out (T, N) = x (T, C) @ weight.T, both int8 (out int32) or E4M3 (out float32); T above 16."""
    if out.dtype == torch.int32:
        torch._int_mm(x, weight.t(), out=out)
        return
    one = torch.ones((), device=x.device)
    torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.float32, out=out)


_ROTATION = ("head_size", "rotary_size", "interleaved")


def _scales_of(weight: QuantizedWeight) -> str:
    """The field of a GEMM task that has the weight's scales."""
    return "block_scales" if weight.block_rows > 1 else "weight_scales"


def _in_rows(weight: QuantizedWeight) -> QuantizedWeight:
    """As the kernels read it."""
    return replace(weight, values=weight.values.contiguous(), scales=weight.scales.float().contiguous())
