"""Parses and tokenises requests on two threads, between the front end's thread and the engine.

execute() returns at once. A request that takes long to prepare delays no heartbeat, and since small requests
have a thread of their own, no small request either. The queues are bounded in requests and bytes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from tridecode.backend.base.errors import CapacityError

#: largest request that counts as small, in bytes: 10 ms of tokenising
SMALL_BYTES = 16_384

Job = Callable[[], None]


class Preparation:
    """Runs small and large jobs on two threads, each in order of arrival. A job must not raise."""

    def __init__(self, max_requests: int, max_bytes: int):
        """max_requests: limit for each of the two. max_bytes: of all large requests together."""
        self._small = _Lane("prepare-small", max_requests, max_requests * SMALL_BYTES)
        self._large = _Lane("prepare-large", max_requests, max_bytes)

    @property
    def free(self) -> tuple[threading.Thread, ...]:
        """Return the threads that tokenise for long, without the GIL."""
        return (self._large,)

    @property
    def pending(self) -> int:
        """Return the number of jobs that have not ended."""
        return self._small.count + self._large.count

    def start(self) -> Preparation:
        self._small.start()
        self._large.start()
        return self

    def put(self, size: int, job: Job) -> None:
        """Queue `job`, which holds `size` bytes. CapacityError if its queue is full."""
        (self._small if size <= SMALL_BYTES else self._large).put(size, job)

    def close(self, timeout_s: float = 5.0) -> None:
        """Drop the queued jobs, whose requests the caller must answer, and wait for the running ones."""
        for lane in (self._small, self._large):
            lane.stop()
        for lane in (self._small, self._large):
            lane.join(timeout_s)


class _Lane(threading.Thread):
    def __init__(self, name: str, max_count: int, max_bytes: int):
        super().__init__(name=name, daemon=True)
        self.count = 0
        self._bytes, self._max_count, self._max_bytes = 0, max_count, max_bytes
        self._inbox: queue.SimpleQueue[tuple[int, Job] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closing = False

    def put(self, size: int, job: Job) -> None:
        with self._lock:
            too_large = self.count > 0 and self._bytes + size > self._max_bytes
            if self.count >= self._max_count or too_large:
                found = f"{self.count:,} requests of {self._bytes:,} bytes are being prepared already"
                raise CapacityError(
                    f"{found} (max_preparing_requests and max_preparing_bytes in config.pbtxt); "
                    "try again later"
                )
            self.count += 1
            self._bytes += size
        self._inbox.put((size, job))

    def stop(self) -> None:
        self._closing = True
        self._inbox.put(None)

    def run(self) -> None:
        while (entry := self._inbox.get()) is not None:
            size, job = entry
            try:
                if not self._closing:
                    job()
            finally:
                with self._lock:
                    self.count -= 1
                    self._bytes -= size
            entry = job = None  # type: ignore[assignment]  # release the request while this thread waits
