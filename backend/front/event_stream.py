"""Server-sent events, written from a callback of the engine's link, without a task's turn for each piece.

The chain of coroutines of Starlette and uvicorn costs more than everything else that is done for a piece, so
only the first and the last message of an answer go through it. Between them each ring of the engine's link
calls `_Pump.step`, which takes the new pieces, encodes them and writes them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tridecode.backend.base.errors import RequestCancelled
from tridecode.backend.front.calls import Call
from tridecode.backend.front.errors import CLIENT_LEFT, ApiError
from tridecode.backend.front.process.http_protocol import Connection
from tridecode.backend.front.reading import Pieces, Reader

#: interval of comments in a stream that has nothing to say, for proxies that close silent connections
_SILENT_S = 15.0
_COMMENT = b": waiting\n\n"


class EventWriter(Protocol):
    """The part of an answer's writer that streams need."""

    def take(self, pieces: Pieces) -> bytes: ...

    def end(self) -> bytes: ...


class EventStream(Response):
    """The answer to a request that the engine has. end: called once, with the error if there is one; returns
    the error to send. elsewhere: calls the writer's `take` on another thread, if it takes long.
    """

    def __init__(
        self,
        connection: Connection,
        call: Call,
        reader: Reader,
        writer: EventWriter,
        first: Pieces | None,
        end: Callable[..., BaseException],
        headers: dict[str, str],
        elsewhere: Callable[[Pieces], Awaitable[bytes]] | None = None,
    ):
        """first: the pieces that have come, None for none yet."""
        super().__init__(headers={**headers, "cache-control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._pump = _Pump(connection, call, reader, writer)
        self._call, self._reader = call, reader
        self._writer, self._first, self._end, self._elsewhere = writer, first, end, elsewhere

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if self._elsewhere is None:
                await self._pump.run(self._first)
            else:
                await self._send_pieces(send, self._elsewhere)
            await send(_last(self._writer.end()))
        except BaseException as found:
            error = self._end(found)
            if not isinstance(error, ApiError):
                raise
            if error.status != CLIENT_LEFT:
                await send(_last(b"data: " + error.body + b"\n\n"))
        else:
            self._end()

    async def _send_pieces(self, send: Send, take: Callable[[Pieces], Awaitable[bytes]]) -> None:
        """Send events that another thread encodes, so that they do not delay other streams."""
        pieces = self._first
        while pieces is None or pieces:
            data = _COMMENT
            if pieces is not None:
                self._call.deliver(pieces)
                data = await take(pieces)
                self._call.chunks += bool(data)
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            pieces = await self._reader.next(_SILENT_S)


def _last(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": False}


class _Pump:
    """Moves the pieces of one request to its connection.

    Where the connection takes no more, pieces stay in the request's stream, where they become one; a client
    that does not read at all loses its request.
    """

    def __init__(self, connection: Connection, call: Call, reader: Reader, writer: EventWriter):
        self._connection, self._call, self._reader, self._writer = connection, call, reader, writer
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._commented_at = 0.0

    async def run(self, first: Pieces | None) -> None:
        """Return when all pieces were written. Raises the error that ended the request."""
        if first is None:
            self._comment()
        elif first:
            self._write(first)
        self._reader.listen(self.step)
        self._connection.when_writable(self.step)
        self._look_at(_SILENT_S)
        try:
            self.step()
            await self._done
        finally:
            self._reader.listen(None)
            self._connection.when_writable(None)
            if self._timer is not None:
                self._timer.cancel()

    def step(self) -> None:
        """Write what has come, if the connection takes it."""
        if self._done.done():
            return
        reader = self._reader
        try:
            if reader.left:
                raise RequestCancelled("the client has left")
            if not self._connection.writable:
                return
            if pieces := reader.stream.take():
                self._write(pieces)
            if reader.stream.finished:
                self._done.set_result(None)
        except Exception as error:
            self._done.set_exception(error)

    def _write(self, pieces: Pieces) -> None:
        self._call.deliver(pieces)
        if data := self._writer.take(pieces):
            self._call.chunks += 1
            self._connection.write_part(data)

    def _look_at(self, seconds: float) -> None:
        """Look for silence after so long. One timer, not one a piece."""
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        left_s = _SILENT_S - (time.monotonic() - max(self._call.last, self._commented_at))
        if left_s <= 0.0 and self._connection.writable:
            self._comment()
        self._look_at(left_s if left_s > 0.0 else _SILENT_S)

    def _comment(self) -> None:
        self._commented_at = time.monotonic()
        self._connection.write_part(_COMMENT)
