"""Integer and FP8 grids of a group of weights, and rounding to the nearest level of the grid.

A grid has a scale and a zero: a stored level q represents (q - zero) * scale. Arithmetic is in the dtype
of the weights, float32 or float64; scales are rounded to float32, which is stored, before they are used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from tridecode.kernels.formats.quantized import VALUE_DTYPES, QuantizedWeight, packed

_FP8_MAX = 448.0  # largest value of E4M3


@dataclass(frozen=True)
class Grid:
    """A kind of grid.

    format: "int8", "int4" or "fp8". group_size: consecutive inputs that share a scale; 0: all inputs.
    symmetric: the zero is fixed (0; 8 for int4). Only int4 can be asymmetric: then 0 to 15 covers the group's
    range of weights, widened to include 0. block_rows: consecutive outputs that share scales; above 1 only
    for fp8, with group_size equal to block_rows.
    """

    format: str = "int4"
    group_size: int = 128
    symmetric: bool = False
    block_rows: int = 1

    def __post_init__(self) -> None:
        if self.format not in VALUE_DTYPES:
            raise ValueError(f"format is {self.format!r}; wanted one of {', '.join(VALUE_DTYPES)}")
        if self.group_size < 0:
            raise ValueError(f"group_size is {self.group_size}; wanted 0 or more")
        if not (self.symmetric or self.has_zeros):
            raise ValueError(f"{self.format} has no zeros; wanted symmetric = True, or int4")
        if self.block_rows != 1 and (self.format, self.group_size) != ("fp8", self.block_rows):
            found = f"{self.format}, block_rows {self.block_rows}, group_size {self.group_size}"
            raise ValueError(f"{found}; wanted square blocks of fp8, or block_rows = 1")

    @property
    def has_zeros(self) -> bool:
        return self.format == "int4" and not self.symmetric

    def of(self, weights: Tensor, shrink: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """Return (scales, zeros) (..., 1) for groups of weights (..., n), in their dtype.

        With block_rows the first axis has the outputs and starts at the beginning of a block. shrink: the
        grid's range relative to the weights' range; values outside are clipped. Half a step, or 0 for int8
        and FP8, is the largest error without clipping.
        """
        if self.has_zeros:
            low = weights.amin(-1, keepdim=True).clamp(max=0) * shrink
            high = weights.amax(-1, keepdim=True).clamp(min=0) * shrink
            scales = _as_stored((high - low) / 15)
            return scales, (-low / scales).round().clamp(0, 15)
        # 7.5: levels -8 to 7; a weight of 7.5 steps is still half a step from the nearest
        steps = {"int4": 7.5, "int8": 127.0, "fp8": _FP8_MAX}[self.format]
        largest = _over_blocks(weights.abs().amax(-1, keepdim=True), self.block_rows)
        scales = _as_stored(largest * shrink / steps)
        return scales, torch.full_like(scales, 8.0 if self.format == "int4" else 0.0)

    def levels(self, weights: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """Return the nearest levels in the dtype of the weights; halves are rounded to even."""
        scaled = weights / scales
        if self.format == "fp8":
            return scaled.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).to(weights.dtype)
        low, high = (0, 15) if self.format == "int4" else (-127, 127)
        return (scaled.round() + zeros).clamp(low, high)

    def grouped(self, weight: Tensor) -> Tensor:
        """Split (out, in) into (out, G, group_size); zeros, which change no grid, pad the last group."""
        size = self.group_size or weight.shape[1]
        return pad(weight, (0, -weight.shape[1] % size)).unflatten(1, (-1, size))

    def stored(
        self, levels: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor | None = None
    ) -> QuantizedWeight:
        """Return the QuantizedWeight of levels (out, in), scales and zeros (out, G). groups: as in it."""
        values = packed(levels) if self.format == "int4" else levels.to(VALUE_DTYPES[self.format])
        return QuantizedWeight(
            self.format,
            levels.shape[1],
            values,
            scales[:: self.block_rows].float().clone(memory_format=torch.contiguous_format),
            zeros.float() if self.has_zeros else None,
            0 if groups is not None else self.group_size,
            groups,
            self.block_rows,
        )

    def rounded(self, weight: Tensor, shrink: Tensor | float = 1.0) -> QuantizedWeight:
        """Return weight (out, in) rounded to nearest. shrink: (out, G, 1), or one value for all groups."""
        grouped = self.grouped(weight)
        scales, zeros = self.of(grouped, shrink)
        levels = self.levels(grouped, scales, zeros).flatten(1)[:, : weight.shape[1]]
        return self.stored(levels, scales.squeeze(-1), zeros.squeeze(-1))

    def simulated(self, weight: Tensor) -> Tensor:
        """Return (out, in), the matrix that `rounded` represents, in the dtype of the weights."""
        grouped = self.grouped(weight)
        scales, zeros = self.of(grouped)
        return ((self.levels(grouped, scales, zeros) - zeros) * scales).flatten(1)[:, : weight.shape[1]]


def _over_blocks(largest: Tensor, rows: int) -> Tensor:
    """Return (out, ..., 1): for each output the largest value of its block of `rows` outputs."""
    if rows == 1:
        return largest
    blocks = [block.amax(0, keepdim=True).expand_as(block) for block in largest.split(rows)]
    return torch.cat(blocks)


def _as_stored(scales: Tensor) -> Tensor:
    """Return the scales rounded to float32; 1 for groups of zeros."""
    rounded = scales.float().to(scales.dtype)
    return torch.where(rounded > 0, rounded, 1.0)
