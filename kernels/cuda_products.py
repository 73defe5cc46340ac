"""The products on an NVIDIA GPU: which of the ways computes one, and its launch."""

from __future__ import annotations

import torch
from torch import Tensor

from tridecode.kernels.checks import DtypeError, LayoutError, ShapeError, indices, match, same_dtype
from tridecode.kernels.cuda_base import (
    ACTIVATIONS,
    DTYPES,
    NUM_COUNTERS,
    SUM_BYTES,
    CudaBase,
    check_cache,
    pointer,
)
from tridecode.kernels.library import current_stream
from tridecode.kernels.ops import Batch, CacheLayer, Heads, Linear, Norm

#: up to this many tokens a product of this many weights is csrc/linear_many_sm90a.cu's, where it takes it
MANY_TOKENS, MANY_WEIGHTS = 64, 1 << 24
#: up to this many tokens a small product normalises its input itself: more would take every block longer
#: than a kernel
FUSED_NORM_TOKENS = 2


class CudaProducts(CudaBase):
    """norm, linear and project_qkv of kernels.ops.Ops."""

    def norm(self, x: Tensor, norm: Norm, *, out: Tensor) -> None:
        sizes = match("norm", ("TC", "x", x), ("C", "weight", norm.weight), ("TC", "out", out))
        dtype = same_dtype("norm", ("x", x), ("weight", norm.weight), ("out", out))
        if norm.bias is not None:
            match("norm", ("TC", "x", x), ("C", "bias", norm.bias))
            same_dtype("norm", ("x", x), ("bias", norm.bias))
        self.library.norm(
            out.data_ptr(),
            x.data_ptr(),
            norm.weight.data_ptr(),
            pointer(norm.bias),
            norm.eps,
            sizes["T"],
            sizes["C"],
            x.stride(0),
            out.stride(0),
            DTYPES[dtype],
            current_stream(self.device),
        )

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
        gated = activation == "swiglu"
        _check_linear("linear", x, linear, residual, out, gated)
        if x.shape[0] == 0:
            return
        if self._is_many(x, linear, activation, residual, out):
            self._many_linear(x, linear, norm, activation, residual, out)
        elif self._is_small(x, linear):
            self._small_linear(x, linear, norm, activation, residual, out)
        else:
            self._library_linear(x, linear, norm, activation, residual, out)

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
        _check_linear("project_qkv", x, linear, None, out, False)
        if out.shape[1] != heads.qkv_size:
            raise ShapeError(f"project_qkv: out has {out.shape[1]} columns; the heads need {heads.qkv_size}")
        check_cache("project_qkv", heads, cache, out)
        indices("project_qkv", ("kv_slots", batch.kv_slots), ("positions", batch.positions))
        rope = heads.rope
        rotation = {
            "cos": 0 if rope is None else rope.cos.data_ptr(),
            "sin": 0 if rope is None else rope.sin.data_ptr(),
            "positions": batch.positions.data_ptr(),
            "kv_slots": batch.kv_slots.data_ptr(),
            "cache": cache.blocks.data_ptr(),
            "heads": heads.num_heads,
            "kv_heads": heads.num_kv_heads,
            "head_size": heads.head_size,
            "rotary_size": 0 if rope is None else rope.size,
            "interleaved": int(rope is not None and rope.interleaved),
            "block_tokens": cache.block_tokens,
        }
        if x.shape[0] == 0:
            return
        fused = fuses_heads(heads)
        if self._is_many(x, linear, None, None, out, qkv=True, fused=fused):
            self._many_linear(x, linear, norm, None, None, out, **(rotation if fused else {}))
            if fused:
                return
        elif self._is_small(x, linear, rope is not None):
            self._small_linear(x, linear, norm, None, None, out, **rotation)
            return
        else:
            self._library_linear(x, linear, norm, None, None, out)
        self.library.rotate_and_cache(
            current_stream(self.device),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            tokens=x.shape[0],
            dtype=DTYPES[out.dtype],
            **rotation,
        )

    def _is_small(self, x: Tensor, linear: Linear, rotated: bool = False) -> bool:
        """Whether csrc/linear.cu takes the product: 16-bit, every row at a multiple of 16 bytes, and few
        tokens.

        By what measured faster on an H200, all that is fused counted in. One or two tokens are ours, save
        long sums without a bias; up to small_tokens are matrices that cuBLAS does not spread over the chip,
        and the widest.
        """
        weight = linear.weight
        tokens, inputs, outputs = x.shape[0], x.shape[1], weight.shape[0]
        aligned = (inputs | x.stride(0) | weight.stride(0)) % 8 == 0 and (
            x.data_ptr() | weight.data_ptr()
        ) % 16 == 0
        if not aligned or x.dtype == torch.float32 or tokens > self.small_tokens:
            return False
        if tokens <= FUSED_NORM_TOKENS:
            return linear.bias is not None or not outputs <= 8192 < inputs
        return self.capability == 90 and not rotated and (outputs > 20480 or outputs * inputs <= 1 << 24)

    def _is_many(
        self,
        x: Tensor,
        linear: Linear,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
        qkv: bool = False,
        fused: bool = False,
    ) -> bool:
        """Whether csrc/linear_many_sm90a.cu computes the product: on Hopper, in 16 bit, everything that it
        copies in boxes at multiples of 16 bytes."""
        if self.capability != 90 or self.many == "never" or x.dtype == torch.float32:
            return False
        outputs, inputs = linear.weight.shape
        gated = activation == "swiglu"
        if self.many != "always" and not gains_by_many(
            x.shape[0], inputs, outputs, gated=gated, qkv=qkv, fused=fused
        ):
            return False
        if out.dtype != x.dtype and (gated or residual is not None):
            return False
        if gated and (residual is not None or outputs % 16):
            return False
        boxes = [x, linear.weight, *([] if residual is None else [residual])]
        boxes += [out] if out.dtype == x.dtype else []
        return not any(box.stride(0) % 8 or box.data_ptr() % 16 for box in boxes)

    def _many_linear(
        self,
        x: Tensor,
        linear: Linear,
        norm: Norm | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
        **heads: int,
    ) -> None:
        if norm is not None:
            x = self._normed(x, norm)
        self.library.linear_many(
            current_stream(self.device),
            split=self.split,
            **self._fields(x, linear, activation, residual, out),
            **heads,
        )

    def _fields(
        self, x: Tensor, linear: Linear, activation: str | None, residual: Tensor | None, out: Tensor
    ) -> dict[str, int]:
        """What every task of a product has."""
        weight = linear.weight
        return {
            "out": out.data_ptr(),
            "x": x.data_ptr(),
            "weight": weight.data_ptr(),
            "bias": pointer(linear.bias),
            "residual": pointer(residual),
            "x_stride": x.stride(0),
            "weight_stride": weight.stride(0),
            "residual_stride": 0 if residual is None else residual.stride(0),
            "out_stride": out.stride(0),
            "tokens": x.shape[0],
            "inputs": x.shape[1],
            "outputs": weight.shape[0],
            "activation": ACTIVATIONS[activation],
            "out_float32": out.dtype == torch.float32,
            "dtype": DTYPES[x.dtype],
            "partials": self._sums.data_ptr(),
            "partial_bytes": SUM_BYTES,
            "counters": self._counters.data_ptr(),
            "num_counters": NUM_COUNTERS,
        }

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        normed = self._temporary("normed", x.shape[0], x.shape[1], x.dtype)
        self.norm(x, norm, out=normed)
        return normed

    def _small_linear(
        self,
        x: Tensor,
        linear: Linear,
        norm: Norm | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
        **heads: int,
    ) -> None:
        tokens, inputs = x.shape
        if norm is not None and (tokens > FUSED_NORM_TOKENS or not self._fits(tokens, inputs)):
            x, norm = self._normed(x, norm), None
        self.library.linear(
            current_stream(self.device),
            norm_weight=0 if norm is None else norm.weight.data_ptr(),
            norm_bias=0 if norm is None else pointer(norm.bias),
            norm_eps=0.0 if norm is None else norm.eps,
            **self._fields(x, linear, activation, residual, out),
            **heads,
        )

    def _fits(self, tokens: int, inputs: int) -> bool:
        """Whether the whole input of a small product, padded as csrc/linear.cu pads it, fits in shared
        memory."""
        sums = 16 * 16 * 8 * 4 * 2 * (1 if tokens <= 8 else 2)
        return -(-inputs // 4096) * 4096 * 2 * tokens + sums + 3072 <= self.shared_bytes

    def _library_linear(
        self,
        x: Tensor,
        linear: Linear,
        norm: Norm | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
    ) -> None:
        """The product by cuBLAS; what its epilogues cannot do follows in one kernel."""
        tokens, columns = x.shape[0], linear.weight.shape[0]
        if norm is not None:
            x = self._normed(x, norm)
        weight, bias = linear.weight.t(), linear.bias
        if out.dtype == x.dtype and residual is None and activation in (None, "gelu_tanh", "relu"):
            if bias is None and activation is None:
                torch.mm(x, weight, out=out)
                return
            if bias is not None and activation is None:
                torch.addmm(bias, x, weight, out=out)
                return
            if bias is not None and x.dtype != torch.float32:
                torch._addmm_activation(bias, x, weight, use_gelu=activation == "gelu_tanh", out=out)
                return
        if out.dtype == x.dtype and residual is not None and activation is None:
            torch.addmm(residual, x, weight, out=out)
            if bias is not None:
                self._finish(out, bias, None, None, out, x.dtype)
            return
        if out.dtype == x.dtype and activation != "swiglu":
            product = out if residual is None else self._temporary("product", tokens, columns, x.dtype)
            torch.mm(x, weight, out=product)
        elif out.dtype == x.dtype:
            product = self._temporary("product", tokens, columns, x.dtype)
            torch.mm(x, weight, out=product)
        else:
            product = (
                out if activation != "swiglu" else self._temporary("product", tokens, columns, out.dtype)
            )
            torch.mm(x, weight, out_dtype=out.dtype, out=product)
        if product is not out or bias is not None or activation is not None or residual is not None:
            self._finish(product, bias, activation, residual, out, x.dtype)

    def _finish(
        self,
        product: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.library.finish_linear(
            out.data_ptr(),
            product.data_ptr(),
            pointer(bias),
            pointer(residual),
            out.shape[0],
            out.shape[1],
            out.stride(0),
            product.stride(0),
            0 if residual is None else residual.stride(0),
            ACTIVATIONS[activation],
            int(product.dtype == torch.float32),
            int(out.dtype == torch.float32),
            DTYPES[dtype],
            current_stream(self.device),
        )


def fuses_heads(heads: Heads) -> bool:
    """Whether csrc/linear_many_sm90a.cu rotates such heads and writes them to the cache itself."""
    if heads.rope is None:
        return heads.head_size % 8 == 0
    whole = heads.rope.size == heads.head_size and not heads.rope.interleaved
    return whole and heads.head_size in (64, 128, 256)


def gains_by_many(tokens: int, inputs: int, outputs: int, *, gated: bool, qkv: bool, fused: bool) -> bool:
    """Where csrc/linear_many_sm90a.cu measured faster on an H200 than the other products, with all that each
    leaves to kernels after it. fused: heads are rotated and kept at once.

    Over long prompts, which seem bound by power, cuBLAS was faster but for SwiGLU, which saves a pass there.
    """
    if outputs * inputs < MANY_WEIGHTS:
        return False
    if gated:
        return not 256 < tokens < 1024
    return tokens <= MANY_TOKENS and (fused or not qkv)


def _check_linear(
    operation: str, x: Tensor, linear: Linear, residual: Tensor | None, out: Tensor, gated: bool
) -> None:
    sizes = match(operation, ("TI", "x", x), ("WI", "weight", linear.weight), ("TO", "out", out))
    dtype = same_dtype(operation, ("x", x), ("weight", linear.weight))
    wanted = sizes["W"] // 2 if gated else sizes["W"]
    if sizes["O"] != wanted:
        raise ShapeError(f"{operation}: out has {sizes['O']} columns; {sizes['W']} weight rows give {wanted}")
    if out.dtype not in (dtype, torch.float32):
        raise DtypeError(f"{operation}: out is {out.dtype}; wanted {dtype} or float32")
    if linear.bias is not None:
        match(operation, ("WI", "weight", linear.weight), ("W", "bias", linear.bias))
        same_dtype(operation, ("x", x), ("bias", linear.bias))
    if residual is not None:
        match(operation, ("TO", "out", out), ("TO", "residual", residual))
        same_dtype(operation, ("x", x), ("residual", residual))
    if x.data_ptr() == out.data_ptr():
        raise LayoutError(f"{operation}: out may not be x")
