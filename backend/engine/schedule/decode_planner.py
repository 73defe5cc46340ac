"""The decoding sequences and their rows of a step. Host only: no torch."""

from __future__ import annotations

import numpy as np

from tridecode.backend.engine.cache.cache_manager import NO_RING, CacheManager
from tridecode.backend.engine.schedule.admission import SchedulerLimits
from tridecode.backend.engine.schedule.drafts import Drafter, DraftPlanner
from tridecode.backend.engine.schedule.rows import (
    DecodeBatch,
    Rows,
    adapters_of,
    slot_start,
    top_log_probs_of,
)
from tridecode.backend.engine.schedule.sequence import Sequence, Stage
from tridecode.backend.engine.speculation.learning import Learning
from tridecode.backend.engine.step.plan import SlotStart


class DecodePlanner:
    """The sequences after their prefill, until their last token. BeamPlanner has those of beam searches.

    A sequence whose last token is in flight drains: it gives slot and blocks back with the next plan, which
    runs after the step that still uses them. It keeps them for a session, whose blocks get their identity
    when the answer is known, for other samples of its prompt, which share them, and if the tokens in flight
    fill a block, which gets its identity (prefix_cache.py) when they are known, or copies are in flight that
    decide whether its tokens count.
    """

    def __init__(self, limits: SchedulerLimits, cache: CacheManager):
        self._limits, self._cache = limits, cache
        self.decoding: list[Sequence] = []
        self._awaited: dict[Sequence, None] = {}  # decoding, waiting for their tokens in flight
        self._drained: list[Sequence] = []  # draining, and still with the slot that the plan before needed
        self.without_slot: set[Sequence] = set()  # draining, their slots given back
        self._unstarted: list[Sequence] = []  # forks whose sampling state the next plan starts
        self._batch: DecodeBatch | None = None  # of `decoding`; None: to be rebuilt
        self._moved = False  # whether its positions are to be read again
        self._last_lengths = np.zeros(limits.max_sequences, np.int32)  # by slot: the last token is in flight
        self.drafts: DraftPlanner | None = None  # of an engine with a drafter

    def use_drafter(self, drafter: Drafter, learning: Learning | None = None, most_forced: int = 0) -> None:
        """Verify the tokens that the drafter proposes, and up to most_forced in a row that grammars force.
        Call this before the first plan."""
        self.drafts = DraftPlanner(
            drafter, self._limits, self._cache, self._last_lengths, learning, most_forced
        )

    # ------------------------------------------------------------ which sequences decode

    def admit(self, sequence: Sequence) -> None:
        """Note that the sequence got its slot: from which length on its last token is in flight."""
        last = len(sequence.prompt) + sequence.params.max_tokens - 1
        self._last_lengths[sequence.slot] = last if sequence.group.search is None else 0

    def begin(self, sequence: Sequence) -> None:
        """Take a sequence whose known tokens are all planned; beams then belong to BeamPlanner."""
        length = self._cache.lengths.item(sequence.slot)
        waits = self._waits or sequence.waits_for_mask or sequence.arriving
        if length >= self._last_lengths[sequence.slot] or waits:
            self._await(sequence, length)
        else:
            sequence.stage = Stage.DECODE
            self._set_decoding([*self.decoding, sequence])

    def fork(self, parent: Sequence, child: Sequence, *, same_token: bool) -> bool:
        """Let a new child decode at once; return False if it cannot share the parent's cache.

        same_token: the child has the parent's newest token, too."""
        copy_state = same_token and parent not in self._unstarted
        settled = parent.stage is Stage.DECODE and parent.in_flight == 0
        if settled and self.drafts is not None:
            self.drafts.trim(parent)
        if not (settled and self._cache.fork(parent, child, copy_state=copy_state)):
            return False
        if not copy_state:
            self._unstarted.append(child)
        self._last_lengths[child.slot] = self._last_lengths[parent.slot]
        child.stage = Stage.DECODE
        self._set_decoding([*self.decoding, child])
        return True

    def resume(self, sequences: list[Sequence]) -> None:
        """Continue to decode the sequences whose tokens in flight are known, the longest waiting first."""
        if not self._awaited:
            return
        awaited = [one for one in sequences if one.stage is Stage.AWAITED]
        known = [one for one in awaited if not one.in_flight and one.may_continue]
        for sequence in known:
            sequence.stage = Stage.DECODE
            del self._awaited[sequence]
        if known:
            self._set_decoding(self.decoding + known)

    def hold_unready(self) -> None:
        """Let the sequences wait whose last token is known and whose next mask is not."""
        held = [one for one in self._current().masked if not one.in_flight and not one.may_continue]
        for sequence in held:
            self._await(sequence, self._cache.lengths.item(sequence.slot))
        if held:
            self._set_decoding([one for one in self.decoding if one.stage is Stage.DECODE])

    def miss(self, sequence: Sequence) -> None:
        """Take back the row of the newest plan that was not sampled, because its mask came too late. The
        sequence waits for `resume`.
        """
        self._cache.lengths[sequence.slot] -= 1
        sequence.in_flight -= 1
        sequence.stage = Stage.AWAITED
        self._awaited[sequence] = None
        self._set_decoding([one for one in self.decoding if one is not sequence])

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence whose slot and blocks are given back."""
        if sequence.stage is Stage.DECODE:
            self._set_decoding([one for one in self.decoding if one is not sequence])
        else:
            self._awaited.pop(sequence, None)

    def release_drained(self) -> None:
        """Give back the slots and blocks that the plan before needed for the last time."""
        for sequence in self._drained:
            if sequence.slot >= 0 and sequence.stage is Stage.DRAINING:  # not ended since
                self._cache.release(sequence)
                self.without_slot.add(sequence)
        self._drained = []

    def running(self) -> list[Sequence]:
        """Return the sequences that may be preempted."""
        return [*self.decoding, *self._awaited]

    def growing(self) -> list[Sequence]:
        """Return the sequences whose next token begins a block, by its place in the sequence."""
        offsets = self._current().positions % self._limits.block_tokens
        if np.count_nonzero(offsets) == len(offsets):
            return []
        return [self.decoding[i] for i in np.flatnonzero(offsets == 0).tolist()]

    def outgrown(self, tokens: int) -> list[Sequence]:
        """Return the sequences whose next token is the first beyond `tokens`, and whose rotary positions are
        not shifted."""
        batch = self._current()
        outgrown = (batch.positions == tokens) & (batch.shifts == 0)
        return [self.decoding[i] for i in np.flatnonzero(outgrown).tolist()]

    def next_batch(self) -> list[Sequence]:
        """Return the decoding sequences of the next plan, the longest waiting first: all, or an equal share
        with micro-batches."""
        if self._limits.micro_batches == 1:
            return self.decoding
        most = -(-(len(self.decoding) + len(self._awaited)) // self._limits.micro_batches)
        return self.decoding[:most]

    # ------------------------------------------------------------ rows of a step

    def take_rows(self, sequences: list[Sequence], draft_budget: int = 0) -> Rows:
        """Return the rows of the sequences that `next_batch` returned; advance their lengths in the cache and
        their tokens in flight.

        draft_budget: drafts that all rows together may have, in an engine with a drafter.
        """
        batch = self._current() if len(sequences) == len(self.decoding) else self._batch_of(sequences)
        if self.drafts is not None:
            counts = self.drafts.counts(sequences, draft_budget, bool(batch.masked))
            if counts is not None or (self.drafts.needs_token and self._limits.micro_batches == 1):
                counts = counts or [0] * len(sequences)
                return self._draft_rows(self.drafts, sequences, batch, counts, draft_budget)
        cache, positions = self._cache, batch.positions
        kv_slots = cache.addresses(batch.slots, positions if batch.rings is None else positions % batch.rings)
        token_ids = np.full(len(sequences), -1, np.int32)
        if self._limits.micro_batches > 1:
            token_ids[:] = [sequence.output[-1] for sequence in sequences]
        starts = self._start_forks(sequences, token_ids, batch.query_starts) if self._unstarted else []
        masked, late = batch.masked, []
        if masked:
            masked = [one for one in masked if not one.in_flight]
            if len(masked) < len(batch.masked):
                late = [i for i, one in enumerate(sequences) if one.constraint is not None and one.in_flight]
        self._advance(sequences, batch)
        lens = batch.positions if batch.rings is None else np.minimum(batch.positions, batch.rings)
        return Rows(
            sequences,
            token_ids,
            positions + batch.shifts,
            kv_slots,
            batch.query_starts,
            batch.slots,
            lens,
            batch.samples,
            batch.adapters,
            batch.top_log_probs,
            starts=starts,
            masked=masked,
            late=late,
        )

    def settle(self, sequence: Sequence, planned: int, accepted: int) -> None:
        """Note that a row of `planned` tokens of a step that verifies keeps the first `accepted`."""
        if self.drafts is not None:
            self.drafts.settle(sequence, planned, accepted)
            self._moved = True

    @property
    def _waits(self) -> bool:
        """Return whether a sequence waits for the token of each of its rows before its next one."""
        return self._limits.micro_batches > 1 or (self.drafts is not None and self.drafts.needs_token)

    def _set_decoding(self, decoding: list[Sequence]) -> None:
        self.decoding, self._batch = decoding, None

    def _current(self) -> DecodeBatch:
        batch = self._batch
        if batch is None:
            batch = self._batch = self._batch_of(self.decoding)
        elif self._moved:
            batch.positions = self._cache.lengths[batch.slots]
            batch.steps_left = self._steps_left(batch.slots, batch.positions)
        self._moved = False
        return batch

    def _steps_left(self, slots: np.ndarray, positions: np.ndarray) -> int:
        left = self._last_lengths[slots] - positions
        return int(left.min(initial=self._limits.max_sequence_tokens))

    def _batch_of(self, sequences: list[Sequence]) -> DecodeBatch:
        cache, slots = self._cache, np.array([sequence.slot for sequence in sequences], np.int32)
        positions, rings = cache.lengths[slots], cache.rings[slots]
        return DecodeBatch(
            slots,
            positions,
            cache.shifts[slots],
            rings if (rings < NO_RING).any() else None,
            adapters_of(sequences),
            top_log_probs_of(sequences),
            np.arange(len(sequences) + 1, dtype=np.int32),
            np.ones(len(sequences), np.int32),
            self._steps_left(slots, positions),
            [one for one in sequences if one.constraint is not None],
        )

    def _start_forks(
        self, sequences: list[Sequence], token_ids: np.ndarray, query_starts: np.ndarray
    ) -> list[SlotStart]:
        """Return the starts of the forks among the rows, and write their newest token, which the device does
        not know, to token_ids."""
        waiting = [sequence for sequence in self._unstarted if sequence.stage is Stage.DECODE]
        forks = [sequence for sequence in waiting if sequence in sequences]
        self._unstarted = [sequence for sequence in waiting if sequence not in sequences]
        for sequence in forks:
            token_ids[query_starts[sequences.index(sequence)]] = sequence.output[-1]
        return [slot_start(sequence) for sequence in forks]

    def _advance(self, sequences: list[Sequence], batch: DecodeBatch) -> None:
        """Count one more token in flight for each row.

        One whose last token is in flight is not planned again; one with a constraint, or any of them with
        micro-batches, waits for `resume`."""
        batch.positions = batch.positions + 1
        batch.steps_left -= 1
        self._cache.lengths[batch.slots] = batch.positions
        for sequence in sequences:
            sequence.in_flight += 1
        if self._limits.micro_batches > 1:
            self._set_decoding(self.decoding[len(sequences) :])
            for sequence, length in zip(sequences, batch.positions.tolist()):
                self._await(sequence, length)
            return
        if batch.steps_left == 0:
            for i in np.flatnonzero(batch.positions >= self._last_lengths[batch.slots]).tolist():
                self._drain(self.decoding[i])
            self._set_decoding([one for one in self.decoding if one.stage is Stage.DECODE])
        waiting = [one for one in batch.masked if one.stage is Stage.DECODE and one.waits_for_mask]
        if waiting:
            for sequence in waiting:
                self._await(sequence, self._cache.lengths.item(sequence.slot))
            self._set_decoding([one for one in self.decoding if one.stage is Stage.DECODE])

    def _draft_rows(
        self,
        drafts: DraftPlanner,
        sequences: list[Sequence],
        batch: DecodeBatch,
        counts: list[int],
        budget: int,
    ) -> Rows:
        drafted = drafts.rows(sequences, counts, budget)
        starts = (
            self._start_forks(sequences, drafted.token_ids, drafted.starts[:-1]) if self._unstarted else []
        )
        self._advance_drafted(sequences)
        return Rows(
            sequences,
            drafted.token_ids,
            drafted.positions,
            drafted.kv_slots,
            drafted.starts,
            batch.slots,
            drafted.context_lens,
            np.diff(drafted.starts),
            batch.adapters,
            batch.top_log_probs,
            drafted.queries,
            starts,
            batch.masked,
        )

    def _advance_drafted(self, sequences: list[Sequence]) -> None:
        """Advance the rows of a step with drafts.

        A row that may have the sequence's last token in flight is not planned again before its tokens are
        known; with needs_token or micro-batches no row is."""
        rest, goes_on = self.decoding[len(sequences) :], []
        for sequence in sequences:
            length = self._cache.lengths.item(sequence.slot)
            waits = self._waits or sequence.waits_for_mask
            if waits or length >= self._last_lengths[sequence.slot]:
                self._await(sequence, length)
            else:
                goes_on.append(sequence)
        if len(goes_on) < len(sequences):
            self._set_decoding(goes_on + rest)
        self._moved = True

    def _await(self, sequence: Sequence, length: int) -> None:
        """Do not plan the sequence, with `length` tokens in the cache, before its tokens are known."""
        if sequence.group.search is not None:  # BeamPlanner has it
            sequence.stage = Stage.AWAITED
        elif length >= self._last_lengths[sequence.slot] and not sequence.unsettled:
            self._drain(sequence)
        else:
            sequence.stage = Stage.AWAITED
            self._awaited[sequence] = None

    def _drain(self, sequence: Sequence) -> None:
        """Note that the last token of the sequence is in the plan that is being made."""
        sequence.stage, group = Stage.DRAINING, sequence.group
        stays = group.row is not None or group.has_samples or sequence.arriving
        if not (stays or self._cache.ends_in_flight(sequence)):
            self._drained.append(sequence)
