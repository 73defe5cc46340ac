"""Requests between Triton's thread and the engine: parsed and tokenised on two threads of their own.

execute() returns at once, and a request that takes long to prepare holds up neither heartbeats nor, as small
requests have a thread for themselves, the answers to others. What waits here is bounded in number and bytes.
"""

from __future__ import annotations

import queue
import threading
from typing import Callable

from tridecode.backend.errors import CapacityError

#: at most this many bytes make a request a small one: 10 ms of tokenising
SMALL_BYTES = 16_384

Job = Callable[[], None]


class Preparation:
    """Runs jobs in the order of arrival, small and large ones apart. A job must not raise."""

    def __init__(self, max_requests: int, max_bytes: int):
        self._max_requests, self._max_bytes = max_requests, max_bytes
        self._count = self._bytes = 0
        self._lock = threading.Lock()
        self._lanes = {small: _Lane(small, self._done) for small in (True, False)}

    def start(self) -> Preparation:
        for lane in self._lanes.values():
            lane.start()
        return self

    def put(self, size: int, job: Job) -> None:
        """Run `job`, which holds `size` bytes, later on another thread. CapacityError if too much waits."""
        with self._lock:
            if self._count >= self._max_requests or self._bytes + size > self._max_bytes and self._count:
                found = f"{self._count:,} requests of {self._bytes:,} bytes are being prepared already"
                raise CapacityError(
                    f"{found} (max_preparing_requests and max_preparing_bytes in config.pbtxt); "
                    "try again later"
                )
            self._count += 1
            self._bytes += size
        self._lanes[size <= SMALL_BYTES].inbox.put((size, job))

    def close(self, timeout_s: float = 5.0) -> None:
        """Drop what waits, which somebody else must answer, and wait for the jobs under way."""
        for lane in self._lanes.values():
            lane.closing = True
            lane.inbox.put(None)
        for lane in self._lanes.values():
            lane.join(timeout_s)

    def _done(self, size: int) -> None:
        with self._lock:
            self._count -= 1
            self._bytes -= size


class _Lane(threading.Thread):
    def __init__(self, small: bool, done: Callable[[int], None]):
        super().__init__(name=f"prepare-{'small' if small else 'large'}", daemon=True)
        self.inbox: queue.SimpleQueue[tuple[int, Job] | None] = queue.SimpleQueue()
        self.closing = False
        self._done = done

    def run(self) -> None:
        while (entry := self.inbox.get()) is not None:
            size, job = entry
            try:
                if not self.closing:
                    job()
            finally:
                self._done(size)
            entry = job = None  # type: ignore[assignment]  # nothing of a request outlives it here
