"""The first process of the front: opens the port, starts the workers, starts the dead ones again."""

from __future__ import annotations

import contextlib
import logging
import resource
import secrets
import signal
import socket
import time

import msgspec

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.base.pauses import PauseWatch
from tridecode.backend.front.access import digest_of
from tridecode.backend.front.process.beats import HANG_S
from tridecode.backend.front.process.child import Child
from tridecode.backend.front.process.counts import shared_beats
from tridecode.backend.front.settings import FrontSettings
from tridecode.backend.supervisor.processes import ProcessId, alive

_BACKLOG = 2048
_TICK_S = 0.1
_STOP_S = 25.0  # a worker that has not ended this long after SIGTERM is killed
_STOP_BATCHES_S = 5.0  # the same, of the process of the batches

_WORKER = "tridecode.backend.front.process.worker"
_BATCHES = "tridecode.backend.front.batches.process"
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


class Master:
    """Runs until SIGTERM or SIGINT, or until the owner is gone."""

    def __init__(self, settings: FrontSettings, listening: socket.socket, counts_fd: int):
        self._listening = listening
        self._stopping = ""
        pid, start = map(int, settings.owner.split(":"))
        self._owner = ProcessId(pid, start)
        key = secrets.token_urlsafe(32) if settings.batch_dir and _wants_key(settings) else ""
        own_keys = (digest_of(key),) if key else ()
        workers = msgspec.structs.replace(settings, key_digests=settings.key_digests + own_keys)
        fds = (listening.fileno(), counts_fd)
        self._workers = [
            Child(f"worker {n}", _WORKER, [str(n), *map(str, fds)], fds, lambda: msgspec.json.encode(workers))
            for n in range(settings.workers)
        ]
        self._beats = shared_beats(counts_fd, settings.workers)
        self._pauses = PauseWatch(time.monotonic(), _TICK_S)
        self._batches: Child | None = None
        if settings.batch_dir:
            # a dictionary and not the struct: this process does without the client that the other imports
            given = msgspec.json.encode({"front": settings, "url": _own_url(listening), "key": key})
            self._batches = Child("the process of the batches", _BATCHES, [], (), lambda: given)

    def run(self) -> int:
        """The exit code."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        _raise_file_limit()
        while not self._stopping:
            now = time.monotonic()
            for child in self._children():
                child.look(now)
            self._end_hanging(now)
            if not alive(self._owner):
                self._stopping = f"the server (pid {self._owner.pid}) is gone"
            time.sleep(_TICK_S)
        _log.info("stopping: %s", self._stopping)
        self._listening.close()
        self._end()
        return 0

    def _end_hanging(self, now: float) -> None:
        """Kill workers whose event loop does not turn; they are then started again."""
        if self._pauses.turn(now):  # they may have been paused, too: count from now on
            for number in range(len(self._workers)):
                self._beats.excuse(number, now)
        for number, worker in enumerate(self._workers):
            if worker.started_now:
                self._beats.forget(number)
            elif self._beats.silence(number, now) > HANG_S and not worker.is_stopped:
                _log.error("%s has done nothing for %.0f s; it is killed", worker.name, HANG_S)
                worker.signal(signal.SIGKILL)
                self._beats.forget(number)

    def _children(self) -> list[Child]:
        return [*self._workers, *([self._batches] if self._batches is not None else ())]

    def _on_signal(self, signum: int, _frame: object) -> None:
        if self._stopping:  # a second one: do not wait for open requests
            for child in self._children():
                child.signal(signal.SIGKILL)
        self._stopping = self._stopping or f"got {signal.Signals(signum).name}"

    def _end(self) -> None:
        deadline = time.monotonic() + _STOP_S
        if self._batches is not None:  # first: its open lines are cancelled, and sent again after the restart
            self._batches.signal(signal.SIGTERM)
            self._batches.wait(_STOP_BATCHES_S)
        for worker in self._workers:
            worker.signal(signal.SIGTERM)
        for worker in self._workers:
            worker.wait(max(0.0, deadline - time.monotonic()))


def _wants_key(settings: FrontSettings) -> bool:
    return bool(settings.key_digests or settings.key_file)


def _own_url(listening: socket.socket) -> str:
    """Return the address under which this machine reaches the workers."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _raise_file_limit() -> None:
    """A connection is an open file: as many as the system allows. Workers inherit the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
