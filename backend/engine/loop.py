"""The decode loop of rank 0: take requests, plan, step, commit, send events."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import asdict
from typing import Protocol

import torch

from tridecode.backend.base.errors import CapacityError, TridecodeError
from tridecode.backend.engine.cache.prompt_keys import HashedSubmit, PromptKeys
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.pending import Pending
from tridecode.backend.engine.door_socket import DoorSocket
from tridecode.backend.engine.schedule.scheduler import Scheduler
from tridecode.backend.engine.step.plan import LateSamples, PlanMessage, StepPlan
from tridecode.backend.engine.step.plan_queue import End, PlanQueue
from tridecode.backend.wire import messages as m

log = logging.getLogger("tridecode.engine")

_TELL_S = 0.05  # status update interval; heartbeats are rarer
_COUNT_S = 1.0  # interval at which blocks of sessions are counted: this looks at each of them
_IDLE_S = 0.25  # longest wait for a request
_DEVICE_S = 1.0  # interval at which an idle device is checked
_POLL_S = 0.0005  # interval at which a follower that waits for a plan checks its step in flight


class Status(Protocol):
    """Status of the loop; heartbeats read it from another thread."""

    steps: int
    busy_since: float  # monotonic seconds when the current step began; 0: none
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    metrics: dict[str, float]
    loop: threading.Thread | None  # thread that runs the steps
    idles: bool  # whether it may sleep for long between steps


class DecodeLoop:
    """Owns scheduler and engine; the only thread that touches them.

    On a device that works by itself (engine.is_asynchronous) the next step is launched before the tokens of
    the one before are read; with pipeline stages as many steps are in flight as there are stages.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler, doors: DoorSocket, status: Status):
        self.engine, self.scheduler, self.doors, self.status = engine, scheduler, doors, status
        self._stopping = False
        self._seconds = 0.0  # seconds spent in steps
        self._status_at = 0.0
        self._checked = 0.0  # the device
        self._session_blocks, self._sessions_at = 0, 0.0
        self.background = [run.begin() for run in engine.background]
        scheduler.grammars.on_ready = doors.wake
        scheduler.on_end += [work.offer for work in self.background]

    def stop(self) -> None:
        """Stop after the current step. Any thread."""
        self._stopping = True
        self.doors.wake()

    def run(self) -> None:
        """Run until `stop`.

        Open requests get no further events: the supervisor notifies the doors, which end them or pass them to
        the next engine. Raises whatever a step raises, except out-of-memory.
        """
        self.status.loop = threading.current_thread()
        try:
            self._serve()
        finally:
            self.status.loop = None

    def _serve(self) -> None:
        pending: deque[tuple[StepPlan, Pending]] = deque()
        while not self._stopping:
            has_slices = any(work.has_work for work in self.background)
            if pending and pending[-1][0].late:
                pending[-1] = self._sample_late(*pending[-1])
            self._take_requests(may_wait=not pending and not has_slices)
            launched = self._launch()
            if launched is not None:
                pending.append(launched)
            if pending and (launched is None or len(pending) >= self.engine.depth):
                self._commit(*pending.popleft())
            self._run_background(live=bool(pending) or self.scheduler.can_step)
            self._tell()
        if self.engine.micro_batches > 1:
            for _, step in pending:  # the other stages send their results before they receive the end
                step.wait()

    def _take_requests(self, may_wait: bool) -> None:
        arrived = self.doors.drain()
        if may_wait and not arrived and not self.scheduler.can_step:
            self.doors.wait(_IDLE_S)
            arrived = self.doors.drain()
            if not arrived:
                self._check_device()
        for door, message in arrived:
            if isinstance(message, HashedSubmit):
                self._submit(door, *message)
            elif isinstance(message, m.Submit):
                self._submit(door, message)
            elif isinstance(message, m.Cancel):
                self.scheduler.cancel(door, message.request)
            elif isinstance(message, m.EndSession):
                self.scheduler.end_session(door, message.session)
            else:
                self.scheduler.cancel_door(door)

    def _run_background(self, live: bool) -> None:
        """Run a slice of each background feature that is due.

        live: requests are waiting for the next step.
        """
        for work in self.background:
            if work.may_run(live):
                self.status.busy_since = self.status.busy_since or time.monotonic()
                work.run()
                if not live:
                    self.status.busy_since = 0.0

    def _check_device(self) -> None:
        """Notice a device that died while the engine is idle.

        Raises the device's error; a hanging device appears as a step that does not end.
        """
        now = time.monotonic()
        if now - self._checked >= _DEVICE_S:
            self._checked = self.status.busy_since = now
            self.engine.check_device()
            self.status.busy_since = 0.0

    def _submit(self, door: bytes, submit: m.Submit, keys: list[PromptKeys | None] | None = None) -> None:
        try:
            self.scheduler.submit(door, submit, keys)
        except TridecodeError as error:
            self._refuse(door, submit, str(error), error.code)
        except Exception as error:  # a fault in the checks ends only this request
            log.exception("request %d of a door could not be accepted", submit.request)
            self._refuse(door, submit, f"the engine could not accept it: {type(error).__name__}", "INTERNAL")

    def _refuse(self, door: bytes, submit: m.Submit, text: str, code: str) -> None:
        self.doors.send([(door, m.Event(submit.request, 0, finish="error", error=text, code=code))])

    def _launch(self) -> tuple[StepPlan, Pending] | None:
        plan = self.scheduler.plan()
        self.doors.send(self.scheduler.take_events())  # events of requests that were cancelled or overdue
        if plan is None:
            return None
        if not self.status.busy_since:
            self.status.busy_since = time.monotonic()
        try:
            return plan, self.engine.launch(plan)
        except torch.OutOfMemoryError as error:
            if self.engine.ranks.tensor_size * self.engine.ranks.num_stages > 1:
                raise  # the other ranks are in this step and wait for this rank
            log.error("a step of %d tokens did not fit in memory: %s", plan.num_tokens, error)
            self._abandon(plan)
            return None

    def _sample_late(self, plan: StepPlan, pending: Pending) -> tuple[StepPlan, Pending]:
        """Sample the rows of the newest step whose masks follow from the step before, which is committed."""
        rows, masks = self.scheduler.masks.take_late(plan, lambda: pending.is_done)
        return plan, self.engine.sample_late(plan, pending, rows, masks)

    def _abandon(self, plan: StepPlan) -> None:
        if self.engine.state.host is not None:
            self.engine.state.host.synchronize()  # its copies may have begun
        torch.cuda.empty_cache()
        self.scheduler.abandon(
            plan, CapacityError("the device ran out of memory for this request; try again later")
        )
        self.doors.send(self.scheduler.take_events())

    def _commit(self, plan: StepPlan, pending: Pending) -> None:
        self.doors.send(self.scheduler.commit(plan, pending.wait()))
        now = time.monotonic()
        self._seconds += now - self.status.busy_since
        self.status.steps += 1
        self.status.busy_since = now if self.scheduler.can_step else 0.0

    def _tell(self) -> None:
        """Update the status for heartbeats and metrics."""
        scheduler, status, now = self.scheduler, self.status, time.monotonic()
        index, drafts = scheduler.cache.index, scheduler.planner.drafts
        if not scheduler.can_step:
            status.busy_since = 0.0
        if now - self._status_at < _TELL_S and scheduler.has_work:
            return
        self._status_at = now
        if now - self._sessions_at >= _COUNT_S:
            self._session_blocks, self._sessions_at = scheduler.sessions.num_blocks, now
        status.running, status.waiting = scheduler.num_running, scheduler.num_requests
        status.free_blocks, status.total_blocks = index.num_available, index.num_blocks
        status.metrics = {
            **asdict(scheduler.counters),
            **scheduler.grammars.counts.metrics(),
            "requests_waiting": scheduler.num_waiting,
            "sequences_running": scheduler.num_running,
            "sessions": len(scheduler.sessions),
            "session_blocks": self._session_blocks,
            **self._cached_tokens(),
            'cache_blocks{state="used"}': index.num_blocks - index.num_available,
            'cache_blocks{state="cached"}': index.num_cached,
            'cache_blocks{state="free"}': index.num_free,
            "evicted_blocks": index.evictions,
            "step_seconds": self._seconds,
            "steps": status.steps,
            **dict(() if drafts is None or drafts.learning is None else drafts.learning.metrics()),
            **{name: value for work in self.background for name, value in work.metrics().items()},
        }

    def _cached_tokens(self) -> dict[str, float]:
        """Return the totals of cached prompt tokens by tier, and the metrics of the host tier."""
        cache = self.scheduler.cache
        if cache.tier is None:
            return {'cached_prompt_tokens{tier="device"}': cache.cached_tokens}
        return {
            'cached_prompt_tokens{tier="device"}': cache.cached_tokens - cache.tier.tokens,
            'cached_prompt_tokens{tier="host"}': cache.tier.tokens,
            **cache.tier.metrics(),
        }


def follow(engine: Engine, status: Status) -> None:
    """Run the loop of a rank > 0: the plans that rank 0 broadcasts, until it sends the end.

    A thread receives the plans, so that rank 0 never waits for this rank's step. On a device that works by
    itself the next plan is launched before the step in flight has ended, as rank 0 does it.
    """
    plans = PlanQueue(engine.ranks)
    status.loop, status.idles = threading.current_thread(), True
    try:
        _follow(engine, status, plans)
    finally:
        status.loop = None


def _follow(engine: Engine, status: Status, plans: PlanQueue) -> None:
    pending = None
    while True:
        plan = _next_plan(plans, pending)
        if isinstance(plan, End):
            break
        if isinstance(plan, LateSamples):
            raise TridecodeError(f"late samples of plan {plan.step} from rank 0 belong to no late row")
        launched = None
        if plan is not None:
            status.busy_since = status.busy_since or time.monotonic()
            launched = engine.launch(plan)
        if pending is not None:
            _finish(pending, status, launched is not None)
        if launched is not None and plan is not None and plan.late:
            late = plans.take()  # rank 0 sends it after committing the step that has just ended
            if isinstance(late, End):
                break
            launched = _sample_late(engine, plan, launched, late)
        if launched is not None and not engine.is_asynchronous:
            _finish(launched, status, False)
            launched = None
        pending = launched


def _sample_late(engine: Engine, plan: StepPlan, pending: Pending, late: PlanMessage | None) -> Pending:
    """Sample the late rows of a follower's newest step, as rank 0 does."""
    words = engine.state.sampling.masks.shape[1]
    if not isinstance(late, LateSamples) or not set(late.rows) <= set(plan.late):
        raise TridecodeError(f"plan {plan.step} from rank 0 has late rows, but no samples for them follow")
    if late.rows and late.masks.shape[1] != words:
        found = f"masks of {late.masks.shape[1]} words"
        raise TridecodeError(f"late samples of plan {plan.step} from rank 0 have {found}; wanted {words}")
    return engine.sample_late(plan, pending, late.rows, late.masks)


def _next_plan(plans: PlanQueue, pending: Pending | None) -> PlanMessage | End | None:
    """Return the next plan, or None once the step in flight is done and no plan has arrived."""
    if pending is None:
        return plans.take()
    while (plan := plans.take(_POLL_S)) is None and not pending.is_done:
        pass
    return plan


def _finish(pending: Pending, status: Status, more: bool) -> None:
    """Wait for a step of a follower. more: another step is in flight."""
    pending.wait()
    status.steps += 1
    status.busy_since = time.monotonic() if more else 0.0
