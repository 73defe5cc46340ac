"""GEMMs on an NVIDIA GPU: gemm_table.py chooses the kernel, this file checks and launches."""

from __future__ import annotations

import torch
from torch import Tensor

from tridecode.kernels.checks import DtypeError, LayoutError, ShapeError, indices, match, same_dtype
from tridecode.kernels.cuda_base import (
    ACTIVATIONS,
    DTYPES,
    cache_fields,
    check_cache,
    norm_fields,
    pointer,
)
from tridecode.kernels.cuda_packed import CudaPacked
from tridecode.kernels.gemm_table import Gemm, Plan
from tridecode.kernels.library import current_stream
from tridecode.kernels.ops import Batch, CacheLayer, Heads, Linear, Norm
from tridecode.kernels.packed_weight import PackedWeight
from tridecode.kernels.quantized import QuantizedWeight
from tridecode.kernels.reference import GATED, activated, change_qkv
from tridecode.kernels.scratch import NUM_COUNTERS, SUM_BYTES


class CudaGemm(CudaPacked):
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
        _check_linear("linear", x, linear, residual, out, activation in GATED)
        if x.shape[0] == 0:
            return
        if activation is None or activation in ACTIVATIONS:
            self._gemm(x, linear, norm, activation, residual, out)
        else:
            self._torch_activation(x, linear, norm, activation, residual, out)

    def _torch_activation(
        self,
        x: Tensor,
        linear: Linear,
        norm: Norm | None,
        activation: str,
        residual: Tensor | None,
        out: Tensor,
    ) -> None:
        """A product whose activation no epilogue has: torch computes it."""
        product = self._temporary("product", x.shape[0], linear.weight.shape[0], x.dtype)
        self._gemm(x, linear, norm, None, None, product)
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
        _check_linear("project_qkv", x, linear, None, out, False)
        _check_qkv("project_qkv", out, heads, batch, cache)
        if x.shape[0] == 0:
            return
        fields = fields_of_heads(heads, batch, cache)
        if heads.changes_qkv:
            self._gemm(x, linear, norm, None, None, out)
        elif self._gemm(x, linear, norm, None, None, out, heads, fields).fuses_heads:
            return
        self._finish_qkv(out, heads, fields)

    def finish_qkv(self, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer) -> None:
        _check_qkv("finish_qkv", qkv, heads, batch, cache)
        if qkv.shape[0] > 0:
            self._finish_qkv(qkv, heads, fields_of_heads(heads, batch, cache))

    def _finish_qkv(self, qkv: Tensor, heads: Heads, fields: dict[str, float]) -> None:
        if heads.changes_qkv:
            change_qkv(qkv, heads)
        self.library.rotate_and_cache(
            current_stream(self.device),
            out=qkv.data_ptr(),
            out_stride=qkv.stride(0),
            tokens=qkv.shape[0],
            dtype=DTYPES[qkv.dtype],
            **fields,
        )

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
        """Launch what gemm_table.choose plans. head_fields: those of the task for query, key and value. A
        weight in rows of 8 bit is expanded."""
        weight = linear.weight
        if isinstance(weight, PackedWeight):
            return self._packed_gemm(x, linear, weight, norm, activation, residual, out, heads, head_fields)
        if isinstance(weight, QuantizedWeight):
            return self._expanded_gemm(x, linear, norm, activation, residual, out, heads, head_fields)
        (tokens, inputs), outputs = x.shape, weight.shape[0]
        x_stride, weight_stride, out_stride = x.stride(0), weight.stride(0), out.stride(0)
        x_pointer, weight_pointer, out_pointer = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        residual_stride = residual_pointer = 0
        if residual is not None:
            residual_stride, residual_pointer = residual.stride(0), residual.data_ptr()
        out_float32 = out.dtype != x.dtype
        strides, pointers = residual_stride, residual_pointer
        if not out_float32:
            strides, pointers = strides | out_stride, pointers | out_pointer
        plan = self.choose_gemm(
            Gemm(
                tokens,
                inputs,
                outputs,
                "swiglu" if activation == "swiglu" else "qkv" if heads else "linear",
                linear.bias is not None,
                residual is not None,
                norm is not None,
                x.dtype != torch.float32,
                out_float32,
                (x_stride | weight_stride) % 8 == 0 and (x_pointer | weight_pointer) % 16 == 0,
                strides % 8 == 0 and pointers % 16 == 0,
                *((0, 0, False) if heads is None else _rotation(heads)),
                "",
                bool(head_fields and head_fields["cache_format"]),
            )
        )
        if norm is not None and not plan.fuses_norm:
            x, norm = self._normed(x, norm), None
            x_pointer, x_stride = x.data_ptr(), x.stride(0)
        if plan.kernel == "gemm_library":
            self._gemm_library(x, linear, activation, residual, out)
            return plan
        fields = {**(head_fields if head_fields and plan.fuses_heads else {}), **norm_fields(norm)}
        getattr(self.library, plan.kernel)(
            current_stream(self.device),
            out=out_pointer,
            x=x_pointer,
            weight=weight_pointer,
            bias=pointer(linear.bias),
            residual=residual_pointer,
            x_stride=x_stride,
            weight_stride=weight_stride,
            residual_stride=residual_stride,
            out_stride=out_stride,
            tokens=tokens,
            inputs=inputs,
            outputs=outputs,
            activation=ACTIVATIONS[activation],
            out_float32=out_float32,
            dtype=DTYPES[x.dtype],
            tile_outputs=plan.tile_outputs,
            tile_tokens=plan.tile_tokens,
            split=plan.split,
            clusters=plan.clusters,
            stream_k=plan.stream_k,
            partials=self._sums_pointer,
            partial_bytes=SUM_BYTES,
            counters=self._counters_pointer,
            num_counters=NUM_COUNTERS,
            **fields,
        )
        return plan

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        normed = self._temporary("normed", x.shape[0], x.shape[1], x.dtype)
        self.norm(x, norm, out=normed)
        return normed


def _activate(product: Tensor, activation: str, residual: Tensor | None, out: Tensor) -> None:
    """out = activation(product) + residual, by torch; product is overwritten."""
    product = activated(product, activation)
    out.copy_(product if residual is None else product.add_(residual))


def _check_qkv(operation: str, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer) -> None:
    if qkv.shape[1] != heads.qkv_size:
        raise ShapeError(f"{operation}: out has {qkv.shape[1]} columns; the heads need {heads.qkv_size}")
    check_cache(operation, heads, cache, qkv)
    indices(operation, ("kv_slots", batch.kv_slots), ("positions", batch.positions))


def fields_of_heads(heads: Heads, batch: Batch, cache: CacheLayer) -> dict[str, float]:
    """The fields of a GEMM task for query, key and value."""
    rope = heads.rope
    fields: dict[str, float] = {
        "positions": batch.positions.data_ptr(),
        "kv_slots": batch.kv_slots.data_ptr(),
        "heads": heads.num_heads,
        "kv_heads": heads.num_kv_heads,
        "head_size": heads.head_size,
        **cache_fields(cache),
    }
    if rope is not None:
        fields["cos"], fields["sin"] = rope.cos.data_ptr(), rope.sin.data_ptr()
        fields["rotary_size"], fields["interleaved"] = rope.size, rope.interleaved
    return fields


def _rotation(heads: Heads) -> tuple[int, int, bool]:
    rope = heads.rope
    return (heads.head_size, 0, False) if rope is None else (heads.head_size, rope.size, rope.interleaved)


def _check_linear(
    operation: str, x: Tensor, linear: Linear, residual: Tensor | None, out: Tensor, gated: bool
) -> None:
    sizes = match(operation, ("TI", "x", x), ("TO", "out", out))
    dtype, weight = same_dtype(operation, ("x", x)), linear.weight
    if isinstance(weight, PackedWeight):
        match(operation, ("TI", "x", x), ("EGB", "weight", weight.values))
        if (weight.columns, weight.dtype) != (sizes["I"], dtype):
            found = f"x is (T, {sizes['I']}) of {dtype}"
            raise ShapeError(
                f"{operation}: {found}; the weight takes (T, {weight.columns}) of {weight.dtype}"
            )
    elif isinstance(weight, QuantizedWeight):
        match(operation, ("TI", "x", x), ("WI", "weight", weight.values))
        if dtype == torch.float32:
            raise DtypeError(f"{operation}: x is {dtype}; an 8-bit product takes float16 or bfloat16")
    else:
        match(operation, ("TI", "x", x), ("WI", "weight", weight))
        same_dtype(operation, ("x", x), ("weight", weight))
    rows = weight.shape[0]
    wanted = rows // 2 if gated else rows
    if sizes["O"] != wanted:
        raise ShapeError(f"{operation}: out has {sizes['O']} columns; {rows} weight rows give {wanted}")
    if out.dtype not in (dtype, torch.float32):
        raise DtypeError(f"{operation}: out is {out.dtype}; wanted {dtype} or float32")
    if linear.bias is not None:
        match(operation, ("TI", "x", x), ("W", "bias", linear.bias))
        if linear.bias.shape[0] != rows:
            raise ShapeError(f"{operation}: bias.shape[0] is {linear.bias.shape[0]}, but W is {rows}")
        same_dtype(operation, ("x", x), ("bias", linear.bias))
    if residual is not None:
        match(operation, ("TO", "out", out), ("TO", "residual", residual))
        same_dtype(operation, ("x", x), ("residual", residual))
    if x.data_ptr() == out.data_ptr():
        raise LayoutError(f"{operation}: out may not be x")
