"""What a request may want besides its tokens: logits, the prompt's log probability, performance metrics.

Host only: no torch. A sequence that wants any of it has an `Extras`; the others have None, and a step without
such sequences does nothing here. `note_step` adds to a plan what it returns (parts/returned_logits.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from tridecode.backend.base.errors import CapacityError, RequestError
from tridecode.backend.engine.parts.returned_logits import LogitRows, ReturnedLogits
from tridecode.backend.engine.prompt_tables.book import ordinary_runs
from tridecode.backend.engine.schedule.sequence import Sequence
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.wire.messages import EventExtra, Perf, SequenceRequest
from tridecode.backend.wire.sampling_params import SamplingParams

_ITEM = 4  # bytes of a logit: float32
#: the logits of all open requests may have this many times the bytes of one request's limit
_OPEN_REQUESTS = 4


def wants_extras(params: SamplingParams) -> bool:
    return (
        params.return_context_logits
        or params.return_generation_logits
        or params.return_context_log_prob
        or params.return_perf_metrics
    )


def needs_prompt(params: SamplingParams) -> bool:
    """Whether the prompt must run even for a request of no new tokens."""
    return params.return_context_embedding or params.return_context_logits or params.return_context_log_prob


def logits_bytes(prompt: int, params: SamplingParams, vocab_size: int) -> int:
    """Of the logits that a sequence returns; prompt: its tokens."""
    rows = prompt if params.return_context_logits else 0
    rows += params.max_tokens * params.num_sequences if params.return_generation_logits else 0
    return rows * vocab_size * _ITEM


def check_round(params: SamplingParams) -> None:
    """RequestError for a round of a session that wants what only a computed prompt gives: most of its prompt
    is in the cache already."""
    if params.return_context_logits or params.return_context_log_prob:
        raise RequestError(
            "logits or log probabilities of the prompt are wanted in a session, which does not compute its "
            "earlier tokens again; send the prompt as a request of its own"
        )


@dataclass
class Extras:
    """Of one sequence. planned: positions of the prompt whose logits were planned; they run once, also if the
    sequence is preempted. The others are results that no event has carried yet.

    context: (n, V) float32 bytes. generation: (n, V) float32 bytes. log_prob: of the prompt so far.
    """

    planned: int = 0
    arrived_ns: int = field(default_factory=time.time_ns)
    scheduled_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    blocks: int = 0  # of the cache, held at most
    reused: int = 0  # of these, taken over from an earlier request
    context: list[bytes] = field(default_factory=list)
    generation: list[bytes] = field(default_factory=list)
    log_prob: float = 0.0

    @property
    def has_news(self) -> bool:
        """Whether there is something that must not wait for the next token."""
        return bool(self.context)

    def split(self, sequence: Sequence) -> Extras:
        """Of a fork: the prompt's are its parent's."""
        return Extras(len(sequence.prompt), self.arrived_ns, self.scheduled_ns)

    def take(self, params: SamplingParams, has_token: bool, finished: bool) -> EventExtra | None:
        """What the next event carries; None if nothing."""
        perf = self._perf(has_token) if params.return_perf_metrics and (has_token or finished) else None
        log_prob, self.log_prob = self.log_prob, 0.0
        context, self.context = self.context, []
        generation, self.generation = self.generation, []
        if not (context or generation or log_prob or perf):
            return None
        return EventExtra(b"".join(context), b"".join(generation), log_prob, perf)

    def _perf(self, has_token: bool) -> Perf:
        """As of now: a door may end the text before the engine does."""
        if has_token:
            self.last_ns = time.time_ns()
            self.first_ns = self.first_ns or self.last_ns
        new = self.blocks - self.reused
        return Perf(self.arrived_ns, self.scheduled_ns, self.first_ns, self.last_ns, new, self.reused)


def note_step(plan: StepPlan, chunks: Items[tuple[Sequence, int, int]]) -> None:
    """Add to a plan the logits that its sequences want. chunks: (sequence, first, count) of its last rows."""
    ends, wanted = np.cumsum(plan.samples), ReturnedLogits()
    for row, sequence in enumerate(plan.sequences):
        if sequence.extras is None:
            continue
        sequence.extras.blocks = max(sequence.extras.blocks, len(sequence.blocks))
        params = sequence.params
        if params.return_generation_logits and params.max_tokens and plan.samples[row]:
            wanted.samples.append(int(ends[row]) - 1)
    for row, (sequence, first, count) in enumerate(chunks, start=plan.num_rows - len(chunks)):
        if sequence.extras is not None:
            extras = sequence.extras
            extras.scheduled_ns = extras.scheduled_ns or time.time_ns()
            wanted.rows += _prompt_rows(sequence, extras, row, first, count)
    if wanted.rows or wanted.samples:
        plan.parts.append(wanted)


def _prompt_rows(sequence: Sequence, extras: Extras, row: int, first: int, count: int) -> list[LogitRows]:
    """What of a chunk, positions first .. first + count, is the prompt's and was not planned before."""
    begin, end = max(first, extras.planned), min(first + count, len(sequence.prompt))
    if begin >= end:
        return []
    extras.planned, wanted, params = end, [], sequence.params
    following = sequence.prompt[begin + 1 : end + 1]
    if params.return_context_logits:
        for start, stop in ordinary_runs(sequence, sequence.prompt[begin:end]):
            wanted.append(LogitRows(row, begin - first + start, stop - start))
    if params.return_context_log_prob and len(following):
        for start, stop in ordinary_runs(sequence, following):
            wanted.append(LogitRows(row, begin - first + start, stop - start, following[start:stop]))
    return wanted


class LogitsBudget:
    """Bounds the bytes of logits: of one request, and of all open ones together.

    most: of one request (max_logits_bytes in config.pbtxt)."""

    def __init__(self, most: int, vocab_size: int):
        self._most, self._vocab_size = most, vocab_size
        self._held: dict[object, int] = {}

    def reserve(self, key: object, sequences: Items[SequenceRequest], resumed: bool = False) -> None:
        """Count a request's logits until `release`. RequestError if they are too many, CapacityError if they
        are too many now. resumed: an engine that is gone had accepted them, so twice as many are allowed."""
        sizes = [logits_bytes(len(one.prompt) // 4, one.params, self._vocab_size) for one in sequences]
        total = sum(sizes)
        if not total:
            return
        if total > self._most:
            raise RequestError(
                f"the request wants {total:,} bytes of logits; this model accepts {self._most:,} "
                "(max_logits_bytes in config.pbtxt)"
            )
        held = sum(self._held.values())
        if held + total > _OPEN_REQUESTS * self._most * (2 if resumed else 1):
            raise CapacityError(
                f"open requests want {held:,} bytes of logits and this one {total:,} more; together they may "
                f"have {_OPEN_REQUESTS * self._most:,} ({_OPEN_REQUESTS} times max_logits_bytes); try again "
                "later"
            )
        self._held[key] = total

    def release(self, key: object) -> None:
        if self._held:
            self._held.pop(key, None)
