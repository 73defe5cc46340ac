"""The life of the engine through its epochs. No sockets and no waiting: messages and times in, a state out.

starting ── all ranks ready ──> ready
   │  ^                           │
   │  └──── backoff ──── down <───┘   a rank died, fell silent or hung; all of its epoch are killed first
   │                      ^
   ├──────────────────────┘           a start failed
   └──> failed                        it would fail again in the same way; left when a setting changes, a new
   door connects, or FAILED_RETRY_S have passed
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from tridecode.backend.base.errors import ConfigError, TridecodeError
from tridecode.backend.supervisor.blame import Failure
from tridecode.backend.supervisor.engine_settings import EngineSettings
from tridecode.backend.supervisor.rank import RankMessage
from tridecode.backend.supervisor.ranks import RankGroup
from tridecode.backend.wire.messages import EngineState

FAILED_RETRY_S = 60.0  # a file may have been restored without a visible change
FIRST_BACKOFF_S = 0.5  # doubles with each consecutive failure
MAX_BACKOFF_S = 30.0
READY_BACKOFF_S = 4.0  # the longest pause after the death of an engine that had been ready
HEALTHY_S = 30.0  # an engine that was ready for this long resets the count of failures
CHANGE_CHECK_S = 1.0  # interval at which a failed engine's settings are checked
SLOW_DEATH_S = 5.0  # a killed rank that survives longer is logged

#: consecutive failures after which the next pause is READY_BACKOFF_S
_READY_FAILURES = int(math.log2(READY_BACKOFF_S / FIRST_BACKOFF_S))

_log = logging.getLogger("tridecode.supervisor")


class EngineLife:
    """Times are monotonic seconds that the caller gives; nothing here sleeps or blocks.

    read_settings, fingerprint: read the current files of the engine. start: starts the ranks of an epoch.
    endpoint: address of rank 0 in an epoch. first_epoch: the number before the first epoch. waits_for:
    describes what a start still needs, as "waiting for …", or ""; may raise TridecodeError.
    """

    def __init__(
        self,
        read_settings: Callable[[], EngineSettings],
        fingerprint: Callable[[], object],
        start: Callable[[int, EngineSettings, float], RankGroup],
        endpoint: Callable[[int], str],
        first_epoch: int,
        waits_for: Callable[[], str] = lambda: "",
    ) -> None:
        self._read_settings = read_settings
        self._fingerprint = fingerprint
        self._start = start
        self._endpoint = endpoint
        self._waits_for = waits_for
        self._settings = EngineSettings()
        self._seen: object = None  # fingerprint when the epoch began
        self._group: RankGroup | None = None
        self._next_start = 0.0
        self._ready_since: float | None = None
        self._killed_at: float | None = None
        self._next_check = 0.0
        self._failures = 0  # consecutive failures, for the backoff
        self._failed_starts = 0  # consecutive failures, for the text
        self.epoch = first_epoch
        self.phase = "starting"
        self.detail = "starting the supervisor"

    @property
    def state(self) -> EngineState:
        return EngineState(self.epoch, self.phase, self.detail, self._endpoint(self.epoch))

    @property
    def load(self) -> tuple[int, int]:
        """Return the numbers of running and of waiting sequences."""
        return self._group.load if self._group and self.phase == "ready" else (0, 0)

    @property
    def group(self) -> RankGroup | None:
        """The ranks of the epoch."""
        return self._group

    def tick(self, now: float) -> None:
        """Check the ranks and make the next transition that is due."""
        if self.phase in ("stopping", "closing"):
            return
        if self.phase == "failed":
            self._look_for_change(now)
        elif self.phase == "down" or self._group is None:
            self._rebuild_when_due(now)
        else:
            self._watch(self._group, now)

    def hear(self, message: RankMessage, now: float) -> None:
        """Handle a rank's message; those of earlier epochs are ignored."""
        if self._group is not None and message.epoch == self.epoch:
            self._group.hear(message, now)

    def forgive(self, now: float, pause_s: float) -> None:
        """Ignore the peers' silence during a pause of this process, of pause_s seconds."""
        if self._group is not None:
            self._group.forgive(now, pause_s)

    def new_door(self, now: float, alone: bool) -> None:
        """Handle the first Hello of a door process. alone: no other door uses the engine."""
        if self.phase == "failed":
            self._retry(now, "a new door has connected")
        elif self.phase == "ready" and self._fingerprint() != self._seen:
            if alone:
                self._down(now, Failure("its settings have changed"))
                self._next_start = now
            else:
                _log.warning(
                    "the settings have changed; the engine keeps its own until every door has been unloaded"
                )

    def stop(self, detail: str, with_server: bool) -> None:
        """Start nothing from now on. The caller ends the ranks with `kill` and `gone`.

        with_server: the whole server ends, so no other engine will continue the open requests.
        """
        self.phase, self.detail = "closing" if with_server else "stopping", detail

    def kill(self) -> None:
        if self._group is not None:
            self._group.kill()

    def gone(self) -> bool:
        return self._group is None or self._group.gone()

    def living(self) -> str:
        """Describe the ranks that have not ended."""
        return "" if self._group is None else self._group.living()

    def _rebuild_when_due(self, now: float) -> None:
        if self._group is not None and not self._group.gone():
            if self._killed_at is not None and now - self._killed_at > SLOW_DEATH_S:
                pids = ", ".join(map(str, self._group.pids()))
                _log.warning("killed ranks (pid %s) have not ended; the driver may hold them", pids)
                self._killed_at = now
            return
        if now < self._next_start or self._must_wait(now):
            return
        self.epoch += 1
        self.phase, self.detail = "starting", "starting python"
        self._seen = self._fingerprint()
        self._ready_since = None
        try:
            self._settings = self._read_settings()
            self._group = self._start(self.epoch, self._settings, now)
        except TridecodeError as error:
            self._group = None
            self._down(now, Failure(str(error), fatal=True))
        except OSError as error:
            self._group = None
            self._down(now, Failure(f"the ranks cannot be started: {error}"))

    def _must_wait(self, now: float) -> bool:
        """Return whether the start must wait for other nodes, or is impossible."""
        try:
            waiting = self._waits_for()
        except TridecodeError as error:
            self._down(now, Failure(str(error), fatal=isinstance(error, ConfigError)))
            return True
        reason = self.detail.partition("; waiting for ")[0]
        if waiting:
            self.detail = waiting if self.phase == "starting" else f"{reason}; {waiting}"
        return bool(waiting)

    def _watch(self, group: RankGroup, now: float) -> None:
        failure = group.check(now, self._settings.start_timeout_s, self._settings.step_timeout_s)
        if failure is not None:
            self._down(now, failure)
        elif self.phase == "starting":
            self.detail = group.progress()
            if group.ready:
                self.phase, self.detail = (
                    "ready",
                    f"{len(group.ranks)} rank(s), after {now - group.started_at:.1f} s",
                )
                self._ready_since = now
                self._failed_starts = 0
                self._failures = min(self._failures, _READY_FAILURES)
        elif self._failures and self._ready_since is not None and now - self._ready_since > HEALTHY_S:
            self._failures = 0

    def _down(self, now: float, failure: Failure) -> None:
        self.kill()
        self._killed_at = now
        self._failures += 1
        if self._ready_since is None:
            self._failed_starts += 1
        if failure.fatal:
            self.phase, self.detail = "failed", failure.reason
            self._next_start = now + FAILED_RETRY_S
            return
        delay = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self._failures - 1, 16))
        self.phase, self.detail = "down", failure.reason
        if self._failed_starts > 1:
            self.detail += f" ({self._failed_starts} starts in a row have failed; the next is in {delay:g} s)"
        self._next_start = now + delay

    def _look_for_change(self, now: float) -> None:
        if now < self._next_check:
            return
        self._next_check = now + CHANGE_CHECK_S
        if self._fingerprint() != self._seen:
            self._retry(now, "its settings have changed")
        elif now >= self._next_start:
            self._retry(now, f"{FAILED_RETRY_S:g} s have passed")

    def _retry(self, now: float, why: str) -> None:
        self.phase, self.detail = "down", f"starting again, because {why}; before: {_reason(self.detail)}"
        self._failures = self._failed_starts = 0
        self._next_start = now


def _reason(detail: str) -> str:
    """Return the first of consecutive failures, so that the text does not grow with each retry."""
    return detail.rpartition("; before: ")[2]
