"""A front end's link to the engine: submits requests, passes on events, tracks the engine's state.

EngineLink runs the link's thread, which sleeps in poll() until a message or a call arrives or a heartbeat is
due. EngineConnection owns the sockets and follows the engine's epochs. OpenRequests ends each request once.

Lock discipline: only the link's thread touches sockets and requests. Other threads put calls into a queue
that it drains, and read values that are replaced as a whole, never changed in place. The only lock is
EngineConnection.changed; it is held only while state and welcome change.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket as posix
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec
import zmq

from tridecode.backend.base.errors import EngineDownError, RequestError
from tridecode.backend.base.pauses import PauseWatch
from tridecode.backend.service.engine_connection import EngineConnection
from tridecode.backend.service.link import Sink
from tridecode.backend.service.open_requests import OpenRequest, ResumeCounts
from tridecode.backend.service.owner import Owner
from tridecode.backend.supervisor import launch
from tridecode.backend.wire import messages as m

#: the engine's limit is longer, so that its supervisor notices the silence first and reports the reason
_ENGINE_SILENT_S = m.SILENCE_S + 1.25
_POLL_MS = 250
_LENDING_S = 60.0  # interval at which the door of a node without requests checks its state

_log = logging.getLogger("tridecode.door")


class EngineLink:
    """Submits requests to an engine of `engine_dir` and passes its events to sinks.

    A sink is called on the link's thread with each Event of its request and must not block. Every request
    that was submitted ends with a last event of each of its sequences, or with one event of finish "error",
    "cancelled" or "deadline" for all of them; after cancel() no event follows. If the owner is gone, the
    process exits.
    """

    def __init__(
        self,
        engine_dir: str,
        door: str,
        owner: Owner,
        hold_s: float = 2.0,
        ensure: Callable[..., str] = launch.ensure,
        silent_s: float = m.SILENCE_S,
        engine_silent_s: float = _ENGINE_SILENT_S,
        number: int = 0,
    ):
        """door: name of the front end, for logs. owner: the process whose life the engine shares.
        hold_s: how long a request waits for an engine that is starting before it is refused.
        silent_s, engine_silent_s: seconds of silence after which a peer is lost. number: of the engine among
        those of the model's instance_group.
        """
        pid = os.getpid()
        hello = m.Hello(f"{door}:{pid}", pid, owner.pid, owner.shared_memory, guest=owner.guest)
        self._hold_s = hold_s
        self._ids = itertools.count(1)
        self._calls: deque[tuple[Callable[..., None], tuple]] = deque()
        self._wake_read, self._wake_write = posix.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._wake_fd = self._wake_read.fileno()
        search = partial(ensure, engine_dir, owner.pid, number)
        self._connection = EngineConnection(hello, owner, search, self._call, silent_s, engine_silent_s)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine-link", daemon=True)

    # ------------------------------------------------------------ any thread

    def start(self) -> EngineLink:
        self._thread.start()
        return self

    def reserve(self) -> int:
        """Return an id for a future request, unique within this door."""
        return next(self._ids)

    def submit(
        self,
        request: int,
        sequences: list[m.SequenceRequest],
        sink: Sink,
        *,
        priority: int = 0,
        timeout_s: float = 0.0,
        label: str = "",
        session: m.SessionRound | None = None,
        history: list[list[int]] | None = None,
        resume_within_s: float = 0.0,
    ) -> None:
        """Submit a request under an id from reserve().

        history: for a later round of a session, the stored tokens of each row; the lists must not change.
        resume_within_s: if the engine is lost, the next one continues the request if it is ready within this
        time, or before the request's own deadline; 0: the request ends with its engine.

        Raises EngineDownError if the link is closed, RequestError if the request cannot be encoded or if the
        engine could not decode it.
        """
        if self._closed:
            raise EngineDownError("the model is being unloaded")
        frame = _encode(m.Submit(request, sequences, priority, timeout_s, label, session))
        hold_until = time.monotonic() + self._hold_s
        count = sum(sequence.params.num_sequences for sequence in sequences)
        entry = OpenRequest(
            request, frame, sink, count, hold_until, timeout_s, resume_within_s, session, history or []
        )
        self._call(self._connection.requests.submit, entry)

    def cancel(self, request: int) -> None:
        """Forget the request, here and in the engine; no effect if it has ended."""
        self._call(self._connection.requests.cancel, request)

    def end_session(self, number: int) -> None:
        """Make the engine forget a session; without an engine there is none."""
        self._call(self._connection.requests.end_session, number)

    def resumed(self) -> ResumeCounts:
        """Return how many requests another engine has continued so far."""
        return self._connection.requests.resumed

    def limits(self) -> m.Limits | None:
        """Return the engine's limits, or the last one's while it is rebuilt; None before the first was
        ready.
        """
        return self._connection.limits

    def state(self) -> m.EngineState:
        """Return the state last reported by the supervisor; phase "ready" only once the engine itself has
        answered.
        """
        return self._connection.seen_state()

    def beat(self) -> m.EngineBeat | None:
        """Return the engine's last heartbeat; None while no engine runs."""
        return self._connection.beat

    def silent_s(self) -> float:
        """Return the seconds since the engine's last message, without pauses of this process itself."""
        return max(0.0, time.monotonic() - self._connection.engine.heard_at)

    def wait_ready(self, timeout_s: float) -> m.Limits:
        """Block until the engine is ready. Raises EngineDownError with the supervisor's text if it is not."""
        deadline = time.monotonic() + timeout_s
        connection = self._connection
        with connection.changed:
            while connection.welcome is None:
                state = connection.state
                if state.phase in ("failed", "stopping", "closing"):
                    raise EngineDownError(state.detail)
                left = deadline - time.monotonic()
                if state.phase == "lending":
                    left = _LENDING_S  # forever, so that Triton reports this node as not ready
                if left <= 0:
                    last = f"{state.phase}, {state.detail}"
                    raise EngineDownError(f"the engine was not ready after {timeout_s:.0f} s: {last}")
                connection.changed.wait(left)
            return connection.welcome.limits

    def close(self) -> None:
        """Send Goodbye, fail open requests, end the thread."""
        self._closed = True
        self._call(lambda: None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """Run a function on the link's thread, later."""
        self._calls.append((function, arguments))
        with suppress(OSError):  # full: the thread is already awake; closed: it has ended
            self._wake_write.send(b"\0")

    # ------------------------------------------------------------ the link's thread

    def _run(self) -> None:
        connection = self._connection
        connection.poller.register(self._wake_read, zmq.POLLIN)
        watch = PauseWatch(time.monotonic(), _POLL_MS / 1000)
        connection.look()
        try:
            while not self._closed:
                self._turn(watch, {ready for ready, _ in connection.poller.poll(_POLL_MS)})
        finally:
            self._guarded(self._run_calls)
            connection.requests.fail_all("the model is being unloaded")
            connection.leave()
            self._wake_read.close()
            self._wake_write.close()

    def _turn(self, watch: PauseWatch, ready: set[object]) -> None:
        """ready: sockets with messages, and the file descriptor of calls."""
        now, connection = time.monotonic(), self._connection
        if pause_s := watch.turn(now):
            connection.forgive(now, pause_s)
        if self._wake_fd in ready:
            self._guarded(self._run_calls)
        if connection.supervisor.socket in ready:
            self._guarded(connection.hear_supervisor)
        if connection.engine.socket in ready:
            self._guarded(connection.hear_engine)
        self._guarded(connection.tick, now)

    def _guarded(self, function: Callable[..., None], *arguments: object) -> None:
        """A bug in one part of a turn must not stop the other parts or the thread."""
        try:
            function(*arguments)
        except Exception:
            _log.exception("engine link: %s failed", function.__name__)

    def _run_calls(self) -> None:
        with suppress(BlockingIOError):
            self._wake_read.recv(4096)  # before the calls are read: a later one wakes this thread again
        while self._calls:
            function, arguments = self._calls.popleft()
            self._guarded(function, *arguments)


def _encode(submit: m.Submit) -> bytes:
    """Return the frame of a request, checked to be decodable: the engine could not answer any other."""
    try:
        frame = m.encode(submit)
        m.decode(frame, m.ToEngine)
    except (msgspec.MsgspecError, OverflowError, TypeError, ValueError) as error:
        raise RequestError(f"the request cannot be sent to the engine: {error}") from None
    return frame
