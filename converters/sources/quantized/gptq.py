"""GPTQ's checkpoints: 4 or 8 bit integers in 32-bit words, packed along the inputs.

`qweight` (in * bits / 32, out) int32: word r of an output holds its inputs from r * 32 / bits on, the lowest
bits first. `scales` (G, out). `qzeros` (G, out * bits / 32) int32, packed along the outputs; format "gptq"
stores each zero less 1, "gptq_v2" as it is. `g_idx` (in,) is the group of each input; with act-order
(desc_act) the groups are not consecutive. weight[o, i] = scales[g, o] * (value[i, o] - zero[g, o]), g =
g_idx[i]. Source: AutoGPTQ and GPTQModel 7.7, nn_modules/qlinear; Frantar et al. 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.weights.quantization import Quantization
from tridecode.converters.sources.quantized.parts import (
    FLOATS,
    Parts,
    group_numbers,
    unpacked_words,
    unsigned_weight,
)
from tridecode.converters.sources.quantized.settings import Settings
from tridecode.kernels.formats.quantized import QuantizedWeight

#: settings of the search for the weights, or of the kernel: they do not change the stored format
KNOWN = (
    "act_group_aware", "autoround_version", "backend", "batch_size", "block_name_to_quantize", "bits",
    "cache_block_outputs", "checkpoint_format", "damp_auto_increment", "damp_percent", "dataset", "desc_act",
    "disable_exllama", "dynamic", "exllama_config", "format", "group_size", "is_marlin_format", "lm_head",
    "max_input_length", "meta", "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "modules_in_block_to_quantize", "mse", "offload_to_disk",
    "pack_dtype", "pad_token_id", "quant_method", "static_groups", "sym", "tokenizer", "true_sequential",
    "use_cuda_fp16", "use_exllama",
)  # fmt: skip
_LAYOUTS = ("gptq", "gptq_v2")


@dataclass(frozen=True)
class Gptq:
    """bits: 4 or 8. group_size: 0: all inputs. zero_offset: added to a stored zero. symmetric: all zeros
    are half of the range.
    """

    bits: int
    group_size: int
    zero_offset: int
    symmetric: bool

    markers = (".qweight",)
    parts = ("qweight", "qzeros", "scales", "g_idx")

    @property
    def title(self) -> str:
        return (
            f"gptq, {self.bits} bit, {f'groups of {self.group_size}' if self.group_size else 'per channel'}"
        )

    @property
    def kept(self) -> Quantization | None:
        if self.bits == 4:
            return Quantization("int4", self.group_size, zeros=not self.symmetric)
        return Quantization("int8", self.group_size) if self.symmetric else None

    def shape(self, parts: Parts) -> tuple[int, int]:
        per_word = 32 // self.bits
        words, rows = parts.require("qweight", (None, None), torch.int32)
        columns = words * per_word
        if "g_idx" in parts:
            (columns,) = parts.require("g_idx", (None,), torch.int32, torch.int64)
            parts.require("qweight", (-(-columns // per_word), rows))
        groups = -(-columns // (self.group_size or columns))
        parts.require("scales", (groups, rows), *FLOATS)
        parts.require("qzeros", (groups, -(-rows // per_word)), torch.int32)
        return rows, columns

    def weight(self, parts: Parts) -> QuantizedWeight:
        rows, columns = self.shape(parts)
        values = unpacked_words(parts.read("qweight"), self.bits)  # (words, out, in a word)
        values = values.transpose(1, 2).flatten(0, 1)[:columns].t()
        scales = parts.scales("scales").t()
        zeros = unpacked_words(parts.read("qzeros"), self.bits).flatten(1)[:, :rows].t()
        # a zero of 0 is stored as the largest value; the addition wraps it back
        zeros = zeros + self.zero_offset & (1 << self.bits) - 1
        return unsigned_weight(self.bits, values, scales, zeros, self.group_size, self.groups(parts))

    def groups(self, parts: Parts) -> Tensor | None:
        _, columns = self.shape(parts)
        if "g_idx" not in parts:
            return None
        num_groups = -(-columns // (self.group_size or columns))
        return group_numbers(parts, "g_idx", columns, num_groups, self.group_size)


def read_settings(settings: Settings) -> Gptq:
    """Raises UnsupportedError for another number of bits or another layout, such as Marlin's."""
    bits = settings.choice("bits", (4, 8), None)
    plain = settings.choice("format", _LAYOUTS, "gptq")
    layout = settings.choice("checkpoint_format", _LAYOUTS, plain)
    settings.choice("is_marlin_format", (False,), False)
    settings.choice("pack_dtype", ("int32",), "int32")
    settings.choice("desc_act", (True, False), False)  # the tensors tell
    symmetric = settings.choice("sym", (True, False), False)
    _check_exceptions(settings)
    return Gptq(bits, settings.group_size(128), 0 if layout == "gptq_v2" else 1, symmetric)


def _check_exceptions(settings: Settings) -> None:
    """GPTQModel's "dynamic": patterns of modules with settings of their own; "-:" leaves them dense."""
    exceptions = settings.held.get("dynamic")
    if exceptions is None:
        return
    if not isinstance(exceptions, dict):
        settings.refuse("dynamic", exceptions, "an object")
    for pattern, changed in exceptions.items():
        if changed and not pattern.startswith("-:"):
            found = f"{settings.title} with dynamic settings of {pattern[:60]!r}"
            raise UnsupportedError(f"{settings.where} says {found}; this version reads equal settings of all")
