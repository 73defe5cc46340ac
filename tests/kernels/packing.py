"""Weights packed in granules on every GPU, and the layouts of quantised inputs."""

from __future__ import annotations

import torch
from torch import Tensor

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


def rows_of_two_parts(high: Tensor, low: Tensor) -> Tensor:
    """Return (16 * ceil(T / 8), C) int8, as written by csrc/rows/quantize_rows.cu: the high parts of 8
    tokens, then their low parts; zeros for tokens beyond the last.
    """
    tokens, columns = high.shape
    rows = torch.zeros(-(-tokens // 8), 2, 8, columns, dtype=torch.int8, device=high.device)
    for part, values in enumerate((high, low)):
        padded = torch.nn.functional.pad(values, (0, 0, 0, -tokens % 8))
        rows[:, part] = padded.unflatten(0, (-1, 8))
    return rows.flatten(0, 2)


def in_granule_order(values: Tensor) -> Tensor:
    """Reorder the columns of (R, C), C a multiple of 32, to the order of inputs in a granule of 4-bit
    weights.

    Of each 32, column 16 i + 8 h + 2 t + j goes to 16 h + 4 t + 2 j + i; see packed_weight.cuh.
    """
    return values.unflatten(1, (-1, 2, 2, 4, 2)).permute(0, 1, 3, 4, 5, 2).flatten(1)
