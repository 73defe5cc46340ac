"""Checks tensors before a launch. Shapes are given as letters; errors name both sides of a mismatch."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class ShapeError(ValueError):
    """A tensor's shape does not agree with the operation's contract."""


class DtypeError(TypeError):
    """A tensor's dtype does not agree with the operation's contract."""


class LayoutError(ValueError):
    """A tensor's strides or device do not agree with the operation's contract."""


def match(operation: str, *tensors: tuple[str, str, Tensor]) -> dict[str, int]:
    """Bind letters to sizes over (letters, name, tensor) triples, e.g. ("TC", "x", x).

    Raises ShapeError such as `norm: out.shape[1] is 32, but C is 64`, LayoutError if the last axis is not
    contiguous or devices differ.
    """
    sizes: dict[str, int] = {}
    device = tensors[0][2].device
    for letters, name, tensor in tensors:
        if tensor.dim() != len(letters):
            raise ShapeError(
                f"{operation}: {name} has shape {tuple(tensor.shape)}; wanted {len(letters)} axes ({letters})"
            )
        for axis, letter in enumerate(letters):
            size = tensor.shape[axis]
            if sizes.setdefault(letter, size) != size:
                raise ShapeError(
                    f"{operation}: {name}.shape[{axis}] is {size}, but {letter} is {sizes[letter]}"
                )
        if tensor.device != device:
            raise LayoutError(f"{operation}: {name} is on {tensor.device}, {tensors[0][1]} on {device}")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise LayoutError(
                f"{operation}: the last axis of {name} is not contiguous (strides {tensor.stride()})"
            )
    return sizes


def same_dtype(operation: str, *tensors: tuple[str, Tensor]) -> torch.dtype:
    """Return the common floating dtype of all tensors. Raises DtypeError that names two that differ."""
    first, dtype = tensors[0][0], tensors[0][1].dtype
    if dtype not in FLOATS:
        raise DtypeError(f"{operation}: {first} is {dtype}; wanted float32, float16 or bfloat16")
    for name, tensor in tensors[1:]:
        if tensor.dtype != dtype:
            raise DtypeError(f"{operation}: {name} is {tensor.dtype}, but {first} is {dtype}")
    return dtype


def indices(operation: str, *tensors: tuple[str, Tensor]) -> None:
    """Raise DtypeError unless every tensor is int32."""
    for name, tensor in tensors:
        if tensor.dtype != torch.int32:
            raise DtypeError(f"{operation}: {name} is {tensor.dtype}; wanted int32")
