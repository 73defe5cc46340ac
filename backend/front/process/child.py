"""A child process of the front: started again when it dies, continued when a signal has stopped it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

from tridecode.backend.supervisor.processes import Waker, state

_MAX_PAUSE_S = 5.0
_HEALTHY_S = 10.0  # one that has lived for so long is started again at once
_log = logging.getLogger("tridecode.front")


class Child:
    """Times are monotonic seconds that the caller gives."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        fds: Sequence[int],
        settings: Callable[[], bytes],
    ):
        """name: for the log. arguments: of the module; the pid of this process follows them. fds: that it
        inherits. settings: what it reads from its standard input."""
        self.name = name
        self._command = [sys.executable, "-m", module, *arguments, str(os.getpid())]
        self._fds, self._settings = fds, settings
        self.process: subprocess.Popen[bytes] | None = None
        self._start_at = self._pause = self._started_at = 0.0
        self._waker = Waker()
        #: whether the last look has started it
        self.started_now = False

    @property
    def is_stopped(self) -> bool:
        """Return whether a signal has stopped it; it is continued after a while."""
        return self.process is not None and state(self.process.pid) in ("T", "t")

    def look(self, now: float) -> None:
        """Start it unless it runs; to be called several times a second."""
        self.started_now = False
        if self.process is not None and (code := self.process.poll()) is not None:
            self._bury(code, now)
        elif self.process is not None and self._waker.look(self.process.pid, now):
            _log.warning("%s was stopped by a signal; it is continued", self.name)
        if self.process is None and now >= self._start_at:
            self._start(now)

    def _bury(self, code: int, now: float) -> None:
        if now - self._started_at > _HEALTHY_S:
            self._pause = 0.0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        _log.warning("%s ended (%s); it is started again in %.1f s", self.name, how, self._pause)
        self.process = None
        self._start_at = now + self._pause
        self._pause = min(_MAX_PAUSE_S, max(0.2, 2 * self._pause))

    def _start(self, now: float) -> None:
        self.process = subprocess.Popen(self._command, stdin=subprocess.PIPE, pass_fds=self._fds)
        self._started_at, self._waker, self.started_now = now, Waker(), True
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(self._settings())
            self.process.stdin.close()
        except BrokenPipeError:  # it has ended already, which the next look sees
            pass

    def signal(self, signum: int) -> None:
        if self.process is not None:
            self.process.send_signal(signum)

    def wait(self, timeout_s: float) -> None:
        """Wait until it has ended; kill it if it has not by then."""
        if self.process is None:
            return
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.wait()
