"""The kind of a weight on a GPU and its storage: decided once, for launches and for the memory plan.

    dense       rows of the activations' dtype
    int8        W8A8: weight and rounded activations in int8
    fp8         W8A8 in E4M3, a scale for each row of x and of the weight
    fp8_blocks  W8A8 in E4M3, scales of 128 inputs of x and of 128 x 128 of the weight
    two_parts   int8 rows; x is rounded to int8 in two parts
    packed      8-bit weights in granules, dequantised by the kernel
    int4        4-bit weights in granules, dequantised by the kernel or multiplied as int8

A new format needs a row of KINDS (what it accepts, what is stored, its scratch memory) and a class that
launches it (kernels/gemm/gemms.py).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tridecode.kernels.formats.packed_weight import (
    PackedWeight,
    has_uneven_groups,
    loses_scales,
    not_packed,
    pack,
)
from tridecode.kernels.formats.quantized import QuantizedWeight, operand, stays_in_8_bit
from tridecode.kernels.operands import Linear
from tridecode.kernels.scratch import expanded_weight_bytes

log = logging.getLogger("tridecode.engine")

#: kinds whose weight is dequantised to 16 bit in scratch memory for GEMMs of many tokens
DEQUANTISED = ("two_parts", "packed", "int4")
KINDS = ("dense", "int8", "fp8", "fp8_blocks", *DEQUANTISED)


class Packed(NamedTuple):
    """linear: in the kernels' layout. dequantised_bytes: scratch memory for the 16-bit copy of the weight, or
    of a piece of it; 0: none. sorts_inputs: columns of x are gathered in the order of the weight's groups.
    """

    linear: Linear
    dequantised_bytes: int = 0
    sorts_inputs: bool = False


def pack_linear(linear: Linear, dtype: torch.dtype, capability: int, is_head: bool = False) -> Packed:
    """Store a GEMM's weight for the GPU, or only its shape on torch's meta device.

    dtype: that of the activations. capability: 10 * major + minor. is_head: a head has few rows, so no
    scratch memory is reserved for it; where no kernel multiplies it by inputs in 8 bit, they stay in 16 bit.
    """
    weight = linear.weight
    if not isinstance(weight, QuantizedWeight):
        return Packed(Linear(linear.dense.contiguous(), linear.bias))
    if is_head and weight.activations and not stays_in_8_bit(weight, dtype, capability):
        weight = replace(weight, activations="")  # int8 with inputs in 16 bit still has a kernel
    if stays_in_8_bit(weight, dtype, capability):
        kind, sorts_inputs = operand(weight), False
        stored: QuantizedWeight | PackedWeight = _in_rows(weight)
    else:
        why = _not_packed(weight, dtype)
        if why:
            _warn_dequantised(weight.format, why, dtype)
            return Packed(Linear(_dequantised(weight, dtype), linear.bias))
        kind, stored = "int4" if weight.format == "int4" else "packed", pack(weight, dtype)
        sorts_inputs = weight.groups is not None
    needed = kind in DEQUANTISED and not is_head
    size = expanded_weight_bytes(*weight.shape, dtype.itemsize) if needed else 0
    return Packed(replace(linear, weight=stored, is_head=is_head, kind=kind), size, sorts_inputs)


def _not_packed(weight: QuantizedWeight, dtype: torch.dtype) -> str:
    """Return why no kernel reads the weight; "" if one does. Values are not read on the meta device."""
    why = not_packed(weight, dtype)
    if why or weight.values.is_meta:
        return why
    if loses_scales(weight, dtype):
        return f"scales that are too small for {dtype}"
    return "groups of unequal sizes" if has_uneven_groups(weight) else ""


def _in_rows(weight: QuantizedWeight) -> QuantizedWeight:
    """Store values and float32 scales contiguously."""
    return replace(weight, values=weight.values.contiguous(), scales=weight.scales.float().contiguous())


def _dequantised(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    if weight.values.is_meta:
        return torch.empty(weight.shape, dtype=dtype, device="meta")
    return weight.expanded(dtype).contiguous()


@lru_cache(None)
def _warn_dequantised(format: str, why: str, dtype: torch.dtype) -> None:
    """Warn once per format and reason."""
    log.warning(
        "%s weights with %s are expanded to %s at load: no kernel reads them, and the memory is that of %s%s",
        format,
        why,
        dtype,
        dtype,
        "; activations are not rounded" if why.startswith("activations") else "",
    )
