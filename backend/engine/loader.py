"""From weight files to a rank's tensors on the device, in the engine's dtype and in the operations'
layout."""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from tridecode.backend.weight_layout import WeightSpec
from tridecode.backend.weights import WeightReader
from tridecode.kernels.ops import Linear, Norm, Ops

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class FileWeights:
    """backend.models.layers.Weights over a WeightReader. `progress` is told each tensor's name."""

    def __init__(
        self,
        reader: WeightReader,
        specs: list[WeightSpec],
        tensor_rank: int,
        tensor_size: int,
        dtype: torch.dtype,
        ops: Ops,
        device: torch.device,
        progress: Callable[[str], None] | None = None,
    ):
        self._ops = ops
        self._reader, self._specs = reader, {spec.name: spec for spec in specs}
        self._rank, self._size = tensor_rank, tensor_size
        self._dtype, self._device = dtype, device
        self._progress = progress or (lambda name: None)

    def tensor(self, name: str) -> Tensor:
        self._progress(name)
        held = self._reader.read(self._specs[name], self._rank, self._size)
        return held.to(device=self._device, dtype=self._dtype, copy=True)

    def linear(self, name: str, bias: bool) -> Linear:
        return self._oriented(self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias") if bias else None)

    def fused_linear(self, names: list[str], bias: bool) -> Linear:
        weight = torch.cat([self.tensor(f"{name}.weight") for name in names], dim=1)
        return self._oriented(
            weight, torch.cat([self.tensor(f"{name}.bias") for name in names]) if bias else None
        )

    def _oriented(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return self._ops.pack(Linear(weight.t(), bias))

    def head(self, weight: Tensor) -> Linear:
        return self._ops.pack(Linear(weight))

    def norm(self, name: str, eps: float, bias: bool) -> Norm:
        return Norm(self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias") if bias else None, eps)
