"""One GEMM on the GPU, and the fields of the tasks that describe it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tridecode.kernels.checks import DtypeError, LayoutError, ShapeError, indices, match, same_dtype
from tridecode.kernels.formats.packed_weight import PackedWeight
from tridecode.kernels.formats.quantized import QuantizedWeight
from tridecode.kernels.gemm.plan import Gemm
from tridecode.kernels.gpu import (
    ACTIVATIONS,
    DTYPES,
    FUSED_GATES,
    aligned,
    cache_fields,
    check_cache,
    contiguous,
    pointer,
)
from tridecode.kernels.operands import Batch, CacheLayer, Heads, Linear, Norm
from tridecode.kernels.reference.products import GATED


class Call(NamedTuple):
    """out = activation(norm(x) @ weight^T + bias) + residual, arguments as those of kernels.ops.Ops.linear.

    heads, head_fields: set for a query, key and value projection, whose epilogue may rotate the heads and
    write keys and values to the cache; head_fields comes from fields_of_heads. adapters: the fields of
    tridecode_adapted_gemm_task, of a call that WeightKind.adapts accepts. sent and kept:
    those of tridecode_sent_gemm_task and tridecode_kept_gemm_task, likewise with WeightKind.sends and keeps.
    """

    x: Tensor
    linear: Linear
    out: Tensor
    norm: Norm | None = None
    activation: str | None = None
    residual: Tensor | None = None
    heads: Heads | None = None
    head_fields: dict[str, float] | None = None
    adapters: dict[str, int] | None = None
    sent: Mapping[str, float] | None = None
    kept: Mapping[str, float] | None = None

    @property
    def tokens(self) -> int:
        return self.x.shape[0]

    @property
    def out_float32(self) -> bool:
        """Return whether a 16-bit GEMM has a float32 result."""
        return self.out.dtype != self.x.dtype

    @property
    def epilogue(self) -> str:
        """The epilogue, as in Gemm.epilogue."""
        return "swiglu" if self.activation in FUSED_GATES else "qkv" if self.heads else "linear"

    def rows(self, rows: slice) -> Call:
        """Return the same GEMM over these rows of x."""
        residual = None if self.residual is None else self.residual[rows]
        return self._replace(x=self.x[rows], residual=residual, out=self.out[rows])

    def bare(self, out: Tensor) -> Call:
        """Return norm(x) @ weight^T without bias, activation, residual and heads."""
        return Call(self.x, replace(self.linear, bias=None), out, self.norm)

    def fields(self) -> dict[str, float]:
        """Return the task fields for x, out and the epilogue, without those of the weight, the norm and the
        heads.
        """
        x, out, residual = self.x, self.out, self.residual
        return {
            "out": out.data_ptr(),
            "x": x.data_ptr(),
            "bias": pointer(self.linear.bias),
            "residual": pointer(residual),
            "x_stride": x.stride(0),
            "residual_stride": 0 if residual is None else residual.stride(0),
            "out_stride": out.stride(0),
            "activation": ACTIVATIONS[self.activation],
            "out_float32": out.dtype != x.dtype,
            "dtype": DTYPES[x.dtype],
        }

    def gemm(self, outputs: int, inputs: int, weight: Tensor | None = None, operand: str = "") -> Gemm:
        """Return the description by which the tables choose.

        weight: rows in the dtype of x, if it has any.
        """
        x, out, heads, residual = self.x, self.out, self.heads, self.residual
        rope = None if heads is None else heads.rope
        out_float32 = out.dtype != x.dtype
        out_aligned = (out_float32 or aligned(out)) and (residual is None or aligned(residual))
        return Gemm(
            tokens=x.shape[0],
            inputs=inputs,
            outputs=outputs,
            epilogue=self.epilogue,
            bias=self.linear.bias is not None,
            residual=residual is not None,
            norm=self.norm is not None,
            half=x.dtype != torch.float32,
            out_float32=out_float32,
            aligned=aligned(x) and (weight is None or aligned(weight)),
            out_aligned=out_aligned,
            head_size=0 if heads is None else heads.head_size,
            rotary_size=0 if rope is None else rope.size,
            interleaved=rope is not None and rope.interleaved,
            operand=operand,
            rounds=bool(self.head_fields and self.head_fields["cache_format"]),
        )


def fields_of_heads(heads: Heads, batch: Batch, cache: CacheLayer) -> dict[str, float]:
    """Return the fields of a GEMM task for query, key and value."""
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


def fields_of_changes(heads: Heads, qkv: Tensor) -> dict[str, float]:
    """Return the fields of tridecode_heads_task for the clamp and the norms of heads.

    Raises ShapeError, DtypeError or LayoutError if a norm does not fit the heads.
    """
    fields: dict[str, float] = {"limit": heads.qkv_limit}
    kinds = (("query", heads.query_norm, heads.num_heads), ("key", heads.key_norm, heads.num_kv_heads))
    for name, norm, count in kinds:
        if norm is None:
            continue
        own = norm.weight.ndim == 2
        wanted = (count, heads.head_size) if own else (heads.head_size,)
        for part in (norm.weight, norm.bias):
            if part is None:
                continue
            if tuple(part.shape) != wanted:
                raise ShapeError(f"finish_heads: {name}_norm is {tuple(part.shape)}; wanted {wanted}")
            contiguous("finish_heads", (f"{name}_norm", part))
            same_dtype("finish_heads", ("qkv", qkv), (f"{name}_norm", part))
        fields[f"{name}_weight"], fields[f"{name}_bias"] = norm.weight.data_ptr(), pointer(norm.bias)
        fields[f"{name}_eps"], fields["norm_per_head"] = norm.eps, own
    return fields


def check_qkv(operation: str, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer) -> None:
    """Check the tensors of a QKV projection. Raises ShapeError, DtypeError or LayoutError."""
    if qkv.shape[1] != heads.qkv_size:
        raise ShapeError(f"{operation}: out has {qkv.shape[1]} columns; the heads need {heads.qkv_size}")
    check_cache(operation, heads, cache, qkv)
    indices(operation, ("kv_slots", batch.kv_slots), ("positions", batch.positions))


def check_call(operation: str, call: Call) -> None:
    """Raise ShapeError, DtypeError or LayoutError if the tensors do not fit together."""
    x, weight, residual, out = call.x, call.linear.weight, call.residual, call.out
    sizes = match(operation, ("TI", "x", x), ("TO", "out", out))
    dtype, bias = same_dtype(operation, ("x", x)), call.linear.bias
    _check_weight(operation, x, weight)
    rows = weight.shape[0]
    wanted = rows // 2 if call.activation in GATED else rows
    if sizes["O"] != wanted:
        raise ShapeError(f"{operation}: out has {sizes['O']} columns; {rows} weight rows give {wanted}")
    if out.dtype not in (dtype, torch.float32):
        raise DtypeError(f"{operation}: out is {out.dtype}; wanted {dtype} or float32")
    if bias is not None:
        match(operation, ("TI", "x", x), ("W", "bias", bias))
        if bias.shape[0] != rows:
            raise ShapeError(f"{operation}: bias.shape[0] is {bias.shape[0]}, but W is {rows}")
        same_dtype(operation, ("x", x), ("bias", bias))
    if residual is not None:
        match(operation, ("TO", "out", out), ("TO", "residual", residual))
        same_dtype(operation, ("x", x), ("residual", residual))
    if x.data_ptr() == out.data_ptr():
        raise LayoutError(f"{operation}: out may not be x")


def _check_weight(operation: str, x: Tensor, weight: Tensor | QuantizedWeight | PackedWeight) -> None:
    if isinstance(weight, Tensor):
        match(operation, ("TI", "x", x), ("WI", "weight", weight))
        same_dtype(operation, ("x", x), ("weight", weight))
        return
    match(operation, ("TI", "x", x), ("EGB"[: weight.values.dim()], "weight", weight.values))
    if weight.shape[1] != x.shape[1]:
        raise ShapeError(f"{operation}: x has {x.shape[1]} columns; the weight takes {weight.shape[1]}")
    if x.dtype not in weight.product_dtypes:
        names = " or ".join(str(dtype) for dtype in weight.product_dtypes)
        raise DtypeError(f"{operation}: x is {x.dtype}; a product with {weight.format} takes {names}")
