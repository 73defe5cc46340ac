"""Sparse checkpoints in the bitmask containers of compressed-tensors.

A container stores a matrix `<module>.weight` (R, C) as `<module>.shape`, `<module>.bitmask` (R, ceil(C / 8)),
one bit per weight, set if it is stored, the lowest bit first, and `<module>.compressed`, the stored weights
by rows. `sparse-bitmask` adds `<module>.row_offsets`, the number of weights stored before each row;
`sparse-24-bitmask` stores two of every four. Source: compressed-tensors 0.12, compressors/sparse_compressors.
A tensor is expanded when it is read, so that only one is in memory at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.converters.sources import TensorSource

#: keys of config.json that describe a container, or a quantisation
DESCRIPTIONS = ("quantization_config", "compression_config")
FORMATS = ("sparse-bitmask", "sparse-24-bitmask")
_PARTS = ("compressed", "bitmask", "shape", "row_offsets")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_CHUNK = 1 << 22  # weights that are expanded together: their mask takes a byte each


def has_bitmasks(config: dict[str, Any], where: Path) -> bool:
    """Return whether a config.json without quantisation says that its tensors are in a bitmask container.

    Raises UnsupportedError naming the format of another container; CheckpointError for a description that is
    not one.
    """
    container = False
    for key in DESCRIPTIONS:
        held = config.get(key) or {}
        if not isinstance(held, dict):
            raise CheckpointError(f"{where} has {key} = {str(held)[:80]!r}; wanted an object")
        container |= bool(held) and _is_sparse(held, where)
    return container


def _is_sparse(held: dict[str, Any], where: Path) -> bool:
    sparsity = held.get("sparsity_config") or {}
    form = sparsity.get("format", "dense") if isinstance(sparsity, dict) else sparsity
    if form in FORMATS:
        return True
    form = held.get("format", "dense") if form == "dense" else form
    if form not in ("dense", None):
        wanted = f"dense tensors, {' or '.join(FORMATS)}"
        raise UnsupportedError(f"{where} says compressed as {str(form)[:80]}; this version reads {wanted}")
    return False


@dataclass(frozen=True)
class _Held:
    """Stored form of one matrix: the names of its parts, and its shape."""

    parts: dict[str, str]
    shape: tuple[int, int]


class BitmaskSource:
    """A TensorSource over `inner`, with the matrices of bitmask containers as `<module>.weight`.

    Shapes and sizes of all parts are checked at once. Raises CheckpointError naming the tensor.
    """

    def __init__(self, inner: TensorSource, where: Path):
        self._inner, self._where = inner, where
        self._held: dict[str, _Held] = {}
        stems = [name.removesuffix(".bitmask") for name in inner.shapes if name.endswith(".bitmask")]
        for stem in stems:
            self._held[f"{stem.removesuffix('.weight')}.weight"] = self._describe(stem)
        parts = {part for held in self._held.values() for part in held.parts.values()}
        self.shapes = {name: shape for name, shape in inner.shapes.items() if name not in parts}
        for name, held in self._held.items():
            if name in self.shapes:
                raise CheckpointError(f"{where} has {name} twice: compressed and dense")
            self.shapes[name] = held.shape

    def dtype(self, name: str) -> torch.dtype:
        held = self._held.get(name)
        return self._inner.dtype(held.parts["compressed"] if held else name)

    def read(self, name: str) -> Tensor:
        held = self._held.get(name)
        if held is None:
            return self._inner.read(name)
        parts = {part: self._inner.read(stored) for part, stored in held.parts.items() if part != "shape"}
        return self._expand(name, held.shape, parts)

    def _describe(self, stem: str) -> _Held:
        """The parts of one matrix; everything but their contents is checked."""
        inner = self._inner
        parts = {part: f"{stem}.{part}" for part in _PARTS if f"{stem}.{part}" in inner.shapes}
        for part in ("compressed", "shape"):
            if part not in parts:
                raise CheckpointError(f"{self._where} has {stem}.bitmask, but no {stem}.{part}")
        shape = self._shape(parts["shape"])
        rows, columns = shape
        found, wanted = inner.shapes[parts["bitmask"]], (rows, -(-columns // 8))
        if found != wanted or inner.dtype(parts["bitmask"]) != torch.uint8:
            self._fail(
                parts["bitmask"], f"is {found} {inner.dtype(parts['bitmask'])}", f"{wanted} torch.uint8"
            )
        if inner.dtype(parts["compressed"]) not in _DTYPES:
            self._fail(parts["compressed"], f"is {inner.dtype(parts['compressed'])}", "fp16, bf16 or fp32")
        stored = torch.Size(inner.shapes[parts["compressed"]]).numel()
        if stored > rows * columns:
            self._fail(
                parts["compressed"], f"holds {stored:,} weights", f"at most {rows * columns:,} of {shape}"
            )
        return _Held(parts, (rows, columns))

    def _shape(self, name: str) -> tuple[int, int]:
        stored, dtype = self._inner.shapes[name], self._inner.dtype(name)
        if torch.Size(stored).numel() != 2 or dtype.is_floating_point or dtype == torch.bool:
            self._fail(name, f"is {stored} {dtype}", "the two sizes of a matrix")
        rows, columns = (int(size) for size in self._inner.read(name).flatten())
        if not (0 < rows < 1 << 31 and 0 < columns < 1 << 31):
            self._fail(name, f"says ({rows}, {columns})", "two sizes of 1 or more")
        return rows, columns

    def _expand(self, name: str, shape: tuple[int, int], parts: dict[str, Tensor]) -> Tensor:
        rows, columns = shape
        dense, used = torch.zeros(shape, dtype=parts["compressed"].dtype), 0
        values, target = _words(parts["compressed"].flatten()), _words(dense)
        bitmask = parts["bitmask"].numpy()
        offsets = parts["row_offsets"].flatten().numpy() if "row_offsets" in parts else None
        height = max(1, _CHUNK // columns)
        for first in range(0, rows, height):
            mask = np.unpackbits(bitmask[first : first + height], axis=-1, bitorder="little").view(bool)
            if mask[:, columns:].any():
                self._fail(name, "has bits beyond its last column in its bitmask", "zeros there")
            counts = np.count_nonzero(mask, axis=-1)
            starts = used + np.cumsum(counts) - counts
            if offsets is not None and not np.array_equal(offsets[first : first + height], starts):
                self._fail(
                    name, f"has row_offsets from row {first} on that differ from its bitmask", "equal ones"
                )
            end = used + int(counts.sum())
            if end <= len(values):
                target[first : first + height][mask[:, :columns]] = values[used:end]
            used = end
        if used != len(values):
            self._fail(name, f"has {used:,} bits in its bitmask", f"{len(values):,}, the weights stored")
        return dense

    def _fail(self, name: str, found: str, wanted: str) -> None:
        raise CheckpointError(f"{self._where}: {name} {found}; wanted {wanted}")


def _words(tensor: Tensor) -> np.ndarray:
    """The tensor's bits as signed integers of the same size; the memory is shared."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]).numpy()
