"""Waiting for what another thread or process will do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def wait_until(
    condition: Callable[[], object], timeout_s: float = 60.0, what: str = "the condition"
) -> float:
    """Return the seconds until the condition held; fail after timeout_s.

    The default is far more than a loaded machine needs. Give a shorter limit only where the test proves it.
    """
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.01)
    return time.monotonic() - start


@contextmanager
def interpreter_gaps() -> Iterator[list[float]]:
    """Seconds between the turns of another thread that wakes every 5 ms; complete at the end."""
    gaps, closing = [0.0], threading.Event()

    def watch() -> None:
        before = time.monotonic()
        while not closing.wait(0.005):
            gaps.append(time.monotonic() - before)
            before = time.monotonic()

    watcher = threading.Thread(daemon=True, target=watch)
    watcher.start()
    try:
        yield gaps
    finally:
        closing.set()
        watcher.join()
