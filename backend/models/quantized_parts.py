"""Converts the files of a quantised matrix to a rank's QuantizedWeight, and back.

Files are (in, out), like all weight files; a QuantizedWeight is (out, in).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tridecode.backend.base.errors import WeightFileError
from tridecode.backend.weights.layout import WeightSpec
from tridecode.backend.weights.quantization import Quantization
from tridecode.kernels.formats.quantized import QuantizedWeight, packed, unpacked


def file_tensors(weight: QuantizedWeight, spec: WeightSpec, quantization: Quantization) -> dict[str, Tensor]:
    """Return the contents of the files of a whole matrix, by the names of quantization.specs(spec)."""
    values = weight.values.t()
    if weight.format == "int4":
        values = packed(unpacked(weight.values, weight.columns).t())
    tensors = {weight.format: values, "scale": weight.scales.t()}
    if quantization.zeros:
        assert weight.zeros is not None, spec
        tensors["zero"] = weight.zeros.t().to(torch.uint8)
    else:
        assert weight.zeros is None, f"{spec.name}: zeros, for which the format has no file"
    if quantization.act_order:
        assert weight.groups is not None, spec
        tensors["group"] = weight.groups.to(torch.int32)
    wanted = {item.name: item.shape for item in quantization.specs(spec)}
    named = {f"{spec.name}.{part}": tensor for part, tensor in tensors.items()}
    assert {name: tuple(tensor.shape) for name, tensor in named.items()} == wanted, (spec, wanted)
    return named


def read_quantized(
    spec: WeightSpec, quantization: Quantization, read: Callable[[str], Tensor], rank: int, world: int
) -> QuantizedWeight:
    """Return a rank's shard of the matrix `spec` at degree `world`.

    read: returns the rank's shard of a file by name, in the file's dtype. Raises WeightFileError for scales
    that are not finite, values of fp8 that are NaN, zeros above 15 and groups that do not exist.
    """
    values = _values(read(f"{spec.name}.{quantization.weights}"), spec, quantization)
    scales = read(f"{spec.name}.scale").t()  # (out, G)
    zeros = read(f"{spec.name}.zero").t() if quantization.zeros else None
    groups = read(f"{spec.name}.group") if quantization.act_order else None
    columns = spec.shard_shape(world)[0]
    _check(spec, scales, zeros, groups)
    block_rows = quantization.block_rows
    if block_rows > 1:
        scales, block_rows = _rows_of_blocks(scales, spec, rank, world, block_rows)
    group_size = quantization.group
    if spec.axis == 0 and group_size:
        scales, zeros, groups = _groups_of_rows(scales, zeros, groups, spec, rank, world, group_size)
    return QuantizedWeight(
        quantization.weights,
        columns,
        values,
        scales.contiguous(),
        None if zeros is None else zeros.float().contiguous(),
        group_size,
        None if groups is None else groups.contiguous(),
        block_rows,
        quantization.activations,
    )


def _values(stored: Tensor, spec: WeightSpec, quantization: Quantization) -> Tensor:
    """Convert (in, out) or, for int4, (in, out / 2) to QuantizedWeight.values."""
    if quantization.weights == "int4":
        return packed(unpacked(stored, 2 * stored.shape[1]).t())
    is_fp8 = quantization.weights == "fp8" and _has_data(stored)
    if is_fp8 and ((stored.view(torch.uint8) & 0x7F) == 0x7F).any():
        raise WeightFileError(f"{spec.name}.fp8 holds values that are not finite")
    return stored.t().contiguous()


def _check(spec: WeightSpec, scales: Tensor, zeros: Tensor | None, groups: Tensor | None) -> None:
    if not _has_data(scales):
        return
    if not scales.isfinite().all():
        raise WeightFileError(f"{spec.name}.scale holds values that are not finite")
    if zeros is not None and zeros.numel() and int(zeros.max()) > 15:
        raise WeightFileError(f"{spec.name}.zero holds {int(zeros.max())}; wanted 0 to 15")
    if groups is not None and not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1]:
        found = f"groups {int(groups.min())} to {int(groups.max())}"
        raise WeightFileError(f"{spec.name}.group holds {found}; wanted 0 to {scales.shape[1] - 1}")


def _has_data(tensor: Tensor) -> bool:
    return tensor.device.type != "meta"  # shapes only, for the memory plan


def _rows_of_blocks(
    scales: Tensor, spec: WeightSpec, rank: int, world: int, block: int
) -> tuple[Tensor, int]:
    """Return the scales (blocks of outputs, G) of this rank's outputs, and how many outputs share one.

    There is one scale per output if the rank's outputs do not begin and end with a block.
    """
    if spec.axis != 1 or world == 1:
        return scales, block
    outputs, whole = [], True
    for (start, stop), size in zip(spec.slices(rank, world), spec.share_sizes(world)):
        whole = whole and start % block == size % block == 0 and stop - start == size
        own = torch.arange(start, start + size, device=scales.device)
        outputs.append(own.clamp(max=spec.shape[1] - 1))
    rows = torch.cat(outputs) // block
    return (scales[rows[::block]], block) if whole else (scales[rows], 1)


def _groups_of_rows(
    scales: Tensor,
    zeros: Tensor | None,
    groups: Tensor | None,
    spec: WeightSpec,
    rank: int,
    world: int,
    size: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return scales, zeros and groups of this rank's inputs; padded inputs, whose x is 0, get the last
    group.
    """
    columns = spec.shard_shape(world)[0]
    ((start, stop),) = spec.slices(rank, world)
    inputs = torch.arange(start, start + columns, device=scales.device).clamp(max=spec.shape[0] - 1)
    if groups is not None:
        return scales, zeros, groups[inputs]
    if start % size == 0 and stop - start == columns:
        own = slice(start // size, -(-stop // size))
        return scales[:, own], None if zeros is None else zeros[:, own], None
    return scales, zeros, (inputs // size).to(torch.int32)


def stacked(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Stack matrices over the same inputs (gate and up) along their outputs."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if first.block_rows > 1 and any(part.shape[0] % first.block_rows for part in parts):
        parts = [_with_row_scales(part) for part in parts]
    if first.groups is not None and not all(_same_groups(first, part) for part in parts[1:]):
        parts = _with_own_groups(parts)
    return replace(
        parts[0],
        values=torch.cat([part.values for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=None if first.zeros is None else torch.cat([_zeros(part) for part in parts]),
    )


def _zeros(part: QuantizedWeight) -> Tensor:
    assert part.zeros is not None
    return part.zeros


def _with_row_scales(part: QuantizedWeight) -> QuantizedWeight:
    rows = torch.arange(part.shape[0], device=part.scales.device) // part.block_rows
    return replace(part, scales=part.scales[rows], block_rows=1)


def _same_groups(first: QuantizedWeight, other: QuantizedWeight) -> bool:
    assert first.groups is not None and other.groups is not None
    return not _has_data(first.groups) or torch.equal(first.groups, other.groups)


def _with_own_groups(parts: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """Return the parts with a common `groups`: one group for each combination of the parts' groups that an
    input has.
    """
    together = torch.stack([part.groups for part in parts if part.groups is not None])
    combined, groups = together.unique(dim=1, return_inverse=True)
    return [
        replace(
            part,
            scales=part.scales[:, own],
            zeros=None if part.zeros is None else part.zeros[:, own],
            groups=groups.to(torch.int32),
        )
        for part, own in zip(parts, combined.long())
    ]
