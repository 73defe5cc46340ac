"""Which blocks of the paged cache are free, and how many users each has. Plain Python: no torch, no GPU."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Blocks 0 .. num_blocks - 1, each with a count of its users. Used by the scheduler's thread only.

    A block returns to the free list when its last user releases it.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._users = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # popped from the end: low numbers first

    @property
    def num_free(self) -> int:
        return len(self._free)

    def users(self, block: int) -> int:
        return self._users[block]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one user each. Raises MemoryError where fewer are free."""
        if count > len(self._free):
            raise MemoryError(f"{count} blocks wanted, {len(self._free)} of {self.num_blocks} are free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._users[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more user for each of the blocks, which are in use."""
        for block in blocks:
            assert self._users[block] > 0, f"block {block} is free and cannot be shared"
            self._users[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One user less for each of the blocks."""
        for block in blocks:
            assert self._users[block] > 0, f"block {block} is released more often than it was taken"
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free.append(block)
