"""`tridecode serve`: runs tritonserver on a model repository, brings dead doors and a dead server back, and
drains on SIGTERM.

    tridecode serve ── server_guard ── tritonserver ── doors ─ ─ supervisor ── ranks
                                 (a dashed line: started by it, with a life of its own)

The engines live as long as the guard, so a tritonserver that died is started again with a warm engine.
Whoever of these is killed, nothing is left behind: see server_guard.py, and backend/supervisor/main.py for
what happens without `serve`. docs/security.md: what listens, and who may call what.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tridecode.backend.errors import ConfigError, TridecodeError
from tridecode.backend.pauses import PauseWatch
from tridecode.backend.supervisor import processes, runtime_dir, state_file
from tridecode.tools import listening, triton_access
from tridecode.tools.door_watch import DoorWatch
from tridecode.tools.generate import TEXT_MODELS
from tridecode.tools.guarded_server import GuardedServer
from tridecode.tools.listening import check_free
from tridecode.tools.serve_checks import check_repository, check_triton_arguments
from tridecode.tools.server_start import Start, StartError
from tridecode.tools.triton_http import ModelState, TritonHttp, TritonHttpError

TICK_S = 0.1
WATCH_S = 0.25  # the doors are looked at so often
MEND_S = 2.0  # … and the runtime folder
FROZEN_S = 3.0  # a tritonserver that is stopped by a signal for longer is killed and started again
IDLE_S = 1.0  # an engine without work for so long has drained
TOLD_S = 1.0  # doors have so long to send the error of requests that were cut
END_S = 3.0  # tritonserver has so long to end after SIGTERM: an open gRPC stream would hold it for ever
ORPHANS = "3.5"  # seconds, so that within five every open request has an answer or an error
MAX_DEATHS = 10  # tritonserver is started again until it has died so often
DEATHS_WITHIN_S = 300.0  # … within so long
FIRST_PAUSE_S = 0.2  # before it is started again; doubles with each death that counts, up to
MAX_PAUSE_S = 15.0  # below the 60 s that an engine waits for a door


_log = logging.getLogger("tridecode.serve")


def _check_orphans(value: str) -> float | None:
    """Seconds, infinite for "idle", None for "leave". Raises ConfigError."""
    if value in ("idle", "leave"):
        return float("inf") if value == "idle" else None
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0.0:
        raise ConfigError(f"--orphans is {value!r}; wanted idle, leave, or a number of seconds")
    return seconds


@dataclass(frozen=True)
class ServeOptions:
    """How `tridecode serve` runs.

    address: where HTTP and gRPC listen, and the metrics unless metrics_address says otherwise. drain_s:
    requests under way may take so long after SIGTERM. start_timeout_s: a start may go so long without
    progress. orphans: when tritonserver is started again for requests that cannot end, because their door
    died: "idle" (when nothing else is open), seconds (then, at the latest), or "leave". key: of the control
    APIs.
    """

    repository: Path
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    address: str = triton_access.LOOPBACK
    door_python: str | None = None
    drain_s: float = 20.0
    triton_args: tuple[str, ...] = ()
    metrics_address: str | None = None
    start_timeout_s: float = 600.0
    orphans: str = ORPHANS
    key: str = field(default_factory=triton_access.control_key, repr=False)

    def server_arguments(self) -> list[str]:
        """Of tritonserver; of two values Triton takes the later one, the user's."""
        return [
            f"--model-repository={self.repository}",
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            f"--http-address={self.address}",
            f"--grpc-address={self.address}",
            f"--metrics-address={self.metrics_address or self.address}",
            *triton_access.restrictions(self.key, self.triton_args),
            "--disable-auto-complete-config",
            "--model-control-mode=explicit",
            "--load-model=*",
            "--model-load-thread-count=8",  # as many doors start at once; Triton's default is 4
            "--exit-on-error=false",  # a model that fails is told with its reason, by the repository index
            f"--exit-timeout-secs={max(1, round(self.drain_s))}",
            *([] if shutil.which("nvidia-smi") else _WITHOUT_GPU),
            *self.triton_args,
        ]

    def http(self) -> TritonHttp:
        host = triton_access.LOOPBACK if self.address in ("0.0.0.0", "::", "") else self.address
        return TritonHttp(f"{host}:{self.http_port}", self.key)

    def ports(self) -> dict[str, int]:
        """The ports that tritonserver will open, by name."""
        ports = {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}
        for name in ("grpc", "metrics"):
            values = triton_access.values_of(self.triton_args, f"allow-{name}")
            if values and values[-1].lower() in ("false", "0"):
                del ports[name]
        return ports

    def check(self) -> list[str]:
        """The models to serve. Raises ConfigError for what can be known before anything starts."""
        _check_orphans(self.orphans)
        for name, seconds in (("drain-s", self.drain_s), ("start-timeout-s", self.start_timeout_s)):
            if not seconds >= 0.0:
                raise ConfigError(f"--{name} is {seconds:g}; wanted 0 or more seconds")
        check_triton_arguments(self.triton_args)
        models = check_repository(self.repository)
        ports = self.ports()
        for name, port in ports.items():
            same = [other for other in ports if other != name and ports[other] == port]
            if same:
                raise ConfigError(
                    f"--{name}-port and --{same[0]}-port are both {port}; wanted distinct ports"
                )
            address = self.metrics_address if name == "metrics" else None
            check_free(name, address or self.address, port)
        return models


# what these would do without a GPU is write warnings and errors into the log
_WITHOUT_GPU = ("--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0", "--enable-peer-access=false")


class _Signals:
    """Counts SIGTERM, SIGINT and SIGHUP."""

    def __init__(self) -> None:
        self.count = 0
        self.name = ""
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, _frame: object) -> None:
        self.count += 1
        self.name = signal.Signals(signum).name


def serve(
    repository: str | os.PathLike,
    http_port: int = 8000,
    grpc_port: int = 8001,
    metrics_port: int = 8002,
    door_python: str | None = None,
    triton_args: Sequence[str] = (),
    address: str = triton_access.LOOPBACK,
    drain_s: float = 20.0,
    metrics_address: str | None = None,
    start_timeout_s: float = 600.0,
    orphans: str = ORPHANS,
) -> int:
    """Serve a model repository until SIGTERM, SIGINT or SIGHUP; the exit code of the process.

    0: a signal asked for the end, and the requests under way were finished or ended with an error. 1:
    tritonserver did not become ready, died too often, or a second signal asked to kill it; the last line of
    the log says why. door_python: python of the doors, see triton_install.prepare. The rest: ServeOptions.
    Must run in the main thread. Raises ConfigError for a wrong setting, before anything is started.
    """
    options = ServeOptions(
        Path(repository),
        http_port,
        grpc_port,
        metrics_port,
        address,
        door_python,
        drain_s,
        tuple(triton_args),
        metrics_address,
        start_timeout_s,
        orphans,
    )
    models = options.check()
    for removed in runtime_dir.sweep(runtime_dir.base_dir()):
        _log.warning("removed %s, which a killed server had left", removed)
    signals = _Signals()
    arguments = options.server_arguments()
    failure: TridecodeError | None = None
    with GuardedServer(arguments, door_python, options.key) as server:
        _log.info("tritonserver is process %d", server.pid)
        if not shutil.which("nvidia-smi"):
            _log.info("no GPU: Triton will say once that CudaDriverHelper is not initialized, as it must")
        try:
            return _Serving(options, server, signals, models).run()
        except TridecodeError as error:
            failure = error
    _log.error("%s", failure)  # after all that the end of the server writes
    return 1


class _Deaths:
    """Deaths of tritonserver; times are monotonic seconds that the caller gives."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def add(self, now: float) -> int:
        """How many there were within DEATHS_WITHIN_S, this one included."""
        self._times.append(now)
        while self._times[0] < now - DEATHS_WITHIN_S:
            self._times.popleft()
        return len(self._times)


class _Serving:
    """One server's life: wait until it is ready, watch it, start it again when it dies, drain it."""

    def __init__(
        self, options: ServeOptions, server: GuardedServer, signals: _Signals, models: Sequence[str] = ()
    ) -> None:
        self._options = options
        self._server = server
        self._signals = signals
        self._models = models
        self._http = options.http()
        self._watch = DoorWatch(server.pid, self._http)
        self._deaths = _Deaths()
        self._frozen_since: float | None = None  # when tritonserver was first seen stopped by a signal
        self._pauses = PauseWatch(time.monotonic(), WATCH_S)
        self._was_ready = False
        self._idle_since = 0.0
        self._mended_at = 0.0
        self._for_orphans = False  # the server was killed for requests that could not end

    def run(self) -> int:
        """The exit code. Raises TridecodeError, after which the server must be closed."""
        self._first_start()
        while self._signals.count == 0:
            if self._server.running():
                self._look()
                time.sleep(WATCH_S)
            else:
                self._start_again()
        return self._stop()

    def _goes_on(self) -> bool:
        """During a start."""
        self._watch.tick(time.monotonic())
        return self._server.running() and self._signals.count == 0

    def _look(self) -> None:
        now = time.monotonic()
        self._watch.tick(now)
        self._look_at_server(now)
        self._look_at_folder(now)
        self._look_at_orphans(now)

    # ------------------------------------------------------------ the start

    def _start(self) -> list[ModelState]:
        start = Start(self._server, self._http, self._models, self._options.ports())
        return start.wait(self._options.start_timeout_s, self._goes_on)

    def _first_start(self) -> None:
        began = time.monotonic()
        rows = self._start()
        if not rows:
            if self._signals.count == 0:
                raise StartError(
                    f"tritonserver {self._server.ending()} before it was ready; the lines above say why"
                )
            return
        failed = sorted((row for row in rows if row.state != "READY"), key=lambda row: bool(row.reason))
        for row in failed[:-1]:
            _log.error("model %s could not be loaded: %s", row.name, _one_line(row.reason))
        if failed:
            last = failed[-1]
            raise StartError(f"model {last.name} could not be loaded: {_one_line(last.reason)}")
        self._was_ready = True
        self._say_ready(time.monotonic() - began)

    def _say_ready(self, seconds: float) -> None:
        options = self._options
        ports = options.ports()
        where = [f"HTTP {options.address}:{options.http_port}"]
        if "grpc" in ports:
            where.append(f"gRPC {options.address}:{options.grpc_port}")
        if "metrics" in ports:
            where.append(f"metrics {options.metrics_address or options.address}:{options.metrics_port}")
        _log.info("ready after %.1f s: %s", seconds, ", ".join(where))
        _log.info("models: %s", ", ".join(self._models))
        if "grpc" in ports and any(name in self._models for name in TEXT_MODELS):
            host = (
                "localhost" if options.address in (triton_access.LOOPBACK, "0.0.0.0", "") else options.address
            )
            _log.info(
                'try: tridecode generate --url %s:%d --prompt "The capital of France is"',
                host,
                options.grpc_port,
            )

    def _start_again(self) -> None:
        """After the server's end. Raises TridecodeError where it has died too often."""
        how, began = self._server.ending(), time.monotonic()
        if not self._for_orphans:
            deaths = self._deaths.add(began)
            if deaths >= MAX_DEATHS:
                raise TridecodeError(
                    f"tritonserver {how}; that was death {deaths} within {DEATHS_WITHIN_S:g} s: giving up"
                )
            pause = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** (deaths - 1))
            _log.error(
                "tritonserver %s: starting it again in %.1f s (death %d within %g s; at %d serve gives up)",
                how,
                pause,
                deaths,
                DEATHS_WITHIN_S,
                MAX_DEATHS,
            )
            self._pause(pause)
        self._for_orphans = False
        if self._signals.count:
            return
        engines = self._engines()
        self._server.restart()
        self._watch = DoorWatch(self._server.pid, self._http)
        self._frozen_since = None
        try:
            rows = self._start()
        except StartError as error:
            _log.error("%s", error)
            self._server.kill_server()
            return
        for row in rows:
            if row.state != "READY":
                _log.error("model %s could not be loaded: %s", row.name, _one_line(row.reason))
                self._watch.bring_back(row.name)
        if rows:
            kept = "the engine was kept" if engines == self._engines() else "with a new engine"
            _log.warning("tritonserver is back after %.1f s, %s", time.monotonic() - began, kept)

    def _engines(self) -> set[tuple[int, int]]:
        """Supervisor and epoch of each engine."""
        return {(one.supervisor_pid, one.state.epoch) for one in state_file.read_all(self._server.folder)}

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._signals.count == 0:
            time.sleep(min(TICK_S, seconds))

    # ------------------------------------------------------------ while it serves

    def _look_at_server(self, now: float) -> None:
        """A server that stays stopped answers nobody: it is killed and started again.

        A pause of `serve` itself does not count, since it may have been a pause of all.
        """
        paused_s = self._pauses.turn(now)
        if processes.state(self._server.pid) != "T":
            if self._frozen_since is not None:
                _log.warning("tritonserver %d runs again", self._server.pid)
            self._frozen_since = None
        elif self._frozen_since is None:
            _log.error("tritonserver %d is stopped by a signal", self._server.pid)
            self._frozen_since = now
        elif paused_s:
            self._frozen_since += paused_s
        elif now - self._frozen_since > FROZEN_S:
            _log.error("tritonserver %d has been stopped for %g s: killing it", self._server.pid, FROZEN_S)
            self._server.kill_server()

    def _look_at_folder(self, now: float) -> None:
        if now - self._mended_at < MEND_S:
            return
        self._mended_at = now
        try:
            if self._server.mend():
                _log.warning("%s, or something in it, was removed: laid out again", self._server.folder)
        except (OSError, TridecodeError) as error:
            _log.error("%s cannot be laid out again: %s", self._server.folder, error)

    def _look_at_orphans(self, now: float) -> None:
        """Requests open at a door that died never end in Triton; only the end of the server ends them."""
        limit = _check_orphans(self._options.orphans)
        if any(engine.running or engine.waiting for engine in state_file.read_all(self._server.folder)):
            self._idle_since = now
        orphaned = self._watch.orphaned(now)
        if limit is None or not orphaned or self._watch.busy:
            return
        ports = self._options.ports()
        if not listening.connections([port for name, port in ports.items() if name != "metrics"]):
            return  # nobody waits any more
        waited = now - min(orphaned.values())
        idle = now - self._idle_since > IDLE_S
        if idle or waited > limit:
            _log.warning(
                "%s died with requests open, which Triton cannot end: starting tritonserver again, since %s",
                ", ".join(orphaned),
                "nothing else is open" if idle else f"they are {waited:.0f} s old (--orphans)",
            )
            self._for_orphans = True
            self._server.kill_server()

    # ------------------------------------------------------------ the end

    def _stop(self) -> int:
        """Readiness off, finish what is under way, end the rest with an error, end the server."""
        _log.info("%s: stopping", self._signals.name)
        # the signal may have come between two looks: clients can be quicker to see that the server is ready
        may_be_busy = self._was_ready or self._http.ready()
        drained = self._drain(self._options.drain_s) if may_be_busy else True
        if self._hurried():
            return 1
        if not drained:
            self._cut()
        self._server.terminate()
        self._wait(time.monotonic() + END_S, lambda: False)
        self._server.kill()
        self._server.wait_cleaned()
        _log.info("stopped")
        return 0

    def _drain(self, seconds: float) -> bool:
        """Whether all that was under way has ended in time."""
        _log.info("requests under way have %g s", seconds)
        deadline = time.monotonic() + seconds
        if self._unload_all():
            return self._wait_drained(deadline)
        self._server.terminate()  # it drains by itself, as far as it can
        return self._wait(deadline, lambda: False)

    def _hurried(self) -> bool:
        if self._signals.count < 2:
            return False
        _log.warning("%s again: killing", self._signals.name)
        self._server.kill()
        self._server.wait_cleaned()
        return True

    def _unload_all(self) -> bool:
        """Requests under way go on, new ones are refused, readiness is false, and all ports stay open."""
        try:
            for model in sorted({row.name for row in self._http.index() if row.state == "READY"}):
                self._http.unload(model)
        except TritonHttpError as error:
            _log.warning("models cannot be unloaded: %s", error)
            return False
        return True

    def _wait_drained(self, deadline: float) -> bool:
        """Until no model is busy, or no engine is: an open gRPC stream holds its model even without work."""
        idle_since = time.monotonic()

        def drained() -> bool:
            nonlocal idle_since
            engines = state_file.read_all(self._server.folder)
            if not engines or any(engine.running or engine.waiting for engine in engines):
                idle_since = time.monotonic()
            return time.monotonic() - idle_since > IDLE_S or not self._unloading()

        return self._wait(deadline, drained)

    def _unloading(self) -> bool:
        try:
            return any(row.state == "UNLOADING" for row in self._http.index())
        except TritonHttpError:
            return False

    def _wait(self, deadline: float, condition: Callable[[], bool]) -> bool:
        """True when the condition held or the server had ended; False at the deadline or a second signal."""
        while self._server.running():
            if condition():
                return True
            if time.monotonic() > deadline or self._signals.count > 1:
                return False
            time.sleep(TICK_S)
        return True

    def _cut(self) -> None:
        """End the engines, so that the doors end their requests with a text that says why."""
        _log.warning("requests are still under way after %g s: ending them", self._options.drain_s)
        try:
            (self._server.folder / runtime_dir.STOPPING).touch()
        except OSError as error:  # doors may start an engine again, which then ends with the guard
            _log.warning("%s cannot be written: %s", self._server.folder / runtime_dir.STOPPING, error)
        for engine in state_file.read_all(self._server.folder):
            supervisor = processes.identify(engine.supervisor_pid)
            if supervisor is not None:
                processes.kill(supervisor, signal.SIGTERM)
        time.sleep(TOLD_S)


def _one_line(reason: str) -> str:
    """The reason of a model's failure without the python frames that Triton puts after it."""
    return " ".join(reason.partition("\n\nAt:")[0].split()) or "a model that it needs could not be"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of `python -m tridecode.tools.serve`; `tridecode serve` offers the same options."""
    parser = argparse.ArgumentParser(
        prog="tridecode serve",
        description="Serve a model repository with tritonserver.",
        epilog="What follows -- is passed to tritonserver.",
    )
    parser.add_argument("repository")
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    parser.add_argument(
        "--address", default=triton_access.LOOPBACK, help="where to listen; 0.0.0.0: on every interface"
    )
    parser.add_argument("--metrics-address", help="where the metrics listen, if elsewhere than --address")
    parser.add_argument("--door-python", help="python of the doors (TRIDECODE_DOOR_PYTHON, else this one)")
    parser.add_argument(
        "--drain-s", type=float, default=20.0, help="seconds for requests under way after SIGTERM"
    )
    parser.add_argument(
        "--start-timeout-s", type=float, default=600.0, help="seconds that a start may go without progress"
    )
    parser.add_argument(
        "--orphans",
        default=ORPHANS,
        help="when tritonserver is started again for requests whose door died: idle (once nothing else is "
        "open), a number of seconds (then at the latest), or leave (never)",
    )
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # ends with it: running_server.py
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = given[: given.index("--")] if "--" in given else given
    options = vars(parser.parse_args(own))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    parent = options.pop("parent")
    if parent is not None:
        processes.die_with_parent()
        if os.getppid() != parent:
            return 1
    try:
        return serve(**options, triton_args=given[len(own) + 1 :])
    except ConfigError as error:  # before anything was started
        _log.error("%s", error)
        return 2
    except TridecodeError as error:
        _log.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
