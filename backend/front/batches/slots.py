"""Limits the lines of batches that are open at once, so that they leave room for the requests of clients.

A line has the engine's lowest priority, so a client's request is admitted first. But a slot that a line has
becomes free only when the line ends. Therefore lines never fill the engine: one of RESERVED_SHARE slots and
those that clients use stay out of their reach, and no line waits in the engine's queue. Lines of equal
lengths would also begin and end together, and a client's request would wait for all of them in its worker:
lines are sent SPACING_S apart.
"""

from __future__ import annotations

import asyncio
import re

import httpx

from tridecode.backend.batches.lines import Request
from tridecode.backend.batches.records import Response
from tridecode.backend.batches.sender import Sender

#: lines leave one of this many slots free; a decode step of 94 % of the rows has 94 % of the tokens/s or more
RESERVED_SHARE = 16
#: seconds between two lines for one worker, which needs 0.4 to 0.8 ms for each
SPACING_S = 0.002
LOOK_S = 0.5
_OPEN = re.compile(rb"^tridecode_engine_open_requests\{[^}]*\} (\d+)$", re.MULTILINE)


def most_lines(slots: int, clients: int) -> int:
    """Return how many lines may be open next to `clients` requests; 1 at least, which may wait."""
    reserved = max(1, slots // RESERVED_SHARE) if slots > 4 else 0
    return max(1, slots - reserved - clients)


class Slots:
    """Admits lines, the first that waits first. slots: sequences that the engines compute at once."""

    def __init__(self, slots: int, workers: int = 1):
        self._slots, self._spacing_s = slots, SPACING_S / workers
        self._next = 0.0
        self.most = most_lines(slots, 0)
        self.open = 0
        self._changed = asyncio.Condition()

    async def wait(self) -> None:
        """Wait for a slot; `leave` must follow."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.open < self.most)
            self.open += 1

    async def space(self) -> None:
        """Wait until the last line was sent long enough ago."""
        now = asyncio.get_running_loop().time()
        begin = max(now, self._next)
        self._next = begin + self._spacing_s
        await asyncio.sleep(begin - now)

    async def leave(self) -> None:
        async with self._changed:
            self.open -= 1
            self._changed.notify()

    async def allow(self, clients: int) -> None:
        """Take note of the open requests of clients."""
        async with self._changed:
            self.most = most_lines(self._slots, clients)
            self._changed.notify_all()


class PatientSender:
    """Sends lines as slots allow. absence: see Sender."""

    def __init__(self, sender: Sender, slots: Slots):
        self._sender, self._slots = sender, slots

    async def send(self, request: Request) -> Response:
        """Raises LineError as Sender does."""
        await self._slots.wait()
        try:
            await self._slots.space()
            return await self._sender.send(request)
        finally:
            await asyncio.shield(self._slots.leave())


def open_requests(page: bytes) -> int | None:
    """Return the open requests of all engines on a metrics page; None: it does not say."""
    found = _OPEN.findall(page)
    return sum(map(int, found)) if found else None


async def watch_clients(http: httpx.AsyncClient, slots: Slots) -> None:
    """Follow the number of the clients' open requests, forever. A heartbeat is up to a second old, so lines
    that have ended since may count as clients for one look."""
    while True:
        ours = slots.open
        try:
            found = open_requests((await http.get("/metrics", timeout=10.0)).content)
        except httpx.HTTPError:
            found = None  # the service is away, and lines wait for it anyway
        if found is not None:
            await slots.allow(max(0, found - max(ours, slots.open)))
        await asyncio.sleep(LOOK_S)
