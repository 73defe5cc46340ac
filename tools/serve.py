"""`tridecode serve`: runs tritonserver on a model repository, brings dead doors back, drains on SIGTERM.

    tridecode serve ── server_guard ── tritonserver ── doors ─ ─ supervisor ── ranks
                                 (a dashed line: started by it, with a life of its own)

Whoever of these is killed, nothing is left behind: see server_guard.py, and backend/supervisor/main.py for
what happens without `serve`.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tridecode.backend.errors import ConfigError, TridecodeError
from tridecode.backend.supervisor import processes, runtime_dir, state_file
from tridecode.tools.door_watch import DoorWatch
from tridecode.tools.guarded_server import GuardedServer
from tridecode.tools.progress import Progress
from tridecode.tools.triton_http import TritonHttp, TritonHttpError

TICK_S = 0.1
WATCH_S = 0.25  # the doors are looked at so often
IDLE_S = 1.0  # an engine without work for so long has drained
TOLD_S = 1.0  # doors have so long to send the error of requests that were cut
END_S = 3.0  # tritonserver has so long to end after SIGTERM: an open gRPC stream would hold it for ever

_log = logging.getLogger("tridecode.serve")


@dataclass(frozen=True)
class ServeOptions:
    """How `tridecode serve` runs. drain_s: requests under way may take so long after SIGTERM."""

    repository: Path
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    address: str = "0.0.0.0"
    door_python: str | None = None
    drain_s: float = 20.0
    triton_args: tuple[str, ...] = ()

    def server_arguments(self) -> list[str]:
        """Of tritonserver; triton_args come last, so that they win where Triton takes the last."""
        return [
            f"--model-repository={self.repository}",
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            f"--http-address={self.address}",
            f"--grpc-address={self.address}",
            "--disable-auto-complete-config",
            "--model-control-mode=explicit",
            "--load-model=*",
            f"--exit-timeout-secs={max(1, round(self.drain_s))}",
            *([] if shutil.which("nvidia-smi") else ["--allow-gpu-metrics=false"]),  # it logs errors without
            *self.triton_args,
        ]

    def http(self) -> TritonHttp:
        host = "127.0.0.1" if self.address in ("0.0.0.0", "::", "") else self.address
        return TritonHttp(f"{host}:{self.http_port}")


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
    address: str = "0.0.0.0",
    drain_s: float = 20.0,
) -> int:
    """Serve a model repository until SIGTERM, SIGINT or SIGHUP; the exit code of the process.

    0: a signal asked for the end, and the requests under way were finished or ended with an error. 1:
    tritonserver ended by itself, could not be started, or a second signal asked to kill it. door_python:
    python of the doors, see triton_install.prepare. drain_s: seconds that requests under way may take after
    the signal. Must run in the main thread. Raises ConfigError for a wrong setting.
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
    )
    if not options.repository.is_dir():
        raise ConfigError(f"{options.repository} is no directory; wanted a model repository")
    for removed in runtime_dir.sweep(runtime_dir.base_dir()):
        _log.warning("removed %s, which a killed server had left", removed)
    signals = _Signals()
    with GuardedServer(options.server_arguments(), door_python) as server:
        _log.info("tritonserver is process %d", server.pid)
        return _Serving(options, server, signals).run()


class _Serving:
    """One server's life: wait until it is ready, watch it, drain it."""

    def __init__(self, options: ServeOptions, server: GuardedServer, signals: _Signals) -> None:
        self._options = options
        self._server = server
        self._signals = signals
        self._http = options.http()
        self._watch = DoorWatch(server.pid, self._http)
        self._frozen = False
        self._was_ready = False

    def run(self) -> int:
        self._wait_ready()
        while self._goes_on():
            self._watch.tick(time.monotonic())
            self._look_at_server()
            time.sleep(WATCH_S)
        if self._signals.count == 0:
            _log.error("tritonserver %s; it was not asked to", self._server.ending())
            return 1
        return self._stop()

    def _goes_on(self) -> bool:
        return self._server.running() and self._signals.count == 0

    def _wait_ready(self) -> None:
        start = time.monotonic()
        with Progress() as progress:
            while self._goes_on():
                states = [content.state for content in state_file.read_all(self._server.folder)]
                late = [state for state in states if state.phase != "ready"]
                if not late and self._http.ready():
                    break
                self._watch.tick(time.monotonic())
                progress.show(f"engine {late[0].phase}: {late[0].detail}" if late else "loading models")
                time.sleep(TICK_S)
        if not self._goes_on():
            return
        self._was_ready = True
        host, seconds = self._options.address, time.monotonic() - start
        _log.info(
            "ready after %.1f s: HTTP %s:%d, gRPC %s:%d",
            seconds,
            host,
            self._options.http_port,
            host,
            self._options.grpc_port,
        )

    def _look_at_server(self) -> None:
        frozen = processes.state(self._server.pid) == "T"
        if frozen and not self._frozen:
            _log.error("tritonserver %d is stopped by a signal", self._server.pid)
        elif self._frozen and not frozen:
            _log.warning("tritonserver %d runs again", self._server.pid)
        self._frozen = frozen

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
        (self._server.folder / runtime_dir.STOPPING).touch()
        for engine in state_file.read_all(self._server.folder):
            supervisor = processes.identify(engine.supervisor_pid)
            if supervisor is not None:
                processes.kill(supervisor, signal.SIGTERM)
        time.sleep(TOLD_S)


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
    parser.add_argument("--address", default="0.0.0.0", help="of the network interface for HTTP and gRPC")
    parser.add_argument("--door-python", help="python of the doors (TRIDECODE_DOOR_PYTHON, else this one)")
    parser.add_argument(
        "--drain-s", type=float, default=20.0, help="seconds for requests under way after SIGTERM"
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
    except TridecodeError as error:
        _log.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
