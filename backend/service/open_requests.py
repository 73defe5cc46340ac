"""The open requests of a door: submitted, held while the engine starts, and ended exactly once.

A request whose engine is lost waits for the next one, which continues it after the events that its sink has
received (messages.Sent). This happens once: a request that kills engines ends with the second one. Used only
by the engine link's thread, so without a lock. Independent of sockets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tridecode.backend.base.errors import EngineDownError, TridecodeError
from tridecode.backend.service.delivered import Delivered
from tridecode.backend.service.link import Sink
from tridecode.backend.wire import messages as m

#: finishes that end the whole request, including its other sequences
FAILURES = ("error", "cancelled", "deadline")
#: the engine must end a request by its deadline; this much later the door ends it
_OVERDUE_S = 5.0

_log = logging.getLogger("tridecode.door")


@dataclass
class OpenRequest:
    """frame: the encoded Submit. unfinished: sequences that have not ended. Times are monotonic seconds.

    hold_until: time at which it is refused if no engine is ready (sent False). timeout_s: 0.0 is the engine's
    default. expires_at: time by which the engine must have ended it; 0.0: not known yet. resume_within_s:
        how long it waits for the next engine if it has no deadline of its own; 0.0: it ends with its engine.
        session: set if it is a round of a session; history: the session's stored tokens, for each row.
    delivered:
        the events that the sink has received; None: it cannot be continued. lost: why the engine that had
    begun
        it is gone; "": no engine was lost. resumed: a second engine is processing it.
    """

    request: int
    frame: bytes
    sink: Sink
    unfinished: int
    hold_until: float
    timeout_s: float = 0.0
    resume_within_s: float = 0.0
    session: m.SessionRound | None = None
    history: list[list[int]] = field(default_factory=list)
    expires_at: float = 0.0
    sent: bool = False
    delivered: Delivered | None = None
    lost: str = ""
    resumed: bool = False

    def __post_init__(self) -> None:
        if self.resume_within_s > 0.0:
            self.delivered = Delivered(self.unfinished)

    @property
    def number(self) -> int:
        """Its number in messages.

        A resumed request has a negative one: an engine that has forgotten this door but still runs may yet
        report that it has cancelled the request with the positive number.
        """
        return -self.request if self.resumed else self.request

    def wait_for_another(self, text: str, now: float) -> None:
        """Mark it as waiting, since the engine that had begun it is lost."""
        self.sent, self.lost = False, text
        self.hold_until = now + self.resume_within_s
        if self.timeout_s and self.expires_at:
            self.hold_until = self.expires_at - _OVERDUE_S


@dataclass
class ResumeCounts:
    """Totals of a door, for its metrics. wait_s: seconds from the loss of an engine to the next one, summed
    over the requests.
    """

    requests: int = 0
    wait_s: float = 0.0


class OpenRequests:
    """Requests by number. A sink that raises ends its own request.

    send(message or frame): sends to the engine; returns False if that is not possible. state(): the engine's
    state, for refusals.
    """

    def __init__(self, send: Callable[..., bool], state: Callable[[], m.EngineState]) -> None:
        self._send, self._state = send, state
        self._open: dict[int, OpenRequest] = {}
        self._limits: m.Limits | None = None  # number of the engine that takes requests now
        self._lost_at = 0.0
        self._engines = 0  # lost so far
        self._sessions: dict[int, int] = {}  # session -> value of _engines when its last round was sent
        self.resumed = ResumeCounts()  # read by other threads

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
            self._send(m.Cancel(entry.number))

    def end_session(self, number: int) -> None:
        self._sessions.pop(number, None)
        self._send(m.EndSession(number))

    def take(self, event: m.Event) -> None:
        """Pass an event of the engine to its sink."""
        entry = self._open.get(abs(event.request))
        if entry is None or not entry.sent or entry.number != event.request:
            return
        if event.finish:
            entry.unfinished -= 1
        failed = event.finish in FAILURES
        if failed or entry.unfinished == 0:
            del self._open[entry.request]
        elif entry.delivered is not None:
            entry.delivered.take(event)
        self._deliver(entry, event)
        if failed and entry.unfinished:  # the client gets one error; its other sequences are useless
            self._send(m.Cancel(event.request))

    def engine_ready(self, limits: m.Limits) -> None:
        """Send the held requests, and those that another engine had begun."""
        self._limits = limits
        waiting = [entry for entry in self._open.values() if not entry.sent]
        self._note_resumed([entry for entry in waiting if entry.lost])
        for entry in waiting:
            self._send_submit(entry, limits)

    def engine_lost(self, text: str) -> None:
        """Let the engine's requests wait for the next engine, or end them; hold new ones."""
        now = time.monotonic()
        if self._limits is not None:
            self._lost_at = now
        self._limits = None
        self._engines += 1
        begun = [entry for entry in self._open.values() if entry.sent]
        waiting = [entry for entry in begun if entry.delivered is not None and not entry.resumed]
        for entry in waiting:
            entry.wait_for_another(text, now)
        if waiting:
            _log.warning("engine link: %d requests are waiting for another engine: %s", len(waiting), text)
        for entry in begun:
            if entry.sent:
                self._fail(entry, text)

    def fail_new(self, text: str) -> None:
        """End the requests that no engine has begun."""
        self._fail_each([entry for entry in self._open.values() if not entry.lost], text)

    def fail_all(self, text: str) -> None:
        self._fail_each(list(self._open.values()), text)

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
            self._send(m.Cancel(entry.number))

    def forgive(self, pause_s: float) -> None:
        """Move all deadlines by a pause of this process itself."""
        for entry in self._open.values():
            entry.hold_until += pause_s
            entry.expires_at += pause_s if entry.expires_at else 0.0

    def _send_submit(self, entry: OpenRequest, limits: m.Limits) -> None:
        entry.sent = True
        if entry.lost:
            frame = self._resumed_frame(entry, limits)
            if not frame:
                self._fail(entry, entry.lost)
                return
        else:
            frame = self._with_history(entry)
            timeout_s = entry.timeout_s or limits.request_timeout_s
            entry.expires_at = time.monotonic() + timeout_s + _OVERDUE_S if timeout_s else 0.0
        if entry.session is not None:
            self._sessions[entry.session.session] = self._engines
        if not self._send(frame):
            self._fail(entry, "the engine takes no messages")

    def _with_history(self, entry: OpenRequest) -> bytes:
        """Return the frame, with the session's tokens if a lost engine had the session."""
        wanted = entry.session
        if wanted is None or not wanted.retained or self._sessions.get(wanted.session) == self._engines:
            return entry.frame
        return m.encode(msgspec.structs.replace(_submit_of(entry), session=_with_tokens(wanted, entry)))

    def _resumed_frame(self, entry: OpenRequest, limits: m.Limits) -> bytes:
        """Return the frame for the second engine; b"" if it is unknown where to continue."""
        assert entry.delivered is not None
        submit, sent = _submit_of(entry), entry.delivered.sent(limits.vocab_size)
        if _is_unclear(submit.sequences, sent):
            return b""
        entry.resumed = True
        left_s = max(entry.expires_at - _OVERDUE_S - time.monotonic(), 1e-3) if entry.expires_at else 0.0
        session = _with_tokens(entry.session, entry) if entry.session is not None else None
        return m.encode(
            msgspec.structs.replace(
                submit, request=entry.number, timeout_s=left_s, sent=sent, session=session
            )
        )

    def _note_resumed(self, entries: list[OpenRequest]) -> None:
        if not entries:
            return
        wait_s = time.monotonic() - self._lost_at
        self.resumed.requests += len(entries)
        self.resumed.wait_s += wait_s * len(entries)
        tokens = sum(entry.delivered.num_tokens for entry in entries if entry.delivered is not None)
        _log.warning(
            "engine link: another engine continues %d requests after %.1f s; %d tokens had been sent",
            len(entries),
            wait_s,
            tokens,
        )

    def _refuse(self, entry: OpenRequest) -> None:
        if entry.lost:
            self._fail(entry, f"{entry.lost}; no other engine was ready in time to continue the request")
            return
        state = self._state()
        self._fail(entry, f"the engine is not ready ({state.phase}): {state.detail}")

    def _fail_each(self, entries: Iterable[OpenRequest], text: str) -> None:
        for entry in entries:
            self._fail(entry, text)

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


def _submit_of(entry: OpenRequest) -> m.Submit:
    return m.decode(entry.frame, m.Submit)


def _with_tokens(wanted: m.SessionRound, entry: OpenRequest) -> m.SessionRound:
    """Return the round for an engine that does not have the session."""
    history = [np.asarray(row, "<i4").tobytes() for row in entry.history]
    return msgspec.structs.replace(wanted, history=history)


def _is_unclear(sequences: list[m.SequenceRequest], sent: list[m.Sent]) -> bool:
    """Return whether part of a prompt's logits was sent and virtual tokens, which have no logits, may be
    next.
    """
    learned = [one.learned for one in sequences for _ in range(one.params.num_sequences)]
    return any(
        table is not None and one.context_rows and not (one.tokens or one.steps)
        for table, one in zip(learned, sent)
    )
