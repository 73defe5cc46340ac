"""Indexes the blocks that a previous engine has left in the host tier. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from tridecode.backend.engine.cache.block_index import BlockIndex
from tridecode.backend.engine.host_tier.region import Entry


def restore(slots: BlockIndex, entries: Sequence[Entry]) -> None:
    """Index the filled slots of an empty index: parents first, used in the order of their filling."""
    by_key = {entry.key: entry for entry in entries}
    every = slots.allocate(slots.num_blocks)
    for entry in entries:
        chain, parent = [entry], by_key.get(entry.parent)
        while parent is not None and not slots.is_indexed(parent.key) and len(chain) <= len(entries):
            chain.append(parent)  # the last condition: damaged memory may contain a cycle
            parent = by_key.get(parent.parent)
        for one in reversed(chain):
            slots.insert(one.parent, [one.key], [one.slot])
    for entry in entries:
        slots.release([entry.slot])
    filled = {entry.slot for entry in entries}
    slots.release([slot for slot in reversed(every) if slot not in filled])
