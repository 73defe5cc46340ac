"""The answer to a submitted request: whole, or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tridecode.backend.base.errors import RequestCancelled
from tridecode.backend.front.calls import Call
from tridecode.backend.front.errors import CLIENT_LEFT, ApiError
from tridecode.backend.front.process.http_protocol import CONNECTION
from tridecode.backend.front.reading import Pieces, Reader
from tridecode.backend.front.service import FrontService
from tridecode.backend.service.text_request import TextRequest

#: longest wait of a stream's headers for the first token, so that an early error has its own status
_HEADERS_S = 5.0
#: interval of comments in a stream that has nothing to say, for proxies that close silent connections
_SILENT_S = 15.0
_COMMENT = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"
NO_EFFECT_HEADER = "x-tridecode-no-effect"


class Writer(Protocol):
    """Makes the answer to one request from its pieces."""

    #: whether `take` and `whole` of a whole answer take long, so that they run on another thread
    heavy: bool

    def take(self, pieces: Pieces) -> bytes:
        """Add pieces; the events of a stream to send for them."""
        ...

    def end(self) -> bytes:
        """The last events of a stream."""
        ...

    def whole(self) -> bytes:
        """The whole answer as JSON, once all pieces were added."""
        ...


def event(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def answer(
    front: FrontService,
    request: Request,
    call: Call,
    asked: TextRequest,
    writer: Writer,
    *,
    streaming: bool,
    timeout_s: float = 0.0,
    names: tuple[str, ...] = (),
    silent: list[str] | None = None,
    more: Iterable[TextRequest] = (),
) -> Response:
    """Submit a request and answer it. names: fields that an error may be about. silent: fields without
    effect. more: requests that follow, each once the one before it has ended, for one whole answer. Raises
    ApiError before the first byte was sent."""
    headers = {"x-request-id": call.label or call.id}
    if silent:
        headers[NO_EFFECT_HEADER] = ", ".join(silent)
    call.sequences = sum(params.num_sequences for params in asked.params)
    try:
        reader = front.model.begin(asked, call.label or call.id, timeout_s)
    except Exception as error:
        raise front.failed(call, error, names) from error
    running = _Running(front, request.scope.get(CONNECTION), call, reader, writer, names)
    try:
        if streaming:
            first = await reader.next(_HEADERS_S)
            return EventStream(running, first, headers)
        await running.read()
        for following in more:
            running.follow(following, timeout_s)
            await running.read()
        body = await front.model.run(writer.heavy, writer.whole)
    except BaseException as error:
        raise running.end(error) from error
    running.end()
    return Response(body, media_type="application/json", headers=headers)


class _Running:
    """A request that the engine has: it ends exactly once here, whatever happens."""

    def __init__(
        self,
        front: FrontService,
        connection: Any,
        call: Call,
        reader: Reader,
        writer: Writer,
        names: tuple[str, ...],
    ):
        self.front, self.call, self.reader, self.writer = front, call, reader, writer
        self._connection, self._names = connection, names
        if connection is not None:
            connection.when_left(reader.leave)

    async def read(self) -> None:
        """Take all pieces of a whole answer."""
        while pieces := await self.reader.next():
            self.call.deliver(pieces)
            await self.front.model.run(self.writer.heavy, self.writer.take, pieces)

    def follow(self, asked: TextRequest, timeout_s: float) -> None:
        """Submit the next request of the answer. timeout_s: for the whole answer; 0: the engine's default."""
        call = self.call
        left = max(timeout_s - (time.monotonic() - call.began), 0.001) if timeout_s else 0.0
        call.sequences += sum(params.num_sequences for params in asked.params)
        reader = self.front.model.begin(asked, call.label or call.id, left)
        self.reader.close()
        self.front.model.end(self.reader)
        self.reader = reader
        if self._connection is not None:
            self._connection.when_left(reader.leave)

    def end(self, error: BaseException | None = None) -> BaseException:
        """The request has ended. Returns the error to raise."""
        if self._connection is not None:
            self._connection.when_left(None)
        self.reader.close()
        self.front.model.end(self.reader)
        if error is None:
            self.front.ended(self.call)
            return RequestCancelled("")
        if not isinstance(error, Exception):  # the service stops
            self.front.failed(self.call, RequestCancelled("the service stops"), ())
            return error
        return self.front.failed(self.call, error, self._names)


class EventStream(Response):
    """Server-sent events. Where the connection takes no more, pieces wait in the request's stream, where they
    become one; a client that does not read at all loses it."""

    def __init__(self, running: _Running, first: Pieces | None, headers: dict[str, str]):
        super().__init__(headers={**headers, "cache-control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._running, self._first = running, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        running, error = self._running, None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_pieces(send)
        except BaseException as found:
            error = running.end(found)
            if not isinstance(error, ApiError):
                raise
            if error.status != CLIENT_LEFT:
                await send(_part(b"data: " + error.body + b"\n\n", False))
        else:
            running.end()

    async def _send_pieces(self, send: Send) -> None:
        reader, writer, call = self._running.reader, self._running.writer, self._running.call
        pieces = self._first
        reader.report_silence(_SILENT_S)
        while True:
            if pieces is None:
                await send(_part(_COMMENT))
            elif not pieces:
                break
            else:
                call.deliver(pieces)
                if writer.heavy:
                    data = await self._running.front.model.run(True, writer.take, pieces)
                else:
                    data = writer.take(pieces)
                if data:
                    call.chunks += 1
                    await send(_part(data))
            pieces = await reader.next()
        await send(_part(writer.end(), False))


def _part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}
