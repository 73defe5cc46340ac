"""Quantised weights of a GEMM: the stored values, and the matrix that they represent.

`QuantizedWeight.expanded` defines every format; kernels that read the quantised bytes are compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tridecode.kernels.checks import ShapeError

#: format -> dtype of the stored values
VALUE_DTYPES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}
#: format of activations -> largest magnitude of a quantised value
ACTIVATION_LIMITS = {"int8": 127.0, "fp8": 448.0}

_EXPANDED_TOGETHER = 1 << 24  # weights; temporary tensors stay small compared with a large matrix


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix (out, in) in 8 or 4 bit: weight[o, i] = (values[o, i] - zeros[o, g]) * scales[o, g].

    format: "int8": values (out, in) int8. "fp8": values (out, in) float8_e4m3fn. "int4": two unsigned values
        of 0 to 15 in each byte of (out, ceil(in / 2)) uint8, the even column in the low half.
    columns: in.
    scales: (ceil(out / block_rows), G) float32; G = 1 is one scale per output channel.
    zeros: (out, G) float32, the value that represents 0, or None: 0 (int8, fp8) or 8 (int4).
    group_size: consecutive columns of a group; 0: all (G = 1). groups: (in,) int32, the group of each column
    if groups are not consecutive (GPTQ's act-order), or None. block_rows: rows that share a scale; 128 for
    the 128 x 128 blocks of FP8 checkpoints, else 1. activations: "": x is not quantised. "int8", "fp8": each
        row of x is quantised to that format first, with the row's scale max|x| / 127 or / 448 (W8A8); with
        block_rows, each group of a row has a scale.
    """

    format: str
    columns: int
    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    group_size: int = 0
    groups: Tensor | None = None
    block_rows: int = 1
    activations: str = ""

    def __post_init__(self) -> None:
        stored = -(-self.columns // 2) if self.format == "int4" else self.columns
        if self.values.ndim != 2 or self.values.shape[1] != stored:
            raise ShapeError(f"{self.format} values {tuple(self.values.shape)}; wanted (out, {stored})")
        num_groups = self.scales.shape[1]
        if self.groups is None and num_groups != -(-self.columns // (self.group_size or self.columns)):
            wanted = f"groups of {self.group_size or self.columns} columns"
            raise ShapeError(f"{num_groups} {wanted}; the matrix has {self.columns} columns")
        rows = -(-self.values.shape[0] // self.block_rows)
        if self.scales.shape[0] != rows:
            raise ShapeError(f"scales {tuple(self.scales.shape)}; wanted ({rows}, {num_groups})")
        if self.zeros is not None and self.zeros.shape != (self.values.shape[0], num_groups):
            raise ShapeError(
                f"zeros {tuple(self.zeros.shape)}; wanted ({self.values.shape[0]}, {num_groups})"
            )

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.values.shape[0], self.columns

    @property
    def product_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of x that a GEMM with this weight accepts, if a kernel reads the weight in 8-bit rows."""
        return torch.float16, torch.bfloat16

    @property
    def activation_group(self) -> int:
        """Columns of x that share a scale when its rows are quantised; 0: all."""
        return self.group_size if self.block_rows > 1 else 0

    @property
    def nbytes(self) -> int:
        parts = (self.values, self.scales, self.zeros, self.groups)
        return sum(part.nbytes for part in parts if part is not None)

    def part(self, rows: slice) -> QuantizedWeight:
        """Return these rows, in the same memory; one scale for each row."""
        return replace(self, values=self.values[rows], scales=self.scales[rows])

    @cached_property
    def fields(self) -> dict[str, float]:
        """The fields of a GEMM task for the weight, shared by its launches. weight_format 0: rows."""
        scales = "block_scales" if self.block_rows > 1 else "weight_scales"
        return {"weight": self.values.data_ptr(), "weight_format": 0, scales: self.scales.data_ptr()}

    def expanded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantise to (out, in), computed in float32 and rounded to `dtype`, some rows at a time."""
        rows, columns = self.shape
        out = torch.empty(rows, columns, dtype=dtype, device=self.values.device)
        groups = self._group_of_each_column()
        step = max(1, _EXPANDED_TOGETHER // max(columns, 1) // self.block_rows) * self.block_rows
        for first in range(0, rows, step):
            out[first : first + step] = self._rows(first, min(first + step, rows), groups)
        return out

    def _rows(self, first: int, stop: int, groups: Tensor) -> Tensor:
        """Return (stop - first, in) float32.

        first: a multiple of block_rows. groups: (in,) int64, by column.
        """
        stored = self.values[first:stop]
        weight = (unpacked(stored, self.columns) if self.format == "int4" else stored).float()
        scales = self.scales[first // self.block_rows : -(-stop // self.block_rows)].float()
        scales = scales.repeat_interleave(self.block_rows, 0)[: stop - first]
        if self.zeros is not None:
            weight = weight - self.zeros[first:stop].float()[:, groups]
        elif self.format == "int4":
            weight = weight - 8.0
        return weight * scales[:, groups]

    def _group_of_each_column(self) -> Tensor:
        if self.groups is not None:
            return self.groups.long()
        columns = torch.arange(self.columns, device=self.values.device)
        return columns // (self.group_size or self.columns)


#: rows and columns of a block of FP8 checkpoints that has one scale
SCALE_BLOCK = 128
#: maximum inputs whose sum of products, up to 127 * 127 each, fits in int32
_MOST_INPUTS = 1 << 17


def stays_in_8_bit(weight: QuantizedWeight, dtype: torch.dtype, capability: int) -> bool:
    """Return whether CUDA multiplies this weight with both operands in 8 bit: W8A8, or int8 with x in
    `two_parts`.

    dtype: X. capability: the GPU's, 10 * major + minor. Except on 9.0, only W8A8 with one scale per output
    does: int8 from 8.0 on, fp8 from 8.9 on.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    plain = weight.groups is None and weight.zeros is None
    in_rows = weight.scales.shape[1] == 1 and weight.block_rows == 1
    in_blocks = weight.format == "fp8" and weight.group_size == weight.block_rows == SCALE_BLOCK
    same = weight.format in ACTIVATION_LIMITS and weight.format == (weight.activations or "int8")
    sizes = weight.shape[0] % 8 == 0 and weight.columns % 16 == 0 and weight.columns <= _MOST_INPUTS
    if capability == 90:
        return plain and same and sizes and (in_rows or in_blocks)
    least, outputs = (80, 8) if weight.format == "int8" else (89, 16)
    fits = capability >= least and weight.activations != "" and weight.shape[0] % outputs == 0
    return fits and plain and same and sizes and in_rows


def operand(weight: QuantizedWeight) -> str:
    """Return how CUDA multiplies a weight that stays_in_8_bit: "int8" or "fp8" (W8A8), "fp8_blocks" (W8A8,
    with a scale for each SCALE_BLOCK x SCALE_BLOCK of the weight), or with x in "two_parts".
    """
    return "fp8_blocks" if weight.block_rows > 1 else weight.activations or "two_parts"


def check_int8_table(operation: str, table: QuantizedWeight) -> QuantizedWeight:
    """Return the table whose rows `operation` looks up: int8 with one scale per row. Raises ShapeError."""
    if table.format != "int8" or table.scales.shape != (table.shape[0], 1):
        found = f"{table.format} with scales {tuple(table.scales.shape)}"
        raise ShapeError(f"{operation}: table is {found}; wanted int8 with scales ({table.shape[0]}, 1)")
    return table


def packed(values: Tensor) -> Tensor:
    """Pack (out, in) of integers 0 to 15 -> (out, ceil(in / 2)) uint8, the even column in the low half."""
    if values.shape[1] % 2:
        values = torch.nn.functional.pad(values, (0, 1))
    values = values.to(torch.uint8)
    return values[:, 0::2] | (values[:, 1::2] << 4)


def unpacked(values: Tensor, columns: int) -> Tensor:
    """Return the inverse of `packed`: (out, columns) uint8."""
    return torch.stack((values & 15, values >> 4), dim=-1).flatten(1)[:, :columns]


def rounded_activations(x: Tensor, format: str, group_size: int = 0) -> tuple[Tensor, Tensor]:
    """Quantise x (T, C) -> (values (T, C) int8 or float8_e4m3fn, scales (T, G) float32); x is about values *
    scales.

    group_size: consecutive columns that share a scale; 0: all, G = 1. A row, or a group, of zeros has scale
    1, one with NaN or infinity a non-finite scale, so that its products are NaN. Halves are rounded
    to even.
    """
    if group_size:
        columns = x.shape[1]
        groups = torch.nn.functional.pad(x, (0, -columns % group_size)).unflatten(1, (-1, group_size))
        values, scales = rounded_activations(groups.flatten(0, 1), format)
        return values.view(len(x), -1)[:, :columns], scales.view(len(x), -1)
    limit = ACTIVATION_LIMITS[format]
    largest = x.abs().amax(dim=-1, keepdim=True).float()
    scales = torch.where(largest == 0, 1.0, largest / limit)
    scaled = (x.float() / scales).clamp(-limit, limit).nan_to_num(0.0)
    if format == "int8":
        return scaled.round().to(torch.int8), scales
    return scaled.to(torch.float8_e4m3fn), scales


def as_rounded(x: Tensor, format: str, group_size: int = 0) -> Tensor:
    """Return values * scales of rounded_activations, multiplied in float32 or wider: (T, C) in the dtype of
    x.
    """
    values, scales = rounded_activations(x, format, group_size)
    if group_size:
        scales = scales.repeat_interleave(group_size, 1)[:, : x.shape[1]]
    wide = torch.promote_types(x.dtype, torch.float32)
    return (values.to(wide) * scales.to(wide)).to(x.dtype)


#: subdivisions of a step of `two_parts`' high part that the low part counts
LOW_STEPS = 254.0


def two_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split x (T, C) -> (high, low (T, C) int8, scales (T, 1) float32).

    x is about (high + low / 254) * scales, with an error of at most max|x| / 64,516 of its row.

    high and scales are those of rounded_activations(x, "int8"); low is the rounded remainder of x / scales.
    """
    high, scales = rounded_activations(x, "int8")
    quotient = (x.float() / scales).clamp(-127.0, 127.0).nan_to_num(0.0)
    low = ((quotient - high.float()) * LOW_STEPS).round().to(torch.int8)
    return high, low, scales
