"""uvicorn's HTTP protocol with limits of time and size, and with word of clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tridecode.backend.front.errors import ApiError
from tridecode.backend.front.settings import FrontSettings

MAX_HEADER_BYTES = 65_536
#: seconds in which a client may read why its connection is refused
_REFUSED_S = 1.0
#: key of the connection in the ASGI scope
CONNECTION = "tridecode.connection"


def protocol(settings: FrontSettings) -> type[HttpToolsProtocol]:
    """The protocol class with the limits of these settings."""
    return type("Connection", (Connection,), {"settings": settings})


class Connection(HttpToolsProtocol):
    """One connection. left: called once if the client closes while a request is answered; stalled(): how long
    it has not read."""

    settings: FrontSettings

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._left: Callable[[], None] | None = None
        self._writable: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._in_headers = True
        self._refused = False  # whether this connection is one too many

    # ------------------------------------------------------------ for the answer

    def when_left(self, call: Callable[[], None] | None) -> None:
        """Call it if the client leaves before the answer has ended; None: no more."""
        if call is not None and (self.transport.is_closing() or self.cycle.disconnected):
            call()
            return
        self._left = call

    @property
    def writable(self) -> bool:
        """Return whether the client reads: less than the high-water mark waits to be sent."""
        return not self.flow.write_paused

    def when_writable(self, call: Callable[[], None] | None) -> None:
        """Call it whenever the client reads again after a pause; None: no more."""
        self._writable = call

    def body_goes_on(self) -> None:
        """Give a body that arrives steadily the time of a whole body again."""
        if not self._in_headers and self._timer is not None:
            self._arm(self.settings.body_s)

    def write_part(self, data: bytes) -> None:
        """Write a part of an answer that was begun without a content-length, as ASGI's send would do."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    # ------------------------------------------------------------ time

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            self._refuse_connection()
        else:
            self._arm(self.settings.idle_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._stall is not None:
            self._stall.cancel()
        super().connection_lost(exc)
        self._tell_left()

    def eof_received(self) -> None:
        self._tell_left()
        super().eof_received()

    def _tell_left(self) -> None:
        left, self._left = self._left, None
        if left is not None:
            left()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(self.settings.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if self._writable is not None:
            self._writable()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_headers:
            if self._header_bytes == 0:
                self._arm(self.settings.headers_s)
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse_headers()

    def on_headers_complete(self) -> None:
        if self._header_bytes > MAX_HEADER_BYTES:  # the count may include bytes of the body
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > MAX_HEADER_BYTES:
                self._refuse_headers()
                raise ValueError("the headers are too large")  # ends the parser
        self._in_headers, self._header_bytes = False, 0
        self._arm(self.settings.body_s)
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_headers = True
        self._disarm()
        super().on_message_complete()

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        """Close a connection whose headers or body have not come in time."""
        if self.transport.is_closing():
            return
        if self._in_headers and self._header_bytes == 0:
            self.transport.close()
        else:
            what = "headers" if self._in_headers else "body"
            seconds = self.settings.headers_s if self._in_headers else self.settings.body_s
            self._refuse(408, f"the {what} did not come within {seconds:g} s", "request_too_slow")

    # ------------------------------------------------------------ refusals before a request

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            self._refuse(400, "the request is not valid HTTP", "invalid_http")

    def _refuse_headers(self) -> None:
        self._refuse(431, f"the headers have more than {MAX_HEADER_BYTES:,} bytes", "headers_too_large")

    def _refuse_connection(self) -> None:
        """Answer before there is a request, and close a little later: closed at once, with a request unread,
        the connection would be reset and the answer lost."""
        self._refused = True
        text = f"this service has {self.settings.max_connections:,} connections, which is its limit"
        self._write_error(503, text, "too_many_connections", b"retry-after: 1\r\n")
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_REFUSED_S, self.transport.close)

    def _write_error(self, status: int, text: str, code: str, headers: bytes = b"") -> None:
        kind = "service_unavailable_error" if status == 503 else "invalid_request_error"
        body = ApiError(status, text, kind=kind, code=code).body
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + headers + b"\r\n" + body)

    def _refuse(self, status: int, text: str, code: str) -> None:
        """Answer in OpenAI's shape and close; only close where an answer has begun."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self._write_error(status, text, code)
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
        self.transport.close()
