"""Waiting for what another thread will do."""

from __future__ import annotations

import time
from typing import Callable


def wait_until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain"
        time.sleep(0.005)
