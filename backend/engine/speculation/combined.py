"""Chooses for each row between the drafts of a search and those of a planned drafter. No torch.

The record of a sequence (DraftRecord) is that of its searches, and has a second one for the planned drafter.
A row whose newest known match is at least as promising relies on the search. The planned drafter drafts for
the others, and the device keeps the drafts of a match that has become long enough meanwhile (Drafting.least).
The result of the step before tells which drafter a row's drafts came from: results come in step order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tridecode.backend.engine.parts.drafting import Drafting
from tridecode.backend.engine.schedule.sequence import Sequence
from tridecode.backend.engine.speculation.learning import Learning
from tridecode.backend.engine.speculation.records import DraftRecord
from tridecode.backend.engine.step.plan import MOST_QUERIES, StepPlan


@dataclass
class CombinedLearning(Learning):
    """most_planned: DeviceDrafter.most_planned."""

    most_planned: int = MOST_QUERIES - 1

    @property
    def least_match(self) -> int:
        return self.policy.least_match(self.planned)

    def choose(self, sequences: list[Sequence], mosts: list[int]) -> list[int]:
        records = [one.own_record for one in sequences]
        ahead = [0 if one is None else min(one.ahead, most) for one, most in zip(records, mosts)]
        others = [0 if count else most for count, most in zip(ahead, mosts)]
        found = self.policy.choose(records, others, searched=True)
        return [max(counts) for counts in zip(ahead, found)]

    def promises(self, sequences: list[Sequence], mosts: list[int]) -> list[int]:
        records = self._records(sequences)
        mosts = [
            0 if self._relies(one) else min(most, self.most_planned) for one, most in zip(records, mosts)
        ]
        return self.policy.choose([None if one is None else one.planned for one in records], mosts)

    def keeps(self, sequence: Sequence) -> bool:
        record = sequence.draft_record
        return record is not None and not self._relies(record) and self._keeps(sequence, record.planned)

    def _records(self, sequences: list[Sequence]) -> list[DraftRecord | None]:
        records = [one.draft_record for one in sequences]  # sources.py has made those of rows with drafts
        for record in records:
            if record is not None and record.planned is None:
                record.planned = DraftRecord(source=self.planned)
        return records

    def _relies(self, record: DraftRecord | None) -> bool:
        """Return whether a row needs no drafts of the planned drafter, or can have none."""
        if record is None or record.planned is None:
            return True
        return self.policy.chance(record) >= self.policy.chance(record.planned)

    def _take_found(self, plan: StepPlan, rows: np.ndarray, found: np.ndarray) -> None:
        super()._take_found(plan, rows, found)
        part = plan.part(Drafting)
        drafted = set() if part is None else set(part.rows.tolist())
        for row, (matched, *_) in zip(rows.tolist(), found.tolist()):
            record = plan.sequences[row].draft_record
            if record is not None:
                record.is_planned = part is not None and row in drafted and matched < part.least
