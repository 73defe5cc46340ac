"""Random weights of a model's true shape, generated on the device, for benchmarks without a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from tridecode.backend.models.weights import Weights
from tridecode.backend.weights.layout import WeightSpec
from tridecode.backend.weights.quantization import Quantization
from tridecode.kernels.formats.quantized import QuantizedWeight
from tridecode.kernels.formats.round_to_nearest import round_to_nearest
from tridecode.kernels.ops import Ops

_SCALE = 0.02  # standard deviation of matrices and embeddings, as in GPT-2's initialisation


class RandomWeights(Weights):
    """Each tensor has its own generator, seeded by `seed`, its name and the tensor rank, so every run gets
    the same.

    Norm weights are about 1, biases small.
    """

    def __init__(
        self,
        specs: Iterable[WeightSpec],
        seed: int,
        tensor_rank: int,
        tensor_size: int,
        dtype: torch.dtype,
        ops: Ops,
        device: torch.device,
        quantization: Quantization | None = None,
        int8_mode: int = 0,
        head_mode: int = 0,
    ):
        super().__init__(specs, ops, quantization, int8_mode, tensor_rank, tensor_size, dtype, head_mode)
        self._seed, self._device = seed, device

    def tensor(self, name: str) -> Tensor:
        generator = torch.Generator(self._device)
        generator.manual_seed(self._seed ^ zlib.crc32(f"{name}.{self.rank}".encode()))
        shape = self.specs[name].shard_shape(self.size)
        out = torch.empty(shape, dtype=self.dtype, device=self._device)
        out.normal_(0.0, _SCALE, generator=generator)
        return out.add_(1.0) if "layernorm.weight" in name else out

    def quantized(self, name: str) -> QuantizedWeight:
        """Return the matrix rounded to nearest; number and width of its parts equal those of a real
        directory.
        """
        assert self.quantization is not None
        q = self.quantization
        return round_to_nearest(self.tensor(name).t(), q.weights, q.group, q.activations, q.block_rows)
