"""One run of `tridecode serve`: start the server, watch it, restart it when it dies, drain it."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.supervisor import state_file
from tridecode.model_repo_templates.contracts_in import in_words
from tridecode.tools.client.example_commands import example_lines, model_name
from tridecode.tools.serve import triton_access
from tridecode.tools.serve.drain import Drain
from tridecode.tools.serve.guarded_server import GuardedServer
from tridecode.tools.serve.options import ServeOptions
from tridecode.tools.serve.server_log import ServerLog
from tridecode.tools.serve.server_watch import WATCH_S, ServerWatch
from tridecode.tools.serve.signals import Signals
from tridecode.tools.serve.start import Start, StartError
from tridecode.tools.serve.triton_http import ModelState

DEATHS_WITHIN_S = 300.0  # window in which deaths of tritonserver are counted (ServeOptions.give_up_after)
FIRST_PAUSE_S = 0.2  # pause before a restart; each counted death doubles it, up to MAX_PAUSE_S
MAX_PAUSE_S = 15.0  # less than the 60 s for which an engine waits for a door
_TICK_S = 0.1

_log = logging.getLogger("tridecode.serve")


def serve(options: ServeOptions) -> int:
    """Serve a model repository until SIGTERM, SIGINT or SIGHUP; the exit code of the process.

    0: a signal requested the end, and the open requests finished or ended with an error. 1: tritonserver did
    not become ready, died too often, or a second signal killed it; the last line of the log says why. Must
    run in the main thread. Raises ConfigError for a wrong setting, before anything is started.
    """
    models = options.check()
    signals = Signals()
    failure: TridecodeError | None = None
    with ServerLog(options.triton_args) as log:
        arguments = [*log.arguments, *options.server_arguments()]
        with GuardedServer(arguments, options.door_python, options.key) as server:
            _log.info("tritonserver is process %d", server.pid)
            try:
                return Serving(options, server, signals, models, log).run()
            except TridecodeError as error:
                failure = error
    _log.error("%s", failure)  # after everything that the end of the server logs
    return 1


class Deaths:
    """Deaths of tritonserver; times are monotonic seconds that the caller gives."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def add(self, now: float) -> int:
        """Add a death; return the number of deaths within DEATHS_WITHIN_S."""
        self._times.append(now)
        while self._times[0] < now - DEATHS_WITHIN_S:
            self._times.popleft()
        return len(self._times)


class Serving:
    """Runs one server. models: the models that must become ready."""

    def __init__(
        self,
        options: ServeOptions,
        server: GuardedServer,
        signals: Signals,
        models: Sequence[str] = (),
        log: ServerLog | None = None,
    ) -> None:
        self._options = options
        self._server = server
        self._signals = signals
        self._models = models
        self._log = log or ServerLog()
        self._http = options.http()
        self._watch = ServerWatch(options, server, self._http)
        self._deaths = Deaths()
        self._was_ready = False

    def run(self) -> int:
        """Run until the end and return the exit code. After a TridecodeError the caller closes the server."""
        self._first_start()
        while self._signals.count == 0:
            if self._server.running():
                self._watch.tick(time.monotonic())
                time.sleep(WATCH_S)
            else:
                self._start_again()
        # a client may have seen that the server is ready before this process has
        may_have_requests = self._was_ready or self._http.ready()
        drain = Drain(self._server, self._http, self._signals)
        return drain.stop(self._options.drain_s, may_have_requests)

    def _goes_on(self) -> bool:
        """Return whether a start may continue."""
        self._watch.doors.tick(time.monotonic())
        return self._server.running() and self._signals.count == 0

    def _start(self) -> list[ModelState]:
        start = Start(self._server, self._http, self._models, self._options.ports())
        return start.wait(self._options.start_timeout_s, self._goes_on)

    def _first_start(self) -> None:
        began, rows = time.monotonic(), list[ModelState]()
        try:
            while not (rows := self._start()):
                if self._signals.count:
                    return
                self._log.show_held()
                self._after_failed_start()
        finally:
            self._log.started(reported=bool(rows))
        failures = _failures(rows)
        for text in failures[:-1]:
            _log.error("%s", text)
        if failures:
            raise StartError(failures[-1])
        self._was_ready = True
        self._log_ready(time.monotonic() - began)

    def _after_failed_start(self) -> None:
        """Restart a server that was killed by a signal during its first start.

        Raises StartError if it ended with an exit code instead, TridecodeError if it has died too often.
        """
        how = self._server.ending()
        if self._server.has_exited():
            raise StartError(f"tritonserver {how} before it was ready; the lines above say why")
        self._wait_after_death(f"{how} before it was ready", time.monotonic())
        if self._signals.count == 0:
            self._restart()

    def _restart(self) -> bool:
        """Restart a dead server; return False if that failed, which counts as another death."""
        try:
            self._server.restart()
        except (OSError, TridecodeError) as error:
            _log.error("tritonserver cannot be started: %s", error)
            return False
        self._watch = ServerWatch(self._options, self._server, self._http)
        return True

    def _log_ready(self, seconds: float) -> None:
        options, ports = self._options, self._options.ports()
        labels = {"http": "HTTP", "grpc": "gRPC"}
        where = [f"{labels.get(name, name)} {options.address_of(name)}:{ports[name]}" for name in ports]
        if options.openai_port is not None:
            where.append(f"OpenAI {options.address}:{options.openai_port}")
        _log.info("ready after %.1f s: %s", seconds, ", ".join(where))
        _log.info("model: %s; as %s", model_name(options.repository), ", ".join(self._models))
        _log.info("contracts: %s", in_words(options.repository))
        everywhere = options.address in (triton_access.LOOPBACK, "0.0.0.0", "")
        host = "localhost" if everywhere else options.address
        for line in example_lines(
            options.repository, self._models, host, options.http_port, options.openai_port
        ):
            _log.info("try: %s", line)

    def _start_again(self) -> None:
        """Handle the server's end. Raises TridecodeError if it has died too often."""
        how, began = self._server.ending(), time.monotonic()
        if not self._watch.killed_for_orphans:
            self._wait_after_death(how, began)
        if self._signals.count:
            return
        engines = self._engines()
        if not self._restart():
            return
        try:
            rows = self._start()
        except StartError as error:
            _log.error("%s", error)
            self._server.kill_server()
            return
        for text in _failures(rows):
            _log.error("%s", text)
        for row in rows:
            if row.state != "READY":
                self._watch.doors.bring_back(row.name)
        if rows:
            kept = "the engine was kept" if engines == self._engines() else "with a new engine"
            _log.warning("tritonserver is back after %.1f s, %s", time.monotonic() - began, kept)

    def _wait_after_death(self, how: str, now: float) -> None:
        deaths = self._deaths.add(now)
        limit = self._options.max_deaths()
        if deaths >= limit:
            raise TridecodeError(
                f"tritonserver {how}; that was death {deaths} within {DEATHS_WITHIN_S:g} s: giving up"
            )
        pause = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(deaths - 1, 30))
        again = f"starting it again in {pause:.1f} s"
        counted = f"death {deaths} within {DEATHS_WITHIN_S:g} s"
        counted += "" if math.isinf(limit) else f"; at {limit} serve gives up"
        _log.error("tritonserver %s: %s (%s)", how, again, counted)
        deadline = time.monotonic() + pause
        while time.monotonic() < deadline and self._signals.count == 0:
            time.sleep(min(_TICK_S, pause))

    def _engines(self) -> set[tuple[int, int]]:
        """Return supervisor and epoch of each engine."""
        return {(one.supervisor_pid, one.state.epoch) for one in state_file.read_all(self._server.folder)}


def _failures(rows: Sequence[ModelState]) -> list[str]:
    """Return a sentence for each reason why models are not ready; models without a reason of their own come
    first.
    """
    models: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: bool(row.reason)):
        if row.state != "READY":
            models.setdefault(_reason(row), []).append(row.name)
    return [
        f"model{'s' if len(names) > 1 else ''} {', '.join(names)} could not be loaded: {reason}"
        for reason, names in models.items()
    ]


def _reason(row: ModelState) -> str:
    """Return why a model is not ready, without the Python frames and the class that Triton adds."""
    reason = " ".join(row.reason.partition("\n\nAt:")[0].split())
    return reason.removeprefix("Internal: TritonModelException: ") or "a model that it needs could not be"
