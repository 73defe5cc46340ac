"""Assigns batch slots and blocks of the paged cache; sharing and copy on write. No torch.

Forks, samples of one prompt and rounds of a session are users of the same blocks in the index. A full block
is never written again. A shared partial block is copied for the fork before its next token, unless the other
users are gone by then. A block with an identity outlives its sequence until it is evicted. Prompts and
answers (prefix_cache.py) and sessions (sessions.py) assign identities.
"""

from __future__ import annotations

import heapq

import numpy as np

from tridecode.backend.engine.cache.block_index import BlockIndex
from tridecode.backend.engine.cache.draft_keys import DraftKeys
from tridecode.backend.engine.cache.prefix_cache import PrefixCache, context_of
from tridecode.backend.engine.cache.sessions import Held
from tridecode.backend.engine.host_tier.tier import HostTier
from tridecode.backend.engine.schedule.admission import SchedulerLimits
from tridecode.backend.engine.schedule.sequence import Sequence
from tridecode.backend.engine.schedule.waiting import Admission

NO_RING = np.iinfo(np.int32).max


class CacheManager:
    """Slots and blocks, held by a sequence from `admit` or `fork` to `release`. S slots, M columns.

    lengths: (S,) int32, tokens in the cache once the planned steps have run; for a ring (sessions.py), tokens
    that were ever in it. tables: (S, M) int32, blocks. rings: (S,) int32, cache positions that a slot's
    tokens share; NO_RING: one per token. shifts: (S,) int32, added to rotary positions.
    """

    def __init__(self, limits: SchedulerLimits, tier: HostTier | None = None):
        self.index = BlockIndex(limits.num_blocks, None if tier is None else tier.hasher)
        self.prefixes = PrefixCache(self.index, limits.block_tokens)
        self.prefixes.tier = self.tier = tier
        self._cleared: set[int] = set()  # blocks that may hold non-finite values
        if tier is not None:
            tier.bind(self.index, self._cleared)
        self.block_tokens = limits.block_tokens
        self.lengths = np.zeros(limits.max_sequences, np.int32)
        columns = -(-limits.max_sequence_tokens // limits.block_tokens)
        self.tables = np.zeros((limits.max_sequences, columns), np.int32)
        self.cached_tokens = 0  # total that admitted sequences have found
        self.reserved = 0  # free slots that are reserved for the beams of running groups
        self.rings = np.full(limits.max_sequences, NO_RING, np.int32)
        self.shifts = np.zeros(limits.max_sequences, np.int32)
        self._free_slots = list(range(limits.max_sequences))  # a heap
        self._sharing: list[Sequence] = []  # forks since the last plan whose partial block may be shared
        self._slot_copies: dict[int, int] = {}  # destination -> source, for the next plan
        self._block_copies: dict[int, int] = {}
        self.draft_keys: DraftKeys | None = None  # of an engine whose drafter has a cache of its own

    def track_drafter(self) -> None:
        """Start to track which blocks the drafter's cache lacks."""
        self.draft_keys = self.prefixes.draft_keys = DraftKeys(self.block_tokens)
        if self.tier is not None:
            self.tier.draft_keys = self.draft_keys

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots) - self.reserved

    def admit(
        self, sequence: Sequence, shift: int = 0, prefix: Sequence | None = None, warm: bool = False
    ) -> Admission:
        """Assign a slot and the blocks of all known tokens; without effect unless the outcome is DONE.

        shift: added to the rotary positions. prefix: a sequence with the same prompt, which is completely
        cached by earlier plans. The sequence uses the cached blocks of `prefix`, of its session or of the
        prefix index. If the last of them is partial, the sequence takes it over if nobody else needs it, or
        else gets a copy. warm: admit it only if blocks of it are cached.
        """
        if self.num_free_slots < 1:
            return Admission.NO_SLOT
        row, size = sequence.group.row, self.block_tokens
        needed = -(-(sequence.num_known if row is None else row.capacity(sequence.num_known)) // size)
        if row is not None and needed > self.index.num_available:
            return Admission.NO_BLOCKS
        length, blocks = self._cached(sequence, shift, prefix)
        if warm and not blocks:
            return Admission.NO_BLOCKS
        if self.prefixes.is_coming(sequence, length // size):
            return Admission.COMING
        is_alone = prefix is None and length % size == 0
        if self.tier is not None and is_alone and self.prefixes.is_brought(sequence, blocks, needed):
            coming = self.tier.joinable(sequence, blocks)
            if not coming or not self._have(needed - len(blocks) - len(coming)):
                return Admission.COMING
            self.tier.join(sequence)
            length, blocks = length + len(coming) * size, blocks + coming
        if self.draft_keys is not None:
            self.draft_keys.begin(sequence, length, blocks, prefix)
        self.index.share(blocks)  # from now on they are not evicted
        written = blocks if row is not None and row.ring else blocks[length // size :]
        copied = bool(written) and not self.index.is_exclusive(written[-1])
        if not self._have(needed - len(blocks) + copied):
            self.index.release(blocks)
            return Admission.NO_BLOCKS
        own = self.index.allocate(needed - len(blocks) + copied)
        if copied:
            source = blocks.pop()
            self._block_copies[own[0]] = self._block_copies.get(source, source)
            self.index.release([source])
        elif written:
            self.index.forget(written)
        self._take_slot(sequence, length, blocks + own, shift)
        held = len(blocks) + copied
        sequence.group.admitted(length, held, needed - held)
        if prefix is None:
            self._count(sequence, length)
        self.prefixes.expect(sequence, length // size)
        if row is not None:
            row.begin(length // size)
            self.rings[sequence.slot] = row.ring or NO_RING
        return Admission.DONE

    def _cached(self, sequence: Sequence, shift: int, prefix: Sequence | None) -> tuple[int, list[int]]:
        """Return how many of the sequence's first tokens are cached, and their blocks.

        The last token never counts.
        """
        group = sequence.group
        row, size = group.row, self.block_tokens
        if row is not None and group.chain is None:
            return row.find(self.index, sequence.num_known, context_of(group, shift), size)
        blocks = self.prefixes.find(sequence, shift)
        length = len(blocks) * size
        if row is not None:  # its own blocks count if the last of them reaches further
            kept = row.find(self.index, sequence.num_known, context_of(group, shift), size, is_shared=True)
            return kept if kept[0] > length else (length, blocks)
        if prefix is not None and length < len(sequence.prompt):
            length = len(sequence.prompt) - 1
            blocks = prefix.blocks[: -(-length // self.block_tokens)]
        return length, blocks

    def admit_beams(self, beams: list[Sequence], width: int, shift: int, warm: bool) -> Admission:
        """Assign slots and blocks to all beams of a group, which have the same number of tokens; reserve the
        rest of `width` slots. They share the full blocks of the prompt, which the first beam computes as far
        as they are not cached.

        Without effect unless the outcome is DONE. shift, warm: see `admit`.
        """
        first, *others = beams
        size = self.block_tokens
        needed = -(-first.num_known // size)
        shared = len(first.prompt) // size if others else 0
        if self.num_free_slots < width:
            return Admission.NO_SLOT
        found = self.prefixes.find(first, shift)[: len(first.prompt) // size]
        if warm and not found:
            return Admission.NO_BLOCKS
        if self.prefixes.is_coming(first, len(found)):
            return Admission.COMING
        most = len(beams) * (needed - shared) + shared
        if self.tier is not None and self.prefixes.is_brought(first, found, most):
            return Admission.COMING
        if self.draft_keys is not None:
            for beam in beams:
                beam.draft_gap = self.draft_keys.gap_of(found)
        self.index.share(found)  # from now on they are not evicted
        if not self._have(most - len(found)):
            self.index.release(found)
            return Admission.NO_BLOCKS
        self.reserved += width - len(beams)
        self._take_slot(first, len(found) * size, found + self.index.allocate(needed - len(found)), shift)
        first.group.admitted(len(found) * size, len(found), needed - len(found))
        self._count(first, len(found) * size)
        self.prefixes.expect(first, len(found))
        for beam in others:
            held = first.blocks[:shared]
            self.index.share(held)
            self._take_slot(beam, shared * size, held + self.index.allocate(needed - shared), shift)
            beam.mask, beam.num_indexed = first.mask, 0
        return Admission.DONE

    def _count(self, sequence: Sequence, length: int) -> None:
        """Count the cached tokens of a sequence that is admitted."""
        self.cached_tokens += length
        if self.tier is not None:
            self.tier.admitted(sequence, length)

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
        child.mask, child.num_indexed, child.draft_gap = parent.mask, parent.num_indexed, parent.draft_gap

    def _have(self, blocks: int) -> bool:
        """Return whether this number of blocks is free, after eviction of cached blocks if necessary."""
        if blocks > self.index.num_available:
            return False
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
        length = self.prefixes.written(sequence, self.lengths.item(sequence.slot))
        keys, chain = self.prefixes.full_keys(sequence, length)
        if self.draft_keys is not None:
            self.draft_keys.indexed(sequence, 0, sequence.blocks)
        context = context_of(sequence.group, self.shifts.item(sequence.slot))
        return Held(sequence.blocks, length, context, keys, chain)

    def index_written(self, sequence: Sequence) -> None:
        """Index the full blocks of a prompt that the plan in the making writes. Where another sequence has
        computed the same tokens, its blocks take the place of this sequence's.
        """
        self._index(sequence, self.lengths.item(sequence.slot))

    def _index(self, sequence: Sequence, length: int) -> None:
        first, indexed = self.prefixes.index_written(sequence, length)
        own = sequence.blocks[first : first + len(indexed)]
        if indexed != own:
            self.index.share(indexed)
            self.index.release(own)
            sequence.blocks[first : first + len(indexed)] = indexed
            self.tables[sequence.slot, first : first + len(indexed)] = indexed

    def index_answer(self, sequence: Sequence) -> None:
        """Index the full blocks of a decoding sequence with known tokens, so that the host tier has them
        if the sequence is preempted or the engine is killed.
        """
        self._index(sequence, self.prefixes.written(sequence, self.lengths.item(sequence.slot)))

    def ends_in_flight(self, sequence: Sequence) -> bool:
        """Return whether a full block of the sequence, which enters the index, has tokens whose ids are not
        known yet.
        """
        length, size = self.lengths.item(sequence.slot), self.block_tokens
        return sequence.group.chain is not None and length // size > sequence.num_known // size

    def release(self, sequence: Sequence, kept: bool = True) -> None:
        """Take slot and blocks back. A step in flight may still write them; their next use runs after it.

        kept: full blocks without an identity get one before.
        """
        self.prefixes.leave(sequence, self.lengths.item(sequence.slot) if kept else 0)
        heapq.heappush(self._free_slots, sequence.slot)
        self.index.release(sequence.blocks)
        learned = sequence.group.learned
        if sequence.arriving or (learned is not None and learned.size):
            self._cleared.update(block for block in sequence.blocks if self.index.is_free(block))
        self._slot_copies.pop(sequence.slot, None)
        if self._block_copies:
            for block in sequence.blocks:
                self._block_copies.pop(block, None)
        if sequence in self._sharing:
            self._sharing.remove(sequence)
        sequence.slot, sequence.blocks = -1, []

    def take_cleared(self) -> list[int]:
        """Return the blocks that the next plan with rows sets to zero."""
        cleared = sorted(self._cleared)
        self._cleared.clear()
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
            if not self._have(1):
                break
            self._add_blocks(sequence, self.index.allocate(1))
        return min(tokens, len(sequence.blocks) * size)

    def trim(self, sequence: Sequence, more: int = 0) -> None:
        """Free the blocks beyond the sequence's last token plus `more` tokens."""
        needed = -(-(self.lengths.item(sequence.slot) + more) // self.block_tokens)
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
