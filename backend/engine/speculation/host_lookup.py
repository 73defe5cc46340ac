"""Finds drafts on the host of rank 0, where plans have the ids of all tokens: pipeline stages. No torch.

The search is that of Ops.look_up.
"""

from __future__ import annotations

import numpy as np

from tridecode.backend.engine.parts.draft_sources import DraftSources, Entry
from tridecode.backend.engine.schedule.sequence import Sequence
from tridecode.backend.engine.speculation.records import DraftRecord

_MOST_MATCH, _LEAST_MATCH, _SEPARATOR = 32, 2, -1
_OWN, _ANSWER, _CLIENT = 1, 2, 3


class HostLookup:
    """A Drafter that finds what followed the newest tokens where they occurred before.

    most: drafts per row. ring: tokens of the ring of finished answers.
    """

    needs_token = True

    def __init__(self, most: int, ring: int):
        self._most = most
        self._ring = np.full(ring, _SEPARATOR, np.int32)
        self._scopes = np.full(ring, -1, np.int32)
        self._next = 0

    def take(self, sources: DraftSources) -> None:
        """Add the new texts of a plan to the ring."""
        for entry in sources.entries:
            self._append(entry)

    def search(self, sequence: Sequence, record: DraftRecord) -> None:
        """Write record.matched, source and drafts; all tokens of the sequence are known."""
        known = sequence.known_tokens()
        suffix = known[-_MOST_MATCH:][::-1]  # the newest token first
        matched, end = _match(known[:-1], suffix, None)
        in_ring, place = 0, -1
        if max(record.scopes) >= 0:
            allowed = np.isin(self._scopes, [scope for scope in record.scopes if scope >= 0])
            in_ring, place = _match(self._ring[:-1], suffix, allowed[:-1])
        record.matched, record.source, record.drafts = 0, 0, np.zeros(0, np.int32)
        if max(matched, in_ring) < _LEAST_MATCH:
            return
        if matched >= in_ring:
            following = known[end + 1 :]
            record.matched, record.source = matched, _OWN
            record.drafts = np.resize(following, self._most)
            return
        following = self._ring[place + 1 : place + 1 + self._most]
        ends = np.flatnonzero(following < 0)
        record.matched = in_ring
        record.source = _CLIENT if self._scopes[place] == record.scopes[1] else _ANSWER
        record.drafts = following[: ends[0]] if len(ends) else following

    def drafts(self, sequence: Sequence, most: int) -> np.ndarray:
        record = sequence.draft_record
        return np.zeros(0, np.int32) if record is None else record.drafts[:most].astype(np.int32)

    def _append(self, entry: Entry) -> None:
        """Write a text into the ring, between two separators."""
        size, first = len(self._ring), self._next
        tokens = np.concatenate([[_SEPARATOR], entry.tokens[: size - 2], [_SEPARATOR]]).astype(np.int32)
        while len(tokens):
            part = tokens[: size - first]
            self._ring[first : first + len(part)] = part
            self._scopes[first : first + len(part)] = entry.scope
            tokens, first = tokens[len(part) :], (first + len(part)) % size
        self._next = (first - 1) % size  # the next text begins at the last separator


def _match(tokens: np.ndarray, suffix: np.ndarray, allowed: np.ndarray | None) -> tuple[int, int]:
    """Return the length of the longest match of a suffix, newest token first, that ends within `tokens`, and
    the last place where one of this length ends. allowed: places at which it may end; None: all."""
    is_equal = tokens == suffix[0]
    ends = np.flatnonzero(is_equal if allowed is None else is_equal & allowed)
    length, last = 0, -1
    while len(ends):
        length, last = length + 1, int(ends[-1])
        if length == len(suffix):
            break
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == suffix[length]]
    return length, last
