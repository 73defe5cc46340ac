"""FP8 checkpoints: e4m3 matrices with a scale for each block, for each output or for the matrix.

quant_method "fp8" (DeepSeek-V3, transformers' FineGrainedFP8Config): `weight` (out, in) and
`weight_scale_inv` (ceil(out / 128), ceil(in / 128)), by which the values are multiplied, in spite of its
name; without weight_block_size `weight_scale` or `weight_scale_inv` of one element or of (out, 1).
"fbgemm_fp8": `weight_scale` (out, 1). Scales of activations (`input_scale`) are not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tridecode.backend.weights.quantization import BLOCK, Quantization
from tridecode.converters.sources.quantized.parts import Parts, grid_weight, scale_grid
from tridecode.converters.sources.quantized.settings import Settings
from tridecode.kernels.formats.quantized import QuantizedWeight

KNOWN = (
    "activation_scale_ub", "activation_scheme", "dequantize", "expert_dtype", "fmt", "ignored_layers",
    "kv_cache_scheme", "modules_to_convert", "modules_to_not_convert", "quant_method", "scale_fmt",
    "weight_block_size",
)  # fmt: skip


@dataclass(frozen=True)
class Fp8:
    """name: quant_method. block: rows and columns of a block; None: a scale for each output, or one."""

    name: str
    block: tuple[int, int] | None

    markers = (".weight_scale_inv", ".weight_scale")
    parts = ("weight", "weight_scale_inv", "weight_scale")

    @property
    def title(self) -> str:
        blocks = f"blocks of {self.block[0]} x {self.block[1]}" if self.block else "per channel or tensor"
        return f"{self.name}, e4m3, {blocks}"

    @property
    def kept(self) -> Quantization | None:
        if self.block is None:
            return Quantization("fp8", activations="fp8")
        if self.block != (BLOCK, BLOCK):
            return None
        return Quantization("fp8", BLOCK, BLOCK, activations="fp8")

    def shape(self, parts: Parts) -> tuple[int, int]:
        rows, columns = parts.require("weight", (None, None), torch.float8_e4m3fn)
        scale_grid(parts, _scale(parts), (rows, columns), self.block)
        return rows, columns

    def weight(self, parts: Parts) -> QuantizedWeight:
        self.shape(parts)
        values = parts.read("weight")
        if values.view(torch.uint8).bitwise_and(127).eq(127).any():
            parts.fail("weight", "holds NaN", "numbers")
        return grid_weight("fp8", values, parts.scales(_scale(parts)), self.block, activations="fp8")

    def groups(self, parts: Parts) -> None:
        return None


def _scale(parts: Parts) -> str:
    return "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"


def read_settings(settings: Settings) -> Fp8:
    """Raises UnsupportedError for another 8 bit type, and for scales that are stored in 8 bit."""
    settings.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    settings.choice("fmt", ("e4m3",), "e4m3")
    settings.choice("scale_fmt", ("float",), "float")
    settings.choice("expert_dtype", ("fp8",), "fp8")
    block = settings.block("weight_block_size")
    return Fp8(settings.held["quant_method"], block)
