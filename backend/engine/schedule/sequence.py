"""One generation in progress: its tokens, its slot and blocks, and what ends it. Plain Python: no torch."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from tridecode.backend.base.errors import RequestError, TridecodeError
from tridecode.backend.engine.cache.prompt_keys import PromptKeys
from tridecode.backend.engine.cache.sessions import SessionRow
from tridecode.backend.engine.grammars.constraint import Constraint
from tridecode.backend.engine.prompt_tables.held_prompt import HeldPrompt
from tridecode.backend.engine.schedule.extra_outputs import ExtraOutputs
from tridecode.backend.engine.schedule.prompt_embedding import PromptEmbedding
from tridecode.backend.engine.speculation.records import GRAMMAR, NO_GAP, DraftRecord
from tridecode.backend.wire.beam_tree import BeamText
from tridecode.backend.wire.messages import BeamStep, Event, TopLogProbs
from tridecode.backend.wire.sampling_params import SamplingParams


class Finish(str, enum.Enum):
    """The reason why a sequence ended; the door receives the value."""

    END_ID = "end_id"
    STOP_WORD = "stop_word"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class Stage(enum.Enum):
    WAITING = 0  # for a slot and blocks
    PREFILL = 1  # has a slot; part of its known tokens is not in the cache yet
    DECODE = 2
    DRAINING = 3  # its last token is in flight
    ENDED = 4
    AWAITED = 5  # as DECODE, but its tokens in flight must be known before the next is planned


class Search(Protocol):
    """The beam search of a group (beams.BeamSearch)."""

    first: Sequence
    params: SamplingParams
    width: int
    is_over: bool

    def take(self, sequence: Sequence, ids: np.ndarray, log_probs: np.ndarray) -> bool: ...

    def forget(self) -> None: ...

    def restore(self, texts: list[BeamText]) -> None: ...

    def advance(self) -> BeamStep: ...

    def event(self, step: BeamStep) -> Event: ...

    def last_events(
        self, finish: Finish | None, error: TridecodeError | None, step: BeamStep | None
    ) -> list[Event]: ...


@dataclass(eq=False)
class SequenceGroup:
    """The sequences that continue one prompt: one, and more when it forks (beams, n samples).

    door, request: the receiver of their events. prompt: (n,) int32. priority: smaller is sooner; arrival
    breaks ties. deadline: monotonic seconds. lora_name: of the adapter, "" for none; adapter: its number in
    plans once it is loaded, -1 before and for none; adapter_digest: see Loaded.digest. learned: its table of
    virtual tokens (book.py), None for none. session, row: of a session's round, the session's number within
    the door and what the session keeps of the conversation. sequences: those that have not ended.
    """

    door: bytes
    request: int
    prompt: np.ndarray
    priority: int
    arrival: int
    deadline: float
    lora_name: str = ""
    adapter: int = -1
    adapter_digest: bytes = b""
    learned: HeldPrompt | None = None
    session: int = -1
    row: SessionRow | None = None
    sequences: list[Sequence] = field(default_factory=list)
    num_forks: int = 0
    #: samples that wait until the first sequence has computed the prompt
    followers: list[Sequence] = field(default_factory=list)
    has_samples: bool = False  # more than one sequence from the start
    search: Search | None = None  # set for a beam search; `sequences` are the beams that run
    arrived: float = field(default_factory=time.monotonic)
    queued_s: float = 0.0  # until its first admission; 0.0 before it, and after an event has reported it
    chain: PromptKeys | None = None  # None: it neither uses nor fills the prefix index
    late_masks: bool = False  # its rows may be launched before their masks are known
    cached_tokens: int = 0  # of the prompt, found at its first admission; 0 after an event has reported it

    def admitted(self, cached_tokens: int, cached_blocks: int, missed_blocks: int) -> None:
        """Note that a slot and blocks are assigned, and how many of them were found in the cache and missed
        there. Only the first time counts; a request that an earlier engine had begun computed its prompt
        there.
        """
        if self.arrived:
            self.queued_s, self.arrived = time.monotonic() - self.arrived, 0.0
            first = self.sequences[0]
            if first.output:
                return
            self.cached_tokens = min(cached_tokens, len(self.prompt))
            if first.extra_outputs is not None:
                first.extra_outputs.reused, first.extra_outputs.missed = cached_blocks, missed_blocks

    def take_queued(self) -> float:
        """Return the seconds in the queue, for the first event after the admission; 0.0 for later ones."""
        queued_s, self.queued_s = self.queued_s, 0.0
        return queued_s

    def take_cached(self) -> int:
        """Return the prompt tokens found in the cache, for the first event after the admission; 0 for later
        ones.
        """
        cached_tokens, self.cached_tokens = self.cached_tokens, 0
        return cached_tokens


@dataclass(eq=False)
class Sequence:
    """State of one sequence. `in_flight` advances when a step is planned, `output` when it is committed.

    index: of the sequence within its request, for its events. fork: 0, or its number among the group's forks.
    prefill: tokens to compute before decoding: the prompt and, after a preemption, the output so far.
    in_flight: tokens that planned steps will yield and that are not committed yet. unsettled: of their rows,
    those that may keep fewer tokens than they have.
    embedding: the vector of its prompt, until an event takes it; None if the request wants none.
    """

    group: SequenceGroup
    index: int
    params: SamplingParams
    fork: int = 0

    output: list[int] = field(default_factory=list)
    stage: Stage = Stage.WAITING
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    prefill: int = 0
    in_flight: int = 0
    unsettled: int = 0
    embedding: PromptEmbedding | None = None
    tops: list[TopLogProbs] = field(default_factory=list)  # of the tokens that are committed now
    extra_outputs: ExtraOutputs | None = None  # set if it wants logits or metrics
    constraint: Constraint | None = None  # of a sequence that obeys a grammar
    mask: bytes = b""  # of its context (block_keys.py), since its admission
    num_indexed: int = 0  # leading blocks that have an identity
    #: identities, without the mask, of the full blocks after the group's chain, as far as computed
    answer_keys: list[bytes] = field(default_factory=list)
    fetches: int = 0  # number of times that it waited for blocks of the host tier
    fetched: int = 0  # blocks that were copied in for it since its last admission
    #: the step in flight copies blocks of it in and computes it; their checksums are not known yet
    arriving: bool = False
    draft_record: DraftRecord | None = None  # set while its rows have drafts
    forced_record: DraftRecord | None = None  # of the drafts that its grammar forces
    draft_gap: int = NO_GAP  # first position that the drafter's cache lacks (cache/draft_keys.py)
    overtaken: int = 0  # number of sequences behind it that were admitted before it
    awaited: int = 0  # leading tokens of its prompt for whose blocks a more urgent prompt waits

    def __post_init__(self) -> None:
        self.prompt = self.group.prompt
        self.order = (self.group.priority, self.group.arrival, self.fork)
        self._end_ids = frozenset(self.params.end_ids)
        self._longest_stop = max((len(word) for word in self.params.stop_words), default=0)
        self.group.sequences.append(self)

    @property
    def num_known(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.prompt) + len(self.output)

    @property
    def top_p(self) -> float:
        """Return its value now: decayed with every output token, reset by top_p_reset_id."""
        params, top_p = self.params, self.params.top_p
        if params.top_p_decay < 1.0:
            for token in self.output:
                reset = token == params.top_p_reset_id
                top_p = params.top_p if reset else max(top_p * params.top_p_decay, params.top_p_min)
        return top_p

    @property
    def own_record(self) -> DraftRecord | None:
        """Return the record of the drafts that its next row has."""
        constraint = self.constraint
        if constraint is None or (constraint.drafts and not constraint.is_forced):
            return self.draft_record
        if self.forced_record is None:
            self.forced_record = DraftRecord(source=GRAMMAR)
        return self.forced_record

    @property
    def draft_counts(self) -> tuple[int, int]:
        """Return how many drafts steps have verified for it, and how many were right."""
        known = [one for one in (self.draft_record, self.forced_record) if one is not None]
        return sum(one.drafted for one in known), sum(one.accepted for one in known)

    def known_tokens(self) -> np.ndarray:
        """Return (num_known,) int32: the prompt and the output so far."""
        return (
            np.concatenate([self.prompt, np.asarray(self.output, np.int32)]) if self.output else self.prompt
        )

    def tokens_of(self, first: int, last: int) -> np.ndarray:
        """Return the known tokens first .. last - 1."""
        if first >= len(self.prompt):  # avoids a copy of all tokens
            behind = len(self.prompt)
            return np.asarray(self.output[first - behind : last - behind], np.int32)
        return self.known_tokens()[first:last]

    def append(self, token: int) -> Finish | None:
        """Take a new token. Returns the reason if it ends the sequence."""
        self.output.append(token)
        return self._end_of(token)

    def end_with(self, token: int) -> Finish | None:
        """Return what `append` would return."""
        self.output.append(token)
        finish = self._end_of(token)
        self.output.pop()
        return finish

    def _end_of(self, token: int) -> Finish | None:
        params = self.params
        if token in self._end_ids:
            return Finish.END_ID
        if self._longest_stop and self._stops():
            return Finish.STOP_WORD
        if len(self.output) >= params.max_tokens:
            return Finish.LENGTH
        return None

    def _stops(self) -> bool:
        """Return whether the last tokens equal a stop word; it may begin in the prompt, as in
        FasterTransformer.
        """
        tail = self.output[-self._longest_stop :]
        if len(tail) < self._longest_stop:
            missing = self._longest_stop - len(tail)
            tail = self.prompt[max(len(self.prompt) - missing, 0) :].tolist() + tail
        return any(
            tail[-len(word) :] == word for word in self.params.stop_words if 0 < len(word) <= len(tail)
        )

    def take_embedding(self) -> bytes:
        """Return the vector of the prompt as float32 bytes, once, with the first token or the end."""
        if self.embedding is None:
            return b""
        value, self.embedding = self.embedding.value(), None
        return b"" if value is None else value.astype(np.float32).tobytes()

    def take_tops(self, count: int) -> list[TopLogProbs]:
        """Return the most likely tokens of the committed step, for an event with its next `count` tokens."""
        taken, self.tops = self.tops[:count], self.tops[count:]
        return taken

    @property
    def may_continue(self) -> bool:
        """Return whether its next token may be planned, once its tokens in flight are known."""
        return self.constraint is None or self.constraint.ready

    @property
    def waits_for_mask(self) -> bool:
        """Return whether each of its tokens must be known before the next is planned."""
        if self.constraint is None:
            return False
        return not self.group.late_masks or self.extra_outputs is not None or self.params.top_log_probs >= 0

    @property
    def has_news(self) -> bool:
        """Return whether a result must not wait for the next token."""
        return self.extra_outputs is not None and self.extra_outputs.has_news

    def split(self, index: int) -> Sequence:
        """Return a sequence of the same group with the same tokens, without slot and blocks."""
        self.group.num_forks += 1
        child = Sequence(self.group, index, self.params, self.group.num_forks, self.output.copy())
        child.extra_outputs = (
            self.extra_outputs.split(len(self.prompt)) if self.extra_outputs is not None else None
        )
        return child

    def restart(self) -> None:
        """Forget what was computed: all known tokens are computed again after the next admission."""
        self.stage = Stage.WAITING
        if self.embedding is not None:
            self.embedding.restart()


def no_token_error(sequence: Sequence) -> RequestError:
    """Return the error for a sequence if every id is impossible as its next token."""
    allowed = "allowed_token_ids" if sequence.params.allowed_token_ids else "the model"
    if sequence.constraint is not None:
        allowed = "the grammar"
    return RequestError(
        f"no token is possible after {len(sequence.prompt)} tokens of prompt and {len(sequence.output)} of "
        f"output: bad words, repeated n-grams, and end ids before min_tokens, exclude every id that "
        f"{allowed} allows"
    )


def add_samples(first: Sequence) -> None:
    """Add the other samples of a prompt: sample i has the seed of the first plus i.

    They wait until the first has computed the prompt.
    """
    group, params = first.group, first.params
    group.has_samples = True
    for i in range(1, params.num_return_sequences):
        seed = (params.seed + i) % 2**64
        sample = Sequence(group, first.index + i, msgspec.structs.replace(params, seed=seed), i)
        if first.extra_outputs is not None:
            sample.extra_outputs = first.extra_outputs.split(len(sample.prompt))
        group.followers.append(sample)
