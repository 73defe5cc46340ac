"""The beam groups that have slots, and their rows of a step. No torch.

The host chooses a beam's tokens, so its row carries the token id, and no beam of the group is planned while
the step of another is on the device. A beam's slot has sampling state like any other: it starts with the
recomputed tokens, is copied to the slots of beams that branch off, and receives the token of the step before
with the plan (BeamRows.tokens).
"""

from __future__ import annotations

import numpy as np

from tridecode.backend.engine.cache.cache_manager import CacheManager
from tridecode.backend.engine.parts.beams import BeamRows
from tridecode.backend.engine.schedule.beams import BeamSearch
from tridecode.backend.engine.schedule.rows import Rows, adapters_of, top_log_probs_of
from tridecode.backend.engine.schedule.sequence import Sequence, SequenceGroup, Stage
from tridecode.backend.engine.schedule.waiting import Admission
from tridecode.backend.engine.step.plan import StepPlan


class BeamPlanner:
    """A group of `width` beams holds `width` slots from its admission to its end: one for each running beam,
    the rest reserved.

    It is preempted as a whole and recomputed from the tokens of its beams.
    """

    def __init__(self, cache: CacheManager):
        self.cache = cache
        self.running: list[SequenceGroup] = []

    def start(self, sequence: Sequence) -> None:
        """Make the sequence's group a beam search that begins with this sequence."""
        sequence.group.search = BeamSearch(sequence, self._branch, self._drop)

    def members(self) -> list[Sequence]:
        """Return the running beams of all groups."""
        return [sequence for group in self.running for sequence in group.sequences]

    def ready(self) -> list[Sequence]:
        """Return the beams that decode in the next step."""
        return [sequence for sequence in self.members() if sequence.stage is Stage.DECODE]

    def admit(self, group: SequenceGroup, shift: int, warm: bool) -> Admission:
        """Assign slots and blocks to all beams of a group, whose rotary positions are shifted by `shift`; see
        CacheManager.admit_beams.

        They wait while a step that was launched before the group's preemption is still on the device.
        """
        search, beams = group.search, group.sequences
        assert search is not None
        if any(beam.in_flight for beam in beams):
            return Admission.NO_SLOT
        outcome = self.cache.admit_beams(beams, search.width, shift, warm)
        if outcome is Admission.DONE:
            self.running.append(group)
        return outcome

    def may_prefill(self, beam: Sequence) -> bool:
        """Return whether earlier plans have computed the blocks that the beam shares."""
        first, lengths = beam.group.sequences[0], self.cache.lengths
        shared = len(beam.prompt) // self.cache.block_tokens * self.cache.block_tokens
        return beam is first or int(lengths[first.slot]) >= shared

    def release(self, group: SequenceGroup, damaged: bool = False) -> None:
        """Release all slots and blocks of a group; its beams and their tokens stay. damaged: the blocks may
        hold wrong values.
        """
        search = group.search
        assert search is not None
        search.forget()
        if group not in self.running:
            return
        self.running.remove(group)
        self.cache.reserved -= search.width - len(group.sequences)
        for sequence in group.sequences:
            if damaged:
                self.cache.prefixes.forget(sequence)
            self.cache.release(sequence, not damaged)

    def take_rows(self, beams: list[Sequence]) -> Rows:
        """Return the rows of beams that decode; advance their cache lengths and tokens in flight."""
        slots = np.array([beam.slot for beam in beams], np.int32)
        positions = self.cache.lengths[slots]
        kv_slots = self.cache.addresses(slots, positions)
        self.cache.lengths[slots] = positions + 1
        for beam in beams:
            beam.stage, beam.in_flight = Stage.AWAITED, beam.in_flight + 1
        return Rows(
            beams,
            np.array([beam.output[-1] for beam in beams], np.int32),
            positions + self.cache.shifts[slots],
            kv_slots,
            np.arange(len(beams) + 1, dtype=np.int32),
            slots,
            positions + 1,
            np.ones(len(beams), np.int32),
            adapters_of(beams),
            top_log_probs_of(beams),
        )

    def _branch(self, parent: Sequence, child: Sequence) -> None:
        self.cache.branch(parent, child)

    def _drop(self, sequence: Sequence) -> None:
        self.cache.release(sequence, kept=False)
        self.cache.reserved += 1
        sequence.stage = Stage.ENDED
        sequence.group.sequences.remove(sequence)


def mark_beams(plan: StepPlan) -> None:
    """Name the rows of beams, which get candidates instead of a token."""
    sampled = np.flatnonzero(plan.samples)
    is_decode = (sampled < plan.num_decodes).tolist()
    beams = _beam_rows([plan.sequences[row] for row in sampled.tolist()], is_decode)
    if beams is not None:
        plan.parts.append(beams)
        plan.slots = plan.slots.copy()
        plan.slots[sampled[beams.rows]] = -1


def _beam_rows(sampled: list[Sequence], is_decode: list[bool]) -> BeamRows | None:
    """Return the beams among the sequences that a step samples, in order; None if there is none.

    is_decode: whether each row decodes; the slot of a prefill row has started with all tokens.
    """
    rows = [row for row, sequence in enumerate(sampled) if sequence.group.search is not None]
    if not rows:
        return None
    beams = [sampled[row] for row in rows]
    tokens = [beam.output[-1] if is_decode[row] else -1 for row, beam in zip(rows, beams)]
    return BeamRows(
        rows=np.array(rows, np.int32),
        width=max(2 * beam.params.beam_width for beam in beams),
        slots=np.array([beam.slot for beam in beams], np.int32),
        tokens=np.array(tokens, np.int32),
    )
