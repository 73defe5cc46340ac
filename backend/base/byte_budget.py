"""A bound on the memory that several threads hold together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ByteBudget:
    """Limits held memory to `limit` bytes in total; a single larger request may run alone."""

    def __init__(self, limit: int):
        self._limit, self._held, self._change = limit, 0, threading.Condition()

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Hold `size` bytes while the block runs; wait until they are free. A size of 0 never waits."""
        with self._change:
            self._change.wait_for(lambda: not size or not self._held or self._held + size <= self._limit)
            self._held += size
        try:
            yield
        finally:
            with self._change:
                self._held -= size
                self._change.notify_all()
