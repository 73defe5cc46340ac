"""Sends adapters from rank 0 to the other ranks, concurrently with steps, over a separate gloo group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from tridecode.backend.engine.ranks.exchange import exchange
from tridecode.backend.weights.lora_tensors import Lora

#: a rank waits indefinitely for the next adapter
_FOREVER = timedelta(days=365)


class _Header(msgspec.Struct, array_like=True):
    """number: the adapter's. pairs: (target, rank, inputs, outputs) of each pair."""

    number: int
    pairs: list[tuple[str, int, int, int]]


class AdapterChannel:
    """Created collectively, once torch.distributed is initialised. Used by one thread per rank.
    Each method raises PeerLost if another rank is gone.
    """

    waits = ""

    def __init__(self, rank: int, world: int):
        self.is_first = rank == 0
        self._group: Any = dist.new_group(list(range(world)), backend="gloo", timeout=_FOREVER)

    @exchange("an adapter's way to the ranks")
    def send(self, number: int, lora: Lora) -> None:
        """Send an adapter from rank 0 to the others, which `receive` it. All then call `agree`."""
        pairs = [(name, *a.shape, b.shape[0]) for name, (a, b) in lora.pairs.items()]
        self._broadcast_bytes(msgspec.msgpack.encode(_Header(number, pairs)))
        for pair in lora.pairs.values():
            for tensor in pair:
                dist.broadcast(tensor.contiguous(), 0, group=self._group)

    @exchange("an adapter's way to the ranks")
    def receive(self) -> tuple[int, Lora] | None:
        """Receive the next adapter on the other ranks; None after the end."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._group)
        if not int(size):
            return None
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._group)
        header = msgspec.msgpack.decode(data.numpy().tobytes(), type=_Header)
        pairs = {}
        for name, rank, inputs, outputs in header.pairs:
            a, b = torch.empty(rank, inputs), torch.empty(outputs, rank)
            dist.broadcast(a, 0, group=self._group)
            dist.broadcast(b, 0, group=self._group)
            pairs[name] = a, b
        return header.number, Lora(pairs)

    @exchange("an adapter's way to the ranks")
    def agree(self, fine: bool) -> bool:
        """Return whether all ranks succeeded."""
        value = torch.tensor([int(fine)])
        dist.all_reduce(value, op=dist.ReduceOp.MIN, group=self._group)
        return bool(value)

    @exchange("an adapter's way to the ranks")
    def end(self) -> None:
        """Tell the other ranks, from rank 0, that no more adapters follow."""
        dist.broadcast(torch.zeros(1, dtype=torch.int64), 0, group=self._group)

    def _broadcast_bytes(self, data: bytes) -> None:
        dist.broadcast(torch.tensor([len(data)]), 0, group=self._group)
        dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=self._group)
