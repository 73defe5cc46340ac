"""Text streams in an event loop: the engine link's thread rings, the loop reads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from tridecode.backend.base.errors import RequestCancelled
from tridecode.backend.service.text_stream import TextStream
from tridecode.backend.text.completion import Piece

Pieces = list[dict[int, Piece]]


class Bells:
    """Rings of other threads for readers of one event loop. All rings of a step of the engine cost the loop
    one wake-up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._rung: deque[Reader] = deque()
        self._scheduled = False

    def ring(self, reader: Reader) -> None:
        """Wake a reader. Any thread."""
        self._rung.append(reader)
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._pass_on)
            except RuntimeError:  # the loop is closed: nobody reads any more
                pass

    def _pass_on(self) -> None:
        self._scheduled = False  # before the deque is read: a later ring schedules again
        while self._rung:
            self._rung.popleft().wake()


class Reader:
    """Reads one TextStream, which `stream` must be set to at once. Its sink is `ring`. engine: which one of
    the model's has the request.
    """

    stream: TextStream
    engine: int

    def __init__(self, bells: Bells):
        self._bells = bells
        self._waiter: asyncio.Future[Pieces | None] | None = None
        self._listener: Callable[[], None] | None = None
        self.left = False  # whether the client has left

    def ring(self, _stream: TextStream) -> None:
        """Any thread: there is something to take."""
        self._bells.ring(self)

    def wake(self) -> None:
        """Call the listener, or let `next` return if it has something to return. The loop's thread."""
        if self._listener is not None:
            self._listener()
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            try:
                pieces = self._take()
            except Exception as error:
                waiter.set_exception(error)
            else:
                if pieces or self.stream.finished:
                    waiter.set_result(pieces)

    def leave(self) -> None:
        """The client has left: cancel the request, here and in the engine."""
        self.left = True
        self.stream.cancel()
        self.wake()

    def listen(self, call: Callable[[], None] | None) -> None:
        """Call it at every ring, instead of `next`. None: no more."""
        self._listener = call

    async def next(self, timeout_s: float | None = None) -> Pieces | None:
        """Return the pieces since the last call, [] once all have been read, None if timeout_s passes first.

        Raises the TridecodeError that the request ended with, RequestCancelled where the client has left.
        """
        if (pieces := self._take()) or self.stream.finished:
            return pieces
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        handle = None if timeout_s is None else loop.call_later(timeout_s, _expire, self._waiter)
        try:
            return await self._waiter
        finally:
            self._waiter = None
            if handle is not None:
                handle.cancel()

    def _take(self) -> Pieces:
        if self.left:
            raise RequestCancelled("the client has left")
        return self.stream.take()


def _expire(waiter: asyncio.Future[Pieces | None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
