"""Products with weights in 8 or 4 bit on an NVIDIA GPU: packed_table.py chooses the kernel."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
from torch import Tensor

from tridecode.kernels.cuda_base import ACTIVATIONS, DTYPES, aligned, norm_fields, pointer
from tridecode.kernels.cuda_expanded import CudaExpanded
from tridecode.kernels.cuda_int4 import CudaInt4
from tridecode.kernels.gemm_table import Gemm, Plan
from tridecode.kernels.library import current_stream
from tridecode.kernels.ops import Heads, Linear, Norm
from tridecode.kernels.packed_weight import (
    GRANULE_INPUTS,
    PackedWeight,
    has_uneven_groups,
    loses_scales,
    multiplied_in_int8,
    not_packed,
    pack,
)
from tridecode.kernels.quantized import QuantizedWeight

log = logging.getLogger("tridecode.engine")


@lru_cache(None)
def _say_expanded(format: str, why: str, dtype: torch.dtype) -> None:
    """Once for a format and a reason."""
    log.warning(
        "%s weights with %s are expanded to %s at load: no kernel reads them, and the memory is that of %s%s",
        format,
        why,
        dtype,
        dtype,
        "; activations are not rounded" if why.startswith("activations") else "",
    )


class CudaPacked(CudaExpanded, CudaInt4):
    """pack of kernels.ops.Ops, and what becomes of a packed weight."""

    def pack(self, linear: Linear, dtype: torch.dtype = torch.float32, is_head: bool = False) -> Linear:
        """Rows of the weight contiguous, as cuBLAS and the kernels read them; a quantised one arranged for
        the kernels that read it, or expanded."""
        weight = linear.weight
        if not isinstance(weight, QuantizedWeight):
            return Linear(linear.dense.contiguous(), linear.bias)
        why = not_packed(weight, dtype)
        if not why and loses_scales(weight, dtype):
            why = f"scales that are too small for {dtype}"
        if not why and has_uneven_groups(weight):
            why = "groups of unequal sizes"
        if why:
            _say_expanded(weight.format, why, dtype)
            return Linear(weight.expanded(dtype).contiguous(), linear.bias)
        packed = pack(weight, dtype)
        self._sorts_inputs |= packed.order is not None
        if not is_head:
            self._reserve_expanded(packed.rows, packed.columns, dtype)
        return Linear(packed, linear.bias, is_head=is_head)

    def _packed_gemm(
        self,
        x: Tensor,
        linear: Linear,
        weight: PackedWeight,
        norm: Norm | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
        heads: Heads | None,
        head_fields: dict[str, float] | None,
    ) -> Plan:
        """Launch what choose_packed plans; arguments as those of _gemm."""
        rounds = bool(head_fields and head_fields["cache_format"])
        plan = self._packed_plan(x, linear, weight, norm, activation, residual, out, heads, rounds)
        if weight.order is not None and not plan.kernel.startswith("gemm_int4"):
            x, norm = self._ordered(x if norm is None else self._normed(x, norm), weight.order), None
            plan = self._packed_plan(x, linear, weight, norm, activation, residual, out, heads, rounds)
        if plan.kernel == "expand_weight":
            return self._expanded_gemm(x, linear, norm, activation, residual, out, heads, head_fields)
        fields: dict[str, float] = dict(head_fields or {}) if plan.fuses_heads else {}
        if plan.kernel.startswith("gemm_int4"):
            self._int4_gemm(plan, x, linear, weight, norm, activation, residual, out, fields)
            return plan
        if norm is not None and not plan.fuses_norm:
            x, norm = self._normed(x, norm), None
        if norm is not None:
            fields |= norm_fields(norm)
        getattr(self.library, plan.kernel)(
            current_stream(self.device),
            out=out.data_ptr(),
            x=x.data_ptr(),
            bias=pointer(linear.bias),
            residual=pointer(residual),
            x_stride=x.stride(0),
            residual_stride=0 if residual is None else residual.stride(0),
            out_stride=out.stride(0),
            tokens=x.shape[0],
            inputs=weight.columns,
            outputs=weight.rows,
            activation=ACTIVATIONS[activation],
            out_float32=out.dtype != x.dtype,
            dtype=DTYPES[x.dtype],
            **self._plan_fields(plan),
            **weight.fields(),
            **fields,
        )
        return plan

    def _packed_plan(
        self,
        x: Tensor,
        linear: Linear,
        weight: PackedWeight,
        norm: Norm | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
        heads: Heads | None,
        rounds: bool,
    ) -> Plan:
        written = [
            tensor for tensor in (residual, out if out.dtype == x.dtype else None) if tensor is not None
        ]
        rope = None if heads is None else heads.rope
        gemm = Gemm(
            x.shape[0],
            weight.columns,
            weight.rows,
            "swiglu" if activation == "swiglu" else "qkv" if heads else "linear",
            linear.bias is not None,
            residual is not None,
            norm is not None,
            out_float32=out.dtype != x.dtype,
            aligned=aligned(x),
            out_aligned=all(aligned(tensor) for tensor in written),
            head_size=0 if heads is None else heads.head_size,
            rotary_size=0 if rope is None else rope.size,
            interleaved=rope is not None and rope.interleaved,
            operand="int4" if multiplied_in_int8(weight) else "",
            rounds=rounds,
        )
        return self.choose_packed(gemm, GRANULE_INPUTS[weight.format])

    def _ordered(self, x: Tensor, order: Tensor) -> Tensor:
        """x[:, order] in scratch memory, until the next call."""
        out = self._temporary("ordered", x.shape[0], x.shape[1], x.dtype)
        self.library.gather_columns(
            out.data_ptr(),
            x.data_ptr(),
            order.data_ptr(),
            x.shape[0],
            x.shape[1],
            x.stride(0),
            current_stream(self.device),
        )
        return out
