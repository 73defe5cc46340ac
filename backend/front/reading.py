"""Text streams in an event loop: the engine link's thread rings, the loop reads."""

from __future__ import annotations

import asyncio
from collections import deque

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
        self.time = loop.time
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
        self._waiter: asyncio.Future[None] | None = None
        self._rung = False
        self._read_at = bells.time()
        self._timer: asyncio.TimerHandle | None = None
        self.left = False  # whether the client has left

    def ring(self, _stream: TextStream) -> None:
        """Any thread: there is something to take."""
        self._bells.ring(self)

    def wake(self) -> None:
        """Let the reader continue. The loop's thread."""
        self._rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def leave(self) -> None:
        """The client has left: cancel the request, here and in the engine."""
        self.left = True
        self.stream.cancel()
        self.wake()

    def report_silence(self, seconds: float) -> None:
        """Have `next` return None after so long without pieces, until `close`. One timer, not one a piece."""
        loop = asyncio.get_running_loop()
        idle = loop.time() - self._read_at
        if idle >= seconds:
            idle = 0.0
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        self._timer = loop.call_later(seconds - idle, self.report_silence, seconds)

    def close(self) -> None:
        """End the timer: nobody reads any more."""
        if self._timer is not None:
            self._timer.cancel()

    async def next(self, timeout_s: float | None = None) -> Pieces | None:
        """Return the pieces since the last call, [] once all have been read, None after a silence.

        Raises the TridecodeError that the request ended with, RequestCancelled where the client has left.
        """
        while True:
            if self.left:
                raise RequestCancelled("the client has left")
            if self._rung:
                self._rung = False
                if pieces := self.stream.take():
                    self._read_at = self._bells.time()
                    return pieces
                if self.stream.finished:
                    return []
                continue
            if self.stream.finished:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            handle = None
            if timeout_s is not None:
                handle = asyncio.get_running_loop().call_later(timeout_s, _expire, self._waiter)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if handle is not None:
                    handle.cancel()
            if not self._rung and not self.left:
                self._read_at = self._bells.time()
                return None


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
