"""Plans when a drafter with its own cache reads the tokens that it has missed. No torch.

While steps are not worth drafts, such a drafter does not run for decoding sequences, and prompts may begin
with blocks that lack its keys (cache/draft_keys.py). When drafts are worth their time again, it reads the
missing tokens after steps, a few at a time. The target's keys and values do not change, so the drafter may
write to shared blocks: all their sequences need the same values, and do not draft before these are written.
"""

from __future__ import annotations

import numpy as np

from tridecode.backend.engine.cache.draft_keys import DraftKeys
from tridecode.backend.engine.parts.draft_reads import MOST_ROWS, MOST_TOKENS, DraftReads
from tridecode.backend.engine.schedule.sequence import Sequence
from tridecode.backend.engine.speculation.learning import Learning
from tridecode.backend.engine.speculation.records import NO_GAP
from tridecode.backend.engine.step.plan import StepPlan

#: steps between two checks while no sequence with missing tokens is worth drafts
_REST = 8
#: maximum missing tokens per token that a sequence may still generate: reading them must pay
_MOST_MISSING = 64
#: number of newest tokens that the first draft of a row reads itself
_NEWEST = 2


class DraftReadPlanner:
    """Plans the part DraftReads. most: maximum tokens per step."""

    def __init__(self, keys: DraftKeys, most: int):
        self._keys, self._most = keys, min(most, MOST_TOKENS)
        self._rest = 0

    def plan(
        self, plan: StepPlan, rows: list[int], sequences: list[Sequence], mosts: list[int], learning: Learning
    ) -> None:
        """Add the part to a plan of decode rows, if drafts of sequences with missing tokens are worth it.

        rows: the sampled rows. sequences, mosts: of these rows, as for Learning.choose. A sequence without
        missing tokens afterwards may get drafts after this step.
        """
        if self._rest > 0:
            self._rest -= 1
            return
        behind = [place for place, one in enumerate(sequences) if self._may_read(one, mosts[place])]
        if not behind:
            return
        counts = learning.promises(sequences, mosts)
        chosen: list[tuple[int, Sequence, int, int]] = []  # row, sequence, first and last position
        left = self._most
        for place in behind:
            if counts[place] > 0 and left > 0 and len(chosen) < MOST_ROWS:
                first = sequences[place].draft_gap
                last = min(sequences[place].num_known, first + left)
                chosen.append((rows[place], sequences[place], first, last))
                left -= last - first
        if not chosen:
            self._rest = _REST
            return
        plan.parts.append(
            DraftReads(
                np.array([row for row, *_ in chosen], np.int32),
                np.array([first for *_, first, _ in chosen], np.int32),
                np.array([last - first for *_, first, last in chosen], np.int32),
                np.concatenate(
                    [one.tokens_of(first, last) for _, one, first, last in chosen], dtype=np.int32
                ),
            )
        )
        for _, one, _, last in chosen:
            self._keys.read(one, last)
            if last == one.num_known:
                one.draft_gap = NO_GAP

    def _may_read(self, sequence: Sequence, most: int) -> bool:
        """Return whether missing tokens of a row may be read after this step. most: maximum drafts of the
        next step."""
        gap = sequence.draft_gap
        if gap == NO_GAP or not most or sequence.unsettled or sequence.in_flight > _NEWEST:
            return False
        left = sequence.params.max_tokens - len(sequence.output) - sequence.in_flight
        return sequence.num_known - gap <= _MOST_MISSING * left

    def abandon(self, plan: StepPlan) -> None:
        """Record that a plan has not run."""
        part = plan.part(DraftReads)
        if part is not None:
            for row, first in zip(part.rows.tolist(), part.firsts.tolist()):
                self._keys.lose(plan.sequences[row], first)
