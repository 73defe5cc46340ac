"""The first process of the front: opens the port, starts the workers, starts the dead ones again."""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field

import msgspec

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.front.settings import FrontSettings
from tridecode.backend.supervisor.processes import ProcessId, Waker, alive

_BACKLOG = 2048
_TICK_S = 0.1
_MAX_PAUSE_S = 5.0
_HEALTHY_S = 10.0  # a worker that has lived for so long is started again at once
_STOP_S = 25.0  # a worker that has not ended this long after SIGTERM is killed

_log = logging.getLogger("tridecode.front")


def open_port(host: str, port: int) -> socket.socket:
    """A listening socket, which workers inherit. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"the port {port} of {host or 'all addresses'} cannot be opened: {reason}"
        ) from None
    return listening


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    started_at: float
    waker: Waker = field(default_factory=Waker)


class Master:
    """Runs until SIGTERM or SIGINT, or until the owner is gone."""

    def __init__(self, settings: FrontSettings, listening: socket.socket, counts_fd: int):
        self._settings, self._listening, self._counts_fd = settings, listening, counts_fd
        self._workers: dict[int, _Worker] = {}
        self._start_at = dict.fromkeys(range(settings.workers), 0.0)
        self._pauses = dict.fromkeys(range(settings.workers), 0.0)
        self._stopping = ""
        pid, start = map(int, settings.owner.split(":"))
        self._owner = ProcessId(pid, start)

    def run(self) -> int:
        """The exit code."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        _raise_file_limit()
        while not self._stopping:
            now = time.monotonic()
            for number in range(self._settings.workers):
                self._look(number, now)
            if not alive(self._owner):
                self._stopping = f"the server (pid {self._owner.pid}) is gone"
            time.sleep(_TICK_S)
        _log.info("stopping: %s", self._stopping)
        self._listening.close()
        self._end()
        return 0

    def _on_signal(self, signum: int, _frame: object) -> None:
        if self._stopping:  # a second one: do not wait for open requests
            for worker in self._workers.values():
                worker.process.kill()
        self._stopping = self._stopping or f"got {signal.Signals(signum).name}"

    def _look(self, number: int, now: float) -> None:
        worker = self._workers.get(number)
        if worker is not None and (code := worker.process.poll()) is not None:
            del self._workers[number]
            if now - worker.started_at > _HEALTHY_S:
                self._pauses[number] = 0.0
            pause = self._pauses[number]
            _log.warning("worker %d ended (%s); it is started again in %.1f s", number, _how(code), pause)
            self._start_at[number] = now + pause
            self._pauses[number] = min(_MAX_PAUSE_S, max(0.2, 2 * pause))
        elif worker is not None and worker.waker.look(worker.process.pid, now):
            _log.warning("worker %d was stopped by a signal; it is continued", number)
        if number not in self._workers and now >= self._start_at[number]:
            self._workers[number] = _Worker(self._start(number), now)

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        fds = (self._listening.fileno(), self._counts_fd)
        process = subprocess.Popen(
            [sys.executable, "-m", "tridecode.backend.front.process.worker", str(number), *map(str, fds)],
            stdin=subprocess.PIPE,
            pass_fds=fds,
        )
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(self._settings))
            process.stdin.close()
        except BrokenPipeError:  # it has ended already, which the next look sees
            pass
        return process

    def _end(self) -> None:
        deadline = time.monotonic() + _STOP_S
        for worker in self._workers.values():
            worker.process.terminate()
        for worker in self._workers.values():
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _raise_file_limit() -> None:
    """A connection is an open file: as many as the system allows. Workers inherit the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
