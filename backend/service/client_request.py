"""One request of a client while the engine processes it."""

from __future__ import annotations

from tridecode.backend.base.errors import BY_CODE, DeadlineError, TridecodeError
from tridecode.backend.service.link import Link
from tridecode.backend.wire.messages import Event

#: Event.finish of a failed request -> default code and text
FAILURES = {
    "error": ("INTERNAL", "the engine gave no reason"),
    "cancelled": ("CANCELLED", "the request was cancelled"),
    "deadline": ("CANCELLED", "the request's deadline passed"),
}


def failure_of(event: Event) -> type[TridecodeError]:
    """Return the class of the error with which an event of FAILURES ends a request."""
    if event.finish == "deadline":
        return DeadlineError
    code, _ = FAILURES[event.finish]
    return BY_CODE[event.code if event.code in BY_CODE else code]


def failure_text(event: Event) -> str:
    """Return the text of that error."""
    return event.error or FAILURES[event.finish][1]


class ClientRequest:
    """The engine's requests that serve one request of a client, and the receiver of their events.

    Each front end has a subclass. requests: numbers in the engine link, one per row or one for all rows.
    sequences: number of sequences that the engine generates for it. label: the client's request id.
    """

    def __init__(self, link: Link, label: str = ""):
        self.label = label
        self.requests: list[int] = []
        self.sequences = 0
        self._link = link

    @property
    def ended(self) -> bool:
        """Return whether it has ended or will end with an error, so that further work on it is useless."""
        raise NotImplementedError

    def put_row(self, row: int, event: Event) -> None:
        """Take an event of a row, on the link's thread; must not block."""
        raise NotImplementedError

    def count(self, sequences: int, prompt_tokens: int) -> None:
        """Called once, before the engine gets the request. prompt_tokens: of all rows."""
        self.sequences = sequences

    def cancel_rows(self) -> None:
        """Cancel all its requests in link and engine; no event follows."""
        for request in self.requests:
            self._link.cancel(request)

    def cancel_row(self, row: int) -> None:
        """Cancel the request of one text."""
        self._link.cancel(self.requests[row])
