"""Checkpoints of compressed-tensors: 4 and 8 bit integers and FP8, as llm-compressor writes them.

pack-quantized: `weight_packed` (out, ceil(in * bits / 32)) int32, packed along the inputs, the lowest bits
first, each value raised by half of its range; `weight_shape` (2,); `weight_zero_point` (ceil(out * bits /
32), G) int32, packed along the outputs likewise. int-quantized, float-quantized, naive-quantized: `weight`
(out, in) int8 or e4m3, `weight_zero_point` int8. All: `weight_scale` of the matrix, of each output, group or
block; `weight_g_idx` (in,) with act-order. Source: compressed-tensors 0.12,
compressors/quantized_compressors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.backend.weights.quantization import BLOCK, Quantization
from tridecode.converters.sources.quantized.parts import (
    FLOATS,
    Method,
    Parts,
    grid_weight,
    group_numbers,
    scale_grid,
    unpacked_words,
    unsigned_weight,
)
from tridecode.converters.sources.quantized.settings import Settings
from tridecode.kernels.formats.quantized import QuantizedWeight

KNOWN = (
    "config_groups", "format", "global_compression_ratio", "ignore", "kv_cache_scheme", "quant_method",
    "quantization_status", "sparsity_config", "transform_config", "version",
)  # fmt: skip
_MAX_CONFIG_GROUPS = 100
#: format -> types of weights that are read
_KINDS = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}


@dataclass(frozen=True)
class Scheme:
    """Weight format of a config group. kind: "int" or "float". group_size: 0: per channel or matrix.
    symmetric: no zero points. activations: as in QuantizedWeight.
    """

    form: str
    kind: str
    bits: int
    group_size: int
    block: tuple[int, int] | None
    symmetric: bool
    activations: str

    @property
    def kept(self) -> Quantization | None:
        if self.kind == "int" and self.bits == 4:
            return Quantization("int4", self.group_size, zeros=not self.symmetric)
        if not self.symmetric or self.block not in (None, (BLOCK, BLOCK)):
            return None
        rows = BLOCK if self.block else 1
        group = BLOCK if self.block else self.group_size
        return Quantization(
            "int8" if self.kind == "int" else "fp8", group, rows, activations=self.activations
        )

    @property
    def title(self) -> str:
        if self.block is not None:
            scales = f"blocks of {self.block[0]} x {self.block[1]}"
        else:
            scales = f"groups of {self.group_size}" if self.group_size else "per channel or tensor"
        return f"compressed-tensors, {self.form}, {self.kind}{self.bits}, {scales}"

    def scales(self, parts: Parts, shape: tuple[int, int]) -> tuple[int, ...]:
        if not self.group_size:
            return scale_grid(parts, "weight_scale", shape, self.block)
        groups = -(-shape[1] // self.group_size)
        return parts.require("weight_scale", (shape[0], groups), *FLOATS)

    def groups(self, parts: Parts, shape: tuple[int, int]) -> Tensor | None:
        """The group of each input with act-order; a list that holds -1 was never filled."""
        if "weight_g_idx" not in parts or not self.group_size:
            return None
        num_groups = -(-shape[1] // self.group_size)
        parts.require("weight_g_idx", shape[1:], torch.int32, torch.int64)
        if (parts.read("weight_g_idx") == -1).any():
            return None
        return group_numbers(parts, "weight_g_idx", shape[1], num_groups, self.group_size)


@dataclass(frozen=True)
class Packed:
    """pack-quantized."""

    scheme: Scheme

    markers = (".weight_packed",)
    parts = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")

    @property
    def title(self) -> str:
        return self.scheme.title

    @property
    def kept(self) -> Quantization | None:
        return self.scheme.kept

    def shape(self, parts: Parts) -> tuple[int, int]:
        parts.require("weight_shape", (2,), torch.int32, torch.int64)
        rows, columns = (int(size) for size in parts.read("weight_shape"))
        if not (0 < rows < 1 << 31 and 0 < columns < 1 << 31):
            parts.fail("weight_shape", f"says ({rows}, {columns})", "two sizes of 1 or more")
        per_word = 32 // self.scheme.bits
        parts.require("weight_packed", (rows, -(-columns // per_word)), torch.int32)
        self.scheme.scales(parts, (rows, columns))
        if "weight_zero_point" in parts:
            groups = -(-columns // (self.scheme.group_size or columns))
            parts.require("weight_zero_point", (-(-rows // per_word), groups), torch.int32)
        return rows, columns

    def weight(self, parts: Parts) -> QuantizedWeight:
        rows, columns = self.shape(parts)
        values = unpacked_words(parts.read("weight_packed"), self.scheme.bits).flatten(1)[:, :columns]
        scales = parts.scales("weight_scale")
        if not self.scheme.group_size:
            scales = scales.reshape(-1, 1).expand(rows, 1)
        zeros = None
        if "weight_zero_point" in parts:
            words = parts.read("weight_zero_point").t()
            zeros = unpacked_words(words, self.scheme.bits).flatten(1)[:, :rows].t()
        return unsigned_weight(
            self.scheme.bits,
            values,
            scales,
            zeros,
            self.scheme.group_size,
            self.scheme.groups(parts, (rows, columns)),
        )

    def groups(self, parts: Parts) -> Tensor | None:
        return self.scheme.groups(parts, self.shape(parts))


@dataclass(frozen=True)
class Plain:
    """int-quantized, float-quantized and naive-quantized."""

    scheme: Scheme

    markers = (".weight_scale",)
    parts = ("weight", "weight_scale", "weight_zero_point", "weight_g_idx")

    @property
    def title(self) -> str:
        return self.scheme.title

    @property
    def kept(self) -> Quantization | None:
        return self.scheme.kept

    def shape(self, parts: Parts) -> tuple[int, int]:
        dtype = torch.int8 if self.scheme.kind == "int" else torch.float8_e4m3fn
        rows, columns = parts.require("weight", (None, None), dtype)
        scales = self.scheme.scales(parts, (rows, columns))
        if "weight_zero_point" in parts:
            parts.require("weight_zero_point", scales, torch.int8, dtype)
        return rows, columns

    def weight(self, parts: Parts) -> QuantizedWeight:
        shape, scheme = self.shape(parts), self.scheme
        values, scales = parts.read("weight"), parts.scales("weight_scale")
        if scheme.kind == "float" and values.view(torch.uint8).bitwise_and(127).eq(127).any():
            parts.fail("weight", "holds NaN", "numbers")
        zeros = parts.read("weight_zero_point").float() if "weight_zero_point" in parts else None
        if zeros is not None and not zeros.any():
            zeros = None
        format = "int8" if scheme.kind == "int" else "fp8"
        if scheme.group_size:
            groups = scheme.groups(parts, shape)
            size = scheme.group_size
            return QuantizedWeight(
                format, shape[1], values, scales, zeros, size, groups, activations=scheme.activations
            )
        return grid_weight(format, values, scales, scheme.block, zeros, scheme.activations)

    def groups(self, parts: Parts) -> Tensor | None:
        return self.scheme.groups(parts, self.shape(parts))


def read_settings(settings: Settings) -> Method:
    """Raises UnsupportedError for another format, and for groups of modules that are stored differently."""
    settings.choice("quantization_status", ("compressed",), "compressed")
    held = settings.section("config_groups").held
    if not 0 < len(held) <= _MAX_CONFIG_GROUPS:
        settings.refuse("config_groups", f"{len(held)} groups", f"1 to {_MAX_CONFIG_GROUPS}")
    _refuse_transforms(settings)
    groups = settings.section("config_groups")
    schemes = {_scheme(settings, groups.section(name)) for name in held}
    if len(schemes) > 1:
        found = "; ".join(sorted(scheme.title for scheme in schemes)[:4])
        raise UnsupportedError(
            f"{settings.where} says {settings.title} with differing config_groups ({found}); "
            "this version reads groups that are stored alike"
        )
    scheme = schemes.pop()
    return Packed(scheme) if scheme.form == "pack-quantized" else Plain(scheme)


def _refuse_transforms(settings: Settings) -> None:
    """Refuse rotations that are applied to activations at run time, and sparse containers."""
    transforms = settings.held.get("transform_config")
    if transforms:
        raise UnsupportedError(
            f"{settings.where} says {settings.title} with a transform_config; this version reads none"
        )
    sparsity = settings.held.get("sparsity_config")
    if sparsity:
        settings.section("sparsity_config").choice("format", ("dense",), "dense")


def _scheme(settings: Settings, group: Settings) -> Scheme:
    whole = settings.held.get("format")
    form = group.choice("format", tuple(_KINDS), whole)
    weights = group.section("weights")
    kind = weights.choice("type", _KINDS[form], "int")
    bits = weights.choice("num_bits", (8,) if kind == "float" or form != "pack-quantized" else (4, 8), 8)
    weights.choice("dynamic", (False,), False)
    symmetric = weights.choice("symmetric", (True, False), True)
    order = weights.held.get("actorder")  # the tensors tell
    if order is not None and not isinstance(order, (bool, str)):
        weights.refuse("actorder", order, "a name or a boolean")
    size = weights.group_size()
    strategies = ("tensor", "channel", "group", *(() if form == "pack-quantized" else ("block",)))
    strategy = weights.choice("strategy", strategies, "group" if size else "tensor")
    if strategy == "group" and not size:
        weights.refuse("group_size", weights.held.get("group_size"), "1 or more")
    block = weights.block("block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise CheckpointError(
            f"{weights.where} has {weights.title} without block_structure; wanted two sizes"
        )
    return Scheme(
        form, kind, bits, size if strategy == "group" else 0, block, symmetric, _activations(group, kind)
    )


def _activations(group: Settings, kind: str) -> str:
    """Return the activation format of W8A8; all other schemes are computed with unquantised activations."""
    if group.held.get("input_activations") is None:
        return ""
    inputs = group.section("input_activations")
    bits, found = inputs.held.get("num_bits"), inputs.held.get("type")
    if bits != 8 or found != kind:
        return ""
    return "int8" if kind == "int" else "fp8"
