"""Who holds which batch slot and which blocks of the paged cache; sharing and copy on write. No torch.

Sequences that forked share blocks. A full block is never written again. A partial block that is shared is
copied for the fork before its next token, unless the other holders are gone by then. Blocks outlive their
sequence only in a session (sessions.py), which gives them back to `admit` or when others need them.
"""

from __future__ import annotations

import heapq
from typing import Callable

import numpy as np

from tridecode.backend.engine.cache.block_pool import BlockPool
from tridecode.backend.engine.cache.sessions import SessionRow
from tridecode.backend.engine.schedule.admission import SchedulerLimits
from tridecode.backend.engine.schedule.sequence import Sequence

NO_RING = np.iinfo(np.int32).max


class CacheManager:
    """Slots and blocks, held by a sequence from `admit` or `fork` to `release`. S slots, M columns.

    lengths: (S,) int32, tokens in the cache once the planned steps have run; of a ring (sessions.py), tokens
    that were ever in it. tables: (S, M) int32, blocks. rings: (S,) int32, places that the tokens of a slot
    have in the cache; NO_RING: as many as they need. reclaim: frees so many more blocks if it can.
    """

    def __init__(self, limits: SchedulerLimits):
        self.pool = BlockPool(limits.num_blocks)
        self.block_tokens = limits.block_tokens
        self.lengths = np.zeros(limits.max_sequences, np.int32)
        columns = -(-limits.max_sequence_tokens // limits.block_tokens)
        self.tables = np.zeros((limits.max_sequences, columns), np.int32)
        self.reserved = 0  # free slots that running beam groups keep for their beams
        self.rings = np.full(limits.max_sequences, NO_RING, np.int32)
        self.reclaim: Callable[[int], None] = lambda count: None
        self._free_slots = list(range(limits.max_sequences))  # a heap
        self._sharing: list[Sequence] = []  # forks since the last plan whose partial block may be shared
        self._cleared: list[int] = []
        self._slot_copies: dict[int, int] = {}  # destination -> source, for the next plan
        self._block_copies: dict[int, int] = {}

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots) - self.reserved

    def admit(self, sequence: Sequence, shift: int = 0, prefix: Sequence | None = None) -> bool:
        """A slot and the blocks of all known tokens; False, and nothing done, where they are not free.

        shift: of its rotary positions. A row of a session gets the blocks that the session kept. prefix: a
        sequence with the same prompt, all of which earlier plans have put into the cache. The new one has all
        of the prompt but its last token at once: full blocks are shared, a partial one is copied.
        """
        if self.num_free_slots < 1:
            return False
        row = sequence.group.row
        if row is not None:
            return self._admit_row(sequence, row, shift)
        needed = -(-sequence.num_known // self.block_tokens)
        length = len(sequence.prompt) - 1 if prefix is not None else 0
        shared = prefix.blocks[: length // self.block_tokens] if prefix is not None else []
        if not self._have(needed - len(shared)):
            return False
        own = self.pool.allocate(needed - len(shared))
        if prefix is not None and length % self.block_tokens:
            source = prefix.blocks[len(shared)]
            self._block_copies[own[0]] = self._block_copies.get(source, source)
        self.pool.share(shared)
        self._take_slot(sequence, length, shared + own)
        return True

    def admit_beams(self, beams: list[Sequence], width: int) -> bool:
        """Slots and blocks of all beams of a group, which have equally many tokens; the rest of `width` slots
        is reserved. They share the full blocks of the prompt, which the first one computes. False, and
        nothing done, where something is not free."""
        first, *others = beams
        size = self.block_tokens
        needed = -(-first.num_known // size)
        shared = len(first.prompt) // size if others else 0
        if self.num_free_slots < width or not self._have(len(beams) * (needed - shared) + shared):
            return False
        self.reserved += width - len(beams)
        self._take_slot(first, 0, self.pool.allocate(needed))
        for beam in others:
            held = first.blocks[:shared]
            self.pool.share(held)
            self._take_slot(beam, shared * size, held + self.pool.allocate(needed - shared))
        return True

    def branch(self, parent: Sequence, child: Sequence) -> None:
        """A reserved slot for a new beam, which shares all of its parent's blocks. The parent has no token in
        flight, and `make_room` comes before either writes. The next plan copies the slot's sampling state."""
        self.reserved -= 1
        self.pool.share(parent.blocks)
        self._take_slot(child, self.lengths[parent.slot], parent.blocks)
        self._slot_copies[child.slot] = parent.slot

    def _admit_row(self, sequence: Sequence, row: SessionRow, shift: int) -> bool:
        first, peak = row.first_missing(sequence.num_known, shift), row.peak
        written, blocks = row.written, row.take()
        needed = -(-row.capacity(sequence.num_known) // self.block_tokens)
        if first == 0 or len(blocks) > needed:
            kept = needed if first else 0
            self.pool.release(blocks[kept:])
            blocks, written = blocks[:kept], min(written, kept * self.block_tokens)
        if not self._have(needed - len(blocks)):  # its own blocks are not there to be reclaimed
            row.blocks, row.written, row.peak = blocks, written, peak if blocks else 0
            return False
        row.peak = peak if first else 0
        self._take_slot(sequence, first, blocks + self.pool.allocate(needed - len(blocks)))
        self.rings[sequence.slot] = row.ring or NO_RING
        return True

    def _have(self, blocks: int) -> bool:
        """Whether so many blocks are free, once sessions have given back what they hold."""
        if blocks > self.pool.num_free:
            self.reclaim(blocks - self.pool.num_free)
        return blocks <= self.pool.num_free

    def fork(self, parent: Sequence, child: Sequence, *, copy_state: bool) -> bool:
        """A slot for the child, which shares all of the parent's blocks; False where no slot is free.

        The parent has no token in flight. copy_state: the next plan copies the slot's sampling state."""
        if self.num_free_slots < 1:
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
        if sequence.group.learned is not None and sequence.group.learned.size:
            self._cleared += [block for block in sequence.blocks if not self.pool.users(block)]
        self._slot_copies.pop(sequence.slot, None)
        if self._block_copies:
            for block in sequence.blocks:
                self._block_copies.pop(block, None)
        if sequence in self._sharing:
            self._sharing.remove(sequence)
        sequence.slot, sequence.blocks = -1, []

    def take_cleared(self) -> list[int]:
        """Blocks that the next plan sets to zero: a request's table may have made values in them that are not
        finite."""
        cleared, self._cleared = self._cleared, []
        return cleared

    def take_sharing(self) -> list[Sequence]:
        """The forks that need `make_room` although their last block is not full."""
        sharing, self._sharing = self._sharing, []
        return sharing

    def make_room(self, sequence: Sequence) -> bool:
        """A place for the next token in a block of the sequence's own; False where no block is free."""
        places = len(sequence.blocks) * self.block_tokens
        if places >= self.rings.item(sequence.slot):  # a ring has all its blocks, and shares none
            return True
        is_full = self.lengths.item(sequence.slot) == places
        if not is_full and self.pool.users(sequence.blocks[-1]) == 1:
            return True
        if not self._have(1):
            return False
        blocks = self.pool.allocate(1)
        if not is_full:  # copy on write
            self._block_copies[blocks[0]] = shared = sequence.blocks.pop()
            self.pool.release([shared])
        self._add_blocks(sequence, blocks)
        return True

    def addresses(self, slots: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """(n,) int32: block * block_tokens + offset, for the token at each place (n,) of its slot.

        The place is the token's position, modulo the slot's ring."""
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
        self.rings[sequence.slot] = NO_RING
        self.lengths[sequence.slot] = length
        self._add_blocks(sequence, blocks)

    def _add_blocks(self, sequence: Sequence, blocks: list[int]) -> None:
        held = len(sequence.blocks)
        sequence.blocks += blocks
        self.tables[sequence.slot, held : len(sequence.blocks)] = blocks
