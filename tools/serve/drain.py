"""Shuts `tridecode serve` down: readiness off, open requests finish or fail, then the server ends."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable

from tridecode.backend.supervisor import processes, runtime_dir, state_file
from tridecode.tools.serve.guarded_server import GuardedServer
from tridecode.tools.serve.signals import Signals
from tridecode.tools.serve.triton_http import TritonHttp, TritonHttpError

IDLE_S = 1.0  # an engine that had no work for this time has drained
END_S = 3.0  # from SIGTERM to SIGKILL of tritonserver: an open gRPC stream would delay its exit indefinitely
_TICK_S = 0.1
_ERRORS_S = 1.0  # time for the doors to send the errors of ended requests

_log = logging.getLogger("tridecode.serve")


class Drain:
    """Ends one server. signals: a second signal ends it at once."""

    def __init__(self, server: GuardedServer, http: TritonHttp, signals: Signals) -> None:
        self._server = server
        self._http = http
        self._signals = signals

    def stop(self, drain_s: float, may_have_requests: bool) -> int:
        """Drain for drain_s, end the remaining requests and the server; return 0, or 1 after a second
        signal.
        """
        _log.info("%s: stopping", self._signals.name)
        drained = self._drain(drain_s) if may_have_requests else True
        hurried = self._signals.count > 1
        if hurried:
            _log.warning("%s again: killing", self._signals.name)
        else:
            if not drained:
                _log.warning("requests are still open after %g s: ending them", drain_s)
            if not drained or self._has_guests():
                self._end_engines()
            if not drained:
                time.sleep(_ERRORS_S)
            self._server.terminate()
            self._wait(time.monotonic() + END_S)
        self._server.kill()
        self._server.wait_cleaned()
        if hurried:
            return 1
        _log.info("stopped")
        return 0

    def _drain(self, seconds: float) -> bool:
        """Wait for the open requests; return whether all ended in time."""
        _log.info("open requests have %g s", seconds)
        deadline = time.monotonic() + seconds
        self._mark(runtime_dir.DRAINING)  # before the doors disconnect, so that the engine stays for guests
        if self._unload_all():
            return self._wait_drained(deadline)
        self._server.terminate()  # Triton then drains by itself, as far as it can
        return self._wait(deadline)

    def _unload_all(self) -> bool:
        """Unload all models: open requests continue, new ones are refused, readiness is false, all ports stay
        open.
        """
        try:
            for model in sorted({row.name for row in self._http.index() if row.state == "READY"}):
                self._http.unload(model)
        except TritonHttpError as error:
            _log.warning("models cannot be unloaded: %s", error)
            return False
        return True

    def _wait_drained(self, deadline: float) -> bool:
        """Wait until no model or no engine is busy. Models alone do not tell: an open gRPC stream keeps its
        model busy without work, and Triton does not know the requests of guests.
        """
        idle_since = time.monotonic()

        def drained() -> bool:
            nonlocal idle_since
            engines = state_file.read_all(self._server.folder)
            if not engines or any(engine.running or engine.waiting for engine in engines):
                idle_since = time.monotonic()
            if time.monotonic() - idle_since > IDLE_S:
                return True
            return not self._unloading() and not any(engine.guests for engine in engines)

        return self._wait(deadline, drained)

    def _unloading(self) -> bool:
        try:
            return any(row.state == "UNLOADING" for row in self._http.index())
        except TritonHttpError:
            return False

    def _wait(self, deadline: float, condition: Callable[[], bool] = lambda: False) -> bool:
        """Return True once the condition holds or the server has ended, False at the deadline or a second
        signal."""
        while self._server.running():
            if condition():
                return True
            if time.monotonic() > deadline or self._signals.count > 1:
                return False
            time.sleep(_TICK_S)
        return True

    def _has_guests(self) -> bool:
        return any(engine.guests for engine in state_file.read_all(self._server.folder))

    def _mark(self, name: str) -> None:
        """Create a file that the supervisors check."""
        marker = self._server.folder / name
        try:
            marker.touch()
        except OSError as error:  # processes that miss the mark end with the guard
            _log.warning("%s cannot be written: %s", marker, error)

    def _end_engines(self) -> None:
        """End the engines and the OpenAI service. Doors and service fail their requests with the reason."""
        self._mark(runtime_dir.STOPPING)
        for engine in state_file.read_all(self._server.folder):
            supervisor = processes.identify(engine.supervisor_pid)
            if supervisor is not None:
                processes.kill(supervisor, signal.SIGTERM)
