"""Learns from the results of steps how good drafts are, and decides how many there are. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tridecode.backend.engine.schedule.sequence import Sequence, Stage
from tridecode.backend.engine.speculation.depth import DepthPolicy
from tridecode.backend.engine.speculation.host_lookup import HostLookup
from tridecode.backend.engine.speculation.records import DRAFTERS, NEVER, NO_GAP, DraftRecord
from tridecode.backend.engine.speculation.sources import AnswerSources
from tridecode.backend.engine.step.plan import StepPlan, StepResult

#: steps for which a drafter with a cache continues although drafts are not worth their time
_PATIENCE = 8
#: steps without drafts after which drafts that were not worth their time are tried again. A planned drafter
#: begins with the first number, and each failed try doubles it; a try has succeeded after as many steps with
#: drafts. Others have the second
_LEAST_REST, _MOST_REST = 64, 4096


@dataclass
class Learning:
    """The drafts of an engine: their number per row, their texts, their results.

    sources: the searched texts; None: no search. host: the search on rank 0; None: each rank's device
    searches. planned: DraftRecord.source of the planned drafter, which computes drafts after the steps that
    have the part Drafting; 0: none. keeps_cache, reads_rows: those of DeviceDrafter, of the planned drafter.
    drafted, accepted: name of a drafter -> drafts that steps verified, and those that became tokens of an
    answer.
    """

    policy: DepthPolicy
    sources: AnswerSources | None
    host: HostLookup | None = None
    planned: int = 0
    keeps_cache: bool = False
    reads_rows: bool = False
    drafted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DRAFTERS, 0))
    accepted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DRAFTERS, 0))
    _idle_steps: int = 0
    _busy_steps: int = 0  # since drafts were tried again
    _rest: int = _LEAST_REST
    #: whether a row of the newest result with a search has found a match
    _has_match: bool = False

    @property
    def least_match(self) -> int:
        """Return Drafting.least for the next plan."""
        return NEVER

    def __post_init__(self) -> None:
        if not self.planned:
            self._rest = _MOST_REST

    def may_draft(self, rows: int) -> bool:
        """Return whether a step of this many rows can have drafts."""
        return self.policy.may_widen(rows)

    @property
    def finds_nothing(self) -> bool:
        """Return whether the search is the only drafter and found no match for any row, so that the limits of
        each row need not be computed. A row that is not in the newest result then gets its drafts one step
        later."""
        return not (self.planned or self.host is not None or self._has_match)

    def choose(self, sequences: list[Sequence], mosts: list[int]) -> list[int]:
        """Return the number of drafts of each row of a step. mosts: the most that each may have."""
        records = [one.own_record for one in sequences]
        if self.planned:
            masked = [one.constraint is not None for one in sequences]
            return self._choose_planned(records, mosts, masked)
        if self.host is not None:
            for sequence, record, most in zip(sequences, records, mosts):
                if record is not None and most and sequence.constraint is None:
                    self.host.search(sequence, record)
        return self.policy.choose(records, mosts)

    def _choose_planned(
        self, records: list[DraftRecord | None], mosts: list[int], masked: list[bool]
    ) -> list[int]:
        """`choose` where the drafts of a drafter exist already."""
        counts = [0 if one is None else min(one.ahead, most) for one, most in zip(records, mosts)]
        forced = [most if is_masked else 0 for is_masked, most in zip(masked, mosts)]
        if any(forced):
            counts = [max(pair) for pair in zip(counts, self.policy.choose(records, forced))]
        return counts

    def take_proposed(self, sequence: Sequence) -> list[int]:
        """Return the drafts behind the newest token of a sequence that obeys a grammar, whose masks are
        computed next. Call it once for each step of the sequence, after `end_step`."""
        record = sequence.draft_record
        if record is None:
            return []
        if self.host is not None:
            self.host.search(sequence, record)
            (count,) = self.policy.choose([record], [len(record.drafts)])
            return record.drafts[:count].tolist()
        proposed, record.proposed = record.proposed, []
        return proposed

    def plan_ahead(self, sequences: list[Sequence], mosts: list[int], may: bool) -> list[int]:
        """Return how many drafts per row the planned drafter computes after a step, for the next step.
        mosts: as for `choose`, for the next step. may: whether the next step may have drafts."""
        records = self._records(sequences)
        counts = self.promises(sequences, mosts) if may else [0] * len(mosts)
        if may:
            for record, count in zip(records, counts):
                if record is not None and not count:
                    self.policy.rest(record.planned or record)
        self._count_step(any(counts))
        return counts

    def _count_step(self, has_drafts: bool) -> None:
        """Count a step, and let drafts be tried again after enough steps without any."""
        if has_drafts:
            self._idle_steps = 0
            self._busy_steps += 1
            if self.planned and self._busy_steps >= _LEAST_REST:
                self._rest = _LEAST_REST
            return
        self._idle_steps += 1
        if self._idle_steps % self._rest == 0:
            self._rest, self._busy_steps = min(2 * self._rest, _MOST_REST), 0
            self.policy.forget(self.planned)

    def promises(self, sequences: list[Sequence], mosts: list[int]) -> list[int]:
        """Return how many drafts of each row the planned drafter would best compute. mosts: as above."""
        return self.policy.choose(self._records(sequences), mosts)

    def _records(self, sequences: list[Sequence]) -> list[DraftRecord | None]:
        """Return the records of rows for which a planned drafter may draft."""
        for sequence in sequences:
            if sequence.draft_record is None:
                sequence.draft_record = DraftRecord(source=self.planned)
        return [one.draft_record for one in sequences]

    def keeps(self, sequence: Sequence) -> bool:
        """Return whether the planned drafter continues to fill its cache for a row that gets no drafts now.
        It does so for some steps, so that the row does not lose its drafts to a short load peak."""
        return self._keeps(sequence, sequence.draft_record)

    def _keeps(self, sequence: Sequence, record: DraftRecord | None) -> bool:
        is_soon = self.keeps_cache and self._idle_steps <= _PATIENCE
        return is_soon and sequence.draft_gap == NO_GAP and self.policy.chance(record) > 0

    def begin_step(self, plan: StepPlan) -> None:
        """Add the new texts and the slots that start to a plan."""
        part = None if self.sources is None else self.sources.take(plan)
        if part is None:
            return
        if self.host is None:
            plan.parts.append(part)
        else:
            self.host.take(part)

    def end_step(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from the result of a step."""
        is_decode = plan.num_decodes == plan.num_rows
        self.policy.took(plan.num_rows if is_decode else 0, max(plan.queries, 1), time.perf_counter())
        if not self.planned:
            self._count_step(plan.queries > 0)
        if plan.queries and result.accepted is not None:
            wide = np.flatnonzero(plan.samples[: plan.num_decodes] > 1).tolist()
            for row in wide:
                self._verified(plan.sequences[row], int(plan.samples[row]) - 1, int(result.accepted[row]) - 1)
        if result.found is None:
            return
        rows, found = result.found
        if self.sources is not None:
            self._take_found(plan, rows, found[:, :3])
        if found.shape[1] > 3:
            self._propose(plan, rows, found[:, 3:])

    def _take_found(self, plan: StepPlan, rows: np.ndarray, found: np.ndarray) -> None:
        """Take what a search has found for rows of a plan. found: (n, 3) int32."""
        had_match, self._has_match = self._has_match, bool(found[:, 0].any())
        if not (had_match or self._has_match):
            return
        may_draft = self.may_draft(plan.num_decodes)
        for row, (matched, source, agreed) in zip(rows.tolist(), found.tolist()):
            record = plan.sequences[row].draft_record
            if record is None:
                continue
            if may_draft and row < plan.num_decodes and plan.samples[row] == 1:
                self.policy.learn(self._newest(record), 1, agreed)
            record.matched, record.source = matched, source

    def _propose(self, plan: StepPlan, rows: np.ndarray, ids: np.ndarray) -> None:
        """Choose the drafts of the rows that obey a grammar. rows: (n,) of the plan. ids: (n, k) int32, found
        drafts of each."""
        masked = [i for i, row in enumerate(rows.tolist()) if plan.sequences[row].constraint is not None]
        sequences = [plan.sequences[row] for row in rows[masked].tolist()]
        records = [one.draft_record for one in sequences]
        others = plan.num_rows - len(records)
        counts = self.policy.choose(
            [*(None if one is None else self._newest(one) for one in records), *[None] * others],
            [ids.shape[1]] * len(records) + [0] * others,
            searched=True,
            mask_s=max((one.constraint.mask_s for one in sequences if one.constraint), default=0.0),
        )
        for i, record, count in zip(masked, records, counts):
            if record is not None:
                record.proposed = ids[i, :count].tolist()

    def _verified(self, sequence: Sequence, drafted: int, right: int) -> None:
        record = sequence.own_record
        if record is None:
            return
        newest = self._newest(record)
        self.policy.learn(newest, drafted, right)
        if sequence.stage is Stage.ENDED:  # while this step was on the device
            return
        record.drafted += drafted
        record.accepted += right
        record.verified = newest.source
        name = DRAFTERS[newest.source]
        self.drafted[name] += drafted
        self.accepted[name] += right

    def discard(self, sequence: Sequence, count: int) -> None:
        """Take `count` drafts of the newest row back from the totals: they were right, but the answer ended
        before them. Call it after `end_step`."""
        record = sequence.own_record
        if record is not None:
            record.accepted -= count
            self.accepted[DRAFTERS[record.verified]] -= count

    def _newest(self, record: DraftRecord) -> DraftRecord:
        """Return the record of the drafts that a row had in a step whose result is taken now."""
        return record if record.planned is None or not record.is_planned else record.planned

    def metrics(self) -> Iterator[tuple[str, float]]:
        """Yield the names and values of EngineBeat.metrics."""
        for name, count in self.drafted.items():
            yield f'draft_tokens{{drafter="{name}"}}', count
            yield f'accepted_draft_tokens{{drafter="{name}"}}', self.accepted[name]
