"""Packs weights in 8 or 4 bit for the CUDA kernels; packed_weight.cuh describes the layout.

A matrix is packed once, at load. `not_packed` names formats that no kernel reads; they are dequantised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tridecode.kernels.formats.quantized import QuantizedWeight, unpacked

GRANULE_ROWS = 8
#: inputs of a granule by format
GRANULE_INPUTS = {"int8": 64, "fp8": 64, "int4": 128}
#: weight_format of a task (csrc/api.h) by format
FORMAT_CODES = {"int8": 1, "fp8": 2, "int4": 3}
#: added to a 4-bit value by the kernel, and to its zero in `groups`: 16 to 31 are exact in either dtype
BIAS = 16.0
DTYPES = (torch.float16, torch.bfloat16)
#: group scales are rounded to the GEMM's dtype; subnormal float16 numbers lose more than that
_SCALE_ERROR = 2.0**-8


@dataclass(frozen=True)
class PackedWeight:
    """A weight (rows, columns) in 8 or 4 bit on a GPU.

    format: that of QuantizedWeight. dtype: that of the GEMM. values: (ceil(rows / 8), chunks, 512) uint8,
    chunks of 64 or 128 columns. scales: (rows,) float32, for int8 and fp8. groups: (ceil(rows / 8), chunks,
    8, G) int32, for int4: the scale in the low half, the zero plus BIAS in the high half, both in dtype.
    zeros: for int4; "eight" if all are 8, "whole" if all are integers from 0 to 15, else "any". order:
    (columns,) int32 if columns were sorted by their groups (GPTQ's act-order): column c takes input order[c].
    """

    format: str
    rows: int
    columns: int
    dtype: torch.dtype
    values: Tensor
    scales: Tensor | None = None
    groups: Tensor | None = None
    zeros: str = "any"
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.rows, self.columns

    @property
    def product_dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes of x that a GEMM with this weight accepts."""
        return (self.dtype,)

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        parts = (self.values, self.scales, self.groups, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    def part(self, rows: slice) -> PackedWeight:
        """Return these rows, in the same memory. They must begin at a multiple of GRANULE_ROWS."""
        assert rows.start % GRANULE_ROWS == 0, rows
        eights = slice(rows.start // GRANULE_ROWS, -(-rows.stop // GRANULE_ROWS))
        return replace(
            self,
            rows=rows.stop - rows.start,
            values=self.values[eights],
            scales=None if self.scales is None else self.scales[rows],
            groups=None if self.groups is None else self.groups[eights],
        )

    @cached_property
    def fields(self) -> dict[str, float]:
        """Return the fields of a GEMM task that describe the weight, shared by its launches."""
        return {
            "weight": self.values.data_ptr(),
            "weight_format": FORMAT_CODES[self.format],
            "weight_scales": 0 if self.scales is None else self.scales.data_ptr(),
            "weight_groups": 0 if self.groups is None else self.groups.data_ptr(),
            "granule_groups": 0 if self.groups is None else self.groups.shape[3],
        }


def not_packed(weight: QuantizedWeight, dtype: torch.dtype) -> str:
    """Return why the kernels do not read such a weight for GEMMs of dtype; "" if they do.

    Depends only on shapes and formats, so that memory can be planned without the weights.
    """
    if dtype not in DTYPES:
        return f"products of {dtype}"
    if weight.activations:
        return f"activations in {weight.activations}"
    if weight.columns % 8:
        return f"{weight.columns} inputs, which is not a multiple of 8"
    if weight.groups is not None and not _may_be_sorted(weight):
        return "groups that are not consecutive inputs"
    if weight.format != "int4":
        grouped = weight.scales.shape[1] > 1 or weight.block_rows > 1
        return "several scales of a row in 8 bit" if grouped else ""
    size = weight.group_size or weight.columns
    if weight.scales.shape[1] > 1 and size % 128 and size not in (32, 64):
        return f"groups of {size} inputs; wanted 32, 64 or multiples of 128"
    return ""


def _may_be_sorted(weight: QuantizedWeight) -> bool:
    """Return whether the shapes allow int4 groups that become consecutive when columns are sorted by group.

    A tensor rank's share of the inputs has more groups than that.
    """
    size = weight.group_size
    return weight.format == "int4" and size > 0 and weight.scales.shape[1] == -(-weight.columns // size)


def has_uneven_groups(weight: QuantizedWeight) -> bool:
    """Return whether some group is not group_size consecutive columns even after sorting by groups."""
    if weight.groups is None:
        return False
    columns = torch.arange(weight.columns, device=weight.groups.device)
    return not torch.equal(weight.groups.long().sort().values, columns // weight.group_size)


def pack(weight: QuantizedWeight, dtype: torch.dtype) -> PackedWeight:
    """Pack the matrix for the kernels; `not_packed` must be "" and has_uneven_groups False.

    int4's scales are rounded to dtype.
    """
    rows, columns = weight.shape
    if weight.format == "int4":
        values, order = unpacked(weight.values, columns), None
        if weight.groups is not None:
            order = weight.groups.argsort(stable=True)
            values = values[:, order]
        packed, groups = _packed4(values), _packed_groups(weight, dtype)
        order = None if order is None else order.to(torch.int32)
        kind = _kind(weight.zeros)
        return PackedWeight(weight.format, rows, columns, dtype, packed, None, groups, kind, order)
    values = _packed8(weight.values.view(torch.uint8))
    return PackedWeight(weight.format, rows, columns, dtype, values, weight.scales[:, 0].float().contiguous())


def granules(format: str, rows: int, columns: int) -> tuple[int, int]:
    """Return the number of granules down and across a matrix."""
    return -(-rows // GRANULE_ROWS), -(-columns // GRANULE_INPUTS[format])


def _padded(values: Tensor, inputs: int) -> Tensor:
    """Split (out, in) into (eights, 8, chunks, inputs), padded with zeros."""
    rows, columns = values.shape
    values = torch.nn.functional.pad(values, (0, -columns % inputs, 0, -rows % GRANULE_ROWS))
    return values.unflatten(1, (-1, inputs)).unflatten(0, (-1, GRANULE_ROWS))


def _packed8(values: Tensor) -> Tensor:
    """Pack uint8 (out, in) to (eights, chunks, 512)."""
    # inputs of a granule are (step, half, t, second): 16 step + 8 half + 2 t + second
    parts = _padded(values, GRANULE_INPUTS["int8"]).unflatten(3, (4, 2, 4, 2))
    # bytes are (row, t, step, second, half)
    return parts.permute(0, 2, 1, 5, 3, 6, 4).flatten(2).contiguous()


def _packed4(values: Tensor) -> Tensor:
    """Pack uint8 of 0 to 15 (out, in) to (eights, chunks, 512)."""
    # inputs of a granule are (word, step, half, t, second): 32 word + 16 step + 8 half + 2 t + second
    parts = _padded(values, GRANULE_INPUTS["int4"]).unflatten(3, (4, 2, 2, 4, 2))
    # bytes are (row, t, word, second, step), each of a low and a high half byte
    parts = parts.permute(0, 2, 1, 6, 3, 7, 4, 5)
    return (parts[..., 0] | (parts[..., 1] << 4)).flatten(2).contiguous()


def _packed_groups(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    rows, columns = weight.shape
    size = weight.group_size or columns
    count = 1 if weight.scales.shape[1] == 1 or size % 128 == 0 else 128 // size  # groups of a granule
    eights, chunks = granules(weight.format, rows, columns)
    firsts = torch.arange(chunks * count, device=weight.scales.device) * (128 // count)
    of_group = (firsts // size).clamp_(max=weight.scales.shape[1] - 1)
    scales = weight.scales.float()[:, of_group]
    zeros = torch.full_like(scales, 8.0) if weight.zeros is None else weight.zeros.float()[:, of_group]
    pad = (0, 0, 0, eights * GRANULE_ROWS - rows)
    words = torch.stack((scales.to(dtype), (zeros + BIAS).to(dtype)), dim=-1)
    words = torch.nn.functional.pad(words.view(torch.int32).squeeze(-1), pad)
    return words.view(eights, GRANULE_ROWS, chunks, count).transpose(1, 2).contiguous()


def _kind(zeros: Tensor | None) -> str:
    """Return PackedWeight.zeros."""
    if zeros is None:
        return "eight"
    if zeros.is_meta:  # the memory plan has no data
        return "any"
    if bool((zeros == 8).all()):
        return "eight"
    return "whole" if bool(((zeros >= 0) & (zeros <= 15) & (zeros == zeros.round())).all()) else "any"


def multiplied_in_int8(weight: PackedWeight) -> bool:
    """Return whether gemm_int4_sm90 accepts such a weight."""
    if weight.format != "int4" or weight.groups is None:
        return False
    sizes = weight.columns % 32 == 0 and weight.rows % 8 == 0
    return sizes and weight.groups.shape[3] == 1 and weight.zeros in ("eight", "whole")


def loses_scales(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Return whether a group's scale loses more in dtype than a normal number's rounding error."""
    if weight.format != "int4":
        return False
    scales = weight.scales.float()
    error = (scales.to(dtype).float() - scales).abs()
    return bool((error > _SCALE_ERROR * scales.abs()).any())
