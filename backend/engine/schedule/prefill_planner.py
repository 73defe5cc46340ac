"""Chunks of prompts for the next step: which sequences are admitted, and their rows. Host only: no torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tridecode.backend.base.priority import LOWEST_PRIORITY
from tridecode.backend.engine.cache.cache_manager import CacheManager
from tridecode.backend.engine.prompt_tables.book import PromptBook
from tridecode.backend.engine.schedule.admission import SchedulerLimits
from tridecode.backend.engine.schedule.beam_planner import BeamPlanner
from tridecode.backend.engine.schedule.decode_planner import DecodePlanner
from tridecode.backend.engine.schedule.prompt_spread import Spread
from tridecode.backend.engine.schedule.rows import Rows, adapters_of, slot_start, top_log_probs_of
from tridecode.backend.engine.schedule.sequence import Sequence, SequenceGroup, Stage
from tridecode.backend.engine.schedule.waiting import Admission, WaitingQueue
from tridecode.backend.engine.step.plan import SlotStart

#: While sequences queue for slots, free slots stay empty until 1 / HELD_SHARE of all slots are free, or for
#: HELD_STEPS steps at most: the fixed cost of a prefill step is 1.5 ms (LLaMA-3-8B on an H200), and a slot
#: that stays empty for a step costs 0.04 ms.
HELD_SHARE, HELD_STEPS = 32, 8

#: Maximum consecutive steps in which prompts of the lowest priority (lines of batches) give way to other
#: prompts. 64 such prompts of 128 tokens take LLaMA-3-8B 90 ms on an H200; a first token without them takes
#: 15 ms.
PUT_OFF_STEPS = 8


class Chunk(NamedTuple):
    """The known tokens of a sequence, from token `first` on, that one step computes."""

    sequence: Sequence
    first: int
    num_tokens: int


def is_background(sequence: Sequence) -> bool:
    """Return whether the sequence has the lowest priority."""
    return sequence.group.priority >= LOWEST_PRIORITY


class PrefillPlanner:
    """The sequences with a slot whose known tokens are not all planned yet, in order of admission.

    While nearly all slots are taken and more sequences wait than are free, these are filled several at a time
    (HELD_SHARE). Where sequences queue for few slots, their prompts are spread over the steps
    (prompt_spread.py).
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: CacheManager,
        waiting: WaitingQueue,
        prompts: PromptBook,
        decode: DecodePlanner,
        beams: BeamPlanner,
    ):
        """decode, beams: take over the sequences whose prefill is planned."""
        self._limits, self._cache, self._waiting, self._prompts = limits, cache, waiting, prompts
        self._decode, self._beams = decode, beams
        self.prefilling: list[Sequence] = []
        self._held_steps = 0  # since sequences began to wait for more free slots
        self._spread = Spread(limits)
        self._only_others = False  # refuse sequences of the lowest priority
        self._refused = False  # one was refused
        self._put_off = 0  # consecutive steps without the waiting prompts of the lowest priority

    @property
    def goes_on(self) -> bool:
        """Return whether the next step has a chunk of a prompt, whatever is admitted."""
        running = [one for one in self.prefilling if not one.arriving]
        return any(one.group.search is None and not is_background(one) for one in running)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence whose slot and blocks are given back."""
        self.prefilling = [one for one in self.prefilling if one is not sequence]

    def remove_group(self, group: SequenceGroup) -> None:
        """Forget a group whose slots and blocks are given back."""
        self.prefilling = [one for one in self.prefilling if one.group is not group]

    def choose(self, budget: int) -> tuple[list[Chunk], list[SlotStart]]:
        """Return the chunks of the next step, `budget` tokens at most, and the starts of the sequences that
        this admits."""
        chunks: list[Chunk] = []
        starts: list[SlotStart] = []
        background = [one for one in self.prefilling if self._gives_way(one)]
        others = [one for one in self.prefilling if one not in background] if background else self.prefilling
        budget = self._continue(others, budget, chunks)
        self._only_others, self._refused = True, False
        budget = self._admit_within(budget, chunks, starts, may_hold=not background)
        self._only_others = False
        if not (background or self._refused):
            return chunks, starts
        if chunks and self._put_off < PUT_OFF_STEPS:
            self._put_off += 1
            return chunks, starts
        self._put_off = 0
        budget = self._continue(background, budget, chunks)
        self._admit_within(budget, chunks, starts, may_hold=False)
        return chunks, starts

    def _gives_way(self, sequence: Sequence) -> bool:
        """Return whether other prompts go before a running prompt: no urgent one waits for its blocks."""
        return is_background(sequence) and self._cache.lengths.item(sequence.slot) >= sequence.awaited

    def _continue(self, sequences: list[Sequence], budget: int, chunks: list[Chunk]) -> int:
        """Append the next chunks of sequences that have a slot; return the remaining budget."""
        for sequence in sequences:
            if budget <= 0:
                break
            if sequence.arriving or (
                sequence.group.search is not None and not self._beams.may_prefill(sequence)
            ):
                continue
            chunks.append(self._chunk(sequence, budget))
            budget -= chunks[-1].num_tokens
        return budget

    def _admit_within(
        self, budget: int, chunks: list[Chunk], starts: list[SlotStart], may_hold: bool = True
    ) -> int:
        """Admit sequences and append their first chunks; return the remaining budget.

        may_hold: free slots may stay empty if no chunk is planned yet, see HELD_SHARE."""
        least = budget - self._spread.tokens(len(self._waiting), self._cache.num_free_slots)
        while budget > max(least, 0) and (chunks or not (may_hold and self._holds_back())):
            admitted = self._admit()
            if admitted is None:
                break
            beams = admitted.group.sequences if admitted.group.search is not None else [admitted]
            starts += [slot_start(sequence) for sequence in beams]
            chunks.append(self._chunk(admitted, budget))
            budget -= chunks[-1].num_tokens
        return budget

    def take_rows(self, chunks: list[Chunk]) -> Rows | None:
        """Return the rows of the chunks of a step, None for no chunks; advance their lengths in the cache.

        Call this for every step. A sequence whose last chunk this is goes on to decode."""
        self._spread.note(sum(count for _, _, count in chunks))
        if not chunks:
            return None
        sequences, built = [chunk.sequence for chunk in chunks], [self._build(*chunk) for chunk in chunks]
        slots = np.array([sequence.slot for sequence in sequences], np.int32)
        context_lens = np.minimum(self._cache.lengths[slots], self._cache.rings[slots])
        adapters, top_log_probs = adapters_of(sequences), top_log_probs_of(sequences)
        samples = np.array([self._finish(sequence) for sequence in sequences], np.int32)
        self.prefilling = [one for one in self.prefilling if one.stage is Stage.PREFILL]
        return Rows(
            sequences,
            np.concatenate([token_ids for token_ids, _, _ in built]),
            np.concatenate([positions for _, positions, _ in built]),
            np.concatenate([kv_slots for _, _, kv_slots in built]),
            np.cumsum([0, *(count for _, _, count in chunks)], dtype=np.int32),
            slots,
            context_lens,
            samples,
            adapters,
            top_log_probs,
            masked=[one for one, count in zip(sequences, samples) if count and one.constraint is not None],
        )

    def _holds_back(self) -> bool:
        """Return whether the free slots stay empty for this step, see HELD_SHARE."""
        limits, free = self._limits, self._cache.num_free_slots
        saturated = 0 < free < limits.max_sequences // HELD_SHARE and len(self._waiting) > free
        idle = not saturated or not self._decode.decoding or limits.micro_batches > 1
        if idle or self._held_steps == HELD_STEPS:
            self._held_steps = 0
            return False
        self._held_steps += 1
        return True

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk:
        """Return the next chunk of the sequence.

        A token that takes another's place in a ring is a chunk alone, because the tokens before it still
        attend to the replaced one."""
        first, ring = int(self._cache.lengths[sequence.slot]), int(self._cache.rings[sequence.slot])
        return Chunk(sequence, first, min(sequence.prefill - first, budget, max(ring - first, 1)))

    def _admit(self) -> Sequence | None:
        """Return a waiting sequence with a slot and blocks for its tokens; None if all must wait."""
        sequence = self._waiting.admit(self._attempt)
        if sequence is None:
            return None
        group = sequence.group
        for one in [sequence] if group.search is None else group.sequences:
            one.stage, one.prefill = Stage.PREFILL, one.num_known
            self._decode.admit(one)
            if group.learned is not None:
                lengths = self._cache.lengths
                cached = int(lengths[one.slot])
                lengths[one.slot] = self._prompts.admit(one, self._limits.block_tokens, cached)
            self.prefilling.append(one)
        return sequence

    def _attempt(self, sequence: Sequence, warm: bool) -> Admission:
        """Give a sequence a slot and blocks if possible. warm: see WaitingQueue.admit."""
        # a preempted sequence waits for its tokens in flight: they are part of what is computed again
        if sequence.in_flight or not self._prompts.fits(sequence.group):
            return Admission.NO_SLOT
        if sequence.arriving or not sequence.may_continue:
            return Admission.COMING
        if self._only_others and is_background(sequence):
            self._refused = True
            return Admission.NO_SLOT  # the following ones have the same priority
        group, shift = sequence.group, self._shift(sequence)
        if group.search is not None:
            return self._beams.admit(group, shift, warm)
        prefix = self._prefix(sequence, shift) if group.has_samples else None
        return self._cache.admit(sequence, shift, prefix, warm)

    def _shift(self, sequence: Sequence) -> int:
        """Return the number that is added to the rotary positions of a sequence that is admitted."""
        limits = self._limits
        tokens = sequence.num_known if limits.recompute_long else len(sequence.prompt)
        return limits.max_sequence_tokens if 0 < limits.long_prompt_tokens < tokens else 0

    def _prefix(self, sequence: Sequence, shift: int) -> Sequence | None:
        """Return another sample that has the whole prompt in the cache, rotated in the same way."""
        length = len(sequence.prompt)
        for other in sequence.group.sequences:
            cached = self._cache.lengths[other.slot] if other.slot >= 0 else 0
            if cached >= length > 1 and self._cache.shifts[other.slot] == shift:
                return other
        return None

    def _build(self, sequence: Sequence, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return token ids, positions and KV slots of a chunk, (count,) int32 each."""
        cache, slot = self._cache, sequence.slot
        positions = np.arange(first, first + count, dtype=np.int32)
        cache.lengths[slot] = first + count
        kv_slots = cache.addresses(slot, positions % cache.rings[slot])
        positions += cache.shifts[slot]
        return sequence.known_tokens()[first : first + count], positions, kv_slots

    def _finish(self, sequence: Sequence) -> bool:
        """Return whether the row's last token is sampled from: all known tokens are planned now, and the
        request wants a token.
        """
        if self._cache.lengths[sequence.slot] < sequence.prefill:
            return False
        if sequence.params.only_pools:
            self._decode.begin(sequence)  # drains it
            return False
        sequence.in_flight += 1
        for follower in sequence.group.followers:
            self._waiting.push(follower)
        sequence.group.followers = []
        self._decode.begin(sequence)
        return True
