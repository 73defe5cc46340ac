"""Runs the jobs of one call, with and without an event loop."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Sequence
from typing import Any

from tridecode.tools.llm.jobs import Job, Model, Notify
from tridecode.tools.llm.outputs import RequestOutput
from tridecode.tools.llm.progress import PromptProgress


class _Call:
    """The jobs of one call: those that wait, those that run, and all results in order."""

    def __init__(self, model: Model, jobs: Sequence[Job], notify: Notify, progress: PromptProgress):
        self._model, self._waiting, self._notify = model, iter(jobs), notify
        self._progress = progress
        self._running: set[Any] = set()
        self.results: list[RequestOutput] = []

    @property
    def runs(self) -> bool:
        return bool(self._running)

    def fill(self) -> None:
        """Begin as many jobs as the model queues."""
        while len(self._running) < self._model.room() and (job := next(self._waiting, None)) is not None:
            one = self._model.begin(job, self._notify)
            self._running.add(one)
            self.results.append(one.output)

    def take(self, one: Any) -> bool:
        """Take what has come of a job; return whether it has ended. Raises its error."""
        if one not in self._running or not one.take() or not one.output.finished:
            return False
        self._running.remove(one)
        self._model.end(one)
        self._progress.add(sum(len(answer.token_ids) for answer in one.output.outputs))
        return True

    def close(self) -> None:
        """Cancel the jobs that still run."""
        for one in self._running:
            self._model.end(one)


def run_jobs(model: Model, jobs: Sequence[Job], shows: bool) -> list[RequestOutput]:
    """Run jobs, as many at once as the model queues. shows: the progress, on a terminal.

    Blocks the thread. Raises the error of the first job that fails; the others are cancelled.
    """
    news: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with PromptProgress(len(jobs), shows) as progress:
        call = _Call(model, jobs, news.put, progress)
        try:
            call.fill()
            while call.runs:
                if call.take(news.get()):
                    call.fill()
        finally:
            call.close()
    return call.results


async def run_jobs_async(model: Model, jobs: Sequence[Job], shows: bool) -> list[RequestOutput]:
    """Do the same without blocking the event loop: jobs are begun on threads of the loop's pool."""
    loop = asyncio.get_running_loop()
    news: asyncio.Queue[Any] = asyncio.Queue()

    def notify(one: Any) -> None:
        loop.call_soon_threadsafe(news.put_nowait, one)

    with PromptProgress(len(jobs), shows) as progress:
        call = _Call(model, jobs, notify, progress)
        filling: asyncio.Future[None] | None = None
        try:
            while True:
                filling = loop.run_in_executor(None, call.fill)
                await asyncio.shield(filling)
                if not call.runs:
                    return call.results
                while not call.take(await news.get()):
                    pass
        finally:
            if filling is not None and not filling.done():  # this call is cancelled
                await asyncio.wait([filling])
            call.close()
