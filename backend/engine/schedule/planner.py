"""The planner: it chooses the sequences of the next step and builds its arrays. Host only: no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tridecode.backend.engine.cache.cache_manager import NO_RING, CacheManager
from tridecode.backend.engine.cache.sessions import Held
from tridecode.backend.engine.parts.adapters import AdapterRows
from tridecode.backend.engine.parts.embeddings import ContextEmbeddings
from tridecode.backend.engine.parts.forks import Forks
from tridecode.backend.engine.parts.prompt_tables import PromptTables
from tridecode.backend.engine.parts.top_tokens import TopTokens
from tridecode.backend.engine.prompt_tables.book import PromptBook, vocabulary_tokens
from tridecode.backend.engine.schedule import sequence_outputs as extras
from tridecode.backend.engine.schedule.admission import Counters, LazyHeap, SchedulerLimits
from tridecode.backend.engine.schedule.beam_planner import BeamPlanner, beam_rows
from tridecode.backend.engine.schedule.drafts import Drafter, DraftPlanner
from tridecode.backend.engine.schedule.prompt_spread import Spread
from tridecode.backend.engine.schedule.sequence import Sequence, SequenceGroup, Stage
from tridecode.backend.engine.step.plan import SlotStart, StepPart, StepPlan

#: While sequences queue for slots, free slots stay empty until 1 / HELD_SHARE of all slots are free, or for
#: HELD_STEPS steps at most: the fixed cost of a prefill step is 1.5 ms (LLaMA-3-8B on an H200), and a slot
#: that stays empty for a step costs 0.04 ms.
HELD_SHARE, HELD_STEPS = 32, 8

#: The limit on the tokens of a step in which sequences decode: LLaMA-3-8B on an H200 takes 0.18 s for 8192
#: tokens, and no sequence gets its next token in that time
MIXED_TOKENS = 8192


@dataclass
class _DecodeRows:
    """The decoding sequences as arrays, while they are the same from step to step.

    slots: (B,) int32. positions: (B,) int32, of the next token. shifts: (B,) int32, added to them for the
    rotary table. rings: (B,) int32, see CacheManager; None if none has one. adapters: (B,) int32, -1 for
    none. top_log_probs: (B,) int32, as in TopTokens. steps_left: until the last token of one of them is in
    flight.
    """

    slots: np.ndarray
    positions: np.ndarray
    shifts: np.ndarray
    rings: np.ndarray | None
    adapters: np.ndarray
    top_log_probs: np.ndarray
    steps_left: int


class Planner:
    """The sequences that wait or run, by stage. Order is by priority, then arrival.

    A step has every decoding sequence and, within max_step_tokens, the next chunks of prompts; within
    MIXED_TOKENS where a sequence decodes. A sequence gets a slot and the blocks of its known tokens at
    admission, then one block more whenever its last is full. Where no block is free, the last in the order is
    preempted: it gives slot and blocks back, keeps its place in the order, and is computed again later. While
    nearly all slots are taken and more sequences wait than are free, these are filled several at a time
    (HELD_SHARE). Where sequences queue for few slots, their prompts are spread over the steps (spread.py).

    A sequence whose last token is in flight gives slot and blocks back: what is planned next runs after the
    step that still uses them. It keeps them for a session, whose blocks get their identity when the answer is
    known, and for other samples of its prompt, which share them.

    With longrope, all of a prompt of more than limits.long_prompt_tokens is rotated with the long factors:
    its positions are shifted to the second half of the rotary table. With limits.recompute_long, a sequence
    that grows beyond them is computed again so.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: CacheManager,
        counters: Counters,
        prompts: PromptBook | None = None,
    ):
        self.limits, self.cache, self.counters = limits, cache, counters
        self.prompts = prompts or PromptBook()
        self.waiting: LazyHeap[Sequence] = LazyHeap(lambda sequence: sequence.stage is Stage.WAITING)
        self._prefilling: list[Sequence] = []  # in order of admission
        self._decoding: list[Sequence] = []
        self._awaited: dict[Sequence, None] = {}  # decoding, waiting for their tokens in flight
        self._drained: list[Sequence] = []  # draining, and still with the slot that the plan before needed
        self.without_slot: set[Sequence] = set()  # draining, their slots given back
        self._rows: _DecodeRows | None = None  # of _decoding; None: to be rebuilt
        self._unstarted: list[Sequence] = []  # forks whose sampling state the next plan starts
        self._last_lengths = np.zeros(limits.max_sequences, np.int32)  # by slot: the last token is in flight
        self._shifts = np.zeros(limits.max_sequences, np.int32)  # by slot: added to rotary positions
        self.beams = BeamPlanner(limits, cache, self._shifts)
        self._steps = 0
        self._held = 0  # steps since sequences began to wait for more free slots
        self._spread = Spread(limits)
        self.num_extra_outputs = 0  # open sequences with extra_outputs; the scheduler counts them
        self.drafts: DraftPlanner | None = None  # of an engine with a drafter

    def use_drafter(self, drafter: Drafter) -> None:
        """Verify the tokens that the drafter proposes. Call this before the first plan."""
        self.drafts = DraftPlanner(drafter, self.limits, self.cache, self._last_lengths, self._shifts)

    @property
    def _waits(self) -> bool:
        """Return whether a sequence waits for the token of each of its rows before its next one."""
        return self.limits.micro_batches > 1 or (self.drafts is not None and self.drafts.needs_token)

    def wait(self, sequence: Sequence) -> None:
        self.waiting.push(sequence.order, sequence)

    def fork(self, parent: Sequence, child: Sequence, *, same_token: bool) -> None:
        """Place a new child: it decodes at once if it can share the parent's cache, otherwise it waits."""
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
        """Free the sequence's slot and blocks, if it has any."""
        self.without_slot.discard(sequence)
        if sequence.slot >= 0:
            self.cache.release(sequence)
            if sequence.stage is Stage.DECODE:
                self._set_decoding([s for s in self._decoding if s is not sequence])
            elif sequence.stage is Stage.PREFILL:
                self._prefilling = [s for s in self._prefilling if s is not sequence]
            else:
                self._awaited.pop(sequence, None)

    def resume(self, sequences: list[Sequence]) -> None:
        """Continue to decode the sequences whose tokens in flight are known, the longest waiting first."""
        known = [one for one in sequences if one.stage is Stage.AWAITED and not one.in_flight]
        for sequence in known:
            sequence.stage = Stage.DECODE
            del self._awaited[sequence]
        if known:
            self._set_decoding(self._decoding + known)

    def leave_beams(self, group: SequenceGroup) -> None:
        """Free the slots and blocks of a group's beams, if they have any."""
        self.beams.release(group)
        self._prefilling = [sequence for sequence in self._prefilling if sequence.group is not group]

    def held(self, sequence: Sequence) -> Held:
        """Return what a sequence with a slot has in the cache."""
        return self.cache.held(sequence, self._shifts.item(sequence.slot))

    def preempt(self, sequence: Sequence) -> None:
        """Free the cache of the sequence, or of all beams of its group; it is computed again later."""
        self.counters.preemptions += 1
        group = sequence.group
        if group.search is None:
            self.leave(sequence)
            sequence.restart()
            self.wait(sequence)
            return
        self.leave_beams(group)
        for beam in group.sequences:
            beam.restart()
        self.wait(group.sequences[0])

    def plan(self) -> StepPlan | None:
        """Return the next step, or None if there is nothing to do now."""
        self._release_drained()
        if self.limits.recompute_long and self.limits.long_prompt_tokens:
            self._recompute_outgrown()
        self._make_room()
        beams = self.beams.ready() if self.beams.running else []
        decodes = self._decoding if self.limits.micro_batches == 1 else self._micro_batch()
        chunks, starts = self._choose_chunks(self._budget(len(decodes) + len(beams)))
        return self._build(decodes, chunks, starts, beams) if decodes or chunks or beams else None

    def _budget(self, num_decodes: int) -> int:
        """Return the number of prompt tokens that a step with `num_decodes` decode rows may have."""
        limits = self.limits
        if num_decodes == 0:
            return limits.max_step_tokens
        return min(limits.max_step_tokens, max(MIXED_TOKENS, limits.max_sequences)) - num_decodes

    def _drain(self, sequence: Sequence) -> None:
        """Note that the last token of the sequence is in the plan that is being made."""
        sequence.stage, group = Stage.DRAINING, sequence.group
        if group.row is None and not group.has_samples:
            self._drained.append(sequence)

    def _release_drained(self) -> None:
        for sequence in self._drained:
            if sequence.slot >= 0 and sequence.stage is Stage.DRAINING:  # not ended since
                self.cache.release(sequence)
                self.without_slot.add(sequence)
        self._drained = []

    def _micro_batch(self) -> list[Sequence]:
        """Return the decoding sequences of the next plan: an equal share, the longest waiting first."""
        most = -(-(len(self._decoding) + len(self._awaited)) // self.limits.micro_batches)
        return self._decoding[:most]

    def _recompute_outgrown(self) -> None:
        """Preempt the sequences whose next token is the first beyond long_prompt_tokens."""
        rows = self._decode_rows()
        outgrown = (rows.positions == self.limits.long_prompt_tokens) & (rows.shifts == 0)
        for sequence in [self._decoding[i] for i in np.flatnonzero(outgrown).tolist()]:
            self.preempt(sequence)
        for beam in self.beams.ready():
            if beam.stage is not Stage.DECODE:  # its group has just been preempted
                continue
            length, shift = self.cache.lengths[beam.slot], self._shifts[beam.slot]
            if length == self.limits.long_prompt_tokens and shift == 0:
                self.preempt(beam)

    def _shift(self, sequence: Sequence) -> int:
        """Return the number that is added to the rotary positions of a sequence that is admitted."""
        tokens = sequence.num_known if self.limits.recompute_long else len(sequence.prompt)
        return self.limits.max_sequence_tokens if 0 < self.limits.long_prompt_tokens < tokens else 0

    def _make_room(self) -> None:
        """Give every decoding sequence a place for its next token; preempt sequences if no block is free."""
        offsets = self._decode_rows().positions % self.limits.block_tokens
        growing = self.cache.take_sharing()
        if np.count_nonzero(offsets) < len(offsets):
            growing += [self._decoding[i] for i in np.flatnonzero(offsets == 0).tolist()]
        if self.beams.running:
            growing += self.beams.ready()
        for sequence in growing:
            while sequence.stage is Stage.DECODE and not self.cache.make_room(sequence):
                running = (*self._decoding, *self._awaited, *self._prefilling, *self.beams.members())
                self.preempt(max(running, key=lambda s: s.order))

    def _choose_chunks(self, budget: int) -> tuple[list[tuple[Sequence, int, int]], list[SlotStart]]:
        """Return (sequence, first, count) of the chunks of prompts, and the starts of admitted sequences."""
        chunks, starts = [], []
        for sequence in self._prefilling:
            if budget <= 0:
                break
            if sequence.group.search is not None and not self.beams.may_prefill(sequence):
                continue
            chunks.append(self._chunk(sequence, budget))
            budget -= chunks[-1][2]
        least = budget - self._spread.tokens(len(self.waiting), self.cache.num_free_slots)
        while budget > max(least, 0) and (chunks or not self._holds_back()):
            admitted = self._admit()
            if admitted is None:
                break
            beams = admitted.group.sequences if admitted.group.search is not None else [admitted]
            starts += [self._start(sequence) for sequence in beams]
            chunks.append(self._chunk(admitted, budget))
            budget -= chunks[-1][2]
        return chunks, starts

    def _holds_back(self) -> bool:
        """Return whether the free slots stay empty for this step, see HELD_SHARE."""
        limits, free = self.limits, self.cache.num_free_slots
        saturated = 0 < free < limits.max_sequences // HELD_SHARE and len(self.waiting) > free
        if not saturated or not self._decoding or limits.micro_batches > 1 or self._held == HELD_STEPS:
            self._held = 0
            return False
        self._held += 1
        return True

    def _chunk(self, sequence: Sequence, budget: int) -> tuple[Sequence, int, int]:
        """Return (sequence, first, count) of the next chunk.

        A token that takes another's place in a ring is a chunk alone, because the tokens before it still
        attend to the replaced one."""
        first, ring = int(self.cache.lengths[sequence.slot]), int(self.cache.rings[sequence.slot])
        return sequence, first, min(sequence.prefill - first, budget, max(ring - first, 1))

    def _admit(self) -> Sequence | None:
        """Return the queue's first sequence with a slot and blocks for its tokens; None if it must wait."""
        sequence = self.waiting.first()
        # a preempted sequence waits for its tokens in flight: they are part of what is computed again
        if sequence is None or sequence.in_flight or not self.prompts.fits(sequence.group):
            return None
        group, admitted, shift = sequence.group, [sequence], self._shift(sequence)
        if group.search is not None:
            if not self.beams.admit(group):
                return None
            admitted = group.sequences
        else:
            prefix = self._prefix(sequence, shift) if group.has_samples else None
            if not self.cache.admit(sequence, shift, prefix):
                return None
        self.waiting.pop()
        group.admitted()
        for one in admitted:
            one.stage, one.prefill = Stage.PREFILL, one.num_known
            last = len(one.prompt) + one.params.max_tokens - 1
            self._last_lengths[one.slot] = last if group.search is None else 0  # beams decode elsewhere
            self._shifts[one.slot] = shift
            if group.learned is not None:
                lengths = self.cache.lengths
                lengths[one.slot] = self.prompts.admit(one, self.limits.block_tokens, int(lengths[one.slot]))
            self._prefilling.append(one)
        return sequence

    def _prefix(self, sequence: Sequence, shift: int) -> Sequence | None:
        """Return another sample that has the whole prompt in the cache, rotated in the same way."""
        length = len(sequence.prompt)
        for other in sequence.group.sequences:
            cached = self.cache.lengths[other.slot] if other.slot >= 0 else 0
            if cached >= length > 1 and self._shifts[other.slot] == shift:
                return other
        return None

    def _build(
        self,
        sequences: list[Sequence],
        chunks: list[tuple[Sequence, int, int]],
        starts: list[SlotStart],
        beams: list[Sequence],
    ) -> StepPlan:
        """Build the arrays of a step; advance the lengths in the cache and the tokens in flight.

        sequences: those that decode, the first of _decoding."""
        cache, num_decodes, queries = self.cache, len(sequences) + len(beams), 0
        rows = self._decode_rows() if len(sequences) == len(self._decoding) else self._rows_of(sequences)
        slots, adapters, tops = rows.slots, rows.adapters, rows.top_log_probs
        samples = np.ones(num_decodes + len(chunks), np.int32)
        query_starts = np.arange(num_decodes + len(chunks) + 1, dtype=np.int32)
        embeds: list[tuple[int, int]] = []
        if self.drafts is None or not sequences:
            positions = rows.positions
            kv_slots = cache.addresses(slots, positions if rows.rings is None else positions % rows.rings)
            positions = positions + rows.shifts
            token_ids = np.full(len(sequences), -1, np.int32)
            if self.limits.micro_batches > 1:
                token_ids[:] = [sequence.output[-1] for sequence in sequences]
            if self._unstarted:
                starts += self._start_forks(sequences, token_ids)
            self._advance_decodes(sequences, rows)
            context_lens = rows.positions if rows.rings is None else np.minimum(rows.positions, rows.rings)
        else:
            drafted = self.drafts.rows(sequences, *self._draft_budget(sequences, beams, chunks))
            token_ids, positions, kv_slots = drafted.token_ids, drafted.positions, drafted.kv_slots
            context_lens, queries, count = drafted.context_lens, drafted.queries, len(sequences)
            query_starts[:count] = drafted.starts[:-1]
            query_starts[count:] += drafted.starts[-1] - count
            samples[:count] = np.diff(drafted.starts)
            if self._unstarted:
                starts += self._start_forks(sequences, token_ids, drafted.starts)
            self._advance_drafted(sequences)
        if beams:
            more = self.beams.take_rows(beams)
            sequences = sequences + beams
            token_ids = np.concatenate([token_ids, more.token_ids])
            positions = np.concatenate([positions, more.positions])
            kv_slots = np.concatenate([kv_slots, more.kv_slots])
            slots = np.concatenate([slots, more.slots])
            adapters = np.concatenate([adapters, more.adapters])
            tops = np.concatenate([tops, _top_log_probs(beams)])
            context_lens = np.concatenate([context_lens, cache.lengths[more.slots]])
        if chunks:
            sequences = sequences + [sequence for sequence, _, _ in chunks]
            built = [self._build_chunk(*chunk) for chunk in chunks]
            token_ids = np.concatenate([token_ids, *(part[0] for part in built)])
            positions = np.concatenate([positions, *(part[1] for part in built)])
            kv_slots = np.concatenate([kv_slots, *(part[2] for part in built)])
            slots = np.concatenate([slots, np.array([sequence.slot for sequence, _, _ in chunks], np.int32)])
            adapters = np.concatenate([adapters, _adapters([sequence for sequence, _, _ in chunks])])
            tops = np.concatenate([tops, _top_log_probs([sequence for sequence, _, _ in chunks])])
            own = slots[num_decodes:]
            context_lens = np.concatenate([context_lens, np.minimum(cache.lengths[own], cache.rings[own])])
            ends = query_starts[num_decodes] + np.cumsum([count for _, _, count in chunks])
            query_starts[num_decodes + 1 :] = ends
            samples[num_decodes:] = [self._finish_chunk(sequence) for sequence, _, _ in chunks]
            embeds = _embeds(chunks, num_decodes)
            self._prefilling = [s for s in self._prefilling if s.stage is Stage.PREFILL]
        self._spread.note(sum(count for _, _, count in chunks))
        lens = np.minimum(cache.lengths[slots], cache.rings[slots]) if queries else context_lens
        columns = -(-int(lens.max()) // cache.block_tokens)
        slot_copies, block_copies = cache.take_copies()
        prompts = self.prompts.take(
            chunks, token_ids, query_starts[num_decodes:], cache.take_cleared(), block_copies
        )
        # what a part does for a request's events comes before the beams, which may end it
        parts: list[StepPart] = []
        if prompts is not None:
            parts.append(PromptTables(prompts))
        if (adapters >= 0).any():
            parts.append(AdapterRows(adapters))
        if slot_copies or block_copies:
            parts.append(Forks(slot_copies, block_copies))
        if embeds:
            parts.append(ContextEmbeddings(embeds))
        if (tops >= 0).any():
            parts.append(TopTokens(tops))
        self._steps += 1
        plan = StepPlan(
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
            queries=queries,
            starts=starts,
            parts=parts,
            sequences=sequences,
        )
        if self.num_extra_outputs:
            extras.note_step(plan, chunks)
        if self.beams.running:
            _mark_beams(plan)
        return plan

    def _decode_rows(self) -> _DecodeRows:
        if self._rows is None:
            self._rows = self._rows_of(self._decoding)
        return self._rows

    def _rows_of(self, sequences: list[Sequence]) -> _DecodeRows:
        slots = np.array([sequence.slot for sequence in sequences], np.int32)
        positions = self.cache.lengths[slots]
        steps_left = (self._last_lengths[slots] - positions).min(initial=self.limits.max_sequence_tokens)
        shifts, adapters = self._shifts[slots], _adapters(sequences)
        rings, tops = self.cache.rings[slots], _top_log_probs(sequences)
        some = rings if (rings < NO_RING).any() else None
        return _DecodeRows(slots, positions, shifts, some, adapters, tops, int(steps_left))

    def _set_decoding(self, decoding: list[Sequence]) -> None:
        self._decoding, self._rows = decoding, None

    def _draft_budget(
        self, sequences: list[Sequence], beams: list[Sequence], chunks: list[tuple[Sequence, int, int]]
    ) -> tuple[int, bool]:
        """Return (tokens that a step's decode rows may have beyond one each, whether any row may)."""
        limits, rows = self.limits, len(sequences) + len(beams)
        tokens = rows + sum(count for _, _, count in chunks)
        budget = min(limits.max_sequences - rows - len(chunks), limits.max_step_tokens - tokens)
        simple = not beams and not self.num_extra_outputs and not limits.long_prompt_tokens
        others = [sequence for sequence, _, _ in chunks] + sequences
        return budget, simple and all(one.params.top_log_probs < 0 for one in others)

    def _advance_drafted(self, sequences: list[Sequence]) -> None:
        """Advance the rows of a step with drafts.

        A row that may have the sequence's last token in flight is not planned again before its tokens are
        known; with needs_token or micro-batches no row is."""
        rest, lengths = self._decoding[len(sequences) :], self.cache.lengths
        goes_on = []
        for sequence in sequences:
            length = lengths.item(sequence.slot)
            if self._waits or length >= self._last_lengths[sequence.slot]:
                self._await(sequence, length)
            else:
                goes_on.append(sequence)
        self._set_decoding(goes_on + rest)

    def settle(self, plan: StepPlan, row: int, kept: int) -> None:
        """Note that decode row `row` of a plan that verifies keeps its first `kept` tokens."""
        planned = plan.samples.item(row)
        if self.drafts is not None and (planned > 1 or plan.context_lens.item(row) < 0):
            self.drafts.settle(plan.sequences[row], planned, kept)
            self._rows = None

    def _start_forks(
        self, decodes: list[Sequence], token_ids: np.ndarray, tokens: np.ndarray | None = None
    ) -> list[SlotStart]:
        """Return the starts of the forks among the decode rows, and write their newest token, which the
        device does not know, to token_ids.

        tokens: the first token of each row; None: rows have one."""
        waiting = [sequence for sequence in self._unstarted if sequence.stage is Stage.DECODE]
        forks = [sequence for sequence in waiting if sequence in decodes]
        self._unstarted = [sequence for sequence in waiting if sequence not in decodes]
        for sequence in forks:
            row = decodes.index(sequence)
            token_ids[row if tokens is None else tokens[row]] = sequence.output[-1]
        return [self._start(sequence) for sequence in forks]

    def _advance_decodes(self, sequences: list[Sequence], rows: _DecodeRows) -> None:
        """Count one more token in flight for each row.

        One whose last token is in flight is not planned again; with micro-batches none is until `resume`."""
        rows.positions = rows.positions + 1
        rows.steps_left -= 1
        self.cache.lengths[rows.slots] = rows.positions
        for sequence in sequences:
            sequence.in_flight += 1
        if self.limits.micro_batches > 1:
            self._set_decoding(self._decoding[len(sequences) :])
            for sequence, length in zip(sequences, rows.positions.tolist()):
                self._await(sequence, length)
            return
        if rows.steps_left == 0:
            for i in np.flatnonzero(rows.positions >= self._last_lengths[rows.slots]).tolist():
                self._drain(self._decoding[i])
            self._set_decoding([s for s in self._decoding if s.stage is Stage.DECODE])

    def _await(self, sequence: Sequence, length: int) -> None:
        """Do not plan the sequence, with `length` tokens in the cache, before its tokens are known."""
        if sequence.group.search is not None:  # BeamPlanner has it
            sequence.stage = Stage.AWAITED
        elif length >= self._last_lengths[sequence.slot] and not sequence.unsettled:
            self._drain(sequence)
        else:
            sequence.stage = Stage.AWAITED
            self._awaited[sequence] = None

    def _build_chunk(
        self, sequence: Sequence, first: int, count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        positions = np.arange(first, first + count, dtype=np.int32)
        self.cache.lengths[sequence.slot] = first + count
        addresses = self.cache.addresses(sequence.slot, positions % self.cache.rings[sequence.slot])
        positions += self._shifts[sequence.slot]
        return sequence.known_tokens()[first : first + count], positions, addresses

    def _start(self, sequence: Sequence) -> SlotStart:
        history = vocabulary_tokens(sequence)
        return SlotStart(sequence.slot, sequence.params, history, len(sequence.output), sequence.top_p)

    def _finish_chunk(self, sequence: Sequence) -> bool:
        """Return whether all known tokens are planned now, so that the row's last token is sampled from."""
        length = self.cache.lengths[sequence.slot]
        if length < sequence.prefill:
            return False
        sequence.in_flight += 1
        for follower in sequence.group.followers:
            self.wait(follower)
        sequence.group.followers = []
        if length >= self._last_lengths[sequence.slot] or self._waits:
            self._await(sequence, int(length))
        else:
            sequence.stage = Stage.DECODE
            self._set_decoding([*self._decoding, sequence])
        return True


def _mark_beams(plan: StepPlan) -> None:
    """Name the rows of beams, which get candidates in place of a token."""
    sampled = np.flatnonzero(plan.samples)
    is_decode = (sampled < plan.num_decodes).tolist()
    beams = beam_rows([plan.sequences[row] for row in sampled.tolist()], is_decode)
    if beams is not None:
        plan.parts.append(beams)
        plan.slots = plan.slots.copy()
        plan.slots[sampled[beams.rows]] = -1


def _adapters(sequences: list[Sequence]) -> np.ndarray:
    """Return (n,) int32: the number of each sequence's adapter, -1 for none."""
    return np.array([sequence.group.adapter for sequence in sequences], np.int32)


def _top_log_probs(sequences: list[Sequence]) -> np.ndarray:
    """Return (n,) int32: how many of the most likely tokens each sequence returns, -1 for none."""
    return np.array([sequence.params.top_log_probs for sequence in sequences], np.int32)


def _embeds(chunks: list[tuple[Sequence, int, int]], num_decodes: int) -> list[tuple[int, int]]:
    """Return (row, tokens of the prompt in its chunk) for the requests that return the prompt's context
    embedding.
    """
    return [
        (row, max(min(first + count, len(sequence.prompt)) - first, 0))
        for row, (sequence, first, count) in enumerate(chunks, start=num_decodes)
        if sequence.params.return_context_embedding and not sequence.embedding_done
    ]
