"""The source of a model's weights: this rank's shards of the files, packed for the operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from tridecode.backend.models.quantized_parts import read_quantized, stacked
from tridecode.backend.weights.layout import WeightSpec
from tridecode.backend.weights.quantization import Quantization, stored_specs
from tridecode.kernels.formats.quantized import QuantizedWeight
from tridecode.kernels.formats.round_to_nearest import round_to_nearest
from tridecode.kernels.operands import Linear, Norm
from tridecode.kernels.ops import Ops


class Weights(ABC):
    """The source of a model's tensors: this rank's shard, on the device, in the engine's dtype.

    specs: the model's tensors; files: the files that hold them, including the parts of quantised matrices.
    quantization: that of the files. int8_mode, head_mode: from EngineConfig; int8_mode applies to files that
    are not quantised. tensor_rank, tensor_size, dtype: of the shards.
    """

    def __init__(
        self,
        specs: Iterable[WeightSpec],
        ops: Ops,
        quantization: Quantization | None = None,
        int8_mode: int = 0,
        tensor_rank: int = 0,
        tensor_size: int = 1,
        dtype: torch.dtype = torch.float32,
        head_mode: int = 0,
    ):
        self.specs, self.ops = {spec.name: spec for spec in specs}, ops
        self.files = {spec.name: spec for spec in stored_specs(self.specs.values(), quantization)}
        self.quantization, self.int8_mode = quantization, int8_mode if quantization is None else 0
        self.rank, self.size, self.dtype, self.head_mode = tensor_rank, tensor_size, dtype, head_mode
        self.linears: dict[tuple[str, ...], Linear] = {}  # results of `linear`, by its names

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Return the shard of the file `name`, in its shape; a part of a quantised matrix keeps its dtype."""

    def linear(self, *names: str) -> Linear:
        """Return the matrices `<name>.weight`, stacked along their outputs, with `<name>.bias` if there is
        one.
        """
        weight = self._matrix([f"{name}.weight" for name in names])
        has_bias = f"{names[0]}.bias" in self.specs
        bias = _joined([self.tensor(f"{name}.bias") for name in names]) if has_bias else None
        self.linears[names] = packed = self.ops.pack(Linear(weight, bias), self.dtype)
        return packed

    def _matrix(self, names: list[str]) -> Tensor | QuantizedWeight:
        """Return (out, in): matrices of files (in, out), stacked along their outputs."""
        if names[0] not in self.files:
            return stacked([self.quantized(name) for name in names])
        dense = _joined([self.tensor(name) for name in names]).t()
        if not self.int8_mode:
            return dense
        return round_to_nearest(dense, "int8", activations="int8" if self.int8_mode == 2 else "")

    def quantized(self, name: str) -> QuantizedWeight:
        """Return this rank's shard of a matrix that is quantised in the files."""
        assert self.quantization is not None, name
        return read_quantized(self.specs[name], self.quantization, self.tensor, self.rank, self.size)

    def embedding(self, is_head: bool) -> Tensor | QuantizedWeight:
        """Return the word embedding (V, C); if it is also the head, rounded as head_mode requires."""
        table = self.tensor("model.wte")
        return self._rounded_head(table) if is_head and self.head_mode else table

    def head(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Linear:
        """Return the language model's head with `weight` (V, C), which may be the word embedding itself."""
        if self.head_mode and isinstance(weight, Tensor):
            weight = self._rounded_head(weight)
        return self.ops.pack(Linear(weight, bias), self.dtype, is_head=True)

    def _rounded_head(self, weight: Tensor) -> QuantizedWeight:
        return round_to_nearest(weight, "int8", activations="int8" if self.head_mode == 2 else "")

    def norm(self, name: str, eps: float, centred: bool = False) -> Norm:
        """Return a LayerNorm, or an RMSNorm if there is no `<name>.bias`.

        centred: always a LayerNorm, with a bias of 0 if there is none.
        """
        weight = self.tensor(f"{name}.weight")
        if f"{name}.bias" in self.specs:
            return Norm(weight, self.tensor(f"{name}.bias"), eps)
        return Norm(weight, torch.zeros_like(weight) if centred else None, eps)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
