"""A rank's share of a LoRA adapter, in the layout of its model's matrices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tridecode.backend.base.errors import CheckpointError
from tridecode.backend.weights.layout import WeightSpec
from tridecode.backend.weights.lora_tensors import Lora
from tridecode.kernels.operands import Linear

#: id of a Linear's weight -> (a (in, R), b (R, out)) of this rank; the transpose of a is contiguous
Table = dict[int, tuple[Tensor, Tensor]]


def modules_of(specs: Mapping[str, WeightSpec], names: Iterable[str]) -> int:
    """Return the most modules, each with a rank of its own, that an adapter may have for the matrices `names`
    of one GEMM. A fused matrix counts as many as it has sections."""
    return sum(max(len(specs[f"{name}.weight"].sections), 1) for name in names)


@dataclass(frozen=True)
class Place:
    """The matrices of a rank's model.

    linears: stem of a file -> matrix, for this rank's stage. dtype, device: of the activations.
    """

    specs: Mapping[str, WeightSpec]
    linears: Mapping[tuple[str, ...], Linear]
    tensor_rank: int
    tensor_size: int
    num_stages: int
    dtype: torch.dtype
    device: torch.device

    def table(self, lora: Lora) -> Table:
        """Return this rank's share of an adapter, on the host.

        Raises CheckpointError if the adapter does not fit the model.
        """
        missing = set(lora.pairs) - {name for names in self.linears for name in names}
        missing = {name for name in missing if f"{name}.weight" in self.specs or self.num_stages == 1}
        if missing:
            raise CheckpointError(f"the adapter changes {min(missing)}, which this model does not have")
        return {
            id(linear.weight): self._pair(names, lora)
            for names, linear in self.linears.items()
            if any(name in lora.pairs for name in names)
        }

    def _pair(self, names: tuple[str, ...], lora: Lora) -> tuple[Tensor, Tensor]:
        """Return a (in, R) and b (R, out) of the matrices `names`, which are concatenated in one GEMM."""
        shares = [self._share(name, lora.pairs.get(name)) for name in names]
        a = torch.cat([share[0] for share in shares])
        b = torch.block_diag(*(share[1] for share in shares)) if len(shares) > 1 else shares[0][1]
        a, b = a.to(self.dtype).contiguous().t(), b.t().to(self.dtype).contiguous()
        if not b.isfinite().all() or not a.isfinite().all():
            raise CheckpointError(f"the adapter has values for {names[0]} that {self.dtype} cannot represent")
        return a, b

    def _share(self, name: str, pair: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Return a (R, in) and b (out, R) of a matrix, split like the matrix; R is 0 without a pair."""
        spec = self.specs[f"{name}.weight"]
        inputs, outputs = spec.shape
        if pair is None:
            pair = torch.zeros(0, inputs), torch.zeros(outputs, 0)
        a, b = pair
        if (a.shape[1], b.shape[0]) != spec.shape:
            found = f"{a.shape[1]} inputs and {b.shape[0]} outputs"
            raise CheckpointError(
                f"lora_targets.json has {found} for {name}; config.ini makes it {spec.shape}"
            )
        if spec.axis is None:
            return a, b
        if spec.axis == 0:
            return self._cut(spec, a.t()).t(), b
        return a, self._cut(spec, b)

    def _cut(self, spec: WeightSpec, rows: Tensor) -> Tensor:
        """Return this rank's share of rows, split like the matrix and padded with zeros."""
        sizes = spec.share_sizes(self.tensor_size)
        cuts = spec.slices(self.tensor_rank, self.tensor_size)
        parts = [
            part
            for (start, stop), size in zip(cuts, sizes)
            for part in (rows[start:stop], rows.new_zeros(size - (stop - start), rows.shape[1]))
        ]
        return torch.cat(parts)
