"""All sequences of the engine, from `submit` to their last event. Host only: no torch.

The parts: admission.py checks requests, cache_manager.py holds slots and blocks, planner.py chooses the
sequences of a step, output_processor.py commits its results, and request_table.py ends what has ended.

`plan` may run while the step before is still on the device: a decoding row then continues from a token the
host has not seen. With limits.micro_batches several plans are in flight, and a decoding sequence is in one of
them at most. Rows of sequences that ended in the meantime are dropped when their step is committed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np

from tridecode.backend.base.errors import RequestCancelled, RequestError, TridecodeError
from tridecode.backend.engine.adapters.table import Adapters
from tridecode.backend.engine.cache.cache_manager import CacheManager
from tridecode.backend.engine.cache.prompt_keys import PromptHasher, PromptKeys
from tridecode.backend.engine.cache.sessions import SessionRow, SessionStore
from tridecode.backend.engine.grammars.service import Grammars, Start
from tridecode.backend.engine.host_tier.tier import HostTier
from tridecode.backend.engine.parts.adapters import drop_adapters
from tridecode.backend.engine.parts.host_copies import HostCopies
from tridecode.backend.engine.prompt_tables.book import PromptBook, refuse_in_session
from tridecode.backend.engine.schedule import resumption
from tridecode.backend.engine.schedule.admission import (
    Counters,
    SchedulerLimits,
    check_room,
    check_structured,
    fault_of,
)
from tridecode.backend.engine.schedule.masked_rows import MaskedRows
from tridecode.backend.engine.schedule.output_processor import OutputProcessor
from tridecode.backend.engine.schedule.planner import Planner
from tridecode.backend.engine.schedule.request_table import RequestTable
from tridecode.backend.engine.schedule.sequence import (
    Finish,
    Sequence,
    SequenceGroup,
    add_samples,
)
from tridecode.backend.engine.schedule.sequence_outputs import (
    LogitsBudget,
    begin_outputs,
    check_round,
    needs_prompt,
)
from tridecode.backend.engine.step.plan import StepPlan, StepResult
from tridecode.backend.wire.messages import Event, Sent, SequenceRequest, Submit


class Scheduler:
    """The scheduler, which only the loop's thread uses. `clock` gives monotonic seconds."""

    def __init__(
        self,
        limits: SchedulerLimits,
        clock: Callable[[], float],
        adapters: Adapters | None = None,
        prompts: PromptBook | None = None,
        grammars: Grammars | None = None,
        tier: HostTier | None = None,
    ):
        assert limits.max_step_tokens >= limits.max_sequences
        self.limits, self.clock = limits, clock
        self.counters = Counters()
        self.adapters = Adapters() if adapters is None else adapters
        self.grammars = Grammars() if grammars is None else grammars
        self.cache = CacheManager(limits, tier)
        self.prompt_hasher = PromptHasher(
            self.cache.index.hasher, limits.block_tokens, limits.cache_scope, limits.max_sequence_tokens
        )
        self.sessions = SessionStore(self.cache.index, limits, clock)
        self.prompts = PromptBook() if prompts is None else prompts
        self.planner = Planner(limits, self.cache, self.counters, self.prompts)
        self._logits = LogitsBudget(limits.max_logits_bytes, limits.vocab_size)
        self.requests = RequestTable(
            self.planner, self.cache, self.sessions, self.adapters, self.prompts, self._logits
        )
        self.requests.on_remove = self.grammars.release
        self.on_end = self.requests.on_end
        self._outputs = OutputProcessor(
            self.requests, self.planner, self.counters, limits.micro_batches, self.grammars
        )
        self._tier = tier
        if tier is not None:
            self._outputs.handle(HostCopies, lambda parts, found: self._arrive(*tier.commit(parts[0], found)))
        self.masks = MaskedRows(self.grammars, self.planner, self.requests)
        self._arrivals = 0

    @property
    def num_running(self) -> int:
        return self.limits.max_sequences - self.cache.num_free_slots

    @property
    def num_waiting(self) -> int:
        return self.requests.num_sequences - self.num_running - self.planner.num_without_slot

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def can_step(self) -> bool:
        """Whether `plan` may have something to do: false while all that is open waits for adapters or
        grammars."""
        adapters, grammars = self.adapters, self.grammars
        if self._tier is not None and self._tier.has_work:
            return True
        if adapters.has_news or grammars.has_news:
            return self.has_work
        return self.requests.num_groups > adapters.num_waiting + grammars.num_waiting

    def submit(self, door: bytes, submit: Submit, keys: Items[PromptKeys | None] | None = None) -> None:
        """Accept a request whole, or raise RequestError or CapacityError and keep nothing of it.

        keys: what self.prompt_hasher returns for the request, if another thread has computed it.
        """
        try:
            self._accept(door, submit, keys)
        except TridecodeError:
            self.counters.refused += 1
            raise

    def _accept(self, door: bytes, submit: Submit, keys: Items[PromptKeys | None] | None) -> None:
        key = (door, submit.request)
        if key in self.requests:
            raise RequestError(f"request {submit.request} is already running")
        count = len(submit.sequences)
        slots = sum(wanted.params.num_slots for wanted in submit.sequences)
        check_room(slots, self.num_waiting, self.cache.num_free_slots, self.limits, bool(submit.sent))
        prompts = [np.frombuffer(wanted.prompt, np.int32) for wanted in submit.sequences]
        num_new, session = sum(map(len, prompts)), None
        rows: list[SessionRow | None] = [None] * count
        if submit.session is not None:
            for wanted in submit.sequences:
                check_round(wanted.params)
            refuse_in_session(submit)
            session, prompts = self.sessions.check(door, submit, prompts)
            rows = [*session.rows]
        for index, (prompt, wanted, row) in enumerate(zip(prompts, submit.sequences, rows)):
            virtual = self.prompts.check(prompt, wanted.learned)
            fault = fault_of(prompt, wanted.params, self.limits, 0 if row is None else row.ring, virtual)
            if fault is not None:
                raise RequestError(fault if index == 0 else f"sequence {index}: {fault}")
            if wanted.lora_name:
                self.adapters.check(wanted.lora_name)
            if wanted.structured_output is not None:
                check_structured(wanted, self.limits.max_grammar_bytes, self.grammars.fault)
        if submit.sent:
            resumption.check(submit, self.limits.vocab_size)
        table_bytes = sum(len(s.learned.values) for s in submit.sequences if s.learned is not None)
        self.prompts.check_room(table_bytes, bool(submit.sent))
        self._logits.reserve(key, submit.sequences, bool(submit.sent))
        deadline = self.clock() + (submit.timeout_s or self.limits.request_timeout_s)
        groups = [
            SequenceGroup(
                door, submit.request, prompt, submit.priority, self._arrivals + i, deadline, wanted.lora_name
            )
            for i, (prompt, wanted) in enumerate(zip(prompts, submit.sequences))
        ]
        if submit.session is not None and session is not None:
            self.sessions.open(door, submit, session)
            for group, row in zip(groups, rows):
                group.session, group.row = submit.session.session, row
        for group, chain in zip(groups, self.prompt_hasher.keys(submit) if keys is None else keys):
            group.chain = chain
        for group, row, wanted in zip(groups, rows, submit.sequences):
            if row is not None and not row.ring:  # its tokens are known here only
                ids = group.prompt.astype("<i4").tobytes()
                group.chain = self.prompt_hasher.of(ids, wanted.params, row.chain, 4 * row.reusable)
        self.requests.add(key, groups)
        self._arrivals += count
        self.counters.requests += 1
        self.counters.resumed += bool(submit.sent)
        self.counters.prompt_tokens += num_new
        index = 0
        for group, wanted, sent in zip(groups, submit.sequences, resumption.by_prompt(submit)):
            self._begin(group, wanted, index, sent)
            index += wanted.params.num_sequences

    def _begin(self, group: SequenceGroup, wanted: SequenceRequest, index: int, sent: list[Sent]) -> None:
        """Make the group's sequences, the first one with this index, and queue them.

        sent: what an earlier engine sent for them; [] for a new request."""
        params = wanted.params
        sequence = Sequence(group, index, params)
        self.prompts.hold(group, wanted.learned)
        begin_outputs(sequence)
        if params.beam_width > 1:
            self.planner.beams.start(sequence)
        elif params.num_return_sequences > 1:
            add_samples(sequence)
        if sent:
            resumption.restore(group, sent, self.limits.vocab_size)
        self.requests.add_sequences(group)
        if sent and not self._goes_on(group):
            return
        if params.max_tokens == 0 and not needs_prompt(params):
            self.requests.end_group(group, Finish.LENGTH)
        else:
            if wanted.structured_output is not None:
                drafts = self.planner.drafts
                group.late_masks = self.limits.late_masks and drafts is None
                most = 0 if drafts is None else drafts.most_forced(sequence)
                starts = [
                    Start(one, params.end_ids, one.output.copy(), params.allowed_token_ids, most)
                    for one in group.sequences
                ]
                self.grammars.want(group, wanted.structured_output, starts)
            else:
                self._queue(group)
            self.requests.watch_deadline(group)

    def _queue(self, group: SequenceGroup) -> None:
        """Queue a group whose grammar, if any, is compiled: at once, or when its adapter is loaded."""
        if not group.lora_name or self.adapters.want(group):
            self.planner.wait(group.sequences[0])

    def _goes_on(self, group: SequenceGroup) -> bool:
        """Return whether a resumed group has anything left to generate.

        If only the last event of a sequence was lost, end that sequence."""
        if not group.sequences:
            self.requests.remove(group)
        elif group.search is not None:
            if group.search.is_over:
                self.requests.end_beams(group, None)
        else:
            for sequence in list(group.sequences):
                finish = resumption.end_of(sequence)
                if finish is not None:
                    self.requests.end(sequence, finish)
            group.followers = group.sequences[1:]
        return bool(group.sequences)

    def fork(self, parent: Sequence, index: int, token: int | None = None) -> Sequence:
        """A new sequence of the parent's group that has the parent's tokens, the newest replaced by `token`.

        parent: not ended; it has output if `token` is given. index: of the child's events, which carry what
        it generates after the fork. Where the parent decodes and has no token in flight, the child shares its
        cache blocks and copies its sampling state on the device; else the child waits for admission and is
        computed again. For the loop's thread, between commit and plan."""
        child, finish = parent.split(index), None
        self.requests.add_fork(child)
        if token is not None:
            child.output.pop()
            finish = child.append(token)
        if finish is not None:
            self.requests.end(child, finish)
        else:
            self.planner.fork(parent, child, same_token=token is None)
        return child

    def cancel(self, door: bytes, request: int) -> None:
        """End the remaining sequences of a request; their blocks are free at once. Ignore unknown ones."""
        error = RequestCancelled("the request was cancelled")
        for group in self.requests.of_request((door, request)):
            self.counters.cancelled += len(group.sequences) if group.search is None else 1
            self.requests.end_group(group, Finish.CANCELLED, error)

    def end_session(self, door: bytes, number: int) -> None:
        """Forget a session of the door. Rounds that the door has not cancelled end with an error."""
        for key in self.requests.of_door(door):
            if any(group.session == number for group in self.requests.of_request(key)):
                self.cancel(*key)
        self.sessions.end(door, number)

    def cancel_door(self, door: bytes) -> None:
        """End all requests of a door that is gone."""
        for key in self.requests.of_door(door):
            self.cancel(*key)
        self.sessions.end_door(door)

    def take_events(self) -> list[tuple[bytes, Event]]:
        """Return the events since the last call, in order, each with its door."""
        return self.requests.take_events()

    def plan(self) -> StepPlan | None:
        """Return the next step, or None if there is nothing to do now. Requests that are overdue end."""
        self.requests.end_overdue(self.clock())
        for group in self.masks.take_ready():
            group.followers = group.sequences[1:]
            self._queue(group)
        for group, error in self.adapters.take_ready():
            if error is not None:
                self.requests.end_group(group, Finish.ERROR, error)
                continue
            self.planner.wait(group.sequences[0])
        self.sessions.expire()
        plan = self.planner.plan(extra_outputs=self.requests.num_extra_outputs > 0)
        if plan is not None and plan.num_tokens:
            dropped = self.adapters.take_dropped()
            if dropped:
                drop_adapters(plan, dropped)
            if self._tier is not None:
                self._tier.begin_step(plan)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[tuple[bytes, Event]]:
        """Append a step's tokens and end the sequences they end. Returns the events since the last call."""
        if self._tier is not None:
            self._tier.end_step(plan)
        self._outputs.commit(plan, result)
        return self.requests.take_events()

    def _arrive(self, whole: list[Sequence], lost: list[Sequence]) -> list[Sequence]:
        """Let sequences continue whose step has copied their blocks in; compute the `lost` ones again and
        return them.
        """
        for sequence in whole:
            self.planner.arrive(sequence)
        for sequence in lost:
            self.planner.take_back(sequence)
        return lost

    def abandon(self, plan: StepPlan, error: TridecodeError) -> None:
        """End the prompts of a step that ran out of memory with the error; compute its decode rows again."""
        if self._tier is not None:
            self._tier.abandon(plan)
        self._outputs.abandon(plan, error)
