"""The planner: it chooses the sequences of the next step. Host only: no torch."""

from __future__ import annotations

from tridecode.backend.engine.cache.cache_manager import CacheManager
from tridecode.backend.engine.host_tier.tier import HostTier
from tridecode.backend.engine.prompt_tables.book import PromptBook
from tridecode.backend.engine.schedule import sequence_outputs
from tridecode.backend.engine.schedule.admission import Counters, SchedulerLimits
from tridecode.backend.engine.schedule.beam_planner import BeamPlanner, mark_beams
from tridecode.backend.engine.schedule.decode_planner import DecodePlanner
from tridecode.backend.engine.schedule.drafts import Drafter, DraftPlanner
from tridecode.backend.engine.schedule.prefill_planner import Chunk, PrefillPlanner
from tridecode.backend.engine.schedule.sequence import Sequence, SequenceGroup, Stage
from tridecode.backend.engine.schedule.step_builder import StepBuilder
from tridecode.backend.engine.schedule.waiting import WaitingQueue
from tridecode.backend.engine.speculation.learning import Learning
from tridecode.backend.engine.step.plan import StepPlan

#: The limit on the tokens of a step in which sequences decode: LLaMA-3-8B on an H200 takes 0.18 s for 8192
#: tokens, and no sequence gets its next token in that time
MIXED_TOKENS = 8192


class Planner:
    """The sequences that wait or run, by stage. Order is by priority, then arrival.

    A step has every decoding sequence and, within max_step_tokens, the next chunks of prompts; within
    MIXED_TOKENS if a sequence decodes. PrefillPlanner, DecodePlanner and BeamPlanner hold the sequences of a
    stage and make their rows, StepBuilder makes the plan of the rows.

    A sequence gets a slot and the blocks of its known tokens at admission, then one block more whenever its
    last is full. If no block is free, the last in the order is preempted: it gives slot and blocks back,
    keeps its place in the order, and is computed again later.

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
        prompts = prompts or PromptBook()
        self.limits, self.cache, self.counters = limits, cache, counters
        self.waiting = WaitingQueue()
        self.beams = BeamPlanner(cache)
        self._decode = DecodePlanner(limits, cache)
        self._prefill = PrefillPlanner(limits, cache, self.waiting, prompts, self._decode, self.beams)
        self._builder = StepBuilder(cache, prompts)
        self._arrived: list[Sequence] = []  # see `arrive`, since the last plan

    @property
    def drafts(self) -> DraftPlanner | None:
        return self._decode.drafts

    @property
    def num_without_slot(self) -> int:
        """Return how many sequences have given their slot back and have their last token in flight."""
        return len(self._decode.without_slot)

    def use_drafter(self, drafter: Drafter, learning: Learning | None = None, most_forced: int = 0) -> None:
        """Verify the tokens that the drafter proposes, and up to most_forced in a row that grammars force.
        Call this before the first plan."""
        self._decode.use_drafter(drafter, learning, most_forced)

    def wait(self, sequence: Sequence) -> None:
        """Queue a sequence for admission."""
        self.waiting.push(sequence)

    def fork(self, parent: Sequence, child: Sequence, *, same_token: bool) -> None:
        """Place a new child: it decodes at once if it can share the parent's cache, otherwise it waits."""
        if not self._decode.fork(parent, child, same_token=same_token):
            self.wait(child)

    def leave(self, sequence: Sequence, damaged: bool = False) -> None:
        """Free the sequence's slot and blocks, if it has any. damaged: the blocks may hold wrong values."""
        self._decode.without_slot.discard(sequence)
        if sequence.slot >= 0:
            if damaged:
                self.cache.prefixes.forget(sequence)
            self.cache.release(sequence, not damaged)
            if sequence.stage is Stage.PREFILL:
                self._prefill.remove(sequence)
            else:
                self._decode.remove(sequence)

    def leave_beams(self, group: SequenceGroup, damaged: bool = False) -> None:
        """Free the slots and blocks of a group's beams, if they have any. damaged: see `leave`."""
        self.beams.release(group, damaged)
        self._prefill.remove_group(group)

    def resume(self, sequences: list[Sequence]) -> None:
        """Continue to decode the sequences whose tokens in flight are known, the longest waiting first."""
        self._decode.resume(sequences)

    @property
    def has_other_rows(self) -> bool:
        """Return whether a step can be planned without the sequences that wait for a mask."""
        return bool(self._decode.decoding or self._prefill.prefilling or len(self.waiting))

    def arrive(self, sequence: Sequence) -> None:
        """Note that the blocks that a sequence's step has copied in are intact: it continues with the next
        plan.
        """
        sequence.arriving = False
        if sequence.slot >= 0:
            self.cache.index_written(sequence)
            self._arrived.append(sequence)

    def take_back(self, sequence: Sequence) -> None:
        """Compute a sequence again whose step has read wrong blocks. That step's token for it is dropped."""
        sequence.in_flight = 0
        if sequence.slot >= 0:
            self.leave(sequence)
            sequence.restart()
            self.wait(sequence)
        sequence.arriving = False

    def miss(self, sequence: Sequence) -> None:
        """Take back the row of a plan that was not sampled, because its mask came too late."""
        self._decode.miss(sequence)

    def settle(self, plan: StepPlan, row: int, accepted: int) -> None:
        """Note that decode row `row` of a plan that verifies keeps its first `accepted` tokens."""
        planned = plan.samples.item(row)
        if planned > 1:
            self._decode.settle(plan.sequences[row], planned, accepted)

    def preempt(self, sequence: Sequence, abandoned: bool = False) -> None:
        """Free the cache of the sequence, or of all beams of its group; it is computed again later.

        abandoned: the last plan, which has a decode row of it, has not run.
        """
        self.counters.preemptions += 1
        if abandoned:
            for one in [sequence] if sequence.group.search is None else sequence.group.sequences:
                if one.slot >= 0:
                    self.cache.lengths[one.slot] = min(self.cache.lengths[one.slot], one.num_known - 1)
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

    def plan(self, *, extra_outputs: bool = False) -> StepPlan | None:
        """Return the next step, or None if there is nothing to do now.

        extra_outputs: whether an open sequence has any (Sequence.extra_outputs).
        """
        self._decode.release_drained()
        if self._arrived:
            self._decode.resume(self._arrived)
            self._arrived = []
        self._decode.hold_unready()
        if self.limits.recompute_long and self.limits.long_prompt_tokens:
            self._recompute_outgrown()
        self._make_room()
        beams = self.beams.ready() if self.beams.running else []
        decodes = self._decode.next_batch()
        chunks, starts = self._prefill.choose(self._prefill_budget(len(decodes) + len(beams)))
        if not (decodes or chunks or beams):
            return None if self.cache.tier is None else self._copies_alone(self.cache.tier)
        rows = []
        if decodes:
            budget = 0
            if self.drafts is not None:
                budget = self._draft_budget(self.drafts, decodes, beams, chunks)
            rows.append(self._decode.take_rows(decodes, budget))
        if beams:
            rows.append(self.beams.take_rows(beams))
        plan = self._builder.build(rows, self._prefill.take_rows(chunks), chunks, starts)
        if self.cache.tier is not None:
            copies = self.cache.tier.take(plan.num_tokens)  # of blocks that earlier plans have written
            if copies is not None:
                plan.parts.append(copies)
        if self.drafts is not None and self.drafts.learning is not None:
            self.drafts.learning.begin_step(plan)
            self.drafts.plan_ahead(plan, self._prefill.goes_on)
        for chunk in chunks:
            self.cache.index_written(chunk.sequence)
            self.counters.computed_prompt_tokens += chunk.num_tokens
        if extra_outputs:
            sequence_outputs.note_step(plan, chunks)
        if self.beams.running:  # last: the commit of this part may end a request
            mark_beams(plan)
        return plan

    def _copies_alone(self, tier: HostTier) -> StepPlan | None:
        """Return a plan without rows that copies blocks to or from the host tier; None if none is due."""
        copies = tier.take(0, idle=True)
        return None if copies is None else self._builder.build_empty(copies)

    def _prefill_budget(self, num_decodes: int) -> int:
        """Return the number of prompt tokens that a step with `num_decodes` decode rows may have."""
        limits = self.limits
        if num_decodes == 0:
            return limits.max_step_tokens
        return min(limits.max_step_tokens, max(MIXED_TOKENS, limits.max_sequences)) - num_decodes

    def _draft_budget(
        self, drafts: DraftPlanner, decodes: list[Sequence], beams: list[Sequence], chunks: list[Chunk]
    ) -> int:
        """Return the tokens that a step's decode rows may have beyond one each."""
        limits, rows = self.limits, len(decodes) + len(beams)
        if beams or limits.long_prompt_tokens or (chunks and drafts.learning is not None):
            return 0
        tokens = rows + sum(chunk.num_tokens for chunk in chunks)
        return min(limits.rows - rows - len(chunks), limits.max_step_tokens - tokens)

    def _recompute_outgrown(self) -> None:
        """Preempt the sequences whose next token is the first beyond long_prompt_tokens."""
        limit = self.limits.long_prompt_tokens
        for sequence in self._decode.outgrown(limit):
            self.preempt(sequence)
        for beam in self.beams.ready():
            if beam.stage is not Stage.DECODE:  # its group has just been preempted
                continue
            if self.cache.lengths[beam.slot] == limit and self.cache.shifts[beam.slot] == 0:
                self.preempt(beam)

    def _make_room(self) -> None:
        """Give every decoding sequence a place for its next token; preempt sequences if no block is free."""
        growing = self.cache.take_sharing() + self._decode.growing()
        if self.cache.tier is not None:
            for sequence in growing:
                self.cache.index_answer(sequence)
        if self.beams.running:
            growing += self.beams.ready()
        for sequence in growing:
            while sequence.stage is Stage.DECODE and not self.cache.make_room(sequence):
                running = (*self._decode.running(), *self._prefill.prefilling, *self.beams.members())
                self.preempt(max(running, key=lambda s: s.order))
