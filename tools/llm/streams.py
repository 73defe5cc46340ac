"""Answers that are yielded as they grow, with and without an event loop."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import Any

from tridecode.tools.llm.jobs import Job, Model
from tridecode.tools.llm.outputs import RequestOutput


def stream_job(model: Model, job: Job) -> Iterator[RequestOutput]:
    """Yield the same RequestOutput each time it has grown. A caller that stops early cancels the job."""
    news: queue.SimpleQueue[Any] = queue.SimpleQueue()
    running = model.begin(job, news.put, streaming=True)
    try:
        while not running.output.finished:
            news.get()
            if running.take():
                yield running.output
    finally:
        model.end(running)


async def stream_job_async(model: Model, job: Job) -> AsyncGenerator[RequestOutput, None]:
    """Do the same in an event loop."""
    loop = asyncio.get_running_loop()
    news: asyncio.Queue[Any] = asyncio.Queue()

    def notify(one: Any) -> None:
        loop.call_soon_threadsafe(news.put_nowait, one)

    begun = loop.run_in_executor(None, partial(model.begin, job, notify, streaming=True))
    try:
        running = await asyncio.shield(begun)
    except asyncio.CancelledError:
        begun.add_done_callback(partial(_end_begun, model))
        raise
    try:
        while not running.output.finished:
            await news.get()
            if running.take():
                yield running.output
    finally:
        model.end(running)


def _end_begun(model: Model, begun: asyncio.Future[Any]) -> None:
    """End a job that was begun for a task that is cancelled."""
    if begun.exception() is None:
        model.end(begun.result())
