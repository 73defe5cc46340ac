"""The requests of a door that have not ended, and how each of them ends exactly once.

Used by the thread of the engine link only; nothing here knows of sockets.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Callable

from tridecode.backend.messages import Event

#: finishes that end a whole request, whatever its other sequences do
FAILURES = ("error", "cancelled", "deadline")

Sink = Callable[[Event], None]

_log = logging.getLogger("tridecode.door")


@dataclass
class OpenRequest:
    """frame: its encoded Submit. unfinished: sequences that have not ended. Times are monotonic seconds.

    hold_until: when it is refused if it still waits for an engine (sent False). expires_at: when the engine
    must have ended it; 0.0: not known yet.
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
    """By number. A sink that raises ends its own request: cancel(number) is called for it."""

    def __init__(self, cancel: Callable[[int], None]) -> None:
        self._open: dict[int, OpenRequest] = {}
        self._cancel = cancel

    def __len__(self) -> int:
        return len(self._open)

    def add(self, entry: OpenRequest) -> None:
        self._open[entry.request] = entry

    def remove(self, request: int) -> OpenRequest | None:
        """Forget a request; no event reaches its sink any more."""
        return self._open.pop(request, None)

    def unsent(self) -> list[OpenRequest]:
        return [entry for entry in self._open.values() if not entry.sent]

    def late(self, now: float) -> list[OpenRequest]:
        """Those that have waited for an engine for too long."""
        return [entry for entry in self._open.values() if not entry.sent and now > entry.hold_until]

    def expired(self, now: float) -> list[OpenRequest]:
        """Those whose end the engine owes us."""
        return [entry for entry in self._open.values() if entry.sent and 0.0 < entry.expires_at < now]

    def forgive(self, pause_s: float) -> None:
        """This process stood still for pause_s: move the limits."""
        for entry in self._open.values():
            entry.hold_until += pause_s
            entry.expires_at += pause_s if entry.expires_at else 0.0

    def take(self, event: Event) -> bool:
        """Hand an event of the engine on. True if the request ended while some of its sequences still run."""
        entry = self._open.get(event.request)
        if entry is None:
            return False
        if event.finish:
            entry.unfinished -= 1
        failed = event.finish in FAILURES
        if failed or entry.unfinished == 0:
            del self._open[event.request]
        self._deliver(entry, event)
        return failed and entry.unfinished > 0

    def fail(self, request: int, text: str, code: str) -> None:
        """End a request with an error; nothing if it has ended."""
        entry = self._open.pop(request, None)
        if entry is not None:
            self._deliver(entry, Event(request, 0, finish="error", error=text, code=code))

    def fail_all(self, text: str, code: str, sent_only: bool = False) -> None:
        for request in list(self._numbers(sent_only)):
            self.fail(request, text, code)

    def _numbers(self, sent_only: bool) -> Iterator[int]:
        return (number for number, entry in self._open.items() if entry.sent or not sent_only)

    def _deliver(self, entry: OpenRequest, event: Event) -> None:
        try:
            entry.sink(event)
        except Exception:
            _log.exception("engine link: the sink of request %d failed", entry.request)
            self._cancel(entry.request)
