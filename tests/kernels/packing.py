"""Weights packed in granules on every GPU, also where the operations would keep them in rows."""

from __future__ import annotations

import torch

from tridecode.kernels.cuda import Cuda
from tridecode.kernels.gemm.packing import pack_linear
from tridecode.kernels.operands import Linear


def in_granules(ops: Cuda, linear: Linear, dtype: torch.dtype) -> Linear:
    """Pack as for a GPU that multiplies no weight in rows of 8 bit."""
    packed = pack_linear(linear, dtype, capability=0)
    ops.gemms.sorts_inputs |= packed.sorts_inputs
    if packed.dequantised_bytes:
        ops.gpu.arena("expanded_weight", packed.dequantised_bytes)
    return packed.linear
