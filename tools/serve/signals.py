"""The signals that end `tridecode serve` and `tridecode tritonserver`."""

from __future__ import annotations

import signal


class Signals:
    """Counts SIGTERM, SIGINT and SIGHUP; name: of the last one. To be made in the main thread."""

    def __init__(self) -> None:
        self.count = 0
        self.name = ""
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, _frame: object) -> None:
        self.count += 1
        self.name = signal.Signals(signum).name
