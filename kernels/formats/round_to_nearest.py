"""Quantises matrices to 8 or 4 bit without calibration: int8 and fp8 per output, int4 per group of inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from tridecode.kernels.checks import DtypeError
from tridecode.kernels.formats.quantized import QuantizedWeight, packed

#: format -> largest magnitude of a value
_LIMITS = {"int8": 127.0, "fp8": 448.0}
_LEVELS = 15  # the largest value of int4
_BLOCK_ELEMENTS = 4 << 20  # weights held in float32 at a time


def round_to_nearest(
    weight: Tensor, format: str, group_size: int = 0, activations: str = "", block_rows: int = 1
) -> QuantizedWeight:
    """Quantise weight (out, in), any floating dtype, to the nearest values of `format`; arithmetic in
    float32.

    "int8", "fp8": symmetric, scale max|w| / 127 or / 448 of each output; group_size is ignored. "int4":
    asymmetric, groups of group_size inputs (0: all of an output), scale (max - min) / 15, with the range
    widened to include 0, which is represented exactly. A row or group of zeros has scale 0. block_rows above
    1: fp8, `round_blocks` of that size.
    """
    if format not in (*_LIMITS, "int4"):
        raise DtypeError(f"round_to_nearest: format is {format!r}; wanted int8, fp8 or int4")
    if block_rows > 1:
        if format != "fp8" or group_size != block_rows:
            found = f"{format} in blocks of {block_rows} x {group_size}"
            raise DtypeError(f"round_to_nearest: {found}; wanted square blocks of fp8")
        return round_blocks(weight, block_rows, activations)
    rows = max(_BLOCK_ELEMENTS // max(weight.shape[1], 1), 1)
    blocks = [
        _int4(block.float(), group_size) if format == "int4" else _symmetric(block.float(), format)
        for block in weight.split(rows)
    ]
    values, scales, zeros = (torch.cat(parts) for parts in zip(*blocks))
    columns, size = weight.shape[1], group_size if format == "int4" else 0
    own_zeros = zeros if format == "int4" else None
    return QuantizedWeight(format, columns, values, scales, own_zeros, size, activations=activations)


def round_blocks(weight: Tensor, size: int, activations: str = "") -> QuantizedWeight:
    """Quantise weight (out, in), any floating dtype, to fp8 with a scale max|w| / 448 per block of size x
    size.

    FP8 checkpoints have the same format. Arithmetic in float32, one row of blocks at a time.
    """
    parts = [_fp8_blocks(rows.float(), size) for rows in weight.split(size)]
    values, scales = (torch.cat(part) for part in zip(*parts))
    return QuantizedWeight("fp8", weight.shape[1], values, scales, None, size, None, size, activations)


def _fp8_blocks(rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Quantise one row of blocks to fp8: values (out, in), scales (1, blocks)."""
    columns, limit = rows.shape[1], _LIMITS["fp8"]
    blocks = torch.nn.functional.pad(rows, (0, -columns % size)).unflatten(1, (-1, size))
    scales = blocks.abs().amax(dim=(0, 2)) / limit
    scaled = (blocks / _divisors(scales)[:, None]).clamp_(-limit, limit).flatten(1)[:, :columns]
    return scaled.to(torch.float8_e4m3fn), scales[None]


def _symmetric(weight: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return values (out, in), scales (out, 1), and no zeros: (out, 0)."""
    limit = _LIMITS[format]
    scales = weight.abs().amax(dim=1, keepdim=True) / limit
    scaled = (weight / _divisors(scales)).clamp_(-limit, limit)
    values = scaled.round_().to(torch.int8) if format == "int8" else scaled.to(torch.float8_e4m3fn)
    return values, scales, scales.new_empty(len(scales), 0)


def _int4(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return values (out, ceil(in / 2)), scales and zeros (out, G)."""
    columns = weight.shape[1]
    size = group_size or columns
    groups = torch.nn.functional.pad(weight, (0, -columns % size)).unflatten(1, (-1, size))  # (out, G, size)
    low = groups.amin(dim=2).clamp_(max=0)
    scales = (groups.amax(dim=2).clamp_(min=0) - low) / _LEVELS
    zeros = (-low / _divisors(scales)).round_()
    values = (groups / _divisors(scales)[..., None]).round_().add_(zeros[..., None]).clamp_(0, _LEVELS)
    return packed(values.flatten(1)[:, :columns]), scales, zeros


def _divisors(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, 1.0)
