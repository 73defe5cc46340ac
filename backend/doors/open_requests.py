"""The open requests of a door: submitted, held while the engine starts, and ended exactly once.

Used by the thread of the engine link only, so without a lock. Nothing here knows about sockets.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Callable

from tridecode.backend import messages as m
from tridecode.backend.errors import EngineDownError, TridecodeError

#: finishes that end a whole request, whatever its other sequences do
FAILURES = ("error", "cancelled", "deadline")
#: the engine must end a request by its deadline; this much later its door does
_OVERDUE_S = 5.0

Sink = Callable[[m.Event], None]

_log = logging.getLogger("tridecode.door")


@dataclass
class OpenRequest:
    """frame: its encoded Submit. unfinished: sequences that have not ended. Times are monotonic seconds.

    hold_until: when it is refused if no engine is ready (sent False). timeout_s: 0.0 is the engine's default.
    expires_at: when the engine must have ended it; 0.0: not known yet.
    """

    request: int
    frame: bytes
    sink: Sink
    unfinished: int
    hold_until: float
    timeout_s: float = 0.0
    expires_at: float = 0.0
    sent: bool = False


class OpenRequests:
    """Requests by number. A sink that raises ends its own request.

    send(message or frame): to the engine; False if that is not possible. state(): the engine's, for refusals.
    """

    def __init__(self, send: Callable[..., bool], state: Callable[[], m.EngineState]) -> None:
        self._send, self._state = send, state
        self._open: dict[int, OpenRequest] = {}
        self._limits: m.Limits | None = None  # of the engine that takes requests now

    def submit(self, entry: OpenRequest) -> None:
        """Send a request, or hold it while the engine starts."""
        self._open[entry.request] = entry
        if self._limits is not None:
            self._send_submit(entry, self._limits)
        elif entry.hold_until <= time.monotonic() or self._state().phase not in ("ready", "starting"):
            self._refuse(entry)

    def cancel(self, request: int) -> None:
        """Forget a request, here and in the engine; no event reaches its sink any more."""
        entry = self._open.pop(request, None)
        if entry is not None and entry.sent:
            self._send(m.Cancel(request))

    def take(self, event: m.Event) -> None:
        """Pass an event of the engine to its sink."""
        entry = self._open.get(event.request)
        if entry is None:
            return
        if event.finish:
            entry.unfinished -= 1
        failed = event.finish in FAILURES
        if failed or entry.unfinished == 0:
            del self._open[event.request]
        self._deliver(entry, event)
        if failed and entry.unfinished:  # the client gets one error; its other sequences are useless
            self._send(m.Cancel(event.request))

    def engine_ready(self, limits: m.Limits) -> None:
        """Send what was held."""
        self._limits = limits
        for entry in [entry for entry in self._open.values() if not entry.sent]:
            self._send_submit(entry, limits)

    def engine_lost(self, text: str) -> None:
        """End what the engine had; hold what comes."""
        self._limits = None
        for entry in [entry for entry in self._open.values() if entry.sent]:
            self._fail(entry, text)

    def fail_all(self, text: str) -> None:
        for entry in list(self._open.values()):
            self._fail(entry, text)

    def refuse_late(self, now: float) -> None:
        """End requests that have waited too long for an engine."""
        if self._limits is None:
            for entry in [e for e in self._open.values() if not e.sent and now > e.hold_until]:
                self._refuse(entry)

    def end_overdue(self, now: float) -> None:
        """End requests that the engine should have ended."""
        for entry in [e for e in self._open.values() if e.sent and 0.0 < e.expires_at < now]:
            text = f"the engine has not ended the request {_OVERDUE_S:g} s after its deadline"
            self._fail(entry, text, TridecodeError.code)
            self._send(m.Cancel(entry.request))

    def forgive(self, pause_s: float) -> None:
        """Move all deadlines by a pause of this process itself."""
        for entry in self._open.values():
            entry.hold_until += pause_s
            entry.expires_at += pause_s if entry.expires_at else 0.0

    def _send_submit(self, entry: OpenRequest, limits: m.Limits) -> None:
        entry.sent = True
        timeout_s = entry.timeout_s or limits.request_timeout_s
        entry.expires_at = time.monotonic() + timeout_s + _OVERDUE_S if timeout_s else 0.0
        if not self._send(entry.frame):
            self._fail(entry, "the engine takes no messages")

    def _refuse(self, entry: OpenRequest) -> None:
        state = self._state()
        self._fail(entry, f"the engine is not ready ({state.phase}): {state.detail}")

    def _fail(self, entry: OpenRequest, text: str, code: str = EngineDownError.code) -> None:
        """End a request with an error; no effect if it has ended."""
        if self._open.pop(entry.request, None) is not None:
            self._deliver(entry, m.Event(entry.request, 0, finish="error", error=text, code=code))

    def _deliver(self, entry: OpenRequest, event: m.Event) -> None:
        try:
            entry.sink(event)
        except Exception:
            _log.exception("engine link: the sink of request %d failed", entry.request)
            self.cancel(entry.request)
