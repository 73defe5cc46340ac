"""GEMMs with weights in the dtype of the activations."""

from __future__ import annotations

import torch

from tridecode.kernels.gemm.call import Call
from tridecode.kernels.gemm.cublas_products import CublasProducts
from tridecode.kernels.gemm.kind import WeightKind
from tridecode.kernels.gemm.plan import Plan
from tridecode.kernels.gpu import ACTIVATIONS, FUSED_GATES, Gpu, norm_fields, plan_fields
from tridecode.kernels.operands import Linear


class Dense(WeightKind):
    """Weights in float32, float16 or bfloat16 rows. table.py chooses the kernel."""

    def __init__(self, gpu: Gpu, cublas: CublasProducts):
        super().__init__(gpu)
        self._cublas = cublas

    def adapts(self, call: Call) -> bool:
        if call.activation not in ACTIVATIONS:
            return False
        plan = self._plan(call)
        return plan.adapts and (call.heads is None or plan.fuses_heads)

    def sends(self, call: Call) -> bool:
        return not call.out_float32 and self._plan(call).sends

    def keeps(self, call: Call) -> bool:
        return call.activation in FUSED_GATES and not call.out_float32 and self._plan(call).keeps

    def _plan(self, call: Call) -> Plan:
        weight = call.linear.dense
        outputs, inputs = weight.shape
        return self.gpu.choose_gemm(call.gemm(outputs, inputs, weight))

    def launch(self, call: Call) -> bool:
        gpu, weight = self.gpu, call.linear.dense
        outputs, inputs = weight.shape
        plan = gpu.choose_gemm(call.gemm(outputs, inputs, weight))
        if call.norm is not None and not plan.fuses_norm:
            call = call._replace(x=gpu.normed(call.x, call.norm), norm=None)
        if plan.kernel == "gemm_library":
            self._cublas.multiply(call, weight)
            return False
        heads = call.head_fields if call.head_fields and plan.fuses_heads else {}
        task = {
            **call.fields(),
            **gpu.scratch_fields,
            "tokens": call.x.shape[0],
            "weight": weight.data_ptr(),
            "weight_stride": weight.stride(0),
            "inputs": inputs,
            "outputs": outputs,
            **plan_fields(plan),
            **heads,
            **norm_fields(call.norm),
        }
        self.run(plan.kernel, task, call)
        return plan.fuses_heads

    def chain_operand(self, linear: Linear) -> str:
        weight = linear.dense
        if weight.dtype == torch.float32 or linear.activations or not weight.is_contiguous():
            return ""
        return "dense"

    def chain_fields(self, linear: Linear) -> dict[str, int]:
        return {"weight": linear.dense.data_ptr()}
