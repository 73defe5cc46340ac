"""GEMMs with weights in granules of 8 or 4 bit (packed_weight.py); packed_table.py chooses the kernel."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tridecode.kernels.formats.packed_weight import GRANULE_INPUTS, PackedWeight, multiplied_in_int8
from tridecode.kernels.gemm.call import Call
from tridecode.kernels.gemm.dequantised import DequantisedKind
from tridecode.kernels.gemm.eight_bit import quantize_rows
from tridecode.kernels.gemm.plan import Plan
from tridecode.kernels.gpu import norm_fields, plan_fields
from tridecode.kernels.operands import Linear


class Packed(DequantisedKind):
    """8-bit weights in granules; the kernel dequantises them for 16-bit GEMMs."""

    def launch(self, call: Call) -> bool:
        weight = _weight(call)
        plan = self.plan(call, weight)
        if plan.kernel == "expand_weight":
            return self.products.launch(call, weight)
        if call.norm is not None and not plan.fuses_norm:
            call = call._replace(x=self.gpu.normed(call.x, call.norm), norm=None)
        self.multiply(plan, call, weight, norm_fields(call.norm))
        return plan.fuses_heads

    def plan(self, call: Call, weight: PackedWeight) -> Plan:
        operand = "int4" if multiplied_in_int8(weight) else ""
        gemm = call.gemm(weight.rows, weight.columns, operand=operand)
        return self.gpu.choose_packed(gemm, GRANULE_INPUTS[weight.format])

    def multiply(self, plan: Plan, call: Call, weight: PackedWeight, fields: Mapping[str, float]) -> None:
        """Launch plan.kernel. fields: describe the norm, or x in 8 bit."""
        task = {
            **call.fields(),
            **self.gpu.scratch_fields,
            "tokens": call.x.shape[0],
            "inputs": weight.columns,
            "outputs": weight.rows,
            **plan_fields(plan),
            **weight.fields,
            **(call.head_fields if call.head_fields and plan.fuses_heads else {}),
            **fields,
        }
        self.run(plan.kernel, task, call)


class Int4(Packed):
    """4-bit weights in granules.

    Up to 64 tokens on Hopper, x is quantised to int8 in two parts and int8 tensor cores multiply; otherwise
    the kernel dequantises the weight.
    """

    def launch(self, call: Call) -> bool:
        weight = _weight(call)
        plan = self.plan(call, weight)
        if plan.kernel.startswith("gemm_int4"):
            values, scales = quantize_rows(self.gpu, call.x, call.norm, "two_parts_int4", weight.order)
            rows = {
                "x": values.data_ptr(),
                "x_stride": weight.columns,
                "x_scales": scales.data_ptr(),
                "symmetric": weight.zeros == "eight",
            }
            self.multiply(plan, call, weight, rows)
            return plan.fuses_heads
        if weight.order is not None:
            x = call.x if call.norm is None else self.gpu.normed(call.x, call.norm)
            call = call._replace(x=self._ordered(x, weight.order), norm=None)
        return super().launch(call)

    def chain_operand(self, linear: Linear) -> str:
        weight = linear.weight
        assert isinstance(weight, PackedWeight)
        return "two_parts_int4" if multiplied_in_int8(weight) and weight.order is None else ""

    def chain_fields(self, linear: Linear) -> dict[str, int]:
        weight = linear.weight
        assert isinstance(weight, PackedWeight) and weight.groups is not None
        return {"weight": weight.values.data_ptr(), "weight_groups": weight.groups.data_ptr()}

    def _ordered(self, x: Tensor, order: Tensor) -> Tensor:
        """Return x[:, order] in scratch memory, valid until the next call."""
        out = self.gpu.temporary("ordered", x.shape[0], x.shape[1], x.dtype)
        self.gpu.library.gather_columns(
            out.data_ptr(),
            x.data_ptr(),
            order.data_ptr(),
            x.shape[0],
            x.shape[1],
            x.stride(0),
            self.gpu.stream,
        )
        return out


def _weight(call: Call) -> PackedWeight:
    weight = call.linear.weight
    assert isinstance(weight, PackedWeight)
    return weight
