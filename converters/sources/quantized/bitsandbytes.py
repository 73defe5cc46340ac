"""Checkpoints of bitsandbytes: LLM.int8 and the 4 bit types nf4 and fp4.

8 bit: `weight` (out, in) int8; `SCB` (out,) float32 is the largest magnitude of each row, stored as 127.
4 bit: `weight` (n, 1) has two indices of a table per byte, the first in the high half; `weight.quant_map`
(16,) is the table; `weight.absmax` has the scale of each block of consecutive weights, in row order;
`weight.quant_state.bitsandbytes__nf4` (or fp4) is JSON with shape, blocksize and dtype. With double
quantisation absmax is uint8, indices of `weight.nested_quant_map` (256,), scaled by `weight.nested_absmax`
per nested_blocksize of them, plus nested_offset. Source: bitsandbytes 0.50, functional.py,
QuantState; Dettmers et al. 2022 and 2023.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tridecode.backend.weights.quantization import Quantization
from tridecode.converters.sources.quantized.parts import Method, Parts
from tridecode.converters.sources.quantized.settings import Settings
from tridecode.kernels.formats.quantized import QuantizedWeight

KNOWN = (
    "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage",
    "bnb_4bit_quant_type", "bnb_4bit_target_modules", "bnb_4bit_use_double_quant",
    "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "llm_int8_skip_modules",
    "llm_int8_threshold", "load_in_4bit", "load_in_8bit", "quant_method",
)  # fmt: skip
_MAX_STATE_BYTES = 4096
_STORED = (torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32)


class EightBit:
    """LLM.int8; the outliers of activations are not stored in the checkpoint."""

    title = "bitsandbytes, 8 bit, per channel"
    markers = (".SCB",)
    parts = ("weight", "SCB", "weight_format")
    kept = Quantization("int8")

    def shape(self, parts: Parts) -> tuple[int, int]:
        rows, columns = parts.require("weight", (None, None), torch.int8)
        parts.require("SCB", (rows,), torch.float32)
        if "weight_format" in parts and parts.size("weight_format") != 1:
            parts.fail("weight_format", f"holds {parts.size('weight_format')} values", "one")
        return rows, columns

    def weight(self, parts: Parts) -> QuantizedWeight:
        _, columns = self.shape(parts)
        if "weight_format" in parts and parts.read("weight_format").any():
            parts.fail("weight_format", f"is {int(parts.read('weight_format'))}", "0, rows")
        scales = parts.scales("SCB", may_be_zero=True).unsqueeze(1) / 127  # 0 for a row of zeros
        return QuantizedWeight("int8", columns, parts.read("weight"), scales)

    def groups(self, parts: Parts) -> None:
        return None


@dataclass(frozen=True)
class FourBit:
    """The types nf4 and fp4 (`kind`), with the table from the checkpoint."""

    kind: str

    markers = (".weight.absmax",)
    kept = None

    @property
    def title(self) -> str:
        return f"bitsandbytes, {self.kind}"

    @property
    def parts(self) -> tuple[str, ...]:
        ends = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", self._state)
        return ("weight", *(f"weight.{end}" for end in ends))

    @property
    def _state(self) -> str:
        return f"quant_state.bitsandbytes__{self.kind}"

    def shape(self, parts: Parts) -> tuple[int, int]:
        state = self._read_state(parts)
        rows, columns = state["shape"]
        parts.require("weight", (None, 1), *_STORED)
        size = parts.size("weight") * parts.tensors.dtype(f"{parts.stem}.weight").itemsize
        if size != -(-rows * columns // 2):
            parts.fail(
                "weight", f"holds {size:,} bytes", f"{-(-rows * columns // 2):,} of ({rows}, {columns})"
            )
        parts.require("weight.quant_map", (16,), torch.float32)
        blocks = -(-rows * columns // state["blocksize"])
        if "nested_blocksize" not in state:
            parts.require("weight.absmax", (blocks,), torch.float32)
            return rows, columns
        parts.require("weight.absmax", (blocks,), torch.uint8)
        parts.require("weight.nested_quant_map", (256,), torch.float32)
        parts.require("weight.nested_absmax", (-(-blocks // state["nested_blocksize"]),), torch.float32)
        return rows, columns

    def weight(self, parts: Parts) -> Tensor:
        """Return (out, in) float32: blocks cross the ends of rows, which QuantizedWeight cannot represent."""
        rows, columns = self.shape(parts)
        state = self._read_state(parts)
        count, block = rows * columns, state["blocksize"]
        stored = parts.read("weight").contiguous().view(torch.uint8).flatten()
        table = _table(parts, "weight.quant_map")
        weight = torch.empty(stored.numel(), 2)
        torch.index_select(table, 0, (stored >> 4).int(), out=weight[:, 0])
        torch.index_select(table, 0, (stored & 15).int(), out=weight[:, 1])
        values = weight.flatten()[:count]
        scales = self._block_scales(parts, state)
        whole = count // block * block
        values[:whole].view(-1, block).mul_(scales[: whole // block, None])
        values[whole:].mul_(scales[-1])
        return values.view(rows, columns)

    def groups(self, parts: Parts) -> None:
        return None

    def _block_scales(self, parts: Parts, state: dict[str, Any]) -> Tensor:
        if "nested_blocksize" not in state:
            return parts.scales("weight.absmax", may_be_zero=True)
        numbers = _table(parts, "weight.nested_quant_map")[parts.read("weight.absmax").int()]
        outer = parts.scales("weight.nested_absmax", may_be_zero=True)
        outer = outer.repeat_interleave(state["nested_blocksize"])[: numbers.numel()]
        return numbers * outer + state["nested_offset"]

    def _read_state(self, parts: Parts) -> dict[str, Any]:
        """Return the JSON of the quant_state. Raises CheckpointError for a wrong length, size or type."""
        part = f"weight.{self._state}"
        (length,) = parts.require(part, (None,), torch.uint8)
        if length > _MAX_STATE_BYTES:
            parts.fail(part, f"holds {length:,} bytes", f"at most {_MAX_STATE_BYTES:,}")
        try:
            state = json.loads(bytes(parts.read(part).tolist()))
        except (ValueError, RecursionError):
            parts.fail(part, "is not valid JSON", "shape and blocksize")
        sizes = state.get("shape") if isinstance(state, dict) else None
        if not isinstance(sizes, list) or len(sizes) != 2 or not all(_is_size(size) for size in sizes):
            parts.fail(part, "has no shape of a matrix", "two sizes of 1 or more")
        for key in ("blocksize", "nested_blocksize"):
            if key in state and not _is_size(state[key]) or key == "blocksize" and key not in state:
                parts.fail(part, f"has {key} = {str(state.get(key))[:40]}", "1 or more")
        offset = state.get("nested_offset", 0.0)
        if isinstance(offset, bool) or not isinstance(offset, (int, float)) or not math.isfinite(offset):
            parts.fail(part, f"has nested_offset = {str(offset)[:40]}", "a finite number")
        return {"nested_offset": 0.0, **state}


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _table(parts: Parts, part: str) -> Tensor:
    table = parts.read(part)
    if not table.abs().max() <= 1:  # also for NaN
        parts.fail(part, "holds a number beyond -1 to 1", "a table of -1 to 1")
    return table


def read_settings(settings: Settings) -> Method:
    """Raises UnsupportedError for 4 bit types other than nf4 and fp4."""
    four = settings.choice("load_in_4bit", (True, False), False)
    eight = settings.choice("load_in_8bit", (True, False), False)
    if four == eight:
        settings.refuse("load_in_4bit and load_in_8bit", four, "one of them true")
    settings.choice("llm_int8_has_fp16_weight", (False,), False)
    if eight:
        return EightBit()
    return FourBit(settings.choice("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4"))
