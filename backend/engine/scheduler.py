"""All sequences of the engine, from `submit` to their last event. Host only: no torch.

The parts: admission.py checks requests and queues sequences, cache_manager.py holds slots and blocks,
planner.py chooses and builds steps, and this file keeps the requests and commits results.

`plan` may run while the step before is still on the device: a decoding row then continues from a token the
host has not seen. Rows of sequences that ended in the meantime are dropped when their step is committed.
"""

from __future__ import annotations

from typing import Callable

import numpy as np

from tridecode.backend.engine.adapters import Adapters
from tridecode.backend.engine.admission import Counters, LazyHeap, SchedulerLimits, check_room, fault_of
from tridecode.backend.engine.cache_manager import CacheManager
from tridecode.backend.engine.plan import StepPlan, StepResult
from tridecode.backend.engine.planner import Planner
from tridecode.backend.engine.sequence import Finish, Sequence, SequenceGroup, Stage
from tridecode.backend.errors import DeadlineError, RequestCancelled, RequestError, TridecodeError
from tridecode.backend.messages import Event, Submit


class Scheduler:
    """Used by the loop's thread only. `clock` gives monotonic seconds."""

    def __init__(self, limits: SchedulerLimits, clock: Callable[[], float], adapters: Adapters | None = None):
        assert limits.max_step_tokens >= limits.max_sequences
        self.limits, self.clock = limits, clock
        self.counters = Counters()
        self.adapters = Adapters() if adapters is None else adapters
        self.cache = CacheManager(limits)
        self.planner = Planner(limits, self.cache, self.counters)
        self._requests: dict[tuple[bytes, int], list[SequenceGroup]] = {}  # groups that have not ended
        self._num_open = 0  # sequences that have not ended
        self._deadlines: LazyHeap[SequenceGroup] = LazyHeap(lambda group: bool(group.sequences))
        self._events: list[tuple[bytes, Event]] = []
        self._arrivals = 0

    @property
    def num_running(self) -> int:
        return self.limits.max_sequences - self.cache.num_free_slots

    @property
    def num_waiting(self) -> int:
        return self._num_open - self.num_running

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def can_step(self) -> bool:
        """Whether `plan` may have something to do: false while all that is open waits for adapters."""
        return self.has_work and (self._num_open > self.adapters.num_waiting or self.adapters.has_news)

    def submit(self, door: bytes, submit: Submit) -> None:
        """Accept a request whole, or raise RequestError or CapacityError and keep nothing of it."""
        key = (door, submit.request)
        if key in self._requests:
            raise RequestError(f"request {submit.request} is already running")
        count = len(submit.sequences)
        try:
            check_room(count, self.num_waiting, self.cache.num_free_slots, self.limits)
        except TridecodeError:
            self.counters.refused += 1
            raise
        prompts = [np.frombuffer(wanted.prompt, np.int32) for wanted in submit.sequences]
        for index, (prompt, wanted) in enumerate(zip(prompts, submit.sequences)):
            fault = fault_of(prompt, wanted.params, self.limits)
            if fault is not None:
                raise RequestError(fault if index == 0 else f"sequence {index}: {fault}")
            if wanted.lora_name:
                self.adapters.check(wanted.lora_name)
        deadline = self.clock() + (submit.timeout_s or self.limits.request_timeout_s)
        groups = [
            SequenceGroup(
                door, submit.request, prompt, submit.priority, self._arrivals + i, deadline, wanted.lora_name
            )
            for i, (prompt, wanted) in enumerate(zip(prompts, submit.sequences))
        ]
        self._requests[key] = groups.copy()
        self._arrivals += count
        self._num_open += count
        self.counters.requests += 1
        self.counters.prompt_tokens += sum(map(len, prompts))
        for index, (group, wanted) in enumerate(zip(groups, submit.sequences)):
            sequence = Sequence(group, index, wanted.params)
            if wanted.params.max_tokens == 0 and not wanted.params.return_context_embedding:
                self._end(sequence, Finish.LENGTH)
            else:
                if not wanted.lora_name or self.adapters.want(group):
                    self.planner.wait(sequence)
                self._deadlines.push((deadline, group.arrival), group)

    def fork(self, parent: Sequence, index: int, token: int | None = None) -> Sequence:
        """A new sequence of the parent's group that has the parent's tokens, the newest replaced by `token`.

        parent: not ended; it has output if `token` is given. index: of the child's events, which carry what
        it generates after the fork. Where the parent decodes and has no token in flight, the child shares its
        cache blocks and copies its sampling state on the device; else the child waits for admission and is
        computed again. For the loop's thread, between commit and plan.
        """
        child, finish = parent.split(index), None
        self._num_open += 1
        if token is not None:
            child.output.pop()
            finish = child.append(token)
        if finish is not None:
            self._end(child, finish)
        else:
            self.planner.fork(parent, child, same_token=token is None)
        return child

    def cancel(self, door: bytes, request: int) -> None:
        """End what is left of a request; its blocks are free at once. An unknown one has ended already."""
        error = RequestCancelled("the request was cancelled")
        for group in list(self._requests.get((door, request), ())):
            self.counters.cancelled += len(group.sequences)
            self._end_group(group, Finish.CANCELLED, error)

    def cancel_door(self, door: bytes) -> None:
        """The door is gone: end all its requests."""
        for owner, request in [key for key in self._requests if key[0] == door]:
            self.cancel(owner, request)

    def fail_all(self, error: TridecodeError) -> None:
        """End every request with the error."""
        for group in [group for groups in self._requests.values() for group in groups]:
            self._end_group(group, Finish.ERROR, error)

    def take_events(self) -> list[tuple[bytes, Event]]:
        """What happened since the last call, in order, each with its door."""
        events, self._events = self._events, []
        return events

    def plan(self) -> StepPlan | None:
        """The next step, or None where there is nothing to do now. Ends the requests that are overdue."""
        while (group := self._deadlines.first()) is not None and group.deadline <= self.clock():
            self._deadlines.pop()
            for sequence in list(group.sequences):
                done = f"{len(sequence.output)} of {sequence.params.max_tokens} tokens"
                text = f"the request's deadline passed when it had {done}"
                if sequence.group.lora_name and sequence.group.adapter < 0:
                    text += f"; it was waiting for the adapter {sequence.group.lora_name!r}"
                self._end(sequence, Finish.DEADLINE, DeadlineError(text))
        for group, error in self.adapters.take_ready():
            if error is not None:
                self._end_group(group, Finish.ERROR, error)
                continue
            for sequence in group.sequences:
                self.planner.wait(sequence)
        plan = self.planner.plan()
        if plan is not None:
            plan.drop_adapters = self.adapters.take_dropped()
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[tuple[bytes, Event]]:
        """Append a step's tokens and end the sequences they end. Returns the events since the last call."""
        for (row, _), embedding in zip(plan.embeds, result.embeddings):
            sequence = plan.sequences[row]
            sequence.embedding = embedding if sequence.embedding is None else sequence.embedding + embedding
        sampled = plan.sequences
        if not plan.samples.all():
            sampled = [sequence for sequence, count in zip(sampled, plan.samples) if count]
        for sequence, token, log_prob in zip(sampled, result.tokens.tolist(), result.log_probs.tolist()):
            sequence.in_flight -= 1
            if sequence.stage is Stage.ENDED:  # while this step was on the device
                continue
            if sequence.params.max_tokens == 0:  # the request wants the context embedding alone
                self._end(sequence, Finish.LENGTH)
                continue
            finish = sequence.append(token)
            self.counters.output_tokens += 1
            log_probs = [log_prob] if sequence.params.return_log_probs else []
            if finish is not None:
                self._end(sequence, finish, None, [token], log_probs)
            else:
                self._emit(sequence, [token], log_probs)
        return self.take_events()

    def abandon(self, plan: StepPlan, error: TridecodeError) -> None:
        """A step ran out of memory: its prompts end with the error, its decoding rows are computed again."""
        for row, sequence in enumerate(plan.sequences):
            if sequence.stage is Stage.ENDED:
                continue
            sequence.in_flight -= int(plan.samples[row])
            if row >= plan.num_decodes:
                self._end(sequence, Finish.ERROR, error)
            else:
                self.planner.preempt(sequence)

    def _end_group(self, group: SequenceGroup, finish: Finish, error: TridecodeError) -> None:
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
        self.planner.leave(sequence)
        sequence.stage = Stage.ENDED
        self._num_open -= 1
        group = sequence.group
        group.sequences.remove(sequence)
        if not group.sequences:
            self.adapters.release(group)
            key = (group.door, group.request)
            self._requests[key].remove(group)
            if not self._requests[key]:
                del self._requests[key]
        text, code = (str(error), error.code) if error else ("", "")
        self._emit(sequence, tokens or [], log_probs or [], finish.value, text, code)

    def _emit(
        self,
        sequence: Sequence,
        tokens: list[int],
        log_probs: list[float],
        finish: str = "",
        error: str = "",
        code: str = "",
    ) -> None:
        group, embedding = sequence.group, b""
        if sequence.embedding is not None:
            embedding = sequence.take_embedding()
        event = Event(group.request, sequence.index, tokens, log_probs, finish, error, code, embedding)
        self._events.append((group.door, event))
