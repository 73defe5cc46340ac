"""Random weights of a model's true shape, made on the device: for benchmarks without a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from tridecode.backend.models.layers import Weights
from tridecode.backend.weight_layout import WeightSpec
from tridecode.kernels.ops import Ops

_SCALE = 0.02  # of matrices and embeddings, as GPT-2 initialises them


class RandomWeights(Weights):
    """Each tensor comes from a generator of its own, seeded by `seed`, its name and the tensor rank: the same
    on every run. Norm weights are about 1, biases small."""

    def __init__(
        self,
        specs: Iterable[WeightSpec],
        seed: int,
        tensor_rank: int,
        tensor_size: int,
        dtype: torch.dtype,
        ops: Ops,
        device: torch.device,
    ):
        super().__init__(specs, ops)
        self._seed, self._rank, self._size = seed, tensor_rank, tensor_size
        self._dtype, self._device = dtype, device

    def tensor(self, name: str) -> Tensor:
        generator = torch.Generator(self._device)
        generator.manual_seed(self._seed ^ zlib.crc32(f"{name}.{self._rank}".encode()))
        shape = self.specs[name].shard_shape(self._size)
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        out.normal_(0.0, _SCALE, generator=generator)
        return out.add_(1.0) if "layernorm.weight" in name else out
