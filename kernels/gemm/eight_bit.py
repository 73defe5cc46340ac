"""GEMMs with both operands in 8 bit: W8A8, and int8 weights with x in two int8 parts.

`quantize_rows` quantises the rows of x, after the norm. On compute capability 9.0 the wgmma kernels of
csrc/gemm/sm90 multiply (gemm_sm90_*_8bit.cu, gemm_sm90_*_two_parts.cu), or cuBLASLt for many tokens in E4M3;
elsewhere gemm_mma_tiles_8bit.cu up to 64 tokens, and cuBLAS through torch. table.py chooses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tridecode.kernels.checks import match, same_dtype
from tridecode.kernels.formats.quantized import SCALE_BLOCK, QuantizedWeight
from tridecode.kernels.gemm.call import Call
from tridecode.kernels.gemm.cublas_products import CublasProducts
from tridecode.kernels.gemm.dequantised import DequantisedKind, DequantisedProducts
from tridecode.kernels.gemm.kind import WeightKind, finish_heads
from tridecode.kernels.gemm.plan import LARGE_TOKENS, Gemm
from tridecode.kernels.gemm.table import choose
from tridecode.kernels.gemm.table_sm90 import fuses_heads_sm90, library_rows, rounds_heads
from tridecode.kernels.gpu import ACTIVATIONS, DTYPES, FUSED_GATES, Gpu, aligned, plan_fields, pointer
from tridecode.kernels.operands import Heads, Linear, Norm
from tridecode.kernels.scratch import row_scale_bytes


def quantize_rows(
    gpu: Gpu, x: Tensor, norm: Norm | None, operand: str, order: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise the rows of x, or of norm(x) rounded to X, with their columns in `order`.

    operand: a name of tridecode_operand. Returns the values (T * C bytes; in two parts the high parts of 8
    tokens, then their low parts) and the scales (4 * T bytes; in fp8_blocks (ceil(C / 128), T)) of
    kernels.quantized.rounded_activations, valid until the next operation.
    """
    tokens, columns = x.shape
    groups = -(-columns // SCALE_BLOCK) if operand == "fp8_blocks" else 1
    rows = -(-tokens // 8) * 16 if operand.startswith("two_parts") else tokens
    weight = bias = None
    if norm is not None:
        weight, bias = norm.weight, norm.bias
        match("norm", ("TC", "x", x), ("C", "weight", weight))
        same_dtype("norm", ("x", x), ("weight", weight))
        if bias is not None:
            match("norm", ("TC", "x", x), ("C", "bias", bias))
            same_dtype("norm", ("x", x), ("bias", bias))
    values = gpu.arena("normed", rows * columns)
    scales = gpu.arena("row_scales", row_scale_bytes(tokens, groups))
    gpu.library.quantize_rows(
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
        gpu.library.operands[operand],
        DTYPES[x.dtype],
        gpu.stream,
    )
    return values, scales


class EightBit(WeightKind):
    """Weights in 8-bit rows, see quantized.stays_in_8_bit.

    operand: "int8" or "fp8" (W8A8), or "two_parts": int8 weights, x quantised to int8 in two parts.
    """

    def __init__(self, gpu: Gpu, cublas: CublasProducts, operand: str):
        super().__init__(gpu)
        self.cublas, self.operand = cublas, operand

    def adapts(self, call: Call) -> bool:
        weight, heads = _weight(call), call.heads
        if call.activation not in ACTIVATIONS or not self._fuses(weight, call):
            return False
        rounds = bool(call.head_fields and call.head_fields["cache_format"])
        if heads is not None and not self._fuses_heads(weight, call, heads, rounds):
            return False
        return self.gpu.choose_gemm(self._gemm(weight, call)).adapts

    def sends(self, call: Call) -> bool:
        weight = _weight(call)
        if self.operand != "int8" or call.out_float32 or not self._fuses(weight, call):
            return False
        return self.gpu.choose_gemm(self._gemm(weight, call)).sends

    def launch(self, call: Call) -> bool:
        """Launch a call, even if the kernels' epilogue does not cover all of it."""
        weight = _weight(call)
        if self._fuses(weight, call):
            self._multiply(call, weight)
            return call.heads is not None
        product = self.gpu.temporary("product", call.tokens, weight.shape[0], call.x.dtype)
        self._multiply(call.bare(product), weight)
        self.cublas.epilogue(product, call)
        return False

    def project(self, call: Call) -> None:
        heads, fields, weight = call.heads, call.head_fields, _weight(call)
        assert heads is not None and fields is not None
        if not heads.changes_qkv and self._fuses_heads(weight, call, heads, bool(fields["cache_format"])):
            self._multiply(call, weight)
            return
        self.linear(call._replace(heads=None, head_fields=None))
        finish_heads(self.gpu, call.out, heads, fields)

    def chain_operand(self, linear: Linear) -> str:
        return self.operand

    def chain_fields(self, linear: Linear) -> dict[str, int]:
        weight = linear.weight
        assert isinstance(weight, QuantizedWeight)
        return {"weight": weight.values.data_ptr(), "weight_scales": weight.scales.data_ptr()}

    def _fuses_heads(self, weight: QuantizedWeight, call: Call, heads: Heads, rounds: bool) -> bool:
        """Return whether the kernel rotates the heads and writes the cache. rounds: the cache has 8 bits."""
        rotation = (0, False) if heads.rope is None else (heads.rope.size, heads.rope.interleaved)
        if self.gpu.capability != 90 or not fuses_heads_sm90(heads.head_size, *rotation):
            return False
        if not aligned(call.out) or call.out_float32 or self.library_rows(call.tokens, weight):
            return False
        if not rounds:
            return True
        plan = self.gpu.choose_gemm(self._gemm(weight, call))
        return call.tokens <= LARGE_TOKENS and rounds_heads(plan, heads.head_size)

    def library_rows(self, tokens: int, weight: QuantizedWeight) -> int:
        """Return table_sm90.library_rows for a GEMM with this weight."""
        return 0

    def _fuses(self, weight: QuantizedWeight, call: Call) -> bool:
        """Return whether the kernels' epilogue covers everything that follows the GEMM."""
        residual = call.residual
        if residual is not None and call.out_float32:
            return False
        whole = 2 * weight.block_rows if weight.block_rows > 1 else 16
        gated = call.activation in FUSED_GATES
        if gated and (residual is not None or call.out_float32 or weight.shape[0] % whole):
            return False
        return (call.out_float32 or aligned(call.out)) and (residual is None or aligned(residual))

    def _gemm(self, weight: QuantizedWeight, call: Call) -> Gemm:
        """Return the description by which the tables choose."""
        (outputs, inputs), heads = weight.shape, call.heads
        rope = None if heads is None else heads.rope
        return Gemm(
            call.x.shape[0],
            inputs,
            outputs,
            call.epilogue,
            operand=self.operand,
            head_size=0 if heads is None else heads.head_size,
            rotary_size=0 if rope is None else rope.size,
            interleaved=rope is not None and rope.interleaved,
        )

    def _multiply(self, call: Call, weight: QuantizedWeight) -> None:
        """Compute a call for which _fuses is true."""
        gpu, (outputs, inputs), gemm = self.gpu, weight.shape, self._gemm(weight, call)
        plan = gpu.choose_gemm(gemm)
        values, scales = quantize_rows(gpu, call.x, call.norm, self.operand)
        if plan.kernel == "gemm_library":
            if self._by_cublas_lt(call, weight, values, scales):
                if call.heads is not None:
                    finish_heads(gpu, call.out, call.heads, call.head_fields or {})
                return
            plan = choose(gemm, gpu.gemm_device._replace(fp8_library=False, fp8_block_library=False))
        if plan.kernel == "library_8_bit":
            self._by_torch(call, weight, values, scales)
            return
        task = {
            **call.fields(),
            **gpu.scratch_fields,
            "tokens": call.x.shape[0],
            "inputs": inputs,
            "outputs": outputs,
            **weight.fields,
            **self._quantised_x(values, scales, inputs),
            **plan_fields(plan),
            **(call.head_fields or {}),
        }
        self.run(plan.kernel, task, call)

    def _quantised_x(self, values: Tensor, scales: Tensor, inputs: int) -> dict[str, float]:
        """Return the task fields for operands in 8 bit."""
        return {
            "x": values.data_ptr(),
            "x_stride": inputs,
            "weight_stride": inputs,
            "x_scales": scales.data_ptr(),
            "operand": self.gpu.library.operands[self.operand],
        }

    def _by_cublas_lt(self, call: Call, weight: QuantizedWeight, values: Tensor, scales: Tensor) -> bool:
        """Compute the call by cuBLASLt; an activation, or the bias of a float32 result, takes a second pass.

        values, scales: from quantize_rows. Returns False if cuBLASLt has no such GEMM.
        """
        gpu, (outputs, inputs) = self.gpu, weight.shape
        bias = call.linear.bias
        fuses = call.activation is None and (bias is None or not call.out_float32)
        if weight.block_rows > 1:  # cuBLASLt adds no bias to block-scaled GEMMs
            fuses = fuses and bias is None
        product = call.out if fuses else gpu.temporary("product", call.tokens, outputs, call.x.dtype)
        computed = call if fuses else call.bare(product)
        fields = {**computed.fields(), **self._quantised_x(values, scales, inputs)}
        done = gpu.library_products.run(
            gpu.stream,
            call.tokens,
            weight=weight.values.data_ptr(),
            weight_scales=weight.scales.data_ptr(),
            inputs=inputs,
            outputs=outputs,
            **fields,
        )
        if done and not fuses:
            self.cublas.epilogue(product, call)
        return done

    def _by_torch(self, call: Call, weight: QuantizedWeight, values: Tensor, scales: Tensor) -> None:
        """Compute the call by cuBLAS through torch, in pieces of rows whose sums fit in scratch memory.

        values, scales: from quantize_rows.
        """
        gpu, tokens, (outputs, inputs) = self.gpu, call.tokens, weight.shape
        x = values.view(weight.values.dtype)[: tokens * inputs].view(tokens, inputs)
        row_scales = scales.view(torch.float32)[:tokens]
        kind = torch.int32 if weight.format == "int8" else torch.float32
        pieces = -(-4 * tokens * outputs // gpu.sums.numel())
        size = -(-tokens // pieces)  # equal pieces, so that none is short
        for first in range(0, tokens, size):
            rows = slice(first, min(first + size, tokens))
            count = rows.stop - first
            sums = gpu.sums.view(kind)[: count * outputs].view(count, outputs)
            _multiply_8_bit(x[rows], weight.values, sums)
            self.cublas.epilogue(sums, call.rows(rows), weight.scales, row_scales[rows])


class Fp8Blocks(EightBit):
    """W8A8 in E4M3 with block scales."""

    def __init__(self, gpu: Gpu, cublas: CublasProducts):
        super().__init__(gpu, cublas, "fp8_blocks")

    def linear(self, call: Call) -> None:
        """Compute the GEMM; cuBLASLt needs a multiple of 4 tokens, so the remaining tokens are a separate
        GEMM.
        """
        most = self.library_rows(call.tokens, _weight(call))
        if not most:
            super().linear(call)
            return
        for rows in (slice(most), slice(most, None)):
            self.linear(call.rows(rows))

    def library_rows(self, tokens: int, weight: QuantizedWeight) -> int:
        gemm = Gemm(tokens, weight.columns, weight.shape[0], operand=self.operand)
        return library_rows(gemm, self.gpu.gemm_device)

    def chain_operand(self, linear: Linear) -> str:
        return ""


class TwoParts(DequantisedKind):
    """int8 weights: up to TWO_PARTS_TOKENS tokens x is quantised to int8 in two parts; beyond, the weight is
    dequantised.

    The two parts hold 16 bits relative to a row's largest number, and their sums are exact: the error of a
    result is at most max|x| / 64,516 of the row times the sum of the weight row's magnitudes. Rounding x to
    bfloat16 exceeds that unless max|x| is above about 100 times the root mean square of the row.
    """

    def __init__(self, gpu: Gpu, products: DequantisedProducts, rows: EightBit):
        super().__init__(gpu, products)
        self._rows = rows

    def launch(self, call: Call) -> bool:
        if self._dequantises(call):
            return self.products.launch(call, _weight(call))
        return self._rows.launch(call)

    def adapts(self, call: Call) -> bool:
        return not self._dequantises(call) and self._rows.adapts(call)

    def project(self, call: Call) -> None:
        if self._dequantises(call):
            super().project(call)
        else:
            self._rows.project(call)

    def chain_operand(self, linear: Linear) -> str:
        return self._rows.chain_operand(linear)

    def chain_fields(self, linear: Linear) -> dict[str, int]:
        return self._rows.chain_fields(linear)

    def _dequantises(self, call: Call) -> bool:
        """Return whether table.choose plans to dequantise the weight for this GEMM."""
        weight = _weight(call)
        gemm = Gemm(call.tokens, weight.columns, weight.shape[0], operand="two_parts")
        return self.gpu.choose_gemm(gemm).kernel == "expand_rows"


def _weight(call: Call) -> QuantizedWeight:
    weight = call.linear.weight
    assert isinstance(weight, QuantizedWeight)
    return weight


def _multiply_8_bit(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Compute out (T, N) = x (T, C) @ weight.T, both int8 (out int32) or E4M3 (out float32); T above 16."""
    if out.dtype == torch.int32:
        torch._int_mm(x, weight.t(), out=out)
        return
    one = torch.ones((), device=x.device)
    torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.float32, out=out)
