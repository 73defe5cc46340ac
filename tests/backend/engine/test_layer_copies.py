"""Copies from the host tier in groups of layers: the groups, the waits, and the number of calls."""

from __future__ import annotations

import os

import numpy as np
import torch

from tridecode.backend.base.memory_file import create_file
from tridecode.backend.engine.host_tier.region import HostRegion
from tridecode.backend.engine.host_tier.slots import parts_of_slot
from tridecode.backend.engine.host_tier.store import HostStore
from tridecode.backend.engine.host_tier.transfer import AwaitedCaches, layer_groups
from tridecode.backend.engine.parts.host_copies import BlockOut, HostCopies
from tridecode.kernels.block_copies import BlockCopies
from tridecode.kernels.operands import CacheLayer


def test_layers_are_divided_into_growing_groups() -> None:
    for layers in (1, 2, 3, 5, 12, 30, 32, 33, 80):
        groups = layer_groups([4096 * layer for layer in range(layers)], 4096 * layers)
        counts = [(group.end - group.first) // 4096 for group in groups]
        assert sum(counts) == layers and min(counts) > 0 and counts[0] == max(1, round(layers / 32))
        assert [group.first // 4096 for group in groups] == [group.layer for group in groups]
        assert len(groups) <= 5
    odd = layer_groups([0, 520, 1040, 1536], 2048)  # two layers begin inside a unit of the checksum
    assert [group.layer for group in odd] == [0, 3] and odd[0].end == odd[1].first == 1536


def test_caches_wait_before_the_first_layer_of_a_group() -> None:
    seen: list[object] = []
    caches = AwaitedCaches(["a", "b", "c"], {0: lambda: seen.append(0), 2: lambda: seen.append(2)})  # type: ignore[list-item]
    for cache in caches:
        seen.append(cache)
    assert seen == [0, "a", "b", 2, "c"]


class CountedCopies(BlockCopies):
    """Counts what FastBlockCopies would call."""

    calls = runs = launches = 0

    def move(self, slots: torch.Tensor, runs: list, first: int, staged: torch.Tensor) -> None:
        self.calls, self.runs = self.calls + 1, self.runs + len(runs)
        super().move(slots, runs, first, staged)

    def place(self, staged: torch.Tensor, first: int, blocks: torch.Tensor, sums: torch.Tensor) -> None:
        self.launches += 1
        super().place(staged, first, blocks, sums)


def test_slots_next_to_each_other_are_copied_together() -> None:
    """Blocks of 512 KiB and 32 layers: one library call and one launch for each half of the buffer that a
    group fills, and one copy for all adjacent slots of a pinned piece, in whatever order the blocks are
    wanted."""
    layers, count = 32, 48
    caches = [CacheLayer(torch.randn(2 * count, 2, 1, 32, 64)) for _ in range(layers)]
    sizes = [cache.blocks[0].nbytes for cache in caches]
    _, slot_bytes = parts_of_slot(sizes)
    fd = create_file(slot_bytes * (count + 2))
    try:
        region = HostRegion(fd)
        region.lay_out(bytes(32), slot_bytes, count)
        store = HostStore(region, sizes, torch.device("cpu"))
        store.use(caches)
        assert store.pinning.shares == 0 and store._piece == 32, "two pieces hold the 48 slots"
        outs = [BlockOut(n, n, n.to_bytes(16, "little"), bytes(16)) for n in range(count)]
        store.end(store.begin(HostCopies(outs=outs)))
        store._copies = copies = CountedCopies(store._copies.tensors, store._starts, store._copies.checksums)
        order = np.random.default_rng(0).permutation(count).tolist()
        transfer = store.begin(HostCopies(ins=[(n, count + n) for n in order], layered=count))
        assert copies.calls == 0, "a CPU copies a group where its first layer awaits it"
        for cache in transfer.caches(caches):
            assert torch.equal(cache.blocks[count:], cache.blocks[:count])
        assert store.end(transfer) == [True] * count
    finally:
        os.close(fd)
    half = store._halves[0].staged.nbytes
    fills = [-(-count // (half // (group.end - group.first))) for group in store.groups]
    assert copies.calls == copies.launches == sum(fills) < 2 * len(fills) + 8
    assert copies.runs <= sum(fills) + 2 * len(fills), "instead of one per block and group"
