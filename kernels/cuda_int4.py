"""Products with weights in 4 bit on int8 tensor cores, on compute capability 9.0.

quantize_rows rounds the rows of x, after the norm, to int8 in two parts (kernels/quantized.py), in the
order of a granule's inputs; gemm_int4_sm90 and gemm_int4_stream_k_sm90 multiply them with the packed weight.
packed_table.py chooses them where `packed_weight.multiplied_in_int8` holds.
"""

from __future__ import annotations

from torch import Tensor

from tridecode.kernels.cuda_base import ACTIVATIONS, DTYPES, CudaBase, pointer
from tridecode.kernels.gemm_table import Plan
from tridecode.kernels.library import current_stream
from tridecode.kernels.ops import Linear, Norm
from tridecode.kernels.packed_weight import PackedWeight


class CudaInt4(CudaBase):
    """linear and project_qkv of such weights, where the plan says so."""

    def _int4_gemm(
        self,
        plan: Plan,
        x: Tensor,
        linear: Linear,
        weight: PackedWeight,
        norm: Norm | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
        head_fields: dict[str, float],
    ) -> None:
        """out = epilogue(norm(x) @ weight.T)"""
        values, scales = self._rounded(x, norm, "two_parts_int4", weight.order)
        getattr(self.library, plan.kernel)(
            current_stream(self.device),
            out=out.data_ptr(),
            x=values.data_ptr(),
            bias=pointer(linear.bias),
            residual=pointer(residual),
            x_stride=weight.columns,
            residual_stride=0 if residual is None else residual.stride(0),
            out_stride=out.stride(0),
            tokens=x.shape[0],
            inputs=weight.columns,
            outputs=weight.rows,
            activation=ACTIVATIONS[activation],
            out_float32=out.dtype != x.dtype,
            dtype=DTYPES[x.dtype],
            symmetric=weight.zeros == "eight",
            x_scales=scales.data_ptr(),
            **self._plan_fields(plan),
            **weight.fields(),
            **head_fields,
        )

    def _rounded(
        self, x: Tensor, norm: Norm | None, format: str, order: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError
