"""Chat templates for an event loop: one child process renders, and the loop never waits for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from tridecode.backend.base.child_frames import LENGTH, message_of
from tridecode.backend.base.errors import CapacityError
from tridecode.backend.chat.child_process import (
    Child,
    ChildKilled,
    RendererDown,
    RenderLimits,
    TemplateFault,
    request_frame,
    text_of,
)

_MAX_WAITING = 1024  # requests that wait for the child
_MAX_WAITING_BYTES = 256 << 20  # bytes of their frames


@dataclass
class _Job:
    frame: bytes
    answer: asyncio.Future[dict[str, Any]]
    is_second_try: bool = False


class AsyncTemplateRenderer:
    """Renders templates in a child process for the coroutines of one event loop, one after another.

    The child starts with the first request, or with `start`. It is replaced when it breaks a limit; a request
    that it was killed under from outside goes to the next child, once. A caller that is cancelled while its
    request waits costs nothing; one whose template runs leaves the child alive.
    """

    def __init__(self, limits: RenderLimits = RenderLimits()):
        self.limits = limits
        self._jobs: deque[_Job] = deque()
        self._bytes = 0
        self._running: _Job | None = None
        self._child: Child | None = None
        self._wire: _Wire | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._starting: asyncio.Task[None] | None = None
        self._ends: set[asyncio.Future[Any]] = set()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The child's process id; None where there is none."""
        return None if self._child is None else self._child.process.pid

    async def start(self) -> None:
        """Start the child before the first request needs it. Raises TemplateFault."""
        await self.render("", {})

    async def render(self, source: str, values: Mapping[str, Any]) -> str:
        """The text of the template `source`, as transformers renders it.

        values: the variables, of JSON's types. Raises TemplateFault, and CapacityError if too many requests
        wait.
        """
        frame = request_frame(source, values)
        if len(self._jobs) >= _MAX_WAITING or self._bytes + len(frame) > _MAX_WAITING_BYTES:
            raise CapacityError(f"{len(self._jobs):,} requests wait for their chat template; try again later")
        job = _Job(frame, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self._bytes += len(frame)
        self._next()
        return text_of(await job.answer)

    async def close(self) -> None:
        """End the child, and every request with a TemplateFault."""
        self._closed = True
        self._fail_waiting(TemplateFault("the server stops"))
        if self._starting is not None:
            await asyncio.wait([self._starting])
        self._drop_child()
        if self._ends:
            await asyncio.wait(self._ends)

    def kill(self) -> None:
        """End the child without waiting for it; nobody renders any more. Any thread."""
        self._closed = True
        if self._child is not None:
            with suppress(ProcessLookupError):
                self._child.process.kill()

    def _next(self) -> None:
        """Send the next request, if the child is free."""
        if self._running is not None or self._starting is not None:
            return
        while self._jobs and self._jobs[0].answer.done():  # its caller has left
            self._pop()
        if not self._jobs:
            return
        if self._wire is None:
            self._starting = asyncio.ensure_future(self._start())
            return
        job = self._running = self._pop()
        self._wire.send(job.frame)
        self._timer = asyncio.get_running_loop().call_later(self.limits.seconds, self._late)

    def _pop(self) -> _Job:
        job = self._jobs.popleft()
        self._bytes -= len(job.frame)
        return job

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            child = self._child = await loop.run_in_executor(None, Child, self.limits)
            child.socket.setblocking(False)
            _, self._wire = await loop.create_unix_connection(
                lambda: _Wire(self.limits.max_answer, self._answered, self._lost), sock=child.socket
            )
        except (TemplateFault, OSError) as error:
            if self._child is not None:
                self._child.socket.close()
            self._drop_child()
            down = f"the process that renders templates cannot be used: {error}"
            self._fail_waiting(error if isinstance(error, TemplateFault) else RendererDown(down))
        finally:
            self._starting = None
        if not self._closed:
            self._next()

    def _answered(self, answer: dict[str, Any]) -> None:
        job = self._take_running()
        if answer.get("ended"):
            self._drop_child()
        if job is not None and not job.answer.done():
            job.answer.set_result(answer)
        self._next()

    def _late(self) -> None:
        job = self._take_running()
        self._drop_child()
        if job is not None:
            _fail(job, TemplateFault(self.limits.late))
        self._next()

    def _lost(self, wire: _Wire) -> None:
        """The child's end of the connection is closed, or its answer is too long or no message."""
        if wire is not self._wire or self._child is None:
            return
        job, child = self._take_running(), self._child
        self._drop_child(ask=lambda: self._after_loss(job, child))

    async def _after_loss(self, job: _Job | None, child: Child) -> None:
        """Learn why a child has gone, and answer its request or give it to the next child."""
        loop = asyncio.get_running_loop()
        reason = await loop.run_in_executor(None, child.lost)
        await loop.run_in_executor(None, child.kill)
        if job is not None and isinstance(reason, ChildKilled):
            if job.is_second_try:
                reason = TemplateFault("the process that renders it was killed twice (signal 9)")
            elif not job.answer.done() and not self._closed:
                job.is_second_try = True
                self._jobs.appendleft(job)
                self._bytes += len(job.frame)
                job = None
        if job is not None:
            _fail(job, reason)
        self._next()

    def _take_running(self) -> _Job | None:
        job, self._running = self._running, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return job

    def _drop_child(self, ask: Callable[[], Any] | None = None) -> None:
        """Forget the child; other threads wait for its end. ask: makes the coroutine that ends it."""
        child, wire, self._child, self._wire = self._child, self._wire, None, None
        if wire is not None:
            wire.close()
        if child is None:
            return
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Any] = (
            asyncio.ensure_future(ask()) if ask else loop.run_in_executor(None, child.kill)
        )
        self._ends.add(ended)
        ended.add_done_callback(self._ends.discard)

    def _fail_waiting(self, fault: Exception) -> None:
        while self._jobs:
            _fail(self._pop(), fault)
        job = self._take_running()
        if job is not None:
            _fail(job, fault)


def _fail(job: _Job, error: Exception) -> None:
    if not job.answer.done():
        job.answer.set_exception(error)


class _Wire(asyncio.Protocol):
    """The connection to a child: whole frames out, whole answers in."""

    def __init__(self, most: int, answered: Callable[[dict[str, Any]], None], lost: Callable[[_Wire], None]):
        self._most, self._answered, self._lost = most, answered, lost
        self._data = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has another base class

    def send(self, frame: bytes) -> None:
        assert self._transport is not None
        self._transport.write(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._data += data
        length = int.from_bytes(self._data[:LENGTH], "little")
        if len(self._data) >= LENGTH and length > self._most:
            self._lost(self)
        elif len(self._data) >= LENGTH + length:
            try:
                answer = message_of(self._data[LENGTH : LENGTH + length])
            except EOFError:
                self._lost(self)
                return
            self._data.clear()  # a child has one request at a time
            self._answered(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost(self)
