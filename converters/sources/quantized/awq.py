"""AWQ's checkpoints in AutoAWQ's GEMM layout: 4 bit integers, packed along the outputs.

`qweight` (in, out / 8) int32: a word holds eight neighbouring outputs of one input, from the lowest bits on
in the order 0 2 4 6 1 3 5 7. `qzeros` (G, out / 8) int32 likewise. `scales` (G, out).
weight[o, i] = scales[g, o] * (value[i, o] - zero[g, o]), g = i // group_size.
Source: AutoAWQ 0.2.9, modules/linear/gemm.py; Lin et al. 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tridecode.backend.weights.quantization import Quantization
from tridecode.converters.sources.quantized.parts import FLOATS, Parts, unpacked_words, unsigned_weight
from tridecode.converters.sources.quantized.settings import Settings
from tridecode.kernels.formats.quantized import QuantizedWeight

KNOWN = (
    "backend", "bits", "checkpoint_format", "desc_act", "do_fuse", "exllama_config", "format",
    "fuse_max_seq_len", "group_size", "lm_head", "meta", "modules_to_fuse", "modules_to_not_convert",
    "pack_dtype", "q_group_size", "quant_method", "sym", "version", "w_bit", "zero_point",
)  # fmt: skip
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of output 0, 1, ... in a word


@dataclass(frozen=True)
class Awq:
    """group_size: 0: all inputs."""

    group_size: int

    markers = (".qweight",)
    parts = ("qweight", "qzeros", "scales")

    @property
    def title(self) -> str:
        return f"awq, 4 bit, {f'groups of {self.group_size}' if self.group_size else 'per channel'}"

    @property
    def kept(self) -> Quantization:
        return Quantization("int4", self.group_size, zeros=True)

    def shape(self, parts: Parts) -> tuple[int, int]:
        columns, words = parts.require("qweight", (None, None), torch.int32)
        groups = -(-columns // (self.group_size or columns))
        parts.require("scales", (groups, words * 8), *FLOATS)
        parts.require("qzeros", (groups, words), torch.int32)
        return words * 8, columns

    def weight(self, parts: Parts) -> QuantizedWeight:
        self.shape(parts)
        scales = parts.scales("scales").t()
        values, zeros = _by_output(parts.read("qweight")), _by_output(parts.read("qzeros"))
        return unsigned_weight(4, values, scales, zeros, self.group_size)

    def groups(self, parts: Parts) -> None:
        return None


def _by_output(words: Tensor) -> Tensor:
    """(R, out / 8) int32 -> (out, R) uint8."""
    return unpacked_words(words, 4)[..., _PLACES].flatten(1).t()


def read_settings(settings: Settings) -> Awq:
    """Raises UnsupportedError for another number of bits or another layout, such as GEMV's."""
    settings.choice("bits", (4,), 4)
    settings.choice("w_bit", (4,), 4)
    for key in ("version", "format", "checkpoint_format"):
        settings.choice(key, ("gemm", "GEMM"), "gemm")
    settings.choice("zero_point", (True,), True)
    settings.choice("pack_dtype", ("int32",), "int32")
    return Awq(settings.group_size(128))
