"""Which sequences run in the next step, and the arrays of that step. Host only: no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tridecode.backend.engine.admission import Counters, LazyHeap, SchedulerLimits
from tridecode.backend.engine.cache_manager import CacheManager
from tridecode.backend.engine.plan import SlotStart, StepPlan
from tridecode.backend.engine.sequence import Sequence, Stage


@dataclass
class _DecodeRows:
    """The decoding sequences as arrays, while they are the same from step to step.

    slots: (B,) int32. positions: (B,) int32, of the next token. shifts: (B,) int32, added to them for the
    rotary table. adapters: (B,) int32, -1 for none. steps_left: until the last token of one of them is in
    flight."""

    slots: np.ndarray
    positions: np.ndarray
    shifts: np.ndarray
    adapters: np.ndarray
    steps_left: int


class Planner:
    """The sequences that wait or run, by stage. Order is by priority, then arrival.

    A step has every decoding sequence and, within max_step_tokens, the next chunks of prompts. A sequence
    gets a slot and the blocks of its known tokens at admission, then one block more whenever its last is
    full. Where no block is free, the last in the order is preempted: it gives slot and blocks back, keeps its
    place in the order, and is computed again later.

    With longrope, all of a prompt of more than limits.long_prompt_tokens is rotated with the long factors:
    its positions are shifted to the second half of the rotary table. With limits.recompute_long, a sequence
    that grows beyond them is computed again so.
    """

    def __init__(self, limits: SchedulerLimits, cache: CacheManager, counters: Counters):
        self.limits, self.cache, self.counters = limits, cache, counters
        self.waiting: LazyHeap[Sequence] = LazyHeap(lambda sequence: sequence.stage is Stage.WAITING)
        self._prefilling: list[Sequence] = []  # in order of admission
        self._decoding: list[Sequence] = []
        self._rows: _DecodeRows | None = None  # of _decoding; None: to be rebuilt
        self._unstarted: list[Sequence] = []  # forks whose sampling state the next plan starts
        self._last_lengths = np.zeros(limits.max_sequences, np.int32)  # by slot: the last token is in flight
        self._shifts = np.zeros(limits.max_sequences, np.int32)  # by slot: added to rotary positions
        self._steps = 0

    def wait(self, sequence: Sequence) -> None:
        self.waiting.push(sequence.order, sequence)

    def fork(self, parent: Sequence, child: Sequence, *, same_token: bool) -> None:
        """Place a child that has just split off. It decodes at once where it can share the parent's cache,
        else it waits."""
        copy_state = same_token and parent not in self._unstarted
        settled = parent.stage is Stage.DECODE and parent.in_flight == 0
        if not (settled and self.cache.fork(parent, child, copy_state=copy_state)):
            self.wait(child)
            return
        if not copy_state:
            self._unstarted.append(child)
        self._last_lengths[child.slot] = self._last_lengths[parent.slot]
        self._shifts[child.slot] = self._shifts[parent.slot]
        child.stage = Stage.DECODE
        self._set_decoding([*self._decoding, child])

    def leave(self, sequence: Sequence) -> None:
        """The sequence gives its slot and blocks back, if it has any."""
        if sequence.slot >= 0:
            self.cache.release(sequence)
            if sequence.stage is Stage.DECODE:
                self._set_decoding([s for s in self._decoding if s is not sequence])
            elif sequence.stage is Stage.PREFILL:
                self._prefilling = [s for s in self._prefilling if s is not sequence]

    def preempt(self, sequence: Sequence) -> None:
        self.counters.preemptions += 1
        self.leave(sequence)
        sequence.restart()
        self.wait(sequence)

    def plan(self) -> StepPlan | None:
        """The next step, or None where there is nothing to do now."""
        if self.limits.recompute_long and self.limits.long_prompt_tokens:
            self._recompute_outgrown()
        self._make_room()
        chunks, starts = self._choose_chunks(self.limits.max_step_tokens - len(self._decoding))
        return self._build(chunks, starts) if self._decoding or chunks else None

    def _recompute_outgrown(self) -> None:
        """Preempt the sequences whose next token is the first beyond long_prompt_tokens."""
        rows = self._decode_rows()
        outgrown = (rows.positions == self.limits.long_prompt_tokens) & (rows.shifts == 0)
        for sequence in [self._decoding[i] for i in np.flatnonzero(outgrown).tolist()]:
            self.preempt(sequence)

    def _shift(self, sequence: Sequence) -> int:
        """What is added to the rotary positions of a sequence that is admitted."""
        tokens = sequence.num_known if self.limits.recompute_long else len(sequence.prompt)
        return self.limits.max_sequence_tokens if 0 < self.limits.long_prompt_tokens < tokens else 0

    def _make_room(self) -> None:
        """Give every decoding sequence a place for its next token; preempts where no block is free."""
        offsets = self._decode_rows().positions % self.limits.block_tokens
        growing = self.cache.take_sharing()
        if np.count_nonzero(offsets) < len(offsets):
            growing += [self._decoding[i] for i in np.flatnonzero(offsets == 0).tolist()]
        for sequence in growing:
            while sequence.stage is Stage.DECODE and not self.cache.make_room(sequence):
                self.preempt(max((*self._decoding, *self._prefilling), key=lambda s: s.order))

    def _choose_chunks(self, budget: int) -> tuple[list[tuple[Sequence, int, int]], list[SlotStart]]:
        """(sequence, first, count) of the chunks of prompts, and the starts of the sequences admitted."""
        chunks, starts = [], []
        for sequence in self._prefilling:
            if budget <= 0:
                break
            first = int(self.cache.lengths[sequence.slot])
            chunks.append((sequence, first, min(sequence.prefill - first, budget)))
            budget -= chunks[-1][2]
        while budget > 0:
            admitted = self._admit()
            if admitted is None:
                break
            starts.append(_start(admitted))
            chunks.append((admitted, 0, min(admitted.prefill, budget)))
            budget -= chunks[-1][2]
        return chunks, starts

    def _admit(self) -> Sequence | None:
        """The first of the queue, with a slot and the blocks of its known tokens; None where it must wait."""
        sequence = self.waiting.first()
        # a preempted sequence waits for its tokens in flight: they are part of what is computed again
        if sequence is None or sequence.in_flight or not self.cache.admit(sequence):
            return None
        self.waiting.pop()
        sequence.stage, sequence.prefill = Stage.PREFILL, sequence.num_known
        self._last_lengths[sequence.slot] = len(sequence.prompt) + sequence.params.max_tokens - 1
        self._shifts[sequence.slot] = self._shift(sequence)
        self._prefilling.append(sequence)
        return sequence

    def _build(self, chunks: list[tuple[Sequence, int, int]], starts: list[SlotStart]) -> StepPlan:
        """The arrays of a step. Advances the lengths in the cache and the tokens in flight."""
        cache, sequences, num_decodes = self.cache, self._decoding, len(self._decoding)
        rows = self._decode_rows()
        slots, positions = rows.slots, rows.positions
        kv_slots = cache.addresses(slots, positions)
        positions = positions + rows.shifts
        token_ids = np.full(num_decodes, -1, np.int32)
        samples = np.ones(num_decodes + len(chunks), np.int32)
        query_starts = np.arange(num_decodes + len(chunks) + 1, dtype=np.int32)
        if self._unstarted:
            starts += self._start_forks(token_ids)
        adapters = rows.adapters
        embeds: list[tuple[int, int]] = []
        self._advance_decodes(rows)
        context_lens = rows.positions
        if chunks:
            sequences = sequences + [sequence for sequence, _, _ in chunks]
            parts = [self._build_chunk(*chunk) for chunk in chunks]
            token_ids = np.concatenate([token_ids, *(part[0] for part in parts)])
            positions = np.concatenate([positions, *(part[1] for part in parts)])
            kv_slots = np.concatenate([kv_slots, *(part[2] for part in parts)])
            slots = np.concatenate([slots, np.array([sequence.slot for sequence, _, _ in chunks], np.int32)])
            adapters = np.concatenate([adapters, _adapters([sequence for sequence, _, _ in chunks])])
            context_lens = cache.lengths[slots]
            query_starts[num_decodes + 1 :] = num_decodes + np.cumsum([count for _, _, count in chunks])
            samples[num_decodes:] = [self._finish_chunk(sequence) for sequence, _, _ in chunks]
            embeds = _embeds(chunks, num_decodes)
            self._prefilling = [s for s in self._prefilling if s.stage is Stage.PREFILL]
        columns = -(-int(context_lens.max()) // cache.block_tokens)
        slot_copies, block_copies = cache.take_copies()
        self._steps += 1
        return StepPlan(
            step=self._steps,
            token_ids=token_ids,
            positions=positions,
            kv_slots=kv_slots,
            block_tables=cache.tables[slots, :columns],
            context_lens=context_lens,
            query_starts=query_starts,
            slots=slots,
            samples=samples,
            num_decodes=num_decodes,
            starts=starts,
            embeds=embeds,
            slot_copies=slot_copies,
            block_copies=block_copies,
            adapters=adapters if (adapters >= 0).any() else None,
            sequences=sequences,
        )

    def _decode_rows(self) -> _DecodeRows:
        if self._rows is None:
            slots = np.array([sequence.slot for sequence in self._decoding], np.int32)
            positions = self.cache.lengths[slots]
            steps_left = (self._last_lengths[slots] - positions).min(initial=self.limits.max_sequence_tokens)
            shifts, adapters = self._shifts[slots], _adapters(self._decoding)
            self._rows = _DecodeRows(slots, positions, shifts, adapters, int(steps_left))
        return self._rows

    def _set_decoding(self, decoding: list[Sequence]) -> None:
        self._decoding, self._rows = decoding, None

    def _start_forks(self, token_ids: np.ndarray) -> list[SlotStart]:
        """Starts of the forks that still decode; their newest token, which the device does not know, goes to
        token_ids."""
        forks = [sequence for sequence in self._unstarted if sequence.stage is Stage.DECODE]
        self._unstarted = []
        for sequence in forks:
            token_ids[self._decoding.index(sequence)] = sequence.output[-1]
        return [_start(sequence) for sequence in forks]

    def _advance_decodes(self, rows: _DecodeRows) -> None:
        """Each row has one more token in flight; a row whose last token is in flight is not planned again."""
        rows.positions = rows.positions + 1
        rows.steps_left -= 1
        self.cache.lengths[rows.slots] = rows.positions
        for sequence in self._decoding:
            sequence.in_flight += 1
        if rows.steps_left == 0:
            for i in np.flatnonzero(rows.positions >= self._last_lengths[rows.slots]).tolist():
                self._decoding[i].stage = Stage.DRAINING
            self._set_decoding([s for s in self._decoding if s.stage is Stage.DECODE])

    def _build_chunk(
        self, sequence: Sequence, first: int, count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        positions = np.arange(first, first + count, dtype=np.int32)
        self.cache.lengths[sequence.slot] = first + count
        addresses = self.cache.addresses(sequence.slot, positions)
        positions += self._shifts[sequence.slot]
        return sequence.known_tokens()[first : first + count], positions, addresses

    def _finish_chunk(self, sequence: Sequence) -> bool:
        """Whether all known tokens are planned now, so that the row's last token is sampled from."""
        length = self.cache.lengths[sequence.slot]
        if length < sequence.prefill:
            return False
        sequence.in_flight += 1
        if length >= self._last_lengths[sequence.slot]:
            sequence.stage = Stage.DRAINING
        else:
            sequence.stage = Stage.DECODE
            self._set_decoding([*self._decoding, sequence])
        return True


def _start(sequence: Sequence) -> SlotStart:
    return SlotStart(
        sequence.slot, sequence.params, sequence.known_tokens(), len(sequence.output), sequence.top_p
    )


def _adapters(sequences: list[Sequence]) -> np.ndarray:
    """(n,) int32: the number of each sequence's adapter, -1 for none."""
    return np.array([sequence.group.adapter for sequence in sequences], np.int32)


def _embeds(chunks: list[tuple[Sequence, int, int]], num_decodes: int) -> list[tuple[int, int]]:
    """(row, tokens of the prompt in its chunk) for the requests that want the prompt's context embedding."""
    return [
        (row, max(min(first + count, len(sequence.prompt)) - first, 0))
        for row, (sequence, first, count) in enumerate(chunks, start=num_decodes)
        if sequence.params.return_context_embedding and not sequence.embedding_done
    ]
