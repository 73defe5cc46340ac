"""Sessions: conversations whose tokens, and if possible their cache blocks, outlive their requests.

A request with a SessionRound is a round of a session; each of its rows continues from the number of tokens
that the door names. Between rounds a row has no slot. Its cache blocks stay in the index (block_index.py)
without a user until they are evicted; the next round finds those that are left. Missing ones are recomputed
from the stored tokens, so eviction does not change an answer. Host only: no torch.

With memory_len (the row's `ring`), the token at position p is cached at index p mod ring, replacing the token
`ring` positions before it, which no later token attends to. Positions stay absolute. Source:
FasterTransformer's circular cache (memory_max_len of its decoder attention).
"""

from __future__ import annotations

import itertools
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tridecode.backend.base.errors import CapacityError, RequestError, SessionGoneError, UnsupportedError
from tridecode.backend.engine.cache.block_index import BlockIndex
from tridecode.backend.engine.cache.block_keys import Context
from tridecode.backend.engine.cache.prompt_keys import PromptKeys
from tridecode.backend.engine.schedule.admission import SchedulerLimits
from tridecode.backend.wire.messages import SessionRound, Submit

#: token ids that the sessions of an engine may reserve: 256 MiB
MAX_RESERVED_TOKENS = 1 << 26
#: overhead of a row besides its ids, in ids
_ROW_TOKENS = 1024
_EXPIRY_S = 0.5  # interval between checks for idle sessions
_MAX_REASONS = 1024

_NOTHING = np.zeros(0, np.int32)
_ROWS, _PROCESS = itertools.count(), secrets.token_hex(8)


class Held(NamedTuple):
    """A sequence's part of the cache: `written` tokens in its blocks, computed in that context. keys: the
    identities of its full blocks, which others share (prefix_cache.py); None: it shares none. chain: the
    same before the mask of the context.
    """

    blocks: list[int]
    written: int
    context: Context
    keys: list[bytes] | None = None
    chain: PromptKeys | None = None


@dataclass(eq=False)
class SessionRow:
    """One conversation.

    tokens: (n,) int32, all tokens up to the end of the last round. ring: see above; 0: every token stays in
    the cache. keys: the identities of the blocks that were computed for the first `written` tokens, or for
    the last `ring` of them, in that context; evicted ones are not in the index. peak: tokens ever written to
    these blocks, `written` or more. reusable: length of the prefix that the running round shares with the
    round before. num_shared: number of `keys` of full blocks, which everybody finds (prefix_cache.py). chain:
    see Held. salt: separates the other blocks from those of every other row.
    """

    ring: int = 0
    tokens: np.ndarray = field(default_factory=lambda: _NOTHING)
    keys: list[bytes] = field(default_factory=list)
    written: int = 0
    peak: int = 0
    context: Context = Context()
    reusable: int = 0
    num_shared: int = 0
    chain: PromptKeys | None = None
    salt: str = field(default_factory=lambda: f"session row {next(_ROWS)} of {_PROCESS}")

    def capacity(self, tokens: int) -> int:
        """Return the number of cache positions that a sequence of num_known tokens needs."""
        return min(tokens, self.ring) if self.ring else tokens

    def find(
        self, index: BlockIndex, num_known: int, context: Context, block_tokens: int, is_shared: bool = False
    ) -> tuple[int, list[int]]:
        """Return the position from which a sequence of num_known tokens must be computed, and the blocks
        before it.

        The last token is always computed. Blocks that the sequence cannot use lose their identity, unless
        others may use them (is_shared).
        """
        found = index.find(self.keys)
        first = min(self._present(len(found), block_tokens), self.reusable, num_known - 1)
        # a ring that has wrapped lacks tokens that positions before its newest attend to
        if context != self.context or (0 < self.ring < self.peak and first < self.peak - 1):
            first = 0
        used = -(-self.capacity(first) // block_tokens)
        index.forget(found[max(used, self.num_shared) if is_shared else used :])
        del self.keys[used:]
        self.written, self.peak = first, self.peak if first else 0
        return first, found[:used]

    def _present(self, blocks: int, block_tokens: int) -> int:
        """Return the number of cached tokens if the first `blocks` blocks are cached.

        A wrapped ring needs all blocks.
        """
        if 0 < self.ring < self.peak:
            return self.written if blocks == len(self.keys) else 0
        return min(self.written, blocks * block_tokens)

    def begin(self, full_blocks: int) -> None:
        """Mark the blocks that `find` returned as used.

        The sequence writes to partial ones, and to all blocks of a ring.
        """
        del self.keys[0 if self.ring else full_blocks :]
        if self.ring:
            self.written = 0

    def store(self, index: BlockIndex, tokens: np.ndarray, held: Held | None, block_tokens: int) -> None:
        """Store the tokens (n,) of a round that has ended; index the blocks that its sequence is about to
        release.

        held: None if the sequence had no slot.
        """
        self.tokens, self.chain = tokens, None if held is None else held.chain
        if held is None:
            self.written = min(self.written, self.reusable)
            return
        self.written, self.context = min(held.written, len(tokens)), held.context
        self.peak = max(self.peak, held.written)
        if not self.written:
            self.forget(index)
            return
        ids = np.ascontiguousarray(tokens[: self.written], "<i4")
        if held.keys is not None:
            self._share(index, ids, held, held.keys, block_tokens)
            return
        parent = index.hasher.root(held.context)
        if 0 < self.ring < self.peak:  # every block has the newest tokens at some of its positions
            whole = ids.tobytes() + self.peak.to_bytes(8, "little")
            (parent,) = index.hasher.chain(parent, whole, len(whole))
            self.keys = index.hasher.chain(parent, bytes(-(-self.capacity(self.written) // block_tokens)), 1)
            index.insert(parent, self.keys, held.blocks)
            return
        known = len(self.keys)  # identities of full blocks, which the sequence shared
        parent = self.keys[-1] if self.keys else parent
        keys = index.hasher.chain(parent, ids[known * block_tokens :].tobytes(), 4 * block_tokens)
        index.insert(parent, keys, held.blocks[known:])
        self.keys += keys

    def _share(
        self, index: BlockIndex, ids: np.ndarray, held: Held, full: list[bytes], block_tokens: int
    ) -> None:
        """Index the blocks of a round that shares its full ones. The last one may be partial: only this
        conversation finds it.
        """
        wanted = -(-len(ids) // block_tokens)
        self.keys = full[:wanted]
        index.insert(b"", self.keys, held.blocks)
        if len(self.keys) < wanted:
            parent, rest = self.keys[-1] if self.keys else b"", ids[(wanted - 1) * block_tokens :].tobytes()
            own = index.hasher.chain(parent + self.salt.encode(), rest, len(rest))
            index.insert(parent, own, held.blocks[wanted - 1 :])
            self.keys += own
        self.num_shared = min(len(full), wanted)

    def forget(self, index: BlockIndex) -> None:
        """Remove the identities of all blocks that only this conversation finds; those without a user become
        free.
        """
        index.forget(index.find(self.keys)[self.num_shared :])
        self.keys, self.written, self.num_shared = [], 0, 0


@dataclass(eq=False)
class Session:
    """rows: one conversation each. running: sequences of the round that has not ended. used_at: monotonic
    seconds of the end of the last round.
    """

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

    limits.ring_fault: why this model cannot run with a ring; "" if it can.
    """

    def __init__(self, index: BlockIndex, limits: SchedulerLimits, clock: Callable[[], float]):
        self._index, self._limits, self._clock = index, limits, clock
        self._sessions: OrderedDict[tuple[bytes, int], Session] = OrderedDict()  # longest unused first
        # reasons for which sessions have ended
        self._reasons: OrderedDict[tuple[bytes, int], str] = OrderedDict()
        self._reserved = 0
        self._next_look = 0.0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_blocks(self) -> int:
        """Return the number of session blocks that no running sequence uses."""
        index = self._index
        rows = [row for session in self._sessions.values() for row in session.rows]
        blocks = {block for row in rows for block in index.find(row.keys)}
        return sum(not index.users(block) for block in blocks)

    def check(
        self, door: bytes, submit: Submit, prompts: list[np.ndarray]
    ) -> tuple[Session, list[np.ndarray]]:
        """Return the round's session, for `open`, and the whole prompt of each row: stored tokens, then new
        ones. If the session is unknown and the round carries its history, the session begins with that
        history.

        Changes nothing. Raises RequestError, SessionGoneError or CapacityError.
        """
        wanted, rows = submit.session, len(submit.sequences)
        assert wanted is not None
        if any(sequence.params.num_slots > 1 for sequence in submit.sequences):
            raise RequestError("beam_width or num_return_sequences is above 1; a session accepts 1")
        session = self._sessions.get((door, wanted.session))
        if not wanted.retained or (session is None and wanted.history):
            session = self._new(submit, wanted)
        elif session is None:
            raise SessionGoneError(self._reasons.get((door, wanted.session), "the engine does not have it"))
        if session.running:
            raise RequestError("the session's last round has not ended; wanted its next round after that")
        if len(session.rows) != rows or (wanted.retained and len(wanted.retained) != rows):
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
        for row, tokens in zip(rows, wanted.history if wanted.retained else ()):
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
            retained = wanted.retained[index] if wanted.retained else 0
            if not 0 <= retained <= len(row.tokens):
                raise RequestError(f"row {index} keeps {retained} tokens; the session has {len(row.tokens)}")
            if row.ring and len(prompt) > session.memory_len:
                raise RequestError(
                    f"row {index} has {len(prompt)} new tokens; memory_len is {session.memory_len}"
                )
            total = retained + len(prompt) + sequence.params.max_tokens
            if total > session.session_len:
                raise RequestError(
                    f"row {index} has {retained} tokens and {len(prompt)} new ones, and "
                    f"{sequence.params.max_tokens} are wanted, {total} together; "
                    f"session_len is {session.session_len}"
                )
            if sequence.lora_name != session.lora_names[index]:
                raise RequestError(
                    f"lora_name of row {index} is {sequence.lora_name!r}; the session began with "
                    f"{session.lora_names[index]!r}"
                )
            whole.append(np.concatenate([row.tokens[:retained], prompt]))
        return whole

    def open(self, door: bytes, submit: Submit, session: Session) -> None:
        """Begin the round that `check` accepted, and end an older session of the same number."""
        assert submit.session is not None
        key, retained = (door, submit.session.session), submit.session.retained
        if self._sessions.get(key) is not session:
            self.end(door, submit.session.session)
            self._sessions[key] = session
            self._reserved += session.reserved
        self._sessions.move_to_end(key)
        session.running, session.used_at = len(session.rows), self._clock()
        for row, count in zip(session.rows, retained or [0] * len(session.rows)):
            row.reusable = count

    def store(self, door: bytes, number: int, row: SessionRow, tokens: np.ndarray, held: Held | None) -> None:
        """Store the tokens (n,) int32 of a sequence of the running round that has ended."""
        row.store(self._index, tokens, held, self._limits.block_tokens)
        session = self._sessions[door, number]
        session.running -= 1
        session.used_at = self._clock()

    def end(self, door: bytes, number: int, reason: str = "it was ended") -> None:
        """Forget a session that has no running round; an unknown one is ignored."""
        session = self._sessions.pop((door, number), None)
        if session is None:
            return
        for row in session.rows:
            row.forget(self._index)
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
        """End the sessions that were idle for too long. Checks at most twice a second."""
        if not self._sessions or (now := self._clock()) < self._next_look:
            return
        self._next_look = now + _EXPIRY_S
        for (door, number), session in list(self._sessions.items()):
            if not session.running and now - session.used_at > session.idle_s:
                self.end(door, number, f"it was idle for more than {session.idle_s:g} s")
