"""The beam groups that have slots, and their rows of a step. No torch.

The host chooses a beam's tokens, so its row carries the token id, and no beam of the group is planned while
the step of another is on the device. A beam's slot has sampling state like any other: it starts with the
recomputed tokens, is copied to the slots of beams that branch off, and receives the token of the step before
with the plan (BeamRows.tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tridecode.backend.engine.cache.cache_manager import CacheManager
from tridecode.backend.engine.parts.beams import BeamRows
from tridecode.backend.engine.schedule.admission import SchedulerLimits
from tridecode.backend.engine.schedule.beams import BeamSearch
from tridecode.backend.engine.schedule.sequence import Sequence, SequenceGroup, Stage


@dataclass
class Rows:
    """Rows that decoding beams add to a step, (n,) int32 each, and their sequences."""

    sequences: list[Sequence]
    token_ids: np.ndarray
    positions: np.ndarray
    kv_slots: np.ndarray
    slots: np.ndarray
    adapters: np.ndarray


class BeamPlanner:
    """A group of `width` beams holds `width` slots from its admission to its end: one for each running beam,
    the rest reserved.

    It is preempted as a whole and recomputed from the tokens of its beams.
    """

    def __init__(self, limits: SchedulerLimits, cache: CacheManager, shifts: np.ndarray):
        """shifts: (S,) int32 by slot, added to rotary positions."""
        self.limits, self.cache, self._shifts = limits, cache, shifts
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

    def admit(self, group: SequenceGroup) -> bool:
        """Assign slots and blocks to all beams of a group; return False without effect if that is not
        possible now.

        That is so if they are not free, or if a step that was launched before the group's preemption is still
        on the device.
        """
        search, beams = group.search, group.sequences
        assert search is not None
        if any(beam.in_flight for beam in beams) or not self.cache.admit_beams(beams, search.width):
            return False
        self.running.append(group)
        return True

    def may_prefill(self, beam: Sequence) -> bool:
        """Return whether earlier plans have computed the blocks that the beam shares."""
        first, lengths = beam.group.sequences[0], self.cache.lengths
        shared = len(beam.prompt) // self.cache.block_tokens * self.cache.block_tokens
        return beam is first or int(lengths[first.slot]) >= shared

    def release(self, group: SequenceGroup) -> None:
        """Release all slots and blocks of a group; its beams and their tokens stay."""
        search = group.search
        assert search is not None
        search.forget()
        if group not in self.running:
            return
        self.running.remove(group)
        self.cache.reserved -= search.width - len(group.sequences)
        for sequence in group.sequences:
            self.cache.release(sequence)

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
            positions + self._shifts[slots],
            kv_slots,
            slots,
            np.array([beam.group.adapter for beam in beams], np.int32),
        )

    def _branch(self, parent: Sequence, child: Sequence) -> None:
        self.cache.branch(parent, child)
        self._shifts[child.slot] = self._shifts[parent.slot]

    def _drop(self, sequence: Sequence) -> None:
        self.cache.release(sequence)
        self.cache.reserved += 1
        sequence.stage = Stage.ENDED
        sequence.group.sequences.remove(sequence)


def beam_rows(sampled: list[Sequence], is_decode: list[bool]) -> BeamRows | None:
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
