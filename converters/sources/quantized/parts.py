"""The tensors of one quantised module, and shared code to read them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from tridecode.backend.base.errors import CheckpointError
from tridecode.backend.weights.quantization import Quantization
from tridecode.converters.sources import TensorSource
from tridecode.kernels.formats.quantized import QuantizedWeight, packed

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Method(Protocol):
    """The storage of a matrix by one quantisation method.

    title: for messages. markers: name endings that identify modules: each has a tensor with one of them.
    parts: name endings of the tensors that replace `<module>.weight`.
    """

    @property
    def title(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]: ...

    @property
    def parts(self) -> tuple[str, ...]: ...

    @property
    def kept(self) -> Quantization | None:
        """Return how a weight directory stores such matrices without rounding, or None if it cannot; settings
        do not determine act_order.
        """
        ...

    def shape(self, parts: Parts) -> tuple[int, int]:
        """Return (out, in), after checking every part's shape and dtype; contents are not read."""
        ...

    def weight(self, parts: Parts) -> QuantizedWeight | Tensor:
        """Return the matrix (out, in); float32 if QuantizedWeight has no format for it."""
        ...

    def groups(self, parts: Parts) -> Tensor | None:
        """(in,) int32: the group of each input with act-order; None where they are consecutive inputs."""
        ...


@dataclass(frozen=True)
class Parts:
    """The stored tensors of the module `stem`. Raises CheckpointError naming tensor and checkpoint."""

    tensors: TensorSource
    where: Path
    stem: str

    def __contains__(self, part: str) -> bool:
        return f"{self.stem}.{part}" in self.tensors.shapes

    def require(self, part: str, wanted: tuple[int | None, ...], *dtypes: torch.dtype) -> tuple[int, ...]:
        """The shape of a part, which fits `wanted` (None: 1 or more) and is of one of `dtypes`."""
        name = f"{self.stem}.{part}"
        if part not in self:
            raise CheckpointError(f"{self.where} has no {name}, which belongs to {self.stem}")
        shape, dtype = tuple(self.tensors.shapes[name]), self.tensors.dtype(name)
        fits = [found == size if size is not None else found > 0 for found, size in zip(shape, wanted)]
        if len(shape) != len(wanted) or not all(fits):
            sizes = ", ".join("any" if size is None else str(size) for size in wanted)
            self.fail(part, f"is {shape}", f"({sizes})")
        if dtypes and dtype not in dtypes:
            self.fail(part, f"is {dtype}", " or ".join(map(str, dtypes)))
        return shape

    def size(self, part: str) -> int:
        return prod(self.tensors.shapes[f"{self.stem}.{part}"])

    def read(self, part: str) -> Tensor:
        return self.tensors.read(f"{self.stem}.{part}")

    def scales(self, part: str, may_be_zero: bool = False) -> Tensor:
        """Return a part as float32, finite and above 0.

        may_be_zero: for a method that stores 0 for rows of zeros.
        """
        scales = self.read(part).float()
        if not torch.isfinite(scales).all():
            self.fail(part, "holds NaN or infinity", "finite scales")
        least = scales.min().item()
        if least < 0 or (least == 0 and not may_be_zero):
            self.fail(part, f"holds {least:g}", f"scales {'of 0 or more' if may_be_zero else 'above 0'}")
        return scales

    def fail(self, part: str, found: str, wanted: str) -> NoReturn:
        raise CheckpointError(f"{self.where}: {self.stem}.{part} {found}; wanted {wanted}")


def unpacked_words(words: Tensor, bits: int) -> Tensor:
    """(R, C) int32 -> (R, C, 32 / bits) uint8, the lowest bits first. bits: 4 or 8."""
    stored = words.contiguous().view(torch.uint8).unflatten(1, (-1, 4))
    return stored if bits == 8 else torch.stack((stored & 15, stored >> 4), dim=-1).flatten(2)


def unsigned_weight(
    bits: int,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    groups: Tensor | None = None,
) -> QuantizedWeight:
    """A matrix of integers 0 to 2^bits - 1.

    values: (out, in) uint8. scales: (out, G) float32. zeros: (out, G) uint8, None: half of the range.
    """
    middle = 1 << (bits - 1)
    if zeros is not None and torch.equal(zeros, torch.full_like(zeros, middle)):
        zeros = None
    shift = 0 if bits == 4 else middle  # of int8, which is stored signed
    return QuantizedWeight(
        f"int{bits}",
        values.shape[1],
        packed(values) if bits == 4 else (values ^ middle).view(torch.int8).contiguous(),
        scales.contiguous(),
        None if zeros is None else (zeros.float() - shift).contiguous(),
        group_size,
        groups,
    )


def group_numbers(parts: Parts, part: str, columns: int, num_groups: int, group_size: int) -> Tensor | None:
    """The group of each input as the checkpoint lists it; None where groups are consecutive inputs."""
    listed = parts.read(part).to(torch.int32)
    if listed.min() < 0 or listed.max() >= num_groups:
        found = f"has groups {int(listed.min())} to {int(listed.max())}"
        parts.fail(part, found, f"0 to {num_groups - 1}")
    consecutive = torch.arange(columns, dtype=torch.int32) // (group_size or columns)
    return None if torch.equal(listed, consecutive) else listed


def scale_grid(
    parts: Parts, part: str, shape: tuple[int, int], block: tuple[int, int] | None
) -> tuple[int, ...]:
    """Check that scales are of the whole matrix, of each output or of each block. Returns their shape."""
    wanted = [(), (1,), (1, 1), (shape[0],), (shape[0], 1)]
    if block is not None:
        wanted = [(-(-shape[0] // block[0]), -(-shape[1] // block[1]))]
    found = parts.require(part, (None,) * len(parts.tensors.shapes[f"{parts.stem}.{part}"]), *FLOATS)
    if found not in wanted:
        parts.fail(part, f"is {found}", " or ".join(map(str, wanted)))
    return found


def grid_weight(
    format: str,
    values: Tensor,
    scales: Tensor,
    block: tuple[int, int] | None,
    zeros: Tensor | None = None,
    activations: str = "",
) -> QuantizedWeight:
    """A matrix stored as it is, int8 or e4m3, with scales as `scale_grid` allows them."""
    rows, columns = values.shape
    if block is not None:
        return QuantizedWeight(
            format, columns, values, scales, zeros, block[1], block_rows=block[0], activations=activations
        )
    scales = scales.reshape(-1, 1).expand(rows, 1).contiguous()
    if zeros is not None:
        zeros = zeros.reshape(-1, 1).expand(rows, 1).contiguous()
    return QuantizedWeight(format, columns, values, scales, zeros, activations=activations)
