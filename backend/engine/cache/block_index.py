"""Tracks users, identities and eviction order of the blocks of the paged cache. Host only, without torch.

A block with an identity (block_keys.py) outlives its users: it stays cached until it is evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import cast

from tridecode.backend.engine.cache.block_keys import BlockHasher

_BLOCK_BITS = 32  # low bits of an entry of the eviction heap; the bits above are the time


class BlockIndex:
    """Blocks 0 .. num_blocks - 1, each with a user count and some with an identity. Scheduler's thread only.

    A block is in use, cached (an identity and no user) or free. Cached blocks are evicted least recently used
    first, but never before the indexed blocks that follow them, so the parent of an indexed block is always
    indexed. Without identities this is a pool with reference counts.
    """

    def __init__(self, num_blocks: int, hasher: BlockHasher | None = None):
        self.num_blocks = num_blocks
        self.num_cached = 0
        self.evictions = 0  # total number of blocks
        self.hasher = hasher or BlockHasher()
        self._users = [0] * num_blocks
        # popped from the end, so that low numbers are taken first
        self._free = list(range(num_blocks - 1, -1, -1))
        self._blocks: dict[bytes, int] = {}  # identity -> block
        self._keys: list[bytes | None] = [None] * num_blocks  # identity of each block
        self._parents = [-1] * num_blocks  # block with an identity -> previous block; -1: first of its chain
        self._children = [0] * num_blocks  # number of indexed blocks that follow
        self._released = [0] * num_blocks  # time at which each block lost its last user
        self._clock = 0  # number of calls of `release`
        #: eviction heap of time << _BLOCK_BITS | block: all blocks that may be evicted, and outdated entries
        self._leaves: list[int] = []

    @property
    def num_free(self) -> int:
        """Return the number of blocks without a user and without an identity."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Return the number of blocks without a user, free or cached. Eviction frees cached ones, except a
        block that is followed by an indexed block with a user (host_tier/tier.py).
        """
        return len(self._free) + self.num_cached

    def users(self, block: int) -> int:
        return self._users[block]

    def is_free(self, block: int) -> bool:
        """Return whether the block has neither a user nor an identity."""
        return self._users[block] == 0 and self._keys[block] is None

    # ------------------------------------------------------------ users

    def allocate(self, count: int) -> list[int]:
        """Return `count` free blocks with one user each.

        Raises MemoryError if fewer are free; see `evict`.
        """
        if count > len(self._free):
            raise MemoryError(f"{count} blocks wanted, {len(self._free)} of {self.num_blocks} are free")
        rest = len(self._free) - count
        taken = self._free[rest:]
        taken.reverse()
        del self._free[rest:]
        users = self._users
        for block in taken:
            users[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each of the blocks, which must be in use or cached."""
        users = self._users
        for block in blocks:
            if users[block] == 0:
                assert self._keys[block] is not None, f"block {block} is free and cannot be shared"
                self.num_cached -= 1
            users[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a user from each of the blocks. A block without users stays cached if it has an identity."""
        users, keys, free = self._users, self._keys, self._free
        cached = []
        for block in blocks:
            assert users[block] > 0, f"block {block} is released more often than it was taken"
            users[block] -= 1
            if users[block] == 0:
                if keys[block] is not None:
                    cached.append(block)
                else:
                    free.append(block)
        if cached:
            self._add_cached(cached)

    def _add_cached(self, blocks: list[int]) -> None:
        self._clock += 1
        self.num_cached += len(blocks)
        for block in blocks:
            self._released[block] = self._clock
            if not self._children[block]:
                self._push(block)

    # ------------------------------------------------------------ identities

    def insert(self, parent: bytes, keys: Sequence[bytes], blocks: Sequence[int]) -> list[int]:
        """Assign identities to consecutive blocks, which must be in use. A block that already has one of the
        identities keeps it. parent: the identity of an indexed block, or a root.

        Returns the block of each identity.
        """
        before, indexed = self._blocks.get(parent, -1), []
        for key, block in zip(keys, blocks):
            known = self._blocks.get(key)
            if known is None:
                assert self._users[block] > 0, f"block {block} is not in use and cannot be indexed"
                assert self._keys[block] is None, f"block {block} has another identity"
                known = self._blocks[key] = block
                self._keys[block], self._parents[block] = key, before
                if before >= 0:
                    self._children[before] += 1
            indexed.append(known)
            before = known
        return indexed

    def is_indexed(self, key: bytes) -> bool:
        return key in self._blocks

    def block_of(self, key: bytes) -> int | None:
        """Return the block with this identity."""
        return self._blocks.get(key)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest indexed prefix of a chain, without adding a user."""
        blocks = list(map(self._blocks.get, keys))  # half the time of a loop
        if None in blocks:
            del blocks[blocks.index(None) :]
        return cast("list[int]", blocks)

    def is_exclusive(self, block: int) -> bool:
        """Return whether the block's only user may overwrite it once its identity is removed."""
        return self._users[block] == 1 and self._children[block] == 0

    def forget(self, blocks: Sequence[int]) -> None:
        """Remove the identities of consecutive blocks, from the last to the first; blocks without a user
        become free. A block keeps its identity if an indexed block follows it.
        """
        for block in reversed(blocks):
            if self._keys[block] is not None and self._children[block] == 0:
                self._remove(block)

    def evict(self, count: int) -> None:
        """Evict `count` cached blocks, or fewer if no more can be evicted."""
        while count > 0 and self._leaves:
            entry = heapq.heappop(self._leaves)
            if self._is_leaf(entry):
                self._remove(entry & (1 << _BLOCK_BITS) - 1)
                self.evictions += 1
                count -= 1

    def _remove(self, block: int) -> None:
        key, self._keys[block] = self._keys[block], None
        assert key is not None, block
        del self._blocks[key]
        parent, self._parents[block] = self._parents[block], -1
        if self._users[block] == 0:
            self.num_cached -= 1
            self._free.append(block)
        if parent >= 0:
            self._children[parent] -= 1
            if self._users[parent] == 0 and self._children[parent] == 0:
                self._push(parent)

    def _push(self, block: int) -> None:
        """Queue a block that may be evicted."""
        if len(self._leaves) > 2 * self.num_cached + 1024:  # entries of blocks that were used again since
            self._leaves = [entry for entry in self._leaves if self._is_leaf(entry)]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, self._released[block] << _BLOCK_BITS | block)

    def _is_leaf(self, entry: int) -> bool:
        """Return whether the block has been unused since that time and no indexed block follows it."""
        block = entry & (1 << _BLOCK_BITS) - 1
        return (
            self._keys[block] is not None
            and self._users[block] == 0
            and self._children[block] == 0
            and self._released[block] == entry >> _BLOCK_BITS
        )
