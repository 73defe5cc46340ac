"""Every numeric test runs on Reference on the CPU and, with a GPU and the built library, on Cuda.

Grids of shapes are made for the kernels: Reference, which has neither tiles nor splits, runs a part of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tridecode.kernels.ops import Ops
from tridecode.kernels.reference import Reference


@dataclass
class Place:
    """The operations under test and the device of their tensors; inputs are drawn from a fixed seed."""

    ops: Ops
    device: torch.device
    generator: torch.Generator

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * scale).to(dtype).to(self.device)

    def poison(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor of NaN: places that an operation does not write stay NaN, and those that it should not
        read make its results NaN."""
        return torch.full(shape, float("nan"), dtype=dtype, device=self.device)

    def ints(self, values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(self.device)

    def settle(self) -> None:
        """Wait for the constants that a test has just written: kernels prefetch constants before their
        predecessor has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


_cuda: list[Ops] = []


def _cuda_ops() -> Ops:
    if not _cuda:
        from tridecode.kernels.cuda import Cuda

        made = Cuda(torch.device("cuda", 0))
        made.reserve(4096, 8192, 64, 8192, 262144)
        _cuda.append(made)
    return _cuda[0]


@pytest.fixture(
    params=[
        pytest.param("reference", marks=pytest.mark.pairwise),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def place(request: pytest.FixtureRequest) -> Place:
    generator = torch.Generator().manual_seed(len(request.node.name))
    if request.param == "reference":
        return Place(Reference(), torch.device("cpu"), generator)
    return Place(_cuda_ops(), torch.device("cuda", 0), generator)


@pytest.fixture
def large_place(place: Place) -> Place:
    """A place with scratch memory for the logits of 256 rows of up to 300,032 ids."""
    if place.device.type == "cpu":
        return place
    from tridecode.kernels.cuda import Cuda

    made = Cuda(place.device)
    made.reserve(256, 1024, 256, 1024, 300_032)
    return replace(place, ops=made)


@pytest.fixture
def cuda_place() -> Place:
    """The GPU, for properties that only the kernels have, such as graph capture; such tests have the marker
    gpu."""
    return Place(_cuda_ops(), torch.device("cuda", 0), torch.Generator().manual_seed(1))
