"""Which sequences run next: admission, chunked prefill, decoding, preemption, cancellation. Host only: no
torch.

A step takes every decoding sequence and, with the tokens that are left of its budget, the next chunks of
prompts. A sequence gets a slot and the blocks of its whole prompt when it is admitted and one block more as
it grows; when none is left, the sequence that came last gives its blocks back and is computed again later
(recompute). Order is by priority, then arrival; a preempted sequence keeps its place in that order.

`plan` may run while the step before is still on the device: a decoding row then continues from a token the
host has not seen. What that step's commit ends is dropped from the next one's results.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Callable

import numpy as np

from tridecode.backend import messages
from tridecode.backend.engine.block_pool import BlockPool
from tridecode.backend.engine.plan import SlotStart, StepPlan, StepResult
from tridecode.backend.engine.sequence import Finish, Sequence, Stage
from tridecode.backend.errors import (
    CapacityError,
    DeadlineError,
    RequestCancelled,
    RequestError,
    TridecodeError,
)
from tridecode.backend.messages import Event, Submit


@dataclass(frozen=True)
class SchedulerLimits:
    """Sizes the scheduler works with. max_step_tokens >= max_sequences."""

    num_blocks: int
    block_tokens: int
    max_sequences: int
    max_sequence_tokens: int
    max_step_tokens: int
    max_queued_requests: int
    vocab_size: int
    request_timeout_s: float
    max_bad_word_tokens: int = 256
    max_stop_word_tokens: int = 1024


@dataclass
class Counters:
    """Totals since the engine started; gauges are the scheduler's properties."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    cancelled: int = 0


class Scheduler:
    """All sequences of the engine. Used by the loop's thread only. `clock` gives monotonic seconds."""

    def __init__(self, limits: SchedulerLimits, clock: Callable[[], float]):
        assert limits.max_step_tokens >= limits.max_sequences
        self.limits, self.clock = limits, clock
        self.pool = BlockPool(limits.num_blocks)
        self.counters = Counters()
        columns = -(-limits.max_sequence_tokens // limits.block_tokens)
        self._tables = np.zeros((limits.max_sequences, columns), np.int32)
        self._cached = np.zeros(limits.max_sequences, np.int32)
        self._free_slots = list(range(limits.max_sequences))
        heapq.heapify(self._free_slots)
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # a heap; some of them may have ended
        self._num_waiting = 0  # of _waiting, without those that have ended
        self._num_open = 0  # sequences that have not ended
        self._prefilling: list[Sequence] = []  # in order of admission
        self._decoding: list[Sequence] = []
        self._decode_slots: np.ndarray | None = None  # of _decoding; None: to be rebuilt
        self._requests: dict[tuple[bytes, int], list[Sequence]] = {}  # sequences that have not ended
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._events: list[tuple[bytes, Event]] = []
        self._arrivals = 0
        self._steps = 0

    # ------------------------------------------------------------ requests

    @property
    def num_running(self) -> int:
        return self.limits.max_sequences - len(self._free_slots)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def submit(self, door: bytes, submit: Submit) -> None:
        """Accept a request, or raise RequestError or CapacityError; then nothing of it is kept."""
        key = (door, submit.request)
        if key in self._requests:
            raise RequestError(f"request {submit.request} is already running")
        self._check_room(len(submit.sequences))
        now = self.clock()
        deadline = now + (submit.timeout_s or self.limits.request_timeout_s)
        sequences = []
        for index, wanted in enumerate(submit.sequences):
            prompt = np.frombuffer(wanted.prompt, np.int32)
            self._check(prompt, wanted.params, index)
            sequences.append(
                Sequence(
                    door,
                    submit.request,
                    index,
                    prompt,
                    wanted.params,
                    self._arrivals,
                    submit.priority,
                    deadline,
                )
            )
            self._arrivals += 1
        self.counters.requests += 1
        self.counters.prompt_tokens += sum(len(sequence.prompt) for sequence in sequences)
        self._requests[key] = list(sequences)
        self._num_open += len(sequences)
        for sequence in sequences:
            self._wait(sequence)
            if sequence.params.max_tokens == 0 and not sequence.params.return_context_embedding:
                self._end(sequence, Finish.LENGTH)
            else:
                heapq.heappush(self._deadlines, (deadline, sequence.arrival, sequence))

    def _check_room(self, count: int) -> None:
        """RequestError or CapacityError where `count` more sequences would be too many.

        max_queued_requests counts sequences that wait beyond those for which a slot is free.
        """
        limits = self.limits
        if count > limits.max_sequences + limits.max_queued_requests:
            self.counters.refused += 1
            raise RequestError(
                f"the request has {count:,} sequences; this model accepts "
                f"{limits.max_sequences + limits.max_queued_requests:,} "
                "(max_sequences and max_queued_requests in config.pbtxt)"
            )
        if self._num_waiting + count > limits.max_queued_requests + len(self._free_slots):
            self.counters.refused += 1
            raise CapacityError(
                f"{self._num_waiting:,} sequences are waiting already and the request has {count:,} more; "
                f"{limits.max_queued_requests:,} may wait (max_queued_requests in config.pbtxt); "
                "try again later"
            )

    def _wait(self, sequence: Sequence) -> None:
        """Queue a sequence. Those that ended in the queue leave it when they are most of it."""
        if len(self._waiting) > 2 * self._num_waiting + 1024:
            self._waiting = [entry for entry in self._waiting if entry[1].stage is Stage.WAITING]
            heapq.heapify(self._waiting)
        heapq.heappush(self._waiting, (sequence.order, sequence))
        self._num_waiting += 1

    def _check(self, prompt: np.ndarray, params: messages.SamplingParams, index: int) -> None:
        """The engine's own checks: a door has made them too, but the engine trusts none of them."""
        limits = self.limits
        fault = messages.check(params)
        if fault is None and len(prompt) == 0:
            fault = "the prompt has no tokens; wanted 1 or more"
        if fault is None and (prompt.min() < 0 or prompt.max() >= limits.vocab_size):
            wrong = int(prompt[(prompt < 0) | (prompt >= limits.vocab_size)][0])
            fault = f"the prompt has token id {wrong}; this model has ids 0 to {limits.vocab_size - 1}"
        if fault is None and len(prompt) + params.max_tokens > limits.max_sequence_tokens:
            fault = (
                f"the prompt has {len(prompt)} tokens and {params.max_tokens} are wanted, "
                f"{len(prompt) + params.max_tokens} together; this model accepts "
                f"{limits.max_sequence_tokens} (max_sequence_tokens in config.pbtxt)"
            )
        if fault is None:
            needed = -(-(len(prompt) + params.max_tokens) // limits.block_tokens)
            if needed > limits.num_blocks:
                fault = (
                    f"the prompt and the tokens wanted need {needed} cache blocks; "
                    f"the cache has {limits.num_blocks} (cache_bytes in config.pbtxt)"
                )
        for name, words, most in (
            ("bad", params.bad_words, limits.max_bad_word_tokens),
            ("stop", params.stop_words, limits.max_stop_word_tokens),
        ):
            count = sum(len(word) for word in words)
            if fault is None and count > most:
                limit = f"{most} (max_{name}_word_tokens in config.pbtxt)"
                fault = f"the {name} words have {count} tokens; this model accepts {limit}"
            if fault is None and any(not 0 <= token < limits.vocab_size for word in words for token in word):
                fault = f"a {name} word has a token id outside 0 to {limits.vocab_size - 1}"
            if fault is None and name == "bad" and any(not word for word in words):
                fault = "a bad word has no tokens"
        if fault is not None:
            raise RequestError(fault if index == 0 else f"sequence {index}: {fault}")

    def cancel(self, door: bytes, request: int) -> None:
        """End what is left of a request; its blocks are free at once. An unknown one has ended already."""
        for sequence in list(self._requests.get((door, request), ())):
            self.counters.cancelled += 1
            self._end(sequence, Finish.CANCELLED, RequestCancelled("the request was cancelled"))

    def cancel_door(self, door: bytes) -> None:
        """The door has gone: end all its requests."""
        for owner, request in [key for key in self._requests if key[0] == door]:
            self.cancel(owner, request)

    def fail_all(self, error: TridecodeError) -> None:
        for sequences in list(self._requests.values()):
            for sequence in list(sequences):
                self._end(sequence, Finish.ERROR, error)

    def take_events(self) -> list[tuple[bytes, Event]]:
        """What happened since the last call, in order, each with its door."""
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------ plan

    def plan(self) -> StepPlan | None:
        """The next step, or None where there is nothing to do now."""
        self._end_overdue()
        starts: list[SlotStart] = []
        decoding = self._plan_decodes()
        budget = self.limits.max_step_tokens - len(decoding)
        chunks = self._plan_chunks(budget, starts)
        if not decoding and not chunks:
            return None
        return self._build(decoding, chunks, starts)

    def _end_overdue(self) -> None:
        if len(self._deadlines) > 4 * self._num_open + 1024:  # most of them have ended
            self._deadlines = [entry for entry in self._deadlines if entry[2].stage is not Stage.ENDED]
            heapq.heapify(self._deadlines)
        while self._deadlines and self._deadlines[0][0] <= self.clock():
            _, _, sequence = heapq.heappop(self._deadlines)
            if sequence.stage is not Stage.ENDED:
                done = f"{len(sequence.output)} of {sequence.params.max_tokens} tokens"
                text = f"the request's deadline passed when it had {done}"
                self._end(sequence, Finish.DEADLINE, DeadlineError(text))

    def _plan_decodes(self) -> list[Sequence]:
        """Every decoding sequence, each with the block its next token needs; preempts where there is none."""
        size = self.limits.block_tokens
        growing = [s for s in self._decoding if s.cached == len(s.blocks) * size]
        for sequence in growing:
            while sequence.stage is Stage.DECODE and not self.pool.num_free:
                self._preempt(self._last_comer())
            if sequence.stage is Stage.DECODE:
                self._give_blocks(sequence, 1)
        return self._decoding

    def _last_comer(self) -> Sequence:
        running = [s for s in (*self._decoding, *self._prefilling) if s.blocks]
        return max(running, key=lambda s: s.order)

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.preemptions += 1
        self._leave(sequence)
        sequence.restart()
        self._wait(sequence)

    def _plan_chunks(self, budget: int, starts: list[SlotStart]) -> list[tuple[Sequence, int]]:
        """(sequence, tokens) of the prompts' chunks of this step; admits from the queue."""
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self._prefilling:
            if budget <= 0:
                return chunks
            count = min(sequence.prefill - sequence.cached, budget)
            chunks.append((sequence, count))
            budget -= count
        while budget > 0:
            admitted = self._admit()
            if admitted is None:
                break
            starts.append(
                SlotStart(
                    admitted.slot,
                    admitted.params,
                    admitted.known_tokens(),
                    len(admitted.output),
                    admitted.top_p,
                )
            )
            count = min(admitted.prefill, budget)
            chunks.append((admitted, count))
            budget -= count
        return chunks

    def _admit(self) -> Sequence | None:
        """The first of the queue, with a slot and the blocks of all it has to compute; None where it must
        wait."""
        while self._waiting and self._waiting[0][1].stage is Stage.ENDED:
            heapq.heappop(self._waiting)
        if not self._waiting or not self._free_slots:
            return None
        sequence = self._waiting[0][1]
        needed = -(-sequence.num_known // self.limits.block_tokens)
        # a preempted sequence waits for its tokens in flight: they are part of what is computed again
        if sequence.in_flight or needed > self.pool.num_free:
            return None
        heapq.heappop(self._waiting)
        self._num_waiting -= 1
        sequence.slot = heapq.heappop(self._free_slots)
        sequence.stage = Stage.PREFILL
        sequence.prefill = sequence.num_known
        self._cached[sequence.slot] = 0
        self._give_blocks(sequence, needed)
        self._prefilling.append(sequence)
        return sequence

    def _give_blocks(self, sequence: Sequence, count: int) -> None:
        held = len(sequence.blocks)
        sequence.blocks += self.pool.allocate(count)
        self._tables[sequence.slot, held : held + count] = sequence.blocks[held:]

    def _build(
        self, decoding: list[Sequence], chunks: list[tuple[Sequence, int]], starts: list[SlotStart]
    ) -> StepPlan:
        """The arrays of a step; advances what the sequences have in the cache and in flight."""
        size, num_decodes = self.limits.block_tokens, len(decoding)
        slots = self._slots_of_decoding()
        positions = self._cached[slots]
        self._cached[slots] += 1
        token_ids = np.full(num_decodes, -1, np.int32)
        kv_slots = self._tables[slots, positions // size] * size + positions % size
        sequences = list(decoding)
        samples = np.ones(num_decodes + len(chunks), bool)
        query_starts = np.arange(num_decodes + len(chunks) + 1, dtype=np.int32)
        self._advance_decodes(decoding)
        if chunks:
            parts = [self._build_chunk(sequence, count) for sequence, count in chunks]
            token_ids = np.concatenate([token_ids, *(part[0] for part in parts)])
            positions = np.concatenate([positions, *(part[1] for part in parts)])
            kv_slots = np.concatenate([kv_slots, *(part[2] for part in parts)])
            slots = np.concatenate([slots, np.array([sequence.slot for sequence, _ in chunks], np.int32)])
            query_starts[num_decodes + 1 :] = num_decodes + np.cumsum([count for _, count in chunks])
            samples[num_decodes:] = [self._finish_chunk(sequence) for sequence, _ in chunks]
            sequences += [sequence for sequence, _ in chunks]
            self._prefilling = [s for s in self._prefilling if s.stage is Stage.PREFILL]
        context_lens = self._cached[slots]
        columns = -(-int(context_lens.max()) // size)
        self._steps += 1
        return StepPlan(
            step=self._steps,
            token_ids=token_ids,
            positions=positions,
            kv_slots=kv_slots,
            block_tables=self._tables[slots, :columns],
            context_lens=context_lens,
            query_starts=query_starts,
            slots=slots,
            samples=samples,
            num_decodes=num_decodes,
            starts=starts,
            embeds=self._embeds(chunks, num_decodes),
            sequences=sequences,
        )

    def _slots_of_decoding(self) -> np.ndarray:
        if self._decode_slots is None:
            self._decode_slots = np.array([sequence.slot for sequence in self._decoding], np.int32)
        return self._decode_slots

    def _advance_decodes(self, decoding: list[Sequence]) -> None:
        """Each row has one more token in flight; a row that will then have all it may generate is not planned
        again."""
        drained = False
        for sequence in decoding:
            sequence.cached += 1
            sequence.in_flight += 1
            if len(sequence.output) + sequence.in_flight >= sequence.params.max_tokens:
                sequence.stage = Stage.DRAINING
                drained = True
        if drained:
            self._set_decoding([s for s in decoding if s.stage is Stage.DECODE])

    def _set_decoding(self, decoding: list[Sequence]) -> None:
        self._decoding, self._decode_slots = decoding, None

    def _build_chunk(self, sequence: Sequence, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        size, first = self.limits.block_tokens, sequence.cached
        positions = np.arange(first, first + count, dtype=np.int32)
        kv_slots = self._tables[sequence.slot, positions // size] * size + positions % size
        sequence.cached += count
        self._cached[sequence.slot] = sequence.cached
        return sequence.known_tokens()[first : first + count], positions, kv_slots

    def _finish_chunk(self, sequence: Sequence) -> bool:
        """Whether the sequence's known tokens are all planned now, so that its last row is sampled."""
        if sequence.cached < sequence.prefill:
            return False
        sequence.in_flight += 1
        if len(sequence.output) + sequence.in_flight >= sequence.params.max_tokens:
            sequence.stage = Stage.DRAINING
        else:
            sequence.stage = Stage.DECODE
            self._set_decoding([*self._decoding, sequence])
        return True

    @staticmethod
    def _embeds(chunks: list[tuple[Sequence, int]], num_decodes: int) -> list[tuple[int, int]]:
        """(row, tokens of the prompt in its chunk) where the prompt's context embedding was asked for."""
        embeds = []
        for row, (sequence, count) in enumerate(chunks, start=num_decodes):
            if sequence.params.return_context_embedding and not sequence.embedding_done:
                first = sequence.cached - count
                embeds.append((row, max(min(sequence.cached, len(sequence.prompt)) - first, 0)))
        return embeds

    # ------------------------------------------------------------ commit

    def commit(self, plan: StepPlan, result: StepResult) -> list[tuple[bytes, Event]]:
        """Take a step's tokens: append them, end what they end. Returns the events since the last commit."""
        for (row, _), embedding in zip(plan.embeds, result.embeddings):
            sequence = plan.sequences[row]
            sequence.embedding = embedding if sequence.embedding is None else sequence.embedding + embedding
        tokens, log_probs = result.tokens.tolist(), result.log_probs.tolist()
        sampled = plan.sequences
        if not plan.samples.all():
            sampled = [sequence for sequence, samples in zip(plan.sequences, plan.samples) if samples]
        for sequence, token, log_prob in zip(sampled, tokens, log_probs):
            sequence.in_flight -= 1
            if sequence.stage is Stage.ENDED:  # it ended while this step was on the device
                continue
            self._take(sequence, token, log_prob)
        return self.take_events()

    def _take(self, sequence: Sequence, token: int, log_prob: float) -> None:
        if sequence.params.max_tokens == 0:  # only its context embedding was wanted
            self._end(sequence, Finish.LENGTH)
            return
        finish = sequence.append(token)
        self.counters.output_tokens += 1
        logs = [log_prob] if sequence.params.return_log_probs else []
        if finish is None:
            self._events.append(
                (
                    sequence.door,
                    Event(
                        sequence.request,
                        sequence.index,
                        [token],
                        logs,
                        context_embedding=_take_embedding(sequence),
                    ),
                )
            )
        else:
            self._end(sequence, finish, tokens=[token], log_probs=logs)

    def abandon(self, plan: StepPlan, error: TridecodeError) -> None:
        """A step failed for want of memory: its prompts get the error, its decoding rows are computed
        again."""
        for row, sequence in enumerate(plan.sequences):
            if sequence.stage is Stage.ENDED:
                continue
            if plan.samples[row]:
                sequence.in_flight -= 1
            if row >= plan.num_decodes:
                self._end(sequence, Finish.ERROR, error)
            else:
                self._preempt(sequence)

    def _end(
        self,
        sequence: Sequence,
        finish: Finish,
        error: TridecodeError | None = None,
        tokens: list[int] | None = None,
        log_probs: list[float] | None = None,
    ) -> None:
        """End a sequence: its slot and blocks are free, its last event is out."""
        self._leave(sequence)
        if sequence.stage is Stage.WAITING:
            self._num_waiting -= 1
        self._num_open -= 1
        sequence.stage = Stage.ENDED
        key = (sequence.door, sequence.request)
        siblings = self._requests[key]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[key]
        self._events.append(
            (
                sequence.door,
                Event(
                    sequence.request,
                    sequence.index,
                    tokens or [],
                    log_probs or [],
                    finish.value,
                    str(error) if error else "",
                    error.code if error else "",
                    _take_embedding(sequence),
                ),
            )
        )

    def _leave(self, sequence: Sequence) -> None:
        """Give slot and blocks back. A step on the device may still write them: what reuses them runs after
        it."""
        if sequence.slot >= 0:
            heapq.heappush(self._free_slots, sequence.slot)
            self.pool.release(sequence.blocks)
            if sequence.stage is Stage.DECODE:
                self._set_decoding([s for s in self._decoding if s is not sequence])
            elif sequence.stage is Stage.PREFILL:
                self._prefilling = [s for s in self._prefilling if s is not sequence]
            sequence.slot, sequence.blocks = -1, []


def _take_embedding(sequence: Sequence) -> bytes:
    """The context embedding with the sequence's first token, once."""
    if sequence.embedding is None or sequence.embedding_done:
        return b""
    sequence.embedding_done = True
    return sequence.embedding.astype(np.float32).tobytes()
