"""The answer to a submitted request: whole, or as server-sent events (event_stream.py)."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from tridecode.backend.base.errors import RequestCancelled
from tridecode.backend.front.calls import Call
from tridecode.backend.front.event_stream import EventStream
from tridecode.backend.front.process.http_protocol import CONNECTION, Connection
from tridecode.backend.front.reading import Pieces, Reader
from tridecode.backend.front.service import FrontService
from tridecode.backend.service.text_request import TextRequest

#: longest wait of a stream's headers for the first token, so that an early error has its own status
_HEADERS_S = 5.0
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
    connection: Connection = request.scope[CONNECTION]
    running = _Running(front, connection, call, reader, writer, names)
    try:
        if streaming:
            first = await reader.next(_HEADERS_S)
            elsewhere = functools.partial(front.model.run, True, writer.take) if writer.heavy else None
            return EventStream(connection, call, reader, writer, first, running.end, headers, elsewhere)
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
        connection: Connection,
        call: Call,
        reader: Reader,
        writer: Writer,
        names: tuple[str, ...],
    ):
        self._front, self._call, self._reader, self._writer = front, call, reader, writer
        self._connection, self._names = connection, names
        connection.when_left(reader.leave)

    async def read(self) -> None:
        """Take all pieces of a whole answer."""
        while pieces := await self._reader.next():
            self._call.deliver(pieces)
            await self._front.model.run(self._writer.heavy, self._writer.take, pieces)

    def follow(self, asked: TextRequest, timeout_s: float) -> None:
        """Submit the next request of the answer. timeout_s: for the whole answer; 0: the engine's default."""
        call = self._call
        left = max(timeout_s - (time.monotonic() - call.began), 0.001) if timeout_s else 0.0
        call.sequences += sum(params.num_sequences for params in asked.params)
        reader = self._front.model.begin(asked, call.label or call.id, left)
        self._front.model.end(self._reader)
        self._reader = reader
        self._connection.when_left(reader.leave)

    def end(self, error: BaseException | None = None) -> BaseException:
        """The request has ended. Returns the error to raise."""
        self._connection.when_left(None)
        self._front.model.end(self._reader)
        if error is None:
            self._front.ended(self._call)
            return RequestCancelled("")
        if not isinstance(error, Exception):  # the service stops
            self._front.failed(self._call, RequestCancelled("the service stops"), ())
            return error
        return self._front.failed(self._call, error, self._names)
