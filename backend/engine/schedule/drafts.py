"""Decode rows of several tokens: which drafts a step verifies, and where its rows are. No torch.

While a step that verifies is in flight, only the device knows how many of its tokens each row keeps. The
scheduler then counts with the most that it may keep: CacheManager.lengths is that bound, blocks are assigned
up to it, and `settle` lowers it once the step is committed. The row of the next plan has no place of its own;
the device places it behind the tokens that the row before has accepted (Ops.place_rows).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tridecode.backend.engine.cache.cache_manager import NO_RING, CacheManager
from tridecode.backend.engine.parts.drafting import Drafting
from tridecode.backend.engine.schedule.admission import SchedulerLimits
from tridecode.backend.engine.schedule.sequence import Sequence
from tridecode.backend.engine.speculation.draft_reads import DraftReadPlanner
from tridecode.backend.engine.speculation.learning import Learning
from tridecode.backend.engine.speculation.records import NO_GAP
from tridecode.backend.engine.step.plan import MOST_QUERIES, StepPlan


class Drafter(Protocol):
    """Proposes tokens on rank 0 when a row is planned.

    needs_token: drafts depend on the ids of all tokens, so that a sequence is not planned while a token of it
    is in flight.
    """

    needs_token: bool

    def drafts(self, sequence: Sequence, most: int) -> np.ndarray:
        """Return (n,) int32, n <= most: ids that may follow the sequence's newest token. -1 stands for an id
        that the device has in SamplingState.drafts, and for all ids while a token of the sequence is in
        flight."""
        ...


@dataclass
class DraftRows:
    """The decode rows of a step. Of each row: its first token in token_ids, positions and kv_slots, T int32
    each, which starts (B + 1,) int32 cuts; context_lens (B,) int32, as in StepPlan. queries: StepPlan's."""

    token_ids: np.ndarray
    positions: np.ndarray
    kv_slots: np.ndarray
    starts: np.ndarray
    context_lens: np.ndarray
    queries: int


def may_verify(sequence: Sequence) -> bool:
    """Return whether rows of a sequence may have drafts. Beams choose their tokens on the host, a session's
    ring overwrites what earlier tokens of a row still see, and blocks of a request with a prompt table are
    cleared when it ends."""
    group = sequence.group
    return (
        sequence.params.speculate
        and group.search is None
        and (group.row is None or not group.row.ring)
        and group.learned is None
    )


class DraftPlanner:
    """Builds the decode rows of an engine with a drafter.

    last_lengths: (S,) int32 by slot, the length at which a sequence's last token is in flight. learning: what
    is learned of drafts, and how many of them a step verifies; None: as many as the drafter proposes.
    most_forced: tokens in a row that a grammar forces and a step verifies, at most."""

    def __init__(
        self,
        drafter: Drafter,
        limits: SchedulerLimits,
        cache: CacheManager,
        last_lengths: np.ndarray,
        learning: Learning | None = None,
        most_forced: int = 0,
    ):
        self._drafter, self._limits, self._cache = drafter, limits, cache
        self._most_forced = most_forced
        self._last_lengths, self.learning = last_lengths, learning
        self._unsettled = 0  # rows in flight that may keep fewer tokens than they have
        self._reads: DraftReadPlanner | None = None
        if learning is not None and learning.keeps_cache:
            cache.track_drafter()
            assert cache.draft_keys is not None
            self._reads = DraftReadPlanner(cache.draft_keys, limits.max_step_tokens)

    @property
    def needs_token(self) -> bool:
        return self._drafter.needs_token

    def most_forced(self, sequence: Sequence) -> int:
        """Return how many tokens that a grammar forces may follow the newest token of a row of a sequence."""
        return self._most_forced if may_verify(sequence) else 0

    def counts(self, sequences: list[Sequence], budget: int, has_masked: bool) -> list[int] | None:
        """Return how many drafts each row of a step may have; None: the step has none and places no row.

        budget: drafts that all rows together may have. has_masked: whether a row obeys a grammar.
        """
        learning = self.learning
        is_idle = learning is not None and learning.finds_nothing and not has_masked
        if is_idle and not self._unsettled:
            return None
        counts = [0] * len(sequences)
        if budget > 0 and not is_idle and (learning is None or learning.may_draft(len(sequences))):
            mosts = [self._most(sequence, budget) for sequence in sequences]
            counts = mosts if learning is None else learning.choose(sequences, mosts)
        if any(counts) or any(sequence.unsettled for sequence in sequences):
            return counts
        return None

    def _most(self, sequence: Sequence, budget: int) -> int:
        most = MOST_QUERIES - 1
        if sequence.constraint is not None:
            most = len(sequence.constraint.drafts)
        elif not may_verify(sequence):
            return 0
        return self._room_for(sequence, min(most, budget))

    def _most_ahead(self, learning: Learning, sequence: Sequence, budget: int) -> int:
        """Return how many drafts the drafter may compute behind the newest token of a row."""
        if not may_verify(sequence) or self._is_forced(learning, sequence):
            return 0
        return self._room_for(sequence, min(budget, MOST_QUERIES - 1))

    def _room_for(self, sequence: Sequence, most: int) -> int:
        """Return the number of drafts, up to `most`, before the sequence's last token."""
        left = self._last_lengths.item(sequence.slot) - self._cache.lengths.item(sequence.slot) - 1
        return max(min(most, left), 0)

    def rows(self, sequences: list[Sequence], counts: list[int], budget: int) -> DraftRows:
        """Return the rows of the sequences that decode, one token each and drafts; advance the lengths in the
        cache and the tokens in flight. counts: drafts of each row at most. budget: of all rows together."""
        cache, ids, lengths, totals, is_known = self._cache, list[int](), [], [], []
        for sequence, most in zip(sequences, counts):
            length = cache.lengths.item(sequence.slot)
            most = min(most, budget)
            before = len(ids)
            ids += self._ids(sequence, min(most, self._room(sequence, length, most)) if most > 0 else 0)
            count = len(ids) - before
            budget -= count - 1
            lengths.append(length)
            totals.append(count)
            is_known.append(sequence.unsettled == 0)
            cache.lengths[sequence.slot] = length + count
            sequence.in_flight += count
            sequence.unsettled += count > 1
            self._unsettled += count > 1
        row_slots = np.array([sequence.slot for sequence in sequences], np.int32)
        starts = np.zeros(len(row_slots) + 1, np.int32)
        np.cumsum(totals, out=starts[1:])
        owner = np.repeat(np.arange(len(row_slots)), totals)
        slots = row_slots[owner]
        positions = cache.shifts[slots]
        kv_slots, context_lens = np.full(len(ids), -1, np.int32), np.full(len(totals), -1, np.int32)
        if any(is_known):
            known = np.array(is_known)
            of_known = known[owner]
            first = np.array(lengths, np.int32) - starts[:-1]
            place = (np.arange(len(ids), dtype=np.int32) + first[owner])[of_known]
            positions[of_known] += place
            mine = slots[of_known]
            kv_slots[of_known] = cache.addresses(mine, place % cache.rings[mine])
            context_lens[known] = np.minimum(cache.lengths[row_slots], cache.rings[row_slots])[known]
        verifies = len(ids) > len(totals) or not all(is_known)
        return DraftRows(
            np.array(ids, np.int32), positions, kv_slots, starts, context_lens, max(totals) if verifies else 0
        )

    def plan_ahead(self, plan: StepPlan, prompts_follow: bool = False) -> None:
        """Add the part Drafting and the blocks of its drafts to a plan with its final slots, if there is a
        planned drafter and drafts after this step are worth their time. prompts_follow: whether the next step
        has prompts, so that it verifies nothing."""
        learning, cache = self.learning, self._cache
        if learning is None or not learning.planned:
            return
        for sequence in plan.sequences:
            if sequence.draft_record is not None:
                sequence.draft_record.ahead = 0
        rows = np.flatnonzero((plan.samples > 0) & (plan.slots >= 0)).tolist()
        chosen, columns, has_prompts = [], plan.block_tables.shape[1], plan.num_decodes < plan.num_rows
        if rows and not self._limits.long_prompt_tokens:
            sequences = [plan.sequences[row] for row in rows]
            counts = self._counts_ahead(learning, plan, rows, sequences, not prompts_follow)
            count, may_keep = max(1, *counts), learning.keeps_cache and not has_prompts
            for row, sequence, most in zip(rows, sequences, counts):
                if not (most > 0 or (may_keep and self._keeps(learning, sequence))):
                    continue
                tokens, record = cache.lengths.item(sequence.slot) + count, sequence.draft_record
                is_short = tokens <= self._limits.max_sequence_tokens
                if is_short and cache.extend(sequence, tokens) >= tokens:
                    chosen.append(row)
                    columns = max(columns, -(-tokens // cache.block_tokens))
                    assert record is not None
                    record.ahead = most
        is_read = has_prompts or (learning.reads_rows and plan.queries > 0)
        if self._reads is not None and not is_read:
            drafted = set(chosen)
            for row, sequence in enumerate(plan.sequences):  # the drafter does not read their tokens
                if row not in drafted:
                    sequence.draft_gap = min(sequence.draft_gap, sequence.num_known - 1)
        if chosen:
            plan.block_tables = cache.tables[plan.slots, :columns]
            masked = [row for row in chosen if plan.sequences[row].constraint is not None]
            arrays = np.array(chosen, np.int32), np.array(masked, np.int32)
            plan.parts.append(Drafting(count, arrays[0], learning.least_match, arrays[1]))

    def _keeps(self, learning: Learning, sequence: Sequence) -> bool:
        """Return whether the drafter's cache is filled for a row that gets no drafts."""
        return may_verify(sequence) and not self._is_forced(learning, sequence) and learning.keeps(sequence)

    def _is_forced(self, learning: Learning, sequence: Sequence) -> bool:
        """Return whether a row keeps tokens of a grammar that the drafter's cache will lack."""
        constraint = sequence.constraint
        lacks = constraint is not None and constraint.is_forced and sequence.unsettled > 0
        return lacks and learning.keeps_cache and not learning.reads_rows

    def _counts_ahead(
        self, learning: Learning, plan: StepPlan, rows: list[int], sequences: list[Sequence], may: bool
    ) -> list[int]:
        """Return how many drafts of each of these rows the drafter computes behind a step; let it read what
        it has missed before. may: whether the next step may verify drafts."""
        budget = self._limits.rows - len(rows)
        if not (may and budget > 0 and learning.may_draft(len(rows))):
            return learning.plan_ahead(sequences, [0] * len(rows), False)
        mosts = [self._most_ahead(learning, one, budget) for one in sequences]
        if self._reads is not None:
            if plan.num_decodes == plan.num_rows:
                self._reads.plan(plan, rows, sequences, mosts, learning)
            mosts = [most if one.draft_gap == NO_GAP else 0 for one, most in zip(sequences, mosts)]
        return learning.plan_ahead(sequences, mosts, True)

    def abandon(self, plan: StepPlan) -> None:
        """Note that a plan, which ran out of memory, has not run."""
        if self._reads is not None:
            self._reads.abandon(plan)

    def _ids(self, sequence: Sequence, most: int) -> list[int]:
        """Return the row's token ids: the newest token, -1 while it is in flight, and up to `most` drafts."""
        newest = -1 if sequence.in_flight or self._limits.micro_batches == 1 else sequence.output[-1]
        if most <= 0:
            return [newest]
        if sequence.constraint is not None:
            return [newest, *sequence.constraint.drafts[:most]]
        drafts = self._drafter.drafts(sequence, most)
        assert len(drafts) <= most, (len(drafts), most)
        return [newest, *drafts.tolist()]

    def _room(self, sequence: Sequence, length: int, most: int) -> int:
        """Return the number of drafts, up to `most`, for which there are blocks behind the next token's."""
        assert self._cache.rings.item(sequence.slot) == NO_RING
        return self._cache.extend(sequence, length + 1 + most) - length - 1

    def trim(self, sequence: Sequence) -> None:
        """Free the draft blocks of a sequence without a token in flight, before it is forked."""
        if may_verify(sequence):
            if sequence.draft_record is not None:
                sequence.draft_record.ahead = 0
            self._cache.trim(sequence)

    def settle(self, sequence: Sequence, planned: int, accepted: int) -> None:
        """Note that an unsettled row of `planned` tokens keeps the first `accepted`."""
        sequence.unsettled -= 1
        self._unsettled -= 1
        if sequence.slot < 0:  # preempted since, or released
            return
        self._cache.lengths[sequence.slot] -= planned - accepted
        if sequence.unsettled == 0:  # the drafter's cache has the drafts with which the next row begins
            record = sequence.draft_record
            self._cache.trim(sequence, 0 if record is None else record.ahead)
