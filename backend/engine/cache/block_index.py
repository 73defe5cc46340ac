"""The blocks of the paged cache: users, identities, order of eviction. Host only, without torch.

The identity of a block is a keyed hash of the previous block's identity, its token ids, and everything else
that its keys and values depend on (`Context`). The hash key is random in each process, so a request cannot
forge the identity of another's block. A block with an identity outlives its users: it stays cached until it
is evicted.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tridecode.backend.engine.schedule.admission import LazyHeap

_KEY_BYTES = 16


class Context(NamedTuple):
    """Everything besides its tokens that the keys and values of a block depend on.

    adapter, prompt: the numbers that plans use for the loaded adapter and for the table of virtual tokens; -1
    for none. shift: added to rotary positions. ring: see sessions.py; 0: none. salt: separates owners;
    requests with different salts never find each other's blocks.
    """

    adapter: int = -1
    prompt: int = -1
    shift: int = 0
    ring: int = 0
    salt: str = ""


class BlockIndex:
    """Blocks 0 .. num_blocks - 1, each with a user count and some with an identity. Scheduler's thread only.

    A block is in use, cached (an identity and no user) or free. Cached blocks are evicted least recently used
    first, but never before the indexed blocks that follow them, so the parent of an indexed block is always
    indexed. Without identities this is a pool with reference counts.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.num_cached = 0
        self._secret = secrets.token_bytes(32)
        self._users = [0] * num_blocks
        # popped from the end, so that low numbers are taken first
        self._free = list(range(num_blocks - 1, -1, -1))
        self._blocks: dict[bytes, int] = {}  # identity -> block
        self._keys: dict[int, bytes] = {}  # block -> identity
        self._parents = [-1] * num_blocks  # block with an identity -> previous block; -1: first of its chain
        self._children = [0] * num_blocks  # number of indexed blocks that follow
        self._released = [0] * num_blocks  # time at which it lost its last user
        self._clock = 0  # number of calls of `release`
        self._leaves: LazyHeap[tuple[int, int]] = LazyHeap(self._is_leaf)  # (time, block): evicted next

    @property
    def num_free(self) -> int:
        """Return the number of blocks without a user and without an identity."""
        return len(self._free)

    def users(self, block: int) -> int:
        return self._users[block]

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
                assert block in self._keys, f"block {block} is free and cannot be shared"
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
                if block in keys:
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
            self._offer(block)

    # ------------------------------------------------------------ identities

    def root(self, context: Context) -> bytes:
        """Return the parent of the first block of every chain with this context."""
        return self._hash(repr(tuple(context)).encode())

    def chain(self, parent: bytes, ids: bytes, block_bytes: int) -> list[bytes]:
        """Return the identities of consecutive blocks after `parent`.

        Each block holds the next block_bytes of ids; the last may hold fewer.
        """
        keys = []
        for first in range(0, len(ids), block_bytes):
            parent = self._hash(parent, ids[first : first + block_bytes])
            keys.append(parent)
        return keys

    def insert(self, parent: bytes, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Give consecutive blocks, which must be in use, their identities. parent: the identity of an indexed
        block, or a root. If another block already has an identity, it keeps it.
        """
        before = self._blocks.get(parent, -1)
        for key, block in zip(keys, blocks):
            known = self._blocks.get(key)
            if known is None:
                assert self._users[block] > 0, f"block {block} is not in use and cannot be indexed"
                assert block not in self._keys, f"block {block} has another identity"
                known = self._blocks[key] = block
                self._keys[block], self._parents[block] = key, before
                if before >= 0:
                    self._children[before] += 1
            before = known

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest indexed prefix of a chain, without adding a user."""
        found = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def is_exclusive(self, block: int) -> bool:
        """Return whether the block's only user may overwrite it once its identity is removed."""
        return self._users[block] == 1 and self._children[block] == 0

    def forget(self, blocks: Sequence[int]) -> None:
        """Remove the identities of consecutive blocks, the last first; blocks without a user become free. A
        block that is followed by indexed blocks keeps its identity.
        """
        for block in reversed(blocks):
            if block in self._keys and self._children[block] == 0:
                self._remove(block)

    def evict(self, count: int) -> None:
        """Evict `count` cached blocks, or as many as possible."""
        while count > 0 and (leaf := self._leaves.first()) is not None:
            self._leaves.pop()
            self._remove(leaf[1])
            count -= 1

    def _remove(self, block: int) -> None:
        del self._blocks[self._keys.pop(block)]
        parent, self._parents[block] = self._parents[block], -1
        if self._users[block] == 0:
            self.num_cached -= 1
            self._free.append(block)
        if parent >= 0:
            self._children[parent] -= 1
            self._offer(parent)

    def _offer(self, block: int) -> None:
        """Queue the block for eviction if it may be evicted."""
        leaf = self._released[block], block
        if self._is_leaf(leaf):
            self._leaves.push(leaf, leaf)

    def _is_leaf(self, leaf: tuple[int, int]) -> bool:
        """Return whether the block has been unused since that time and no indexed block follows it."""
        released, block = leaf
        return (
            block in self._keys
            and self._users[block] == 0
            and self._children[block] == 0
            and self._released[block] == released
        )

    def _hash(self, *parts: bytes) -> bytes:
        return hashlib.blake2b(b"".join(parts), digest_size=_KEY_BYTES, key=self._secret).digest()
