"""Signs of life of the workers, in the shared memory of their counters.

A worker that hangs accepts connections and answers none of them, and nothing else shows that.
"""

from __future__ import annotations

import mmap
import time

#: seconds without a sign after which a worker hangs; one is due every second, and the parser of a large body
#: holds the event loop for a few seconds on a loaded machine
HANG_S = 20.0


class Beats:
    """A number for each worker: the monotonic seconds of its last sign; 0: it has given none. Linux has one
    such clock for all processes."""

    def __init__(self, fd: int, begin: int, workers: int):
        """begin: offset in bytes, a multiple of 8."""
        memory = memoryview(mmap.mmap(fd, begin + 8 * workers)).cast("d")
        self._times = memory[begin // 8 :]

    def beat(self, number: int) -> None:
        self._times[number] = time.monotonic()

    def forget(self, number: int) -> None:
        """Watch this worker only after its next sign: it starts."""
        self._times[number] = 0.0

    def excuse(self, number: int, now: float) -> None:
        """Count the silence of a worker that has given a sign from now on."""
        if self._times[number]:
            self._times[number] = now

    def silence(self, number: int, now: float) -> float:
        """Return the seconds since the last sign of a worker, 0.0 if it has given none."""
        last = self._times[number]
        return now - last if last else 0.0
