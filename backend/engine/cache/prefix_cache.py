"""Reuse of blocks between requests: which blocks a sequence finds, and which it adds. Host only, no torch.

A full block of a prompt gets its identity with the plan that writes it: later plans run after that one, so
they may read the block. A block of an answer gets its identity when the sequence ends or is preempted. Rounds
of sessions share their full blocks, too, except those with a ring (sessions.py). Requests that send a prompt
table neither use nor fill the index: their blocks are cleared when they are released.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tridecode.backend.engine.cache.block_index import BlockIndex
from tridecode.backend.engine.cache.block_keys import Context, masked
from tridecode.backend.engine.cache.draft_keys import DraftKeys
from tridecode.backend.engine.cache.prompt_keys import PromptKeys
from tridecode.backend.engine.schedule.sequence import Sequence, SequenceGroup

if TYPE_CHECKING:
    from tridecode.backend.engine.host_tier.tier import HostTier


class PrefixCache:
    """The scheduler's side of the index. Sequence.num_indexed is the number of leading blocks that have an
    identity. `find` sets Sequence.mask, the mask of the sequence's context (block_keys.py).
    """

    def __init__(self, index: BlockIndex, block_tokens: int):
        self._index, self._size = index, block_tokens
        self.tier: HostTier | None = None
        self.draft_keys: DraftKeys | None = None
        self._coming: dict[bytes, Sequence] = {}  # identities of blocks that running prompts will write

    def find(self, sequence: Sequence, shift: int) -> list[int]:
        """Return the cached full blocks with which the sequence begins; its last token is never among them.

        shift: added to its rotary positions.
        """
        group = sequence.group
        sequence.mask = self._index.hasher.mask(context_of(group, shift))
        if group.chain is None or not group.chain.reads:
            return []
        blocks = min(sequence.num_known - 1, _first_needed(sequence)) // self._size
        found = self._index.find(self._keys(sequence, 0, blocks))
        learned = group.learned
        if learned is not None and learned.is_prefix and len(found) * self._size < learned.rows:
            return []  # the prefix is copied as a whole
        return found

    def is_coming(self, sequence: Sequence, found: int) -> bool:
        """Return whether a running prompt will write the block behind the first `found` ones of a sequence
        that looks for blocks. A running prompt that is less urgent does not give way until it has written
        those that both need.
        """
        if not self._coming:
            return False
        last, chain = min(sequence.num_known - 1, _first_needed(sequence)) // self._size, sequence.group.chain
        if found >= last or chain is None or not chain.reads:
            return False
        running = self._coming.get(self._keys(sequence, found, found + 1)[0])
        if running is not None and sequence.group.priority < running.group.priority:
            keys = self._keys(sequence, found, last)
            both = next((n for n, key in enumerate(keys) if self._coming.get(key) is not running), len(keys))
            running.awaited = max(running.awaited, (found + both) * self._size)
        return running is not None

    def is_brought(self, sequence: Sequence, found: list[int], needed: int) -> bool:
        """Return whether blocks behind `found` are being copied from the host tier into the cache; start that
        copy if it pays.

        needed: blocks of the whole sequence.
        """
        chain, first = sequence.group.chain, len(found)
        if self.tier is None or chain is None or not chain.reads or sequence.group.learned is not None:
            return False
        last = min(sequence.num_known - 1, _first_needed(sequence)) // self._size
        if first >= last:
            return False
        keys = self._keys(sequence, max(first - 1, 0), last)
        parent = keys.pop(0) if first else b""
        return self.tier.brings(sequence, parent, keys, found, needed)

    def expect(self, sequence: Sequence, found: int) -> None:
        """Record that an admitted sequence, which has found its first `found` blocks, will write the other
        full blocks of its prompt.
        """
        sequence.num_indexed, sequence.awaited = found, 0
        chain = sequence.group.chain
        if chain is not None:
            for key in self._keys(sequence, found, len(chain.keys)):
                self._coming.setdefault(key, sequence)

    def full_keys(self, sequence: Sequence, length: int) -> tuple[list[bytes] | None, PromptKeys | None]:
        """Return the identities of a sequence's full blocks, and their chain before the mask; None if it
        does not enter the index.

        length: tokens that are in the cache.
        """
        chain, blocks = sequence.group.chain, min(length, sequence.num_known) // self._size
        if chain is None:
            return None, None
        keys = self._keys(sequence, 0, blocks)
        return keys, chain._replace(keys=(chain.keys + sequence.answer_keys)[:blocks])

    def written(self, sequence: Sequence, length: int) -> int:
        """Return how many of a sequence's first `length` tokens the planned steps write for certain: a step
        may reject drafts.
        """
        return min(length, sequence.num_known - 1) if sequence.unsettled else length

    def index_written(self, sequence: Sequence, length: int) -> tuple[int, list[int]]:
        """Index the full blocks of a sequence whose first `length` tokens are in the cache once the planned
        steps have run. Return the number of blocks before them, and the blocks that have their identities:
        where another sequence has computed the same tokens, these are its blocks.
        """
        first, full = sequence.num_indexed, min(length, sequence.num_known) // self._size
        if sequence.group.chain is None or full <= first or sequence.arriving:  # its blocks may be wrong
            return first, []
        keys = self._keys(sequence, max(first - 1, 0), full)
        parent = keys.pop(0) if first else b""
        if first and not self._index.is_indexed(parent):  # a failed sequence shared it
            sequence.num_indexed = 0
            return self.index_written(sequence, length)
        self._arrive(sequence, keys)
        sequence.num_indexed = full
        indexed = self._index.insert(parent, keys, sequence.blocks[first:full])
        if self.draft_keys is not None:
            self.draft_keys.indexed(sequence, first, indexed)
        if self.tier is not None:
            self.tier.offer(parent, keys, indexed)
        return first, indexed

    def leave(self, sequence: Sequence, length: int) -> None:
        """Index the blocks of the first `length` tokens of a sequence that is about to release them."""
        if sequence.group.chain is None:
            return
        self.index_written(sequence, self.written(sequence, length))
        self._arrive(sequence, self._keys(sequence, sequence.num_indexed, len(sequence.group.chain.keys)))

    def forget(self, sequence: Sequence) -> None:
        """Remove the identities of a sequence's blocks, which may hold wrong values. A block that is followed
        by an indexed block keeps its identity.
        """
        if sequence.group.chain is not None:
            self._index.forget(sequence.blocks[: sequence.num_indexed])
            if self.tier is not None:
                self.tier.forget(self._keys(sequence, 0, sequence.num_indexed))
            self._arrive(sequence, self._keys(sequence, 0, len(sequence.group.chain.keys)))

    def _arrive(self, sequence: Sequence, keys: list[bytes]) -> None:
        """Stop expecting blocks from this sequence."""
        coming = self._coming
        if coming:
            for key in keys:
                if coming.get(key) is sequence:
                    del coming[key]

    def _keys(self, sequence: Sequence, first: int, last: int) -> list[bytes]:
        """Return the identities of the full blocks first .. last - 1 of a sequence's known tokens."""
        chain, size = sequence.group.chain, self._size
        assert chain is not None
        keys = chain.keys
        if last > len(keys):
            more = sequence.answer_keys
            known = len(keys) + len(more)
            if last > known:
                ids = sequence.tokens_of(known * size, last * size).astype("<i4").tobytes()
                parent = [chain.root, *keys[-1:], *more[-1:]][-1]
                more += self._index.hasher.chain(parent, ids, 4 * size)
            keys = keys + more
        return masked(keys[first:last], sequence.mask)


def context_of(group: SequenceGroup, shift: int) -> Context:
    """Return what the keys and values of the group's tokens depend on. shift: added to rotary positions.

    The salt is that of a session's row; it separates the blocks that the row shares with nobody. The salt of
    a request is in the root of its chain.
    """
    row, prompt = group.row, -1 if group.learned is None else group.learned.number
    if row is None:
        return Context(group.adapter_digest, prompt, shift)
    return Context(group.adapter_digest, prompt, shift, row.ring, row.salt)


def _first_needed(sequence: Sequence) -> int:
    """Return the first position that must be computed because the request wants results of it."""
    params, extra = sequence.params, sequence.extra_outputs
    if sequence.embedding is not None:
        return len(sequence.prompt) - 1 if sequence.embedding.pooling == "last" else 0
    if extra is not None and (params.return_context_logits or params.return_context_log_prob):
        return extra.planned if extra.planned < len(sequence.prompt) else sequence.num_known
    return sequence.num_known
