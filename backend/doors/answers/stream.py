"""A request's stream of responses, from its acceptance to its end.

A send does not wait for the client: tritonserver queues unread responses without limit and does not report
them. The door therefore bounds the bytes that a request may have queued there (Stream.held_back).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import triton_python_backend_utils as pb_utils

from tridecode.backend.base.errors import BY_CODE, TridecodeError
from tridecode.backend.doors.monitoring.request_times import GapCounts, RequestTimes
from tridecode.backend.service.client_request import FAILURES, ClientRequest
from tridecode.backend.service.engine_link import EngineLink
from tridecode.backend.service.error_texts import internal_error, public_text, with_label
from tridecode.backend.wire.messages import Event

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
#: bytes that the server keeps per response in addition to its tensors: names, shapes, parameters
_RESPONSE_OVERHEAD = 600

_log = logging.getLogger("tridecode.door")


class Answer(Protocol):
    """Turns the events of a request into responses. Used by the stream's sender thread only."""

    finished: bool  # every row has ended; valid after the last response of take()
    num_output_tokens: int  # so far, of all rows

    def take(self, events: list[tuple[int, Event]]) -> Iterable[list]:
        """Return the responses to these (row, event) pairs, each a list of tensors; never an error response.

        A response may be built before the previous one is sent, so they must not share an array that changes.
        """


class SenderThread(Protocol):
    """The thread that sends the responses of a stream (senders.py)."""

    inbox: queue.SimpleQueue[Stream | None]
    gaps: GapCounts
    response_s: float

    def measure(self, seconds: float) -> None: ...


class Senders(Protocol):
    """The sender threads of a door (senders.py)."""

    link: EngineLink
    behind_s: float

    def assign(self) -> SenderThread: ...

    def budget(self) -> int: ...

    def ended(self, stream: Stream, outcome: str) -> None: ...


class Stream(ClientRequest):
    """One Triton request from acceptance to its end, which happens exactly once, with one FINAL flag."""

    def __init__(self, senders: Senders, sender, label: str = ""):
        super().__init__(senders.link, label)
        self.answer: Answer | None = None
        self.on_end: Callable[[str], None] = lambda outcome: None  # called once; outcome as in Senders
        self.stop_wanted = False  # set by a stop request, which may come before the answer exists
        self._senders, self._sender = senders, sender
        self._events: deque[tuple[int, Event]] = deque()
        #: code and text only: an exception's traceback would keep the request and its shared memory alive
        self._failure: tuple[str, str] | None = None
        self._queued = False
        self._ended = False
        #: a cancellation query during or after the send of FINAL crashes the server (2.51)
        self._ending = threading.Lock()
        self._thread = senders.assign()
        self.times = RequestTimes(self._thread.gaps)
        self.error = ""  # text of the error that ended it
        self._responses = 0  # sent
        self._response_bytes = 0  # of the largest response measured
        self._spare = 0  # responses sent beyond half of the budget
        self._ends = False  # the end of a row is among the events

    # ------------------------------------------------------------ any thread

    @property
    def ended(self) -> bool:
        return self._ended or self._failure is not None

    def put(self, event: Event) -> None:
        """Add an event of a request whose sequences are the rows."""
        self.put_row(event.sequence, event)

    def put_row(self, row: int, event: Event) -> None:
        self._events.append((row, event))
        if event.finish:
            self._ends = True
        self._wake()

    def fail(self, error: TridecodeError) -> None:
        """End the stream with this error, unless it has ended."""
        self._failure = self._failure or (error.code, str(error))
        self._wake()

    def is_cancelled(self) -> bool:
        with self._ending:
            return not self._ended and self._sender.is_cancelled()

    def count(self, sequences: int, prompt_tokens: int) -> None:
        super().count(sequences, prompt_tokens)
        self.times.prompt_tokens = prompt_tokens

    def _wake(self) -> None:
        if not self._queued:
            self._queued = True
            self._thread.inbox.put(self)

    # ------------------------------------------------------------ the stream's sender thread

    def behind(self, responses: int) -> bool:
        """Return whether this many responses to each stream that waits for this sender would take too long.

        The streams of a sender fall behind together, so one is representative of all. The age of pending
        events would be a worse measure: after a pause of the machine all events are old, but sent quickly.
        """
        if self._over_half():
            return True
        return responses * (1 + self._thread.inbox.qsize()) * self._thread.response_s > self._senders.behind_s

    def held_back(self) -> bool:
        """Return whether pending events must wait to keep the responses within the request's byte budget.

        The first half of the budget is spent without delay. The k-th response after that waits for k steps;
        once the whole budget is spent, only the end of a row is sent. Nothing is lost: pending events are
        part of the next response.
        """
        if not self._over_half() or self._ends or self._failure is not None:
            return False
        if self._responses * self._response_bytes > self._senders.budget():
            return True
        steps = len(self._events) // max(1, len({row for row, _ in list(self._events)}))
        if steps <= self._spare:
            return True
        self._spare += 1
        return False

    def _over_half(self) -> bool:
        return 2 * self._responses * self._response_bytes > self._senders.budget()

    def serve(self) -> None:
        self._queued = False  # before the events are read: later ones wake the sender again
        if self._ended or self.held_back():
            return
        self._ends = False
        try:
            failure = self._serve()
        except TridecodeError as error:
            failure = error.code, str(error)
        except Exception as error:
            _log.exception("request %s: the answer failed", self.label)
            failure = TridecodeError.code, str(internal_error(error, self.label))
        if failure is not None:
            self._end_with(*failure)

    def _serve(self) -> tuple[str, str] | None:
        """Send pending events; return code and text of the error that ends the stream, if there is one."""
        events: list[tuple[int, Event]] = []
        failure = self._failure
        while self._events and failure is None:
            row, event = self._events.popleft()
            if event.finish in FAILURES:
                code, text = FAILURES[event.finish]
                failure = (event.code if event.code in BY_CODE else code), event.error or text
            else:
                events.append((row, event))
        if events and self.answer is not None:
            self.times.deliver(events)
            self._answer(self.answer, events)
        return failure

    def _answer(self, answer: Answer, events: list[tuple[int, Event]]) -> None:
        began = time.monotonic()
        made = None  # held back until it is known whether it is the last response
        for tensors in answer.take(events):
            if made is not None:
                began = self._send(made, began)
            made = tensors
        if answer.finished:
            self._end("ok", None if made is None else pb_utils.InferenceResponse(made))
        elif made is not None:
            self._send(made, began)

    def _send(self, tensors: list, began: float) -> float:
        """Send one response and return the time after the send. began: when its preparation began."""
        self._sender.send(pb_utils.InferenceResponse(tensors))
        self._responses += 1
        if self._responses & (self._responses - 1) == 0:  # measuring costs as much as making one
            self._response_bytes = max(self._response_bytes, _size_of(tensors))
        now = time.monotonic()
        self._thread.measure(now - began)
        return now

    def _end_with(self, code: str, text: str) -> None:
        try:
            self.cancel_rows()
        except Exception:  # the client must be answered anyway
            _log.exception("request %s: it could not be cancelled", self.label)
        if self._ended:  # before the error was sent, or because the last response could not be sent
            return
        self.error = text
        text = with_label(text, self.label)
        error = pb_utils.TritonError(public_text(text), getattr(pb_utils.TritonError, code))
        try:
            self._end(code.lower(), pb_utils.InferenceResponse([], error=error))
        except Exception:
            _log.exception("request %s: its error could not be sent: %s", self.label, text)

    def _end(self, outcome: str, response: Any) -> None:
        """Send the last response, or the FINAL flag alone."""
        with self._ending:
            self._ended = True
            self.times.ended = time.monotonic()
            try:
                if response is None:
                    self._sender.send(flags=FINAL)
                else:
                    self._sender.send(response, flags=FINAL)
            finally:
                self._senders.ended(self, outcome)
                self.answer = self._sender = None


def _size_of(tensors: list) -> int:
    """Return the bytes that the server keeps for a response."""
    size = _RESPONSE_OVERHEAD
    for tensor in tensors:
        array = tensor.as_numpy()
        texts = array.dtype.hasobject
        size += sum(4 + len(text) for text in array.reshape(-1).tolist()) if texts else array.nbytes
    return size
