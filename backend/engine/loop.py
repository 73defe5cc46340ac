"""The decode loop of rank 0: take requests, plan, step, commit, send events."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Protocol

import torch

from tridecode.backend import messages as m
from tridecode.backend.engine.engine import Engine, Pending
from tridecode.backend.engine.front import Front
from tridecode.backend.engine.plan import StepPlan
from tridecode.backend.engine.scheduler import Scheduler
from tridecode.backend.errors import CapacityError, TridecodeError

log = logging.getLogger("tridecode.engine")

_TELL_S = 0.05  # status update interval; heartbeats are rarer
_IDLE_S = 0.25  # longest wait for a request
_DEVICE_S = 1.0  # interval at which an idle device is checked


class Status(Protocol):
    """Status of the loop; heartbeats read it from another thread."""

    steps: int
    busy_since: float  # monotonic seconds when the current step began; 0: none
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    metrics: dict[str, float]


class DecodeLoop:
    """Owns scheduler and engine; the only thread that touches them.

    On a device that works by itself (engine.is_asynchronous) the next step is launched before the tokens of
    the one before are read.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler, front: Front, status: Status):
        self.engine, self.scheduler, self.front, self.status = engine, scheduler, front, status
        self._stopping = False
        self._seconds = 0.0  # spent in steps
        self._told = 0.0
        self._checked = 0.0  # the device

    def stop(self) -> None:
        """End after the current step. For any thread."""
        self._stopping = True
        self.front.wake()

    def run(self) -> None:
        """Until `stop`; then every open request ends with an error. Raises what a step raises, except
        out-of-memory."""
        pending: tuple[StepPlan, Pending] | None = None
        while not self._stopping:
            self._take_requests(may_wait=pending is None)
            launched = self._launch()
            if pending is not None:
                self._commit(*pending)
            if launched is not None and not self.engine.is_asynchronous:
                self._commit(*launched)
                launched = None
            pending = launched
            self._tell()
        self.scheduler.fail_all(CapacityError("the engine is being stopped"))
        self.front.send(self.scheduler.take_events())

    def _take_requests(self, may_wait: bool) -> None:
        arrived = self.front.drain()
        if may_wait and not arrived and not self.scheduler.can_step:
            self.front.wait(_IDLE_S)
            arrived = self.front.drain()
            if not arrived:
                self._check_device()
        for door, message in arrived:
            if isinstance(message, m.Submit):
                self._submit(door, message)
            elif isinstance(message, m.Cancel):
                self.scheduler.cancel(door, message.request)
            else:
                self.scheduler.cancel_door(door)

    def _check_device(self) -> None:
        """Notice a device that died while the engine is idle. Raises the device's error; a device that hangs
        looks like a step that does not end."""
        now = time.monotonic()
        if now - self._checked >= _DEVICE_S:
            self._checked = self.status.busy_since = now
            self.engine.check_device()
            self.status.busy_since = 0.0

    def _submit(self, door: bytes, submit: m.Submit) -> None:
        try:
            self.scheduler.submit(door, submit)
        except TridecodeError as error:
            self._refuse(door, submit, str(error), error.code)
        except Exception as error:  # a fault in the checks ends this request alone
            log.exception("request %d of a door could not be taken", submit.request)
            self._refuse(door, submit, f"the engine could not take it: {type(error).__name__}", "INTERNAL")

    def _refuse(self, door: bytes, submit: m.Submit, text: str, code: str) -> None:
        self.front.send([(door, m.Event(submit.request, 0, finish="error", error=text, code=code))])

    def _launch(self) -> tuple[StepPlan, Pending] | None:
        plan = self.scheduler.plan()
        self.front.send(self.scheduler.take_events())  # of requests that were cancelled or overdue
        if plan is None:
            return None
        if not self.status.busy_since:
            self.status.busy_since = time.monotonic()
        try:
            return plan, self.engine.launch(plan)
        except torch.OutOfMemoryError as error:
            log.error("a step of %d tokens did not fit in memory: %s", plan.num_tokens, error)
            self._abandon(plan)
            return None

    def _abandon(self, plan: StepPlan) -> None:
        torch.cuda.empty_cache()
        self.scheduler.abandon(
            plan, CapacityError("the device ran out of memory for this request; try again later")
        )
        self.front.send(self.scheduler.take_events())

    def _commit(self, plan: StepPlan, pending: Pending) -> None:
        self.front.send(self.scheduler.commit(plan, pending.wait()))
        now = time.monotonic()
        self._seconds += now - self.status.busy_since
        self.status.steps += 1
        self.status.busy_since = now if self.scheduler.can_step else 0.0

    def _tell(self) -> None:
        """Update the status for heartbeats and metrics."""
        scheduler, status, now = self.scheduler, self.status, time.monotonic()
        pool = scheduler.cache.pool
        if not scheduler.can_step:
            status.busy_since = 0.0
        if now - self._told < _TELL_S and scheduler.has_work:
            return
        self._told = now
        status.running, status.waiting = scheduler.num_running, scheduler.num_requests
        status.free_blocks, status.total_blocks = pool.num_free, pool.num_blocks
        status.metrics = {
            **asdict(scheduler.counters),
            "requests_waiting": scheduler.num_waiting,
            "sequences_running": scheduler.num_running,
            "step_seconds": self._seconds,
            "steps": status.steps,
        }


def follow(engine: Engine, status: Status) -> None:
    """The loop of a rank > 0: run the plans that rank 0 broadcasts, until it sends the end."""
    while True:
        plan = engine.ranks.broadcast_plan(None)
        if plan is None:
            return
        status.busy_since = time.monotonic()
        engine.launch(plan).wait()
        status.steps += 1
        status.busy_since = 0.0
