"""Checkpoints that were quantised by others; docs/reference/quantized_checkpoints.md lists what is read.

A module here reads one method's settings and tensors. `QuantizedSource` supplies the matrices to the
conversion: quantised, or dequantised to float32 one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.converters.sources import TensorSource
from tridecode.converters.sources.bitmasks import DESCRIPTIONS
from tridecode.converters.sources.quantized import autoround, awq, bitsandbytes, compressed_tensors, fp8, gptq
from tridecode.converters.sources.quantized.parts import Method, Parts
from tridecode.converters.sources.quantized.settings import Settings, shown
from tridecode.kernels.formats.quantized import QuantizedWeight

#: model types of transformers' Conv1D: plain matrices are (in, out), quantised ones (out, in)
_CONV1D = ("gpt2",)

_Read = Callable[[Settings], Method]
#: quant_method -> reader of its settings, and the known settings
_METHODS: dict[str, tuple[_Read, tuple[str, ...]]] = {
    "gptq": (gptq.read_settings, gptq.KNOWN),
    "awq": (awq.read_settings, awq.KNOWN),
    "compressed-tensors": (compressed_tensors.read_settings, compressed_tensors.KNOWN),
    "bitsandbytes": (bitsandbytes.read_settings, bitsandbytes.KNOWN),
    "fp8": (fp8.read_settings, fp8.KNOWN),
    "fbgemm_fp8": (fp8.read_settings, fp8.KNOWN),
    "auto-round": (autoround.read_settings, autoround.KNOWN),
}


def quantization_of(config: dict[str, Any], where: Path) -> tuple[Method, list[str]] | None:
    """The method that config.json names, and its settings that this version does not know; None without one.

    A sparse container of compressed-tensors is not quantised: sources/bitmasks. Raises UnsupportedError
    naming a method or setting that is not read, CheckpointError for a description that is not one.
    """
    for key in DESCRIPTIONS:
        held = config.get(key)
        if not held:
            continue
        settings = Settings(held, key, where)
        method = held.get("quant_method", "compressed-tensors")
        if method == "compressed-tensors" and not held.get("config_groups"):
            continue
        if not isinstance(method, str) or method not in _METHODS:
            raise UnsupportedError(
                f"{where} says quantised by {shown(method)}; this version reads {', '.join(_METHODS)}: "
                "convert the unquantised checkpoint"
            )
        settings.title = f"quantised by {method}"
        read, known = _METHODS[method]
        return read(settings), settings.unknown(*known)
    return None


class QuantizedSource:
    """A TensorSource over `inner`, with the quantised matrices as `<module>.weight`.

    They are float32 (out, in), or (in, out) where transformers' model has a Conv1D. Shapes and dtypes of all
    parts are checked at once, contents when a matrix is read. Raises CheckpointError naming the tensor.
    """

    def __init__(self, inner: TensorSource, where: Path, method: Method, model_type: str = ""):
        self._inner, self.method = inner, method
        stems = {
            name.removesuffix(marker)
            for marker in method.markers
            for name in inner.shapes
            if name.endswith(marker)
        }
        if not stems:
            ends = " or ".join(method.markers)
            raise CheckpointError(
                f"{where} says quantised ({method.title}), but no tensor's name ends in {ends}"
            )
        self._turned = model_type in _CONV1D
        self._modules = {f"{stem}.weight": Parts(inner, where, stem) for stem in sorted(stems)}
        used = {f"{stem}.{part}" for stem in stems for part in method.parts}
        for name in sorted(set(self._modules) & set(inner.shapes) - used):
            raise CheckpointError(f"{where} has {name} twice: quantised and dense")
        self.shapes = {name: shape for name, shape in inner.shapes.items() if name not in used}
        for name, module in self._modules.items():
            rows, columns = method.shape(module)
            self.shapes[name] = (columns, rows) if self._is_turned(name) else (rows, columns)

    @property
    def notes(self) -> list[str]:
        """Notes for the user about the quantisation."""
        count = len(self._modules)
        return [f"quantised: {self.method.title}; {count} matrices"]

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32 if name in self._modules else self._inner.dtype(name)

    def read(self, name: str) -> Tensor:
        if name not in self._modules:
            return self._inner.read(name)
        weight = self.method.weight(self._modules[name])
        dense = weight.expanded() if isinstance(weight, QuantizedWeight) else weight
        return dense.t() if self._is_turned(name) else dense

    def quantized(self, name: str) -> QuantizedWeight | None:
        """Return a matrix (out, in) in its stored format; None for a tensor that is dense or has no such
        format.
        """
        weight = self.method.weight(self._modules[name]) if name in self._modules else None
        return weight if isinstance(weight, QuantizedWeight) else None

    def groups(self, name: str) -> Tensor | None:
        """(in,) int32: the group of each input of a quantised matrix with act-order; None without it."""
        return self.method.groups(self._modules[name])

    def is_quantized(self, name: str) -> bool:
        return name in self._modules

    def empty_biases(self) -> set[str]:
        """Biases of zeros next to quantised matrices: AutoGPTQ writes them for modules that have none."""
        names = {f"{parts.stem}.bias" for parts in self._modules.values()}
        return {name for name in names & set(self.shapes) if not self._inner.read(name).any()}

    def _is_turned(self, name: str) -> bool:
        return self._turned and not name.endswith("lm_head.weight")
