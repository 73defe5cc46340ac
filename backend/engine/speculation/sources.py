"""The texts besides its own in which a sequence may find drafts: finished answers, and its client's drafts.
No torch.

An answer is found by those who could share its cached blocks, too: requests with the same adapter, salt and
cache scope (prefix_cache.py). Each such set is a scope, and a client's drafts are a scope of their own.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

import numpy as np

from tridecode.backend.engine.cache.block_keys import masked
from tridecode.backend.engine.parts.draft_sources import DraftSources, Entry, SlotScopes
from tridecode.backend.engine.schedule.sequence import Finish, Sequence
from tridecode.backend.engine.speculation.records import DraftRecord
from tridecode.backend.engine.step.plan import StepPlan

#: tokens of the ring of finished answers
RING_TOKENS = 1_000_000
#: tokens before an answer that are stored with it, so that a repeated prompt finds its first token
_LEAD = 16
_MOST_SCOPES = 4096


class AnswerSources:
    """Collects the entries of the ring and the scopes of slots, for the next plan.

    drafts: whether a sequence may have drafts. ring: tokens of the ring.
    """

    def __init__(self, drafts: Callable[[Sequence], bool], ring: int = RING_TOKENS):
        self._drafts, self._ring = drafts, ring
        self._scopes: OrderedDict[bytes, int] = OrderedDict()
        self._number = 0
        self._entries: deque[Entry] = deque()
        self._waiting = 0  # tokens of the entries

    def finished(self, sequence: Sequence, finish: Finish | None) -> None:
        """Add the answer of a sequence that ends."""
        group = sequence.group
        if group.chain is None or group.search is not None or finish is Finish.ERROR:
            return
        if len(sequence.output) > 1:
            lead = sequence.prompt[-_LEAD:]
            tokens = np.concatenate([lead, np.array(sequence.output, np.int32)])
            self._add(Entry(self._scope(masked([group.chain.root], sequence.mask)[0]), tokens))

    def take(self, plan: StepPlan) -> DraftSources | None:
        """Return the part of a plan: the scopes of the slots that start in it, and the entries so far."""
        slots = []
        if plan.starts:
            sequences = {one.slot: one for one in plan.sequences}
            for start in plan.starts:
                sequence = sequences.get(start.slot)
                if sequence is not None and self._drafts(sequence):
                    record = self._begin(sequence)
                    slots.append(SlotScopes(start.slot, *record.scopes))
        if not slots and not self._entries:
            return None
        entries, self._entries, self._waiting = list(self._entries), deque(), 0
        return DraftSources(slots, entries)

    def _begin(self, sequence: Sequence) -> DraftRecord:
        """Return the record of a sequence that starts; add its client's drafts the first time."""
        record, group = sequence.draft_record, sequence.group
        if record is not None:
            record.matched = 0
            return record
        shared, private = -1, -1
        if group.chain is not None and group.chain.reads:
            shared = self._scope(masked([group.chain.root], sequence.mask)[0])
        if sequence.params.draft_tokens:
            private = self._next()
            drafts = np.array(sequence.params.draft_tokens, np.int32)
            self._add(Entry(private, np.concatenate([sequence.prompt[-_LEAD:], drafts])))
        record = sequence.draft_record = DraftRecord(scopes=(shared, private))
        return record

    def _add(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._waiting += len(entry.tokens)
        while self._waiting > self._ring and len(self._entries) > 1:
            self._waiting -= len(self._entries.popleft().tokens)

    def _scope(self, key: bytes) -> int:
        """Return the number of a scope; one that was not used for long gets a new number."""
        found = self._scopes.pop(key, None)
        self._scopes[key] = found = self._next() if found is None else found
        if len(self._scopes) > _MOST_SCOPES:
            self._scopes.popitem(last=False)
        return found

    def _next(self) -> int:
        self._number += 1
        return self._number % 2**31
