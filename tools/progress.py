"""One line that says what is going on: a spinner on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import logging
import sys
import time

from rich.console import Console
from rich.status import Status

QUIET_S = 2.0  # without a terminal, lines come no closer together

_log = logging.getLogger("tridecode.serve")


class Progress:
    """A context manager; `show` may be called as often as one likes."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._status: Status | None = console.status("starting") if console.is_terminal else None
        self._last = ""
        self._logged_at = 0.0

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._status is not None:
            self._status.stop()
        sys.stderr.flush()

    def show(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)
        elif text != self._last and time.monotonic() - self._logged_at > QUIET_S:
            _log.info("%s", text)
            self._last, self._logged_at = text, time.monotonic()
