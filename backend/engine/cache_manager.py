"""Who holds which batch slot and which blocks of the paged cache; sharing and copy on write. No torch.

Sequences that forked share blocks. A full block is never written again. A partial block that is shared is
copied for the fork before its next token, unless the other holders are gone by then. Nothing outlives its
sequences: `release` is where blocks would be kept for a later request.
"""

from __future__ import annotations

import heapq

import numpy as np

from tridecode.backend.engine.admission import SchedulerLimits
from tridecode.backend.engine.block_pool import BlockPool
from tridecode.backend.engine.sequence import Sequence


class CacheManager:
    """Slots and blocks, held by a sequence from `admit` or `fork` to `release`. S slots, M columns.

    lengths: (S,) int32, tokens in the cache once the planned steps have run. tables: (S, M) int32, blocks.
    """

    def __init__(self, limits: SchedulerLimits):
        self.pool = BlockPool(limits.num_blocks)
        self.block_tokens = limits.block_tokens
        self.lengths = np.zeros(limits.max_sequences, np.int32)
        columns = -(-limits.max_sequence_tokens // limits.block_tokens)
        self.tables = np.zeros((limits.max_sequences, columns), np.int32)
        self._free_slots = list(range(limits.max_sequences))  # a heap
        self._sharing: list[Sequence] = []  # forks since the last plan whose partial block may be shared
        self._slot_copies: dict[int, int] = {}  # destination -> source, for the next plan
        self._block_copies: dict[int, int] = {}

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def admit(self, sequence: Sequence) -> bool:
        """A slot and the blocks of all known tokens; False, and nothing done, where they are not free."""
        needed = -(-sequence.num_known // self.block_tokens)
        if not self._free_slots or needed > self.pool.num_free:
            return False
        self._take_slot(sequence, 0, self.pool.allocate(needed))
        return True

    def fork(self, parent: Sequence, child: Sequence, *, copy_state: bool) -> bool:
        """A slot for the child, which shares all of the parent's blocks; False where no slot is free.

        The parent has no token in flight. copy_state: the next plan copies the slot's sampling state."""
        if not self._free_slots:
            return False
        self.pool.share(parent.blocks)
        self._take_slot(child, self.lengths[parent.slot], parent.blocks)
        if copy_state:  # a parent that is itself to be copied to its slot stands for its source
            self._slot_copies[child.slot] = self._slot_copies.get(parent.slot, parent.slot)
        if self.lengths[child.slot] % self.block_tokens:
            self._sharing.append(child)
        return True

    def release(self, sequence: Sequence) -> None:
        """Take slot and blocks back. A step in flight may still write them; their next use runs after it."""
        heapq.heappush(self._free_slots, sequence.slot)
        self.pool.release(sequence.blocks)
        self._slot_copies.pop(sequence.slot, None)
        if self._block_copies:
            for block in sequence.blocks:
                self._block_copies.pop(block, None)
        if sequence in self._sharing:
            self._sharing.remove(sequence)
        sequence.slot, sequence.blocks = -1, []

    def take_sharing(self) -> list[Sequence]:
        """The forks that need `make_room` although their last block is not full."""
        sharing, self._sharing = self._sharing, []
        return sharing

    def make_room(self, sequence: Sequence) -> bool:
        """A place for the next token in a block of the sequence's own; False where no block is free."""
        is_full = self.lengths.item(sequence.slot) == len(sequence.blocks) * self.block_tokens
        if not is_full and self.pool.users(sequence.blocks[-1]) == 1:
            return True
        if not self.pool.num_free:
            return False
        blocks = self.pool.allocate(1)
        if not is_full:  # copy on write
            self._block_copies[blocks[0]] = shared = sequence.blocks.pop()
            self.pool.release([shared])
        self._add_blocks(sequence, blocks)
        return True

    def addresses(self, slots: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """(n,) int32: block * block_tokens + offset, for the token at each position (n,) of its slot."""
        size = self.block_tokens
        return self.tables[slots, positions // size] * size + positions % size

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(source, destination) of the slots and of the blocks to copy before the next plan."""
        slots = [(source, destination) for destination, source in self._slot_copies.items()]
        blocks = [(source, destination) for destination, source in self._block_copies.items()]
        self._slot_copies, self._block_copies = {}, {}
        return slots, blocks

    def _take_slot(self, sequence: Sequence, length: int, blocks: list[int]) -> None:
        sequence.slot = heapq.heappop(self._free_slots)
        self.lengths[sequence.slot] = length
        self._add_blocks(sequence, blocks)

    def _add_blocks(self, sequence: Sequence, blocks: list[int]) -> None:
        held = len(sequence.blocks)
        sequence.blocks += blocks
        self.tables[sequence.slot, held : len(sequence.blocks)] = blocks
