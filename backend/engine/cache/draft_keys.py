"""Tracks the blocks without keys and values of the drafter. Host only, without torch.

A drafter with its own cache keeps it in additional layers of the target's blocks (DeviceState.draft_layers).
It reads every prompt, but not the tokens of steps that are not worth drafts. Blocks with such tokens are
complete for the target and enter the index, but not complete for the drafter until it has read their tokens
(speculation/draft_reads.py). The drafter's keys after the first missing token are wrong, too, so one number
describes a sequence: Sequence.draft_gap.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from tridecode.backend.engine.schedule.sequence import Sequence
from tridecode.backend.engine.speculation.records import NO_GAP


class DraftKeys:
    """Used by the scheduler's thread only. The state of a block is valid only while the block has an
    identity; it is written when the block gets one."""

    def __init__(self, block_tokens: int):
        self._size = block_tokens
        self._lacking: set[int] = set()  # blocks
        self._in_tier: set[bytes] = set()  # identities of complete blocks that were copied to the host tier

    def gap_of(self, blocks: Items[int]) -> int:
        """Return Sequence.draft_gap of a sequence that begins with these indexed blocks."""
        lacking = self._lacking
        if lacking:
            for place, block in enumerate(blocks):
                if block in lacking:
                    return place * self._size
        return NO_GAP

    def begin(
        self, sequence: Sequence, length: int, blocks: Items[int], prefix: Sequence | None = None
    ) -> None:
        """Record that a sequence begins with `length` tokens in these blocks, or in those of `prefix`."""
        gap = self.gap_of(blocks) if prefix is None else prefix.draft_gap
        sequence.draft_gap = gap if gap < length else NO_GAP

    def indexed(self, sequence: Sequence, first: int, blocks: Items[int]) -> None:
        """Record the blocks of a sequence from number `first` on, which have just got identities.

        blocks: the indexed blocks; a block of another sequence if that has computed the same tokens.
        """
        gap, size = sequence.draft_gap, self._size
        for place, block in enumerate(blocks, first):
            if block != sequence.blocks[place]:
                if block in self._lacking:
                    sequence.draft_gap = min(sequence.draft_gap, place * size)
            elif (place + 1) * size > gap:
                self._lacking.add(block)
            else:
                self._lacking.discard(block)

    def read(self, sequence: Sequence, last: int) -> None:
        """Record that the drafter reads the tokens of a sequence from its gap to `last` - 1."""
        self._lacking.difference_update(
            sequence.blocks[sequence.draft_gap // self._size : last // self._size]
        )
        sequence.draft_gap = last

    def lose(self, sequence: Sequence, first: int) -> None:
        """Record that the drafter has not read the tokens of a sequence from `first` on."""
        sequence.draft_gap = min(sequence.draft_gap, first)
        self._lacking.update(sequence.blocks[first // self._size :])

    def copy_out(self, key: bytes, block: int, most: int) -> None:
        """Record that a block is copied to the host tier. most: capacity of the tier in blocks."""
        if block in self._lacking:
            self._in_tier.discard(key)
            return
        if len(self._in_tier) > 2 * most:  # some were evicted since; unknown blocks are read again
            self._in_tier.clear()
        self._in_tier.add(key)

    def copy_in(self, key: bytes, block: int) -> None:
        """Record that a block comes from the host tier. Blocks of a previous engine are unknown."""
        if key in self._in_tier:
            self._lacking.discard(block)
        else:
            self._lacking.add(block)
