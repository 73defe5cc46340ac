"""The stream of a text request, returned by TextService.submit; the front end reads it at its own pace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tridecode.backend.base.errors import (
    CapacityError,
    EngineDownError,
    RequestCancelled,
    TridecodeError,
)
from tridecode.backend.service.client_request import FAILURES, ClientRequest, failure_of, failure_text
from tridecode.backend.service.link import Link
from tridecode.backend.text.completion import Answer, Piece
from tridecode.backend.wire.messages import Event

#: bytes in memory of an event, of each of its tokens, and of each alternative of a token
_EVENT_BYTES, _TOKEN_BYTES, _ALTERNATIVE_BYTES = 320, 32, 72
#: 12,000 steps of one sequence without log probabilities
MAX_UNREAD_BYTES = 4 << 20


class TextStream(ClientRequest):
    """Collects the events of a request until `take` turns them into pieces of text.

    The sink is called with the stream when there is something to take, mostly on another thread, and not
    again before the next `take`; `take` itself may call it. It must not block. `take` decodes, so call it on
    a thread or in the event loop of the front end, from one thread at a time. Once it has raised, or
    `finished` is true, the request has ended. A reader that lets more than max_unread_bytes of
    events pile up loses the request: `take` raises CapacityError.
    """

    def __init__(
        self,
        link: Link,
        sink: Callable[[TextStream], None],
        label: str = "",
        max_unread_bytes: int = MAX_UNREAD_BYTES,
    ):
        super().__init__(link, label)
        self._sink = sink
        self._unread_bytes, self._max_unread_bytes = 0, max_unread_bytes
        self._events: deque[tuple[int, Event]] = deque()
        self._answer: Answer | None = None
        self._failure: TridecodeError | None = None
        self._woken = False

    @property
    def ended(self) -> bool:
        return self._failure is not None or self.finished

    @property
    def finished(self) -> bool:
        """Return whether every row has ended and was taken."""
        return self._answer is not None and self._answer.finished

    def begin(self, answer: Answer) -> None:
        """Called once, before the engine gets the request. answer: decides which pieces are grouped."""
        self._answer = answer

    def put_row(self, row: int, event: Event) -> None:
        if self._failure is not None:
            return
        self._events.append((row, event))
        self._unread_bytes += _size(event)
        if self._unread_bytes > self._max_unread_bytes:
            self.fail(CapacityError("the client does not read its answer, which was cancelled"))
        else:
            self._wake()

    def fail(self, error: TridecodeError) -> None:
        """End the request with this error, unless it has ended. Any thread."""
        if not self.ended:
            self._failure = error
            self.cancel_rows()
            self._wake()

    def cancel(self) -> None:
        """End the request, here and in the engine: `take` raises RequestCancelled. Any thread."""
        self.fail(RequestCancelled("the client has cancelled the request"))

    def take(self) -> list[dict[int, Piece]]:
        """Return the pieces since the last call: one dict, row -> piece, for each group of rows.

        Raises the TridecodeError that ended the request.
        """
        self._woken = False  # before the events are read: later ones wake the sink again
        self._unread_bytes = 0
        if self._failure is not None:
            raise self._failure
        events: list[tuple[int, Event]] = []
        while self._events and self._failure is None:
            row, event = self._events.popleft()
            if event.finish in FAILURES:
                self.fail(self._error_of(event))  # the next call raises it
            else:
                events.append((row, event))
        return self._answer.pieces(events) if self._answer is not None and events else []

    def _error_of(self, event: Event) -> TridecodeError:
        error = failure_of(event)
        if error is CapacityError and self._link.state().phase != "ready":
            error = EngineDownError
        return error(failure_text(event))

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._sink(self)


def _size(event: Event) -> int:
    """Bytes of an event in memory, except for logits, which have a limit of their own."""
    size = _EVENT_BYTES + _TOKEN_BYTES * len(event.tokens)
    for top in event.top_log_probs:
        size += _ALTERNATIVE_BYTES * len(top.ids)
    return size
