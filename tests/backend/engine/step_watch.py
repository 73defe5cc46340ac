"""Ends a test whose engine steps without a result: `while` loops over `step()` need no limit of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.schedule.scheduler import Scheduler

Result = TypeVar("Result")
#: limits of the time and of the plans without an event of any request; both must be exceeded. A loaded
#: machine may be slow, but a loop that only waits makes many plans.
QUIET_S, QUIET_PLANS = 60.0, 2000


class StepWatch:
    """Fails a plan of this scheduler once neither a request nor an event has come for QUIET_S seconds."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self._plan = scheduler.plan
        self._since, self._plans, self._launched = time.monotonic(), 0, 0
        scheduler.plan = self.plan  # type: ignore[method-assign]
        scheduler.submit = self._noting(scheduler.submit)  # type: ignore[method-assign]
        scheduler.commit = self._noting(scheduler.commit)  # type: ignore[method-assign]
        scheduler.take_events = self._noting(scheduler.take_events)  # type: ignore[method-assign]

    def plan(self) -> Any:
        quiet = time.monotonic() - self._since
        if self._plans >= QUIET_PLANS and quiet > QUIET_S:
            raise AssertionError(f"no request has had an event for {quiet:.0f} s: {self.state()}")
        self._plans += 1
        found = self._plan()
        self._launched += found is not None
        return found

    def state(self) -> str:
        """Describe what the engine does: its last plans, and each sequence that has not ended."""
        scheduler = self.scheduler
        sequences = [sequence for group in scheduler.requests.groups() for sequence in group.sequences]
        lines = [
            f"request {one.group.request}: {one.stage.name}, {len(one.prompt)} prompt tokens, "
            f"{len(one.output)} of {one.params.max_tokens} tokens, {one.in_flight} in flight, "
            f"{'waits for its mask' if not one.may_continue else 'may continue'}"
            for one in sequences
        ]
        return (
            f"{self._launched} of {self._plans} plans had rows; {scheduler.num_running} sequences run, "
            f"{scheduler.num_waiting} wait" + "".join(f"\n  {line}" for line in lines)
        )

    def _noting(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """Return the function; a call that returns events, or accepts a request, starts the time again."""

        def call(*given: Any, **named: Any) -> Result:
            result = function(*given, **named)
            if result or result is None:
                self._since, self._plans, self._launched = time.monotonic(), 0, 0
            return result

        return call


class WatchedEngine(OfflineEngine):
    """An offline engine whose `step` fails with the state of its requests if a loop over it would not end."""

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        StepWatch(self.scheduler)
