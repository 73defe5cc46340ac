"""Assigns batch slots and blocks of the paged cache; sharing and copy on write. No torch.

Forks, samples of one prompt and rounds of a session are users of the same blocks in the index. A full block
is never written again. A shared partial block is copied for the fork before its next token, unless the other
users are gone by then. A block with an identity outlives its sequence until it is evicted; only sessions
(sessions.py) give identities.
"""

from __future__ import annotations

import heapq

import numpy as np

from tridecode.backend.engine.cache.block_index import BlockIndex, Context
from tridecode.backend.engine.cache.sessions import Held
from tridecode.backend.engine.schedule.admission import SchedulerLimits
from tridecode.backend.engine.schedule.sequence import Sequence, SequenceGroup

NO_RING = np.iinfo(np.int32).max


class CacheManager:
    """Slots and blocks, held by a sequence from `admit` or `fork` to `release`. S slots, M columns.

    lengths: (S,) int32, tokens in the cache once the planned steps have run; for a ring (sessions.py), tokens
    that were ever in it. tables: (S, M) int32, blocks. rings: (S,) int32, cache positions that a slot's
    tokens share; NO_RING: one per token. shifts: (S,) int32, added to rotary positions.
    """

    def __init__(self, limits: SchedulerLimits):
        self.index = BlockIndex(limits.num_blocks)
        self.block_tokens = limits.block_tokens
        self.lengths = np.zeros(limits.max_sequences, np.int32)
        columns = -(-limits.max_sequence_tokens // limits.block_tokens)
        self.tables = np.zeros((limits.max_sequences, columns), np.int32)
        self.reserved = 0  # free slots that are reserved for the beams of running groups
        self.rings = np.full(limits.max_sequences, NO_RING, np.int32)
        self.shifts = np.zeros(limits.max_sequences, np.int32)
        self._free_slots = list(range(limits.max_sequences))  # a heap
        self._sharing: list[Sequence] = []  # forks since the last plan whose partial block may be shared
        self._cleared: list[int] = []
        self._slot_copies: dict[int, int] = {}  # destination -> source, for the next plan
        self._block_copies: dict[int, int] = {}

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots) - self.reserved

    def admit(self, sequence: Sequence, shift: int = 0, prefix: Sequence | None = None) -> bool:
        """Assign a slot and the blocks of all known tokens; return False without effect if they are not free.

        shift: added to the rotary positions. prefix: a sequence with the same prompt, which is completely
        cached by earlier plans. The sequence uses the cached blocks of `prefix` or of its session. If
        the last of them is partial, the sequence takes it over if nobody else needs it, or else gets a copy.
        """
        if self.num_free_slots < 1:
            return False
        row, size = sequence.group.row, self.block_tokens
        needed = -(-(sequence.num_known if row is None else row.capacity(sequence.num_known)) // size)
        if row is not None and needed > self.index.num_free + self.index.num_cached:
            return False
        length, blocks = self._cached(sequence, shift, prefix)
        self.index.share(blocks)  # from now on they are not evicted
        written = blocks if row is not None and row.ring else blocks[length // size :]
        copied = bool(written) and not self.index.is_exclusive(written[-1])
        if not self._have(needed - len(blocks) + copied):
            self.index.release(blocks)
            return False
        own = self.index.allocate(needed - len(blocks) + copied)
        if copied:
            source = blocks.pop()
            self._block_copies[own[0]] = self._block_copies.get(source, source)
            self.index.release([source])
        elif written:
            self.index.forget(written)
        self._take_slot(sequence, length, blocks + own, shift)
        if row is not None:
            row.begin(length // size)
            self.rings[sequence.slot] = row.ring or NO_RING
        return True

    def _cached(self, sequence: Sequence, shift: int, prefix: Sequence | None) -> tuple[int, list[int]]:
        """Return how many of the sequence's first tokens are cached, and their blocks.

        The last token never counts.
        """
        group = sequence.group
        if group.row is not None:
            return group.row.find(self.index, sequence.num_known, context_of(group, shift), self.block_tokens)
        if prefix is None:
            return 0, []
        length = len(sequence.prompt) - 1
        return length, prefix.blocks[: -(-length // self.block_tokens)]

    def admit_beams(self, beams: list[Sequence], width: int, shift: int = 0) -> bool:
        """Assign slots and blocks to all beams of a group, which have the same number of tokens; reserve the
        rest of `width` slots. They share the full blocks of the prompt, which the first beam computes.

        shift: added to the rotary positions. Return False without effect if slots or blocks are missing.
        """
        first, *others = beams
        size = self.block_tokens
        needed = -(-first.num_known // size)
        shared = len(first.prompt) // size if others else 0
        if self.num_free_slots < width or not self._have(len(beams) * (needed - shared) + shared):
            return False
        self.reserved += width - len(beams)
        self._take_slot(first, 0, self.index.allocate(needed), shift)
        for beam in others:
            held = first.blocks[:shared]
            self.index.share(held)
            self._take_slot(beam, shared * size, held + self.index.allocate(needed - shared), shift)
        return True

    def branch(self, parent: Sequence, child: Sequence) -> None:
        """Assign a reserved slot to a new beam, which shares all of its parent's blocks.

        The parent must have no token in flight; call `make_room` before either of them writes. The next plan
        copies the slot's sampling state.
        """
        self.reserved -= 1
        self._join(parent, child)
        self._slot_copies[child.slot] = parent.slot

    def _join(self, parent: Sequence, child: Sequence) -> None:
        """Give the child a slot of its own and make it a user of all of its parent's blocks."""
        self.index.share(parent.blocks)
        self._take_slot(child, self.lengths[parent.slot], parent.blocks, self.shifts[parent.slot])

    def _have(self, blocks: int) -> bool:
        """Return whether `count` blocks are free, after eviction of cached blocks if necessary."""
        if blocks > self.index.num_free:
            self.index.evict(blocks - self.index.num_free)
        return blocks <= self.index.num_free

    def fork(self, parent: Sequence, child: Sequence, *, copy_state: bool) -> bool:
        """Assign a slot to the child, which shares all of the parent's blocks; return False if no slot is
        free.

        The parent must have no token in flight. copy_state: the next plan copies the slot's sampling state.
        """
        if self.num_free_slots < 1:
            return False
        self._join(parent, child)
        if copy_state:  # a parent whose own slot is still to be copied is replaced by its source
            self._slot_copies[child.slot] = self._slot_copies.get(parent.slot, parent.slot)
        if self.lengths[child.slot] % self.block_tokens:
            self._sharing.append(child)
        return True

    def held(self, sequence: Sequence) -> Held:
        """Return what a sequence with a slot has in the cache."""
        length, shift = self.lengths.item(sequence.slot), self.shifts.item(sequence.slot)
        return Held(sequence.blocks, length, context_of(sequence.group, shift))

    def release(self, sequence: Sequence) -> None:
        """Take slot and blocks back. A step in flight may still write them; their next use runs after it."""
        heapq.heappush(self._free_slots, sequence.slot)
        self.index.release(sequence.blocks)
        if sequence.group.learned is not None and sequence.group.learned.size:
            self._cleared += [block for block in sequence.blocks if not self.index.users(block)]
        self._slot_copies.pop(sequence.slot, None)
        if self._block_copies:
            for block in sequence.blocks:
                self._block_copies.pop(block, None)
        if sequence in self._sharing:
            self._sharing.remove(sequence)
        sequence.slot, sequence.blocks = -1, []

    def take_cleared(self) -> list[int]:
        """Return the blocks that the next plan sets to zero: a request's table may have left non-finite
        values in them.
        """
        cleared, self._cleared = self._cleared, []
        return cleared

    def take_sharing(self) -> list[Sequence]:
        """Return the forks that need `make_room` although their last block is not full."""
        sharing, self._sharing = self._sharing, []
        return sharing

    def make_room(self, sequence: Sequence) -> bool:
        """Make room for the next token in a block of the sequence's own; return False if no block is free."""
        places = len(sequence.blocks) * self.block_tokens
        if places >= self.rings.item(sequence.slot):  # a ring owns all of its blocks and shares none
            return True
        is_full = self.lengths.item(sequence.slot) == places
        if not is_full and self.index.users(sequence.blocks[-1]) == 1:
            return True
        if not self._have(1):
            return False
        blocks = self.index.allocate(1)
        if not is_full:  # copy on write
            self._block_copies[blocks[0]] = shared = sequence.blocks.pop()
            self.index.release([shared])
        self._add_blocks(sequence, blocks)
        return True

    def extend(self, sequence: Sequence, tokens: int) -> int:
        """Assign blocks for up to `tokens` tokens of a sequence that has room for its next one, as far as
        blocks are free; return for how many tokens there are blocks, `tokens` at most."""
        size = self.block_tokens
        more = min(-(-tokens // size), self.tables.shape[1]) - len(sequence.blocks)
        for _ in range(more):
            if not self.index.num_free:  # drafts evict nothing
                break
            self._add_blocks(sequence, self.index.allocate(1))
        return min(tokens, len(sequence.blocks) * size)

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks behind the sequence's last token."""
        needed = -(-self.lengths.item(sequence.slot) // self.block_tokens)
        if needed < len(sequence.blocks):
            self.index.release(sequence.blocks[needed:])
            del sequence.blocks[needed:]

    def addresses(self, slots: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """Return (n,) int32, block * block_tokens + offset for each place (n,) of its slot.

        A token's place is its position modulo the slot's ring.
        """
        size = self.block_tokens
        return self.tables[slots, positions // size] * size + positions % size

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return (source, destination) pairs of the slots and of the blocks to copy before the next plan."""
        slots = [(source, destination) for destination, source in self._slot_copies.items()]
        blocks = [(source, destination) for destination, source in self._block_copies.items()]
        self._slot_copies, self._block_copies = {}, {}
        return slots, blocks

    def _take_slot(self, sequence: Sequence, length: int, blocks: list[int], shift: int) -> None:
        sequence.slot = heapq.heappop(self._free_slots)
        self.rings[sequence.slot] = NO_RING
        self.lengths[sequence.slot], self.shifts[sequence.slot] = length, shift
        self._add_blocks(sequence, blocks)

    def _add_blocks(self, sequence: Sequence, blocks: list[int]) -> None:
        held = len(sequence.blocks)
        sequence.blocks += blocks
        self.tables[sequence.slot, held : len(sequence.blocks)] = blocks


def context_of(group: SequenceGroup, shift: int) -> Context:
    """Return what the keys and values of the group's tokens depend on.

    shift: added to their rotary positions.
    """
    row, prompt = group.row, -1 if group.learned is None else group.learned.number
    if row is None:
        return Context(group.adapter, prompt, shift)
    return Context(group.adapter, prompt, shift, row.ring, row.salt)
