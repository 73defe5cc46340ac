"""All sequences of the engine, from `submit` to their last event. Host only: no torch.

The parts: admission.py checks requests and queues sequences, cache_manager.py holds slots and blocks,
planner.py chooses and builds steps, and this file keeps the requests and commits results.

`plan` may run while the step before is still on the device: a decoding row then continues from a token the
host has not seen. With limits.micro_batches several plans are in flight, and a decoding sequence is in one of
them at most. Rows of sequences that ended in the meantime are dropped when their step is committed.
"""

from __future__ import annotations

from typing import Callable

import numpy as np

from tridecode.backend.base.errors import DeadlineError, RequestCancelled, RequestError, TridecodeError
from tridecode.backend.engine.adapters.table import Adapters
from tridecode.backend.engine.cache.cache_manager import CacheManager
from tridecode.backend.engine.cache.sessions import SessionRow, SessionStore
from tridecode.backend.engine.parts.adapters import drop_adapters
from tridecode.backend.engine.parts.beams import BeamRows
from tridecode.backend.engine.prompt_tables.book import PromptBook, refuse_in_session
from tridecode.backend.engine.schedule import resumption
from tridecode.backend.engine.schedule.admission import (
    Counters,
    LazyHeap,
    SchedulerLimits,
    check_room,
    fault_of,
)
from tridecode.backend.engine.schedule.planner import Planner
from tridecode.backend.engine.schedule.sequence import (
    Finish,
    Search,
    Sequence,
    SequenceGroup,
    Stage,
    add_samples,
    no_token_error,
)
from tridecode.backend.engine.schedule.sequence_outputs import (
    ExtraOutputs,
    LogitsBudget,
    check_round,
    needs_prompt,
    wants_extra_outputs,
)
from tridecode.backend.engine.step.plan import NO_TOKEN, Commit, Handler, StepPart, StepPlan, StepResult
from tridecode.backend.wire.messages import BeamStep, Event, Sent, SequenceRequest, Submit


class Scheduler:
    """The scheduler, which only the loop's thread uses. `clock` gives monotonic seconds."""

    def __init__(
        self,
        limits: SchedulerLimits,
        clock: Callable[[], float],
        adapters: Adapters | None = None,
        prompts: PromptBook | None = None,
    ):
        assert limits.max_step_tokens >= limits.max_sequences
        self.limits, self.clock = limits, clock
        self.counters = Counters()
        self.adapters = Adapters() if adapters is None else adapters
        self.cache = CacheManager(limits)
        self.sessions = SessionStore(self.cache.index, limits, clock)
        self.prompts = PromptBook() if prompts is None else prompts
        self.planner = Planner(limits, self.cache, self.counters, self.prompts)
        self._requests: dict[tuple[bytes, int], list[SequenceGroup]] = {}  # groups that have not ended
        self._num_open = 0  # sequences and beams that have not ended
        self._num_groups = 0  # of them
        self._deadlines: LazyHeap[SequenceGroup] = LazyHeap(lambda group: bool(group.sequences))
        self._events: list[tuple[bytes, Event]] = []
        self._arrivals = 0
        self._handlers: dict[type[StepPart], Handler] = {BeamRows: self._take_candidates}
        self._logits = LogitsBudget(limits.max_logits_bytes, limits.vocab_size)
        #: callbacks for each sequence that ends, and the first of each beam search; None: the search is over
        self.on_end: list[Callable[[Sequence, Finish | None], None]] = []

    @property
    def num_running(self) -> int:
        return self.limits.max_sequences - self.cache.num_free_slots

    @property
    def num_waiting(self) -> int:
        return self._num_open - self.num_running - len(self.planner.without_slot)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def can_step(self) -> bool:
        """Whether `plan` may have something to do: false while all that is open waits for adapters."""
        return self.has_work and (self._num_groups > self.adapters.num_waiting or self.adapters.has_news)

    def submit(self, door: bytes, submit: Submit) -> None:
        """Accept a request whole, or raise RequestError or CapacityError and keep nothing of it."""
        try:
            self._accept(door, submit)
        except TridecodeError:
            self.counters.refused += 1
            raise

    def _accept(self, door: bytes, submit: Submit) -> None:
        key = (door, submit.request)
        if key in self._requests:
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
        self._requests[key] = groups.copy()
        self._arrivals += count
        self._num_groups += count
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
        if wants_extra_outputs(params):
            sequence.extra_outputs = ExtraOutputs()
        if params.beam_width > 1:
            self.planner.beams.start(sequence)
        elif params.num_return_sequences > 1:
            add_samples(sequence)
        if sent:
            resumption.restore(group, sent, self.limits.vocab_size)
        if group.sequences:
            self._num_open += len(group.sequences) if group.search is None else group.search.width
        self.planner.num_extra_outputs += sum(one.extra_outputs is not None for one in group.sequences)
        if sent and not self._goes_on(group):
            return
        if params.max_tokens == 0 and not needs_prompt(params):
            self._end_group(group, Finish.LENGTH)
        else:
            if not wanted.lora_name or self.adapters.want(group):
                self.planner.wait(group.sequences[0])
            self._deadlines.push((group.deadline, group.arrival), group)

    def _goes_on(self, group: SequenceGroup) -> bool:
        """Return whether a resumed group has anything left to generate.

        If only the last event of a sequence was lost, end that sequence."""
        if not group.sequences:
            self._forget(group)
        elif group.search is not None:
            if group.search.is_over:
                self._end_beams(group, None)
        else:
            for sequence in list(group.sequences):
                finish = resumption.end_of(sequence)
                if finish is not None:
                    self._end(sequence, finish)
            group.followers = group.sequences[1:]
        return bool(group.sequences)

    def fork(self, parent: Sequence, index: int, token: int | None = None) -> Sequence:
        """A new sequence of the parent's group that has the parent's tokens, the newest replaced by `token`.

        parent: not ended; it has output if `token` is given. index: of the child's events, which carry what
        it generates after the fork. Where the parent decodes and has no token in flight, the child shares its
        cache blocks and copies its sampling state on the device; else the child waits for admission and is
        computed again. For the loop's thread, between commit and plan."""
        child, finish = parent.split(index), None
        self._num_open += 1
        self.planner.num_extra_outputs += child.extra_outputs is not None
        if token is not None:
            child.output.pop()
            finish = child.append(token)
        if finish is not None:
            self._end(child, finish)
        else:
            self.planner.fork(parent, child, same_token=token is None)
        return child

    def cancel(self, door: bytes, request: int) -> None:
        """End the remaining sequences of a request; their blocks are free at once. Ignore unknown ones."""
        error = RequestCancelled("the request was cancelled")
        for group in list(self._requests.get((door, request), ())):
            self.counters.cancelled += len(group.sequences) if group.search is None else 1
            self._end_group(group, Finish.CANCELLED, error)

    def end_session(self, door: bytes, number: int) -> None:
        """Forget a session of the door. Rounds that the door has not cancelled end with an error."""
        for owner, request in [key for key in self._requests if key[0] == door]:
            if any(group.session == number for group in self._requests[owner, request]):
                self.cancel(owner, request)
        self.sessions.end(door, number)

    def cancel_door(self, door: bytes) -> None:
        """End all requests of a door that is gone."""
        for owner, request in [key for key in self._requests if key[0] == door]:
            self.cancel(owner, request)
        self.sessions.end_door(door)

    def take_events(self) -> list[tuple[bytes, Event]]:
        """Return the events since the last call, in order, each with its door."""
        events, self._events = self._events, []
        return events

    def plan(self) -> StepPlan | None:
        """Return the next step, or None if there is nothing to do now. Requests that are overdue end."""
        while (group := self._deadlines.first()) is not None and group.deadline <= self.clock():
            self._deadlines.pop()
            if group.search is not None:
                self._end_beams(group, Finish.DEADLINE, _overdue(group.sequences[0]))
                continue
            for sequence in list(group.sequences):
                self._end(sequence, Finish.DEADLINE, _overdue(sequence))
        for group, error in self.adapters.take_ready():
            if error is not None:
                self._end_group(group, Finish.ERROR, error)
                continue
            self.planner.wait(group.sequences[0])
        self.sessions.expire()
        plan = self.planner.plan()
        if plan is not None:
            dropped = self.adapters.take_dropped()
            if dropped:
                drop_adapters(plan, dropped)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[tuple[bytes, Event]]:
        """Append a step's tokens and end the sequences they end. Returns the events since the last call."""
        sampled = plan.sequences
        if plan.queries:
            sampled = [one for one, count in zip(sampled, plan.samples.tolist()) for _ in range(count)]
        elif not plan.samples.all():
            sampled = [sequence for sequence, count in zip(sampled, plan.samples) if count]
        tokens, all_log_probs, news = result.tokens.tolist(), result.log_probs.tolist(), []
        if plan.parts:
            step = Commit(plan, sampled, self._handlers)
            for part, found in zip(plan.parts, result.parts):
                if found is not None:
                    part.commit(step, found)
            news = step.news
            if step.taken and not plan.queries:
                others = np.delete(np.arange(len(sampled)), step.taken).tolist()
                sampled = [sampled[i] for i in others]
                tokens, all_log_probs = [tokens[i] for i in others], [all_log_probs[i] for i in others]
        if plan.queries:
            sampled = self._commit_rows(plan, result, set(step.taken) if plan.parts else set())
            tokens = []
        for sequence, token, log_prob in zip(sampled, tokens, all_log_probs):
            sequence.in_flight -= 1
            if sequence.stage is Stage.ENDED:  # while this step was on the device
                continue
            if token < 0:
                error = no_token_error(sequence) if token == NO_TOKEN else _not_a_number(sequence)
                self._end(sequence, Finish.ERROR, error)
                continue
            if sequence.params.max_tokens == 0:  # the request returns results of its prompt
                self._end(sequence, Finish.LENGTH)
                continue
            finish = sequence.append(token)
            self.counters.output_tokens += 1
            log_probs = [log_prob] if sequence.params.return_log_probs else []
            if finish is not None:
                self._end(sequence, finish, None, [token], log_probs)
            else:
                self._emit(sequence, [token], log_probs)
        if self.limits.micro_batches > 1 or self.planner.drafts is not None:
            self.planner.resume(sampled)
        for sequence in news:
            if sequence.stage is not Stage.ENDED and sequence.has_news:
                self._emit(sequence, [], [])
        return self.take_events()

    def _commit_rows(self, plan: StepPlan, result: StepResult, taken: set[int]) -> list[Sequence]:
        """Commit a step that verifies, without the samples that parts have taken; return the sequences of its
        rows."""
        assert result.accepted is not None
        tokens, log_probs = result.tokens.tolist(), result.log_probs.tolist()
        accepted, committed, first = result.accepted.tolist(), [], 0
        for row, (sequence, count) in enumerate(zip(plan.sequences, plan.samples.tolist())):
            start, first = first, first + count
            if count == 0 or start in taken:
                continue
            kept = accepted[row] if row < plan.num_decodes else 1
            committed.append(sequence)
            sequence.in_flight -= count
            if row < plan.num_decodes:
                self.planner.settle(plan, row, kept)
            if sequence.stage is not Stage.ENDED:  # while this step was on the device
                self._take_tokens(sequence, tokens[start : start + kept], log_probs[start : start + kept])
        return committed

    def _take_tokens(self, sequence: Sequence, tokens: list[int], log_probs: list[float]) -> None:
        """Append the tokens that a row keeps, and end the sequence where one of them ends it."""
        finish = None
        for count, token in enumerate(tokens, 1):
            if token < 0:
                if count > 1:
                    self._emit(sequence, tokens[: count - 1], self._wanted(sequence, log_probs[: count - 1]))
                error = no_token_error(sequence) if token == NO_TOKEN else _not_a_number(sequence)
                self._end(sequence, Finish.ERROR, error)
                return
            if sequence.params.max_tokens == 0:  # the request returns results of its prompt
                self._end(sequence, Finish.LENGTH)
                return
            finish = sequence.append(token)
            self.counters.output_tokens += 1
            if finish is not None:
                break
        tokens, log_probs = tokens[:count], self._wanted(sequence, log_probs[:count])
        if finish is not None:
            self._end(sequence, finish, None, tokens, log_probs)
        else:
            self._emit(sequence, tokens, log_probs)

    @staticmethod
    def _wanted(sequence: Sequence, log_probs: list[float]) -> list[float]:
        return log_probs if sequence.params.return_log_probs else []

    def abandon(self, plan: StepPlan, error: TridecodeError) -> None:
        """End the prompts of a step that ran out of memory with the error; compute its decode rows again."""
        for row, sequence in enumerate(plan.sequences):
            if sequence.stage is Stage.ENDED:
                continue
            sequence.in_flight -= int(plan.samples[row])
            if plan.queries and row < plan.num_decodes:
                self.planner.settle(plan, row, int(plan.samples[row]))
            if row >= plan.num_decodes:
                if sequence.group.search is None:
                    self._end(sequence, Finish.ERROR, error)
                else:
                    self._end_beams(sequence.group, Finish.ERROR, error)
            elif sequence.stage is not Stage.WAITING:  # a beam whose group has been preempted already
                self.planner.preempt(sequence)

    def _take_candidates(self, beams: list[Sequence], found: tuple[np.ndarray, np.ndarray]) -> None:
        """Hand each beam of a step its candidates, a row of ids and of log_probs (n, W), most likely first; a
        group whose beams all have theirs advances."""
        for sequence, mine, likely in zip(beams, *found):
            sequence.in_flight -= 1
            search, most = sequence.group.search, 2 * sequence.params.beam_width
            if sequence.stage is not Stage.AWAITED or search is None:  # ended or preempted since
                continue
            if sequence.params.max_tokens == 0:  # the request wants the context embedding alone
                self._end_beams(sequence.group, Finish.LENGTH)
            elif search.take(sequence, mine[:most], likely[:most]):
                self._advance(sequence.group, search)

    def _advance(self, group: SequenceGroup, search: Search) -> None:
        """Advance a beam search by one step; emit its event or end it."""
        try:
            step = search.advance()
        except ArithmeticError as error:
            self._end_beams(group, Finish.ERROR, TridecodeError(str(error)))
            return
        except RequestError as error:
            self._end_beams(group, Finish.ERROR, error)
            return
        self.counters.output_tokens += sum(token >= 0 for token in step.tokens)
        for sequence in group.sequences:
            sequence.stage = Stage.DECODE
        if search.is_over:
            self._end_beams(group, None, None, step)
        elif not search.params.beam_pool:
            self._events.append((group.door, search.event(step)))

    def _end_beams(
        self,
        group: SequenceGroup,
        finish: Finish | None,
        error: TridecodeError | None = None,
        step: BeamStep | None = None,
    ) -> None:
        """Free all that the group holds and emit its last events. finish: None if the search is over."""
        search = group.search
        assert search is not None
        for callback in self.on_end:
            callback(search.first, finish)
        self.planner.leave_beams(group)
        for sequence in group.sequences:
            sequence.stage = Stage.ENDED
        group.sequences.clear()
        self._num_open -= search.width
        self.planner.num_extra_outputs -= search.first.extra_outputs is not None
        self._forget(group)
        self._events += [(group.door, event) for event in search.last_events(finish, error, step)]

    def _end_group(self, group: SequenceGroup, finish: Finish, error: TridecodeError | None = None) -> None:
        if group.search is not None:
            self._end_beams(group, finish, error)
        for sequence in list(group.sequences):
            self._end(sequence, finish, error)

    def _end(
        self,
        sequence: Sequence,
        finish: Finish,
        error: TridecodeError | None = None,
        tokens: list[int] | None = None,
        log_probs: list[float] | None = None,
    ) -> None:
        """Free the sequence's slot and blocks and emit its last event."""
        for callback in self.on_end:
            callback(sequence, finish)
        if sequence.group.row is not None:
            self._keep(sequence, sequence.group.row, finish)
        self.planner.leave(sequence)
        sequence.stage = Stage.ENDED
        self._num_open -= 1
        self.planner.num_extra_outputs -= sequence.extra_outputs is not None
        group = sequence.group
        group.sequences.remove(sequence)
        if not group.sequences:
            self._forget(group)
        text, code = (str(error), error.code) if error else ("", "")
        self._emit(sequence, tokens or [], log_probs or [], finish.value, text, code)

    def _forget(self, group: SequenceGroup) -> None:
        """Forget a group that has ended."""
        self._num_groups -= 1
        self.adapters.release(group)
        self.prompts.release(group)
        key = (group.door, group.request)
        self._requests[key].remove(group)
        if not self._requests[key]:
            del self._requests[key]
            self._logits.release(key)

    def _keep(self, sequence: Sequence, row: SessionRow, finish: Finish) -> None:
        """Index the sequence's blocks for its session, unless an error may have left them unwritten."""
        held = None
        if sequence.slot >= 0:
            held = self.planner.held(sequence)
            if finish is Finish.ERROR:
                held = held._replace(written=0)
        group = sequence.group
        self.sessions.keep(group.door, group.session, row, sequence.known_tokens(), held)

    def _emit(
        self,
        sequence: Sequence,
        tokens: list[int],
        log_probs: list[float],
        finish: str = "",
        error: str = "",
        code: str = "",
    ) -> None:
        group, embedding, extra = sequence.group, b"", None
        if sequence.embedding is not None and (tokens or finish):  # else a chunk of the prompt may be missing
            embedding = sequence.take_embedding()
        if sequence.extra_outputs is not None:
            extra = sequence.extra_outputs.take(sequence.params, bool(tokens), bool(finish))
        tops = sequence.take_top() if sequence.top is not None and tokens else []
        event = Event(
            group.request, sequence.index, tokens, log_probs, finish, error, code, embedding, tops, extra,
            queued_s=group.take_queued(),
        )  # fmt: skip
        self._events.append((group.door, event))


def _overdue(sequence: Sequence) -> DeadlineError:
    done = f"{len(sequence.output)} of {sequence.params.max_tokens} tokens"
    text = f"the request's deadline passed when it had {done}"
    if sequence.group.lora_name and sequence.group.adapter < 0:
        text += f"; it was waiting for the adapter {sequence.group.lora_name!r}"
    return DeadlineError(text)


def _not_a_number(sequence: Sequence) -> TridecodeError:
    return TridecodeError(
        f"the model's logits are not numbers (NaN or infinite) after {len(sequence.prompt)} tokens of prompt "
        f"and {len(sequence.output)} of output; weights may be damaged, or overflow in data_type fp16"
    )
