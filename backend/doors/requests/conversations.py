"""The conversations of an interactive door: their tokens, and the order of their rounds. Free of Triton.

The door keeps the tokens that an answer shows. The engine keeps them too, with their cache blocks; a round
names the number of tokens that it continues from. So a failed round changes nothing: the next one names the
same number. An engine that was started since the last round gets the tokens with the next one.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from tridecode.backend.base.errors import CapacityError, SessionGoneError
from tridecode.backend.wire.messages import Event

Key = int | str  # Triton's sequence id
#: rounds of one conversation that may wait for the one before
MAX_WAITING = 16
_MAX_REASONS = 1024
_LOOK_S = 1.0
#: the door forgets an idle conversation later than Triton and the engine do
_MARGIN_S = 5.0


@dataclass(eq=False)
class Conversation:
    """number: its id in the engine. rows: the tokens of each row, without an end token that the next round
    replaces. leads: for each row the number of tokens that the engine has but the answer does not show: a
    start_id.
    """

    number: int
    session_len: int
    memory_len: int
    rows: list[list[int]]
    leads: list[list[int]]
    used_at: float = 0.0

    @property
    def longest(self) -> int:
        return max(self.stored)

    @property
    def stored(self) -> list[int]:
        """Return the number of tokens of each row that the engine has."""
        return [len(row) + len(lead) for row, lead in zip(self.rows, self.leads)]

    @property
    def history(self) -> list[list[int]]:
        """Return the tokens of each row that the engine has, from which another engine can continue."""
        return [lead + row for row, lead in zip(self.rows, self.leads)]


@dataclass(eq=False)
class Turn:
    """One round. whole: the tokens of each row before its answer, from the start of the conversation.

    received, stream: used by the door. prepared, begun: see Turns."""

    key: Key
    start: bool
    end: bool
    stream: Any
    received: Any = None
    conversation: Conversation | None = None
    whole: list[list[int]] = field(default_factory=list)
    ended_by: list[str] = field(default_factory=list)
    prepared: bool = False
    begun: bool = False

    def set_prompts(self, whole: list[list[int]]) -> None:
        self.whole, self.ended_by = whole, [""] * len(whole)

    def take(self, event: Event) -> None:
        """Record an event of the round before its stream gets it."""
        self.whole[event.sequence] += event.tokens
        self.ended_by[event.sequence] = event.finish or self.ended_by[event.sequence]

    def close(self) -> None:
        """Add the tokens of the answered round to the conversation."""
        assert self.conversation is not None
        for row, finish in zip(self.whole, self.ended_by):
            if finish == "end_id":
                row.pop()
        self.conversation.rows = self.whole


class Turns:
    """The rounds of each conversation, one at a time and in the order of `enter`."""

    def __init__(self) -> None:
        self._lanes: dict[Key, list[Turn]] = {}
        self._lock = threading.Lock()

    def enter(self, turn: Turn) -> None:
        with self._lock:
            lane = self._lanes.setdefault(turn.key, [])
            if len(lane) > MAX_WAITING:
                raise CapacityError(
                    f"{MAX_WAITING} rounds of session {turn.key} are waiting already; send the next one later"
                )
            lane.append(turn)

    def prepare(self, turn: Turn) -> bool:
        """Mark the turn as ready to begin. Return whether it must begin now, because none is before it."""
        with self._lock:
            turn.prepared = True
            return self._first(turn.key) is turn

    def leave(self, turn: Turn) -> Turn | None:
        """End the turn. Return the turn that must begin now, if there is one."""
        with self._lock:
            lane = self._lanes.get(turn.key, [])
            if turn in lane:
                lane.remove(turn)
            if not lane:
                self._lanes.pop(turn.key, None)
            return self._first(turn.key)

    def _first(self, key: Key) -> Turn | None:
        """Mark the first turn as begun and return it, if it can begin and has not begun."""
        first = next(iter(self._lanes.get(key, [])), None)
        if first is None or first.begun or not first.prepared:
            return None
        first.begun = True
        return first

    def has(self, key: Key) -> bool:
        with self._lock:
            return key in self._lanes


class Conversations:
    """Conversations by Triton's sequence id. Thread-safe; only its running turn may change a conversation."""

    def __init__(self, turns: Turns, idle_s: float):
        self._turns, self._idle_s = turns, idle_s
        self._held: dict[Key, Conversation] = {}
        self._reasons: OrderedDict[Key, str] = OrderedDict()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._looked_at = 0.0

    def __len__(self) -> int:
        return len(self._held)

    def begin(self, key: Key, session_len: int, memory_len: int, rows: int) -> Conversation:
        """Return a new conversation, which is not registered before `add`."""
        return Conversation(
            next(self._numbers), session_len, memory_len, [[] for _ in range(rows)], [[] for _ in range(rows)]
        )

    def get(self, key: Key) -> Conversation:
        """Return a conversation. Raises SessionGoneError with the reason if there is none."""
        with self._lock:
            found = self._held.get(key)
            if found is None:
                reason = self._reasons.get(key, "this model has no session of this sequence id")
                raise SessionGoneError(gone(key, reason))
            found.used_at = time.monotonic()
            return found

    def add(self, key: Key, conversation: Conversation) -> None:
        with self._lock:
            self._reasons.pop(key, None)
            self._held[key] = conversation
            conversation.used_at = time.monotonic()

    def drop(self, key: Key, reason: str) -> Conversation | None:
        """Forget a conversation and return it, so that the caller can end it in the engine."""
        with self._lock:
            self._reasons[key] = reason
            self._reasons.move_to_end(key)
            if len(self._reasons) > _MAX_REASONS:
                self._reasons.popitem(last=False)
            return self._held.pop(key, None)

    def drop_idle(self) -> list[Conversation]:
        """Forget conversations that were idle for too long. Checks once a second."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return []
        self._looked_at = now
        with self._lock:
            idle = [k for k, c in self._held.items() if now - c.used_at > self._idle_s + _MARGIN_S]
        reason = f"it was idle for more than {self._idle_s:g} s"
        dropped = [self.drop(key, reason) for key in idle if not self._turns.has(key)]
        return [conversation for conversation in dropped if conversation is not None]


def gone(key: Key, reason: str) -> str:
    return f"session {key} is gone: {reason}; start it again (sequence_start)"
