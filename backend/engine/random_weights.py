"""Random weights of a model's true shape, made on the device: for benchmarks that have no checkpoint."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from tridecode.backend.weight_layout import WeightSpec
from tridecode.kernels.ops import Linear, Norm, Ops

_SCALE = 0.02  # of matrices and embeddings, as GPT-2 initialises them


class RandomWeights:
    """backend.models.layers.Weights, each tensor from a generator of its own, seeded by `seed` and its name:
    the same on every run and for every tensor rank's share. Norm weights are about 1, biases small."""

    def __init__(
        self,
        specs: list[WeightSpec],
        seed: int,
        tensor_rank: int,
        tensor_size: int,
        dtype: torch.dtype,
        ops: Ops,
        device: torch.device,
    ):
        self._specs = {spec.name: spec for spec in specs}
        self._seed, self._rank, self._size = seed, tensor_rank, tensor_size
        self._dtype, self._ops, self._device = dtype, ops, device

    def tensor(self, name: str) -> Tensor:
        spec = self._specs[name]
        return self._draw(name, spec.shard_shape(self._size))

    def _draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator(self._device)
        generator.manual_seed(self._seed ^ zlib.crc32(f"{name}.{self._rank}".encode()))
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        out.normal_(0.0, _SCALE, generator=generator)
        return out.add_(1.0) if "layernorm.weight" in name else out

    def linear(self, name: str, bias: bool) -> Linear:
        inner, outer = self._specs[f"{name}.weight"].shard_shape(self._size)
        weight = self._draw(f"{name}.weight", (outer, inner))
        return self._ops.pack(Linear(weight, self.tensor(f"{name}.bias") if bias else None))

    def fused_linear(self, names: list[str], bias: bool) -> Linear:
        shapes = [self._specs[f"{name}.weight"].shard_shape(self._size) for name in names]
        weight = self._draw(names[0], (sum(shape[1] for shape in shapes), shapes[0][0]))
        biases = torch.cat([self.tensor(f"{name}.bias") for name in names]) if bias else None
        return self._ops.pack(Linear(weight, biases))

    def head(self, weight: Tensor) -> Linear:
        return self._ops.pack(Linear(weight))

    def norm(self, name: str, eps: float, bias: bool) -> Norm:
        return Norm(self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias") if bias else None, eps)
