"""The files of a quantised matrix, for the writer: the matrix is computed once, and each file takes a
part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from torch import Tensor

from tridecode.backend.models.quantized_parts import file_tensors
from tridecode.backend.weights.layout import WeightSpec
from tridecode.backend.weights.quantization import Quantization
from tridecode.converters.writer import TensorToWrite
from tridecode.kernels.formats.quantized import QuantizedWeight


class _Parts:
    """The contents of a matrix's files by name, made at the first `take` and dropped after the last."""

    def __init__(self, spec: WeightSpec, quantization: Quantization, load: Callable[[], QuantizedWeight]):
        self._spec, self._quantization, self._load = spec, quantization, load
        self._held: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    def take(self, name: str) -> Tensor:
        with self._lock:
            if name not in self._held:
                self._held = file_tensors(self._load(), self._spec, self._quantization)
            return self._held.pop(name)


def quantized_tensors(
    spec: WeightSpec,
    quantization: Quantization,
    load: Callable[[], QuantizedWeight],
    memory: int,
) -> list[TensorToWrite]:
    """The files of the matrix `spec`.

    load: returns its QuantizedWeight, whole; memory: the bytes it needs.
    """
    parts = _Parts(spec, quantization, load)
    return [
        TensorToWrite(file, partial(parts.take, file.name), 0 if number else memory)
        for number, file in enumerate(quantization.specs(spec))
    ]
