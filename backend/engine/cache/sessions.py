"""Sessions: conversations whose tokens, and as far as possible keys and values, outlive their requests.

A request with a SessionRound is a round of a session; each of its rows goes on from the tokens that the door
names. Between rounds a row has no slot. It holds its cache blocks until others need them: idle sessions give
blocks back first, the one that was used longest ago before the others. What is missing is computed again from
the kept tokens, so an answer does not depend on it. Host only: no torch.

With memory_len (the row's `ring`), the token at position p is cached at index p mod ring, in place of the
token `ring` positions before it, which no later token sees. Positions stay absolute. Source:
FasterTransformer's circular cache (memory_max_len of its decoder attention).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Callable, NamedTuple

import numpy as np

from tridecode.backend.base.errors import CapacityError, RequestError, SessionGoneError, UnsupportedError
from tridecode.backend.engine.cache.block_pool import BlockPool
from tridecode.backend.engine.schedule.admission import SchedulerLimits
from tridecode.backend.wire.messages import SessionRound, Submit

#: token ids that the sessions of an engine may reserve: 256 MiB
MAX_RESERVED_TOKENS = 1 << 26
#: what a row costs beside its ids, in ids
_ROW_TOKENS = 1024
#: what a sequence can return only if all of its prompt is computed
_OF_PROMPTS = ("return_context_embedding", "return_context_logits", "return_context_log_prob")
_EXPIRY_S = 0.5  # interval at which idle sessions are looked for
_MAX_REASONS = 1024

_NOTHING = np.zeros(0, np.int32)


class Held(NamedTuple):
    """What a sequence had in the cache when it ended: `written` tokens, their rotary positions + shift."""

    blocks: list[int]
    written: int
    shift: int


@dataclass(eq=False)
class SessionRow:
    """One conversation. While its sequence has a slot, `blocks` are the sequence's and empty here.

    tokens: (n,) int32, all tokens up to the end of the last round. ring: see above; 0: every token stays in
    the cache. blocks: of the first `written` tokens, or of the last `ring` of them. peak: tokens ever written
    to these blocks, `written` or more. shift: of the tokens' rotary positions. reusable: how many of the
    first tokens the running round has in common with those of the round before.
    """

    ring: int = 0
    tokens: np.ndarray = field(default_factory=lambda: _NOTHING)
    blocks: list[int] = field(default_factory=list)
    written: int = 0
    peak: int = 0
    shift: int = 0
    reusable: int = 0

    def capacity(self, tokens: int) -> int:
        """Places in the cache that a sequence of so many tokens needs."""
        return min(tokens, self.ring) if self.ring else tokens

    def first_missing(self, num_known: int, shift: int) -> int:
        """The position from which a sequence of num_known tokens must be computed; its last one always is."""
        first = min(self.written, self.reusable, num_known - 1)
        # a ring that has wrapped lacks what the positions before its newest see
        if shift != self.shift or (0 < self.ring < self.peak and first < self.peak - 1):
            return 0
        return first

    def take(self) -> list[int]:
        """The blocks, which are the caller's now."""
        blocks, self.blocks, self.written, self.peak = self.blocks, [], 0, 0
        return blocks

    def shed(self, count: int, block_tokens: int) -> list[int]:
        """`count` of the blocks, the last tokens' first; all of them where the others are useless."""
        if count <= 0:
            return []
        if 0 < self.ring < self.peak or count >= len(self.blocks):
            return self.take()
        kept = len(self.blocks) - count
        shed, self.blocks = self.blocks[kept:], self.blocks[:kept]
        self.written = min(self.written, kept * block_tokens)
        return shed

    def keep(self, tokens: np.ndarray, held: Held | None) -> None:
        """A round has ended with these tokens (n,). held: None where its sequence had no slot."""
        self.tokens = tokens
        if held is None:
            self.written = min(self.written, self.reusable)
        else:
            self.blocks, self.written, self.shift = held
            self.peak = max(self.peak, self.written)


@dataclass(eq=False)
class Session:
    """rows: one conversation each. running: sequences of the round that has not ended. used_at: monotonic
    seconds of the end of the last round."""

    rows: list[SessionRow]
    session_len: int
    memory_len: int
    lora_names: list[str]
    idle_s: float
    used_at: float = 0.0
    running: int = 0

    @property
    def reserved(self) -> int:
        return len(self.rows) * (self.session_len + _ROW_TOKENS)


class SessionStore:
    """The sessions of all doors, by door and number; used by the scheduler's thread only.

    limits.ring_fault: why this model cannot keep the last tokens alone; "" if it can.
    """

    def __init__(self, pool: BlockPool, limits: SchedulerLimits, clock: Callable[[], float]):
        self._pool, self._limits, self._clock = pool, limits, clock
        self._sessions: OrderedDict[tuple[bytes, int], Session] = OrderedDict()  # longest unused first
        self._reasons: OrderedDict[tuple[bytes, int], str] = OrderedDict()  # of sessions that are gone
        self._reserved = 0
        self._next_look = 0.0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_blocks(self) -> int:
        """Blocks that sessions without a running sequence hold."""
        return sum(len(row.blocks) for session in self._sessions.values() for row in session.rows)

    def check(
        self, door: bytes, submit: Submit, prompts: list[np.ndarray]
    ) -> tuple[Session, list[np.ndarray]]:
        """The round's session, which `open` takes, and the whole prompt of each row: kept tokens, then new.
        A round that brings the history of a session that is not known begins it with that history.

        Changes nothing. Raises RequestError, SessionGoneError or CapacityError.
        """
        wanted, rows = submit.session, len(submit.sequences)
        assert wanted is not None
        for name in _OF_PROMPTS:
            if any(getattr(sequence.params, name) for sequence in submit.sequences):
                raise RequestError(f"{name} is true; a session, which computes no kept token again, has none")
        if any(sequence.params.num_slots > 1 for sequence in submit.sequences):
            raise RequestError("beam_width or num_return_sequences is above 1; a session accepts 1")
        session = self._sessions.get((door, wanted.session))
        if not wanted.kept or (session is None and wanted.history):
            session = self._new(submit, wanted)
        elif session is None:
            raise SessionGoneError(self._reasons.get((door, wanted.session), "the engine does not have it"))
        if session.running:
            raise RequestError("the session's last round has not ended; wanted its next round after that")
        if len(session.rows) != rows or (wanted.kept and len(wanted.kept) != rows):
            raise RequestError(f"this round has {rows} rows; the session has {len(session.rows)}")
        return session, self._whole(session, wanted, submit, prompts)

    def _new(self, submit: Submit, wanted: SessionRound) -> Session:
        longest = self._limits.max_sequence_tokens
        if not 0 < wanted.session_len <= longest:
            raise RequestError(
                f"session_len is {wanted.session_len}; this model accepts 1 to {longest} "
                "(max_sequence_tokens in config.pbtxt)"
            )
        ring = wanted.memory_len if 0 < wanted.memory_len < wanted.session_len else 0
        if ring and self._limits.ring_fault:
            found = f"memory_len is {wanted.memory_len} and session_len {wanted.session_len}"
            raise UnsupportedError(f"{found}; wanted session_len or more: {self._limits.ring_fault}")
        rows = [SessionRow(ring) for _ in submit.sequences]
        for row, tokens in zip(rows, wanted.history if wanted.kept else ()):
            row.tokens = np.frombuffer(tokens, "<i4")
        session = Session(
            rows,
            wanted.session_len,
            wanted.memory_len,
            [sequence.lora_name for sequence in submit.sequences],
            wanted.idle_s,
        )
        if self._reserved + session.reserved > MAX_RESERVED_TOKENS:
            raise CapacityError(
                f"{len(self._sessions):,} sessions have reserved {self._reserved:,} tokens and this one "
                f"wants {session.reserved:,} more; {MAX_RESERVED_TOKENS:,} are allowed; try again later"
            )
        return session

    def _whole(
        self, session: Session, wanted: SessionRound, submit: Submit, prompts: list[np.ndarray]
    ) -> list[np.ndarray]:
        whole = []
        for index, (row, prompt, sequence) in enumerate(zip(session.rows, prompts, submit.sequences)):
            kept = wanted.kept[index] if wanted.kept else 0
            if not 0 <= kept <= len(row.tokens):
                raise RequestError(f"row {index} keeps {kept} tokens; the session has {len(row.tokens)}")
            if row.ring and len(prompt) > session.memory_len:
                raise RequestError(
                    f"row {index} has {len(prompt)} new tokens; memory_len is {session.memory_len}"
                )
            total = kept + len(prompt) + sequence.params.max_tokens
            if total > session.session_len:
                raise RequestError(
                    f"row {index} has {kept} tokens and {len(prompt)} new ones, and "
                    f"{sequence.params.max_tokens} are wanted, {total} together; "
                    f"session_len is {session.session_len}"
                )
            if sequence.lora_name != session.lora_names[index]:
                raise RequestError(
                    f"lora_name of row {index} is {sequence.lora_name!r}; the session began with "
                    f"{session.lora_names[index]!r}"
                )
            whole.append(np.concatenate([row.tokens[:kept], prompt]))
        return whole

    def open(self, door: bytes, submit: Submit, session: Session) -> None:
        """Begin the round that `check` accepted. A session of the same number that it replaces ends."""
        assert submit.session is not None
        key, kept = (door, submit.session.session), submit.session.kept
        if self._sessions.get(key) is not session:
            self.end(door, submit.session.session)
            self._sessions[key] = session
            self._reserved += session.reserved
        self._sessions.move_to_end(key)
        session.running, session.used_at = len(session.rows), self._clock()
        for row, count in zip(session.rows, kept or [0] * len(session.rows)):
            row.reusable = count

    def keep(self, door: bytes, number: int, row: SessionRow, tokens: np.ndarray, held: Held | None) -> None:
        """A sequence of the running round has ended with these tokens (n,) int32."""
        row.keep(tokens, held)
        size, places = self._limits.block_tokens, row.capacity(row.written)
        self._pool.release(row.shed(len(row.blocks) - -(-places // size), size))
        session = self._sessions[door, number]
        session.running -= 1
        session.used_at = self._clock()

    def reclaim(self, count: int) -> None:
        """Free `count` more blocks of the pool, as far as sessions hold them."""
        wanted = self._pool.num_free + count
        for session in self._sessions.values():
            for row in session.rows:
                missing = wanted - self._pool.num_free
                if missing <= 0:
                    return
                self._pool.release(row.shed(missing, self._limits.block_tokens))

    def end(self, door: bytes, number: int, reason: str = "it was ended") -> None:
        """Forget a session that has no running round; an unknown one is ignored."""
        session = self._sessions.pop((door, number), None)
        if session is None:
            return
        for row in session.rows:
            self._pool.release(row.take())
        self._reserved -= session.reserved
        self._reasons[door, number] = reason
        if len(self._reasons) > _MAX_REASONS:
            self._reasons.popitem(last=False)

    def end_door(self, door: bytes) -> None:
        for owner, number in [key for key in self._sessions if key[0] == door]:
            self.end(owner, number)
        for key in [key for key in self._reasons if key[0] == door]:
            del self._reasons[key]

    def expire(self) -> None:
        """End the sessions that were idle for too long. Looks at most twice a second."""
        if not self._sessions or (now := self._clock()) < self._next_look:
            return
        self._next_look = now + _EXPIRY_S
        for (door, number), session in list(self._sessions.items()):
            if not session.running and now - session.used_at > session.idle_s:
                self.end(door, number, f"it was idle for more than {session.idle_s:g} s")
