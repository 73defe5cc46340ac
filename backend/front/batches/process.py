"""Process that answers the batches of a front: python -m tridecode.backend.front.batches.process PARENT

The front's first process starts it with the workers and ends it before them. It is a client of the workers'
port like any other: reading lines, JSON and waiting for the disk never hold up the event loop of a worker,
lines spread over the workers as connections do, and a worker or this process may die alone.

Reads BatchSettings as JSON from its standard input. One process at a time answers the batches of a folder.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import sys
from typing import Any

import httpx
import msgspec

from tridecode.backend.base import log_format
from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.batches.sender import Sender
from tridecode.backend.batches.target import USUAL_CONCURRENCY, Described, Target, describe
from tridecode.backend.front.batches.answering import Answering
from tridecode.backend.front.batches.batch_records import MAX_RECORDS, all_batches
from tridecode.backend.front.batches.cleaning import clean
from tridecode.backend.front.batches.objects import FINAL
from tridecode.backend.front.batches.slots import PatientSender, Slots, watch_clients
from tridecode.backend.front.batches.store import Store
from tridecode.backend.front.settings import FrontSettings
from tridecode.backend.supervisor import processes

#: batches that are answered at once; later ones wait, so that a short one is not behind a day's work alone
MAX_BATCHES = 4
#: where processors are short, those of the workers come first
NICE = 10
_LOOK_S = 0.25
_LOCK_S = 0.5
_DAY_S = 86_400.0  # the longest answer to a line
_log = logging.getLogger("tridecode.front.batches")


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """url: of the workers. key: an API key that they know; "": they want none."""

    front: FrontSettings
    url: str
    key: str


async def answer_all(settings: BatchSettings, store: Store, stop: asyncio.Event) -> None:
    """Answer batches until `stop` is set."""
    target = Target(settings.url, settings.key)
    described = await _described(target, stop)
    if described is None:
        return
    slots = Slots(described.sequences or USUAL_CONCURRENCY, settings.front.workers)
    sender = Sender(target, float("inf"), _DAY_S)
    async with httpx.AsyncClient(**target.options()) as http:
        watch = asyncio.create_task(watch_clients(http, slots))
        try:
            await _answer_found(store, PatientSender(sender, slots), slots.most, stop)
        finally:
            watch.cancel()
            await sender.close()


async def _described(target: Target, stop: asyncio.Event) -> Described | None:
    """Wait until the service is ready; None: it is to stop before."""
    loop, stopping = asyncio.get_running_loop(), asyncio.ensure_future(stop.wait())
    while not stop.is_set():
        try:
            found = loop.run_in_executor(None, describe, target, 2.0, lambda state: None, True)
            waiting: list[asyncio.Future[Any]] = [found, stopping]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if found.done():
                return found.result()
        except TridecodeError:  # it starts, or is away
            await asyncio.wait({stopping}, timeout=_LOOK_S)
    return None


async def _answer_found(store: Store, sender: PatientSender, concurrency: int, stop: asyncio.Event) -> None:
    running: dict[str, asyncio.Task[None]] = {}
    ended: set[str] = set()  # not read again: an idle service would read 1000 records four times a second
    stopping = asyncio.ensure_future(stop.wait())
    while not stop.is_set():
        waiting: set[asyncio.Future[Any]] = {stopping}
        if len(ended) > 2 * MAX_RECORDS:  # most of these do not exist any more
            ended.clear()
        for batch in await asyncio.to_thread(all_batches, store, ended):
            if batch.status in FINAL:
                ended.add(batch.id)
                continue
            if batch.id in running or len(running) >= MAX_BATCHES:
                continue
            answering = Answering(store, batch, sender, concurrency, stop)
            running[batch.id] = asyncio.create_task(answering.run())
        waiting.update(running.values())
        await asyncio.wait(waiting, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        for batch_id, task in list(running.items()):
            if task.done():
                del running[batch_id]
                task.result()
    stopping.cancel()
    await asyncio.gather(*running.values())


async def _own(store: Store, stop: asyncio.Event) -> int | None:
    """Wait until no other process answers the batches of this folder; return the lock."""
    fd = os.open(store.folder / "runner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    said = False
    while not stop.is_set():
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not said:
                _log.warning("another service answers the batches of %s; waiting for its end", store.folder)
            said = True
            await asyncio.sleep(_LOCK_S)
        else:
            return fd
    return None


async def run(settings: BatchSettings) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    store = Store.of(settings.front)
    assert store is not None
    lock = await _own(store, stop)
    if lock is None:
        return
    try:
        clean(store)
        await answer_all(settings, store, stop)
    finally:
        os.close(lock)


def main() -> None:
    processes.end_with(int(sys.argv[1]))
    os.nice(NICE)
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=BatchSettings)
    log_format.configure("openai batches")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
