"""Waiting for what another thread or process will do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout_s: float = 5.0, what: str = "the condition") -> float:
    """Seconds until the condition held; fails after timeout_s."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.01)
    return time.monotonic() - start
