"""One run of a batch: workers take lines, send them, and hand the results to one writer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from tridecode.backend.batches.answer_files import AnswerFile, AnswerFiles
from tridecode.backend.batches.lines import InputLines, Request
from tridecode.backend.batches.meter import Meter
from tridecode.backend.batches.records import LineError, Response, answer_line, error_line

_log = logging.getLogger("tridecode.batches")

_TICK_S = 0.5
_YIELD_LINES = 200  # that are read before other tasks have their turn
_GROUP_BYTES = 16 << 20


class Sends(Protocol):
    """Answers one request. Raises LineError for one that has no answer."""

    async def send(self, request: Request) -> Response: ...


class Runner:
    """Requests of `lines` in, whole lines of `files` out."""

    def __init__(self, lines: InputLines, files: AnswerFiles, meter: Meter):
        self._lines, self._files, self.meter = lines, files, meter
        self._reading: asyncio.Lock
        self._results: asyncio.Queue[tuple[AnswerFile, bytes] | None]

    async def run(
        self, sender: Sends, concurrency: int, stopping: asyncio.Event, show: Callable[[], object]
    ) -> None:
        """Answer all lines, or stop once `stopping` is set. show: called every 0.5 s; it may
        raise OSError.

        When the run ends or fails, the files contain all answers received so far. Raises the errors of
        `sender`, and OSError.
        """
        self._reading = asyncio.Lock()
        self._results = asyncio.Queue(concurrency)
        writer = asyncio.create_task(self._write())
        showing = asyncio.create_task(self._show(show))
        workers = [asyncio.create_task(self._work(sender)) for _ in range(concurrency)]
        try:
            await _first_failure_or_all(workers, writer, asyncio.create_task(stopping.wait()))
        finally:
            showing.cancel()
            await self._end(writer)
        self.meter.empty = self._lines.num_empty

    async def _work(self, sender: Sends) -> None:
        while (request := await self._next()) is not None:
            try:
                response = await sender.send(request)
            except LineError as error:
                await self._results.put((self._files.errors, error_line(error)))
                self.meter.add_error()
            else:
                await self._results.put((self._files.answers, answer_line(request.custom_id, response)))
                self.meter.add_answer(response.body)

    async def _next(self) -> Request | None:
        """Return the next request without a result; None at the end."""
        async with self._reading:
            for number in range(1, 1 << 62):
                if number % _YIELD_LINES == 0:
                    await asyncio.sleep(0)
                try:
                    request = self._lines.next()
                except LineError as error:
                    await self._report(error)
                    continue
                if request is None or not self._is_done(request):
                    return request
        raise AssertionError("unreachable")

    def _is_done(self, request: Request) -> bool:
        is_answer = request.custom_id in self._files.answered
        if not is_answer and request.custom_id not in self._files.refused:
            return False
        self.meter.skip(is_answer)
        return True

    async def _report(self, error: LineError) -> None:
        """Write the error of a line that is not a request, unless an earlier run has."""
        if error.fields.line in self._files.reported:
            self.meter.skip(is_answer=False)
            return
        await self._results.put((self._files.errors, error_line(error)))
        self.meter.add_error()

    # ------------------------------------------------------------ the other tasks

    async def _write(self) -> None:
        """Write results in groups: what has come while the disk took the group before."""
        while (result := await self._results.get()) is not None:
            group, size = [result], len(result[1])
            ends = False
            while size < _GROUP_BYTES and not ends and not self._results.empty():
                more = self._results.get_nowait()
                ends = more is None
                if more is not None:
                    group.append(more)
                    size += len(more[1])
            for file in (self._files.answers, self._files.errors):
                if lines := [line for where, line in group if where is file]:
                    await asyncio.to_thread(file.append, lines)
            if ends:
                return

    async def _end(self, writer: asyncio.Task[None]) -> None:
        """Let the writer write what it has; raise its error."""
        if not writer.done():
            with suppress(asyncio.QueueFull):
                self._results.put_nowait(None)
        while not writer.done():
            await asyncio.wait({writer}, timeout=_TICK_S)
            with suppress(asyncio.QueueFull):
                self._results.put_nowait(None)
        await writer

    async def _show(self, show: Callable[[], object]) -> None:
        failed = False
        while True:
            self.meter.empty = self._lines.num_empty
            self.meter.sample()
            try:
                show()
            except OSError as error:  # a disk may be full only briefly: the writer raises lasting errors
                if not failed:
                    _log.warning("the progress could not be shown: %s", error)
                failed = True
            await asyncio.sleep(_TICK_S)


async def _first_failure_or_all(
    workers: list[asyncio.Task[None]], writer: asyncio.Task[None], stopping: asyncio.Task[Any]
) -> None:
    """Wait until all workers have ended, one of the tasks fails, or the stop is requested."""
    working = asyncio.gather(*workers)
    waiting: set[asyncio.Future[Any]] = {working, writer, stopping}
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        stopping.cancel()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
