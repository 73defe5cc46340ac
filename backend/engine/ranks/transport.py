"""Transfers tensors between ranks: by the device's own backend, or through host memory if ranks share a
GPU.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Transport(Protocol):
    """Exchanges contiguous device tensors, in stream order; every rank of a group must call.

    captures: whether a CUDA graph may hold these calls.
    """

    captures: bool

    def all_reduce(self, x: Tensor) -> None:
        """Sum x over the tensor group, in place; every rank gets the same bits."""
        ...

    def gather(self, parts: list[Tensor], x: Tensor) -> None:
        """Gather x of each tensor rank into parts, in rank order; parts have x's shape and dtype."""
        ...

    def broadcast(self, x: Tensor, source: int) -> None:
        """Broadcast x of rank `source` to all ranks."""
        ...

    def send(self, x: Tensor, rank: int) -> None:
        """Send x, which may be overwritten by later work on the stream."""
        ...

    def receive(self, x: Tensor, rank: int) -> None: ...


class Direct:
    """NCCL for GPUs, gloo for CPUs. Except on CPUs, calls return while the device works."""

    captures = True

    def __init__(self, tensor_group: Any, everyone: Any):
        self._tensor_group, self._everyone = tensor_group, everyone

    def all_reduce(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self._tensor_group)

    def gather(self, parts: list[Tensor], x: Tensor) -> None:
        dist.all_gather(parts, x, group=self._tensor_group)

    def broadcast(self, x: Tensor, source: int) -> None:
        dist.broadcast(x, source, group=self._everyone)

    def send(self, x: Tensor, rank: int) -> None:
        dist.send(x, rank, group=self._everyone)

    def receive(self, x: Tensor, rank: int) -> None:
        dist.recv(x, rank, group=self._everyone)


class Staged:
    """GPU tensors through host memory: NCCL refuses two ranks on one GPU. gloo: the same groups on the host.

    Every call waits for the device, so this is for trials. Sums are float32 before the only rounding.
    """

    captures = False

    def __init__(self, gloo: Direct):
        self._gloo = gloo

    def all_reduce(self, x: Tensor) -> None:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        total = _on_host(wide)
        self._gloo.all_reduce(total)
        x.copy_(total)

    def gather(self, parts: list[Tensor], x: Tensor) -> None:
        found = [torch.empty(x.nbytes, dtype=torch.uint8) for _ in parts]
        self._gloo.gather(found, _bytes(_on_host(x)))
        for part, data in zip(parts, found):
            part.copy_(data.view(x.dtype).view(x.shape))

    def broadcast(self, x: Tensor, source: int) -> None:
        host = _on_host(x)
        self._gloo.broadcast(_bytes(host), source)
        x.copy_(host)

    def send(self, x: Tensor, rank: int) -> None:
        self._gloo.send(_bytes(_on_host(x)), rank)

    def receive(self, x: Tensor, rank: int) -> None:
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        self._gloo.receive(_bytes(host), rank)
        x.copy_(host)


def _on_host(x: Tensor) -> Tensor:
    """Return a copy in pinned memory (plain memory for a CPU tensor), complete at the return."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x)


def _bytes(host: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes: gloo does not support every dtype."""
    return host.view(-1).view(torch.uint8)


def shares_a_gpu(device: torch.device, names: list[str]) -> bool:
    """Return whether two ranks have the same GPU. names: gpu_name of each rank."""
    return device.type == "cuda" and len(set(names)) < len(names)


def gpu_name(device: torch.device) -> str:
    """Return a name that is unique among the GPUs of all hosts; "" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
