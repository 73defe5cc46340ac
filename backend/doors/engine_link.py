"""A door's connection to the engine: one thread that owns the sockets.

Any thread may submit and cancel; everything else happens on the link's own thread, which sleeps in poll()
until a message, a command or the next heartbeat is due. The supervisor says which engine is the present one
(its epoch and endpoint); what was submitted to an engine that is gone ends with an error at once.

Silence: a supervisor that is silent is looked for again, and replaced where it does not answer; an engine
that is silent while its supervisor speaks loses this connection, and a new one is made. Whoever answers
Unknown has forgotten this door, which says Hello again. Pauses of this process itself count against nobody.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket as posix
import threading
import time
from collections import deque
from typing import Callable

import msgspec
import zmq

from tridecode.backend import messages as m
from tridecode.backend.doors.open_requests import OpenRequest, OpenRequests, Sink
from tridecode.backend.errors import ConfigError, EngineDownError, RequestError, TridecodeError
from tridecode.backend.pauses import PauseWatch
from tridecode.backend.supervisor import launch

#: a supervisor that is silent for longer is looked for again
SUPERVISOR_SILENT_S = m.SILENCE_S
#: an engine likewise; its supervisor gets the time to find that out by itself and to say why
ENGINE_SILENT_S = m.SILENCE_S + 1.25
#: a request whose deadline passed this long ago was lost by the engine
_OVERDUE_S = 5.0
_RETRY_S = 2.0
_POLL_MS = 250

_log = logging.getLogger("tridecode.door")


def shared_memory_region() -> str:
    """Name of the shared memory region on this stub's command line; "" where this is no stub of Triton's."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            words = file.read().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    return next((word for word in words if word.startswith("triton_python_backend_shm_region")), "")


class EngineLink:
    """Submits requests to the engine of `engine_dir` and hands its events to sinks.

    A sink is called on the link's thread with each Event of its request and must not block. Every request
    that was submitted ends with a last event of each of its sequences, or with one event of finish "error",
    "cancelled" or "deadline" that stands for all; after cancel() none follows. If the server that owns this
    process is gone, the process ends itself.
    """

    def __init__(
        self,
        engine_dir: str,
        door: str,
        hold_s: float = 2.0,
        ensure: Callable[..., str] = launch.ensure,
        silent_s: float = SUPERVISOR_SILENT_S,
        engine_silent_s: float = ENGINE_SILENT_S,
    ):
        """hold_s: how long a request waits for an engine that is starting before it is refused. ensure: as
        launch.ensure. silent_s, engine_silent_s: seconds of silence of supervisor and engine."""
        self._engine_dir, self._hold_s, self._ensure = engine_dir, hold_s, ensure
        self._silent_s, self._engine_silent_s = silent_s, engine_silent_s
        self._server_pid = os.getppid()
        self._hello = m.Hello(f"{door}:{os.getpid()}", os.getpid(), self._server_pid, shared_memory_region())
        self._ids = itertools.count(1)
        self._commands: deque[tuple[Callable[..., None], tuple]] = deque()
        self._wake_read, self._wake_write = posix.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._changed = threading.Condition()
        self._state = m.EngineState(0, "starting", "looking for the engine's supervisor", "")
        self._welcome: m.Welcome | None = None  # of the engine that is ready now
        self._limits: m.Limits | None = None  # of the last engine that was ready
        self._beat: m.EngineBeat | None = None
        # what follows belongs to the link's thread
        self._context: zmq.Context = zmq.Context.instance()
        self._poller = zmq.Poller()
        self._supervisor: zmq.Socket | None = None
        self._engine: zmq.Socket | None = None
        self._open = OpenRequests(self._do_cancel)
        self._looking = False
        self._look_at = 0.0
        self._heard_supervisor = self._heard_engine = self._last_ping = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine-link", daemon=True)

    # ------------------------------------------------------------ any thread

    def start(self) -> EngineLink:
        self._thread.start()
        return self

    def reserve(self) -> int:
        """An id for a request to come, unique within this door."""
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
    ) -> None:
        """Hand a request to the engine, under an id from reserve().

        Raises EngineDownError if the link is closed, RequestError if the request cannot be encoded or would
        not be understood by the engine.
        """
        if self._closed:
            raise EngineDownError("the model is being unloaded")
        frame = _encode(m.Submit(request, sequences, priority, timeout_s, label))
        hold_until = time.monotonic() + self._hold_s
        entry = OpenRequest(request, frame, sink, len(sequences), hold_until, timeout_s)
        self._command(self._do_submit, entry)

    def cancel(self, request: int) -> None:
        """Forget the request, here and in the engine; one that has ended is passed over."""
        self._command(self._do_cancel, request)

    def limits(self) -> m.Limits | None:
        """Limits of the engine, or of the last one while it is rebuilt; None before the first was ready."""
        return self._limits

    def state(self) -> m.EngineState:
        """The supervisor's last word; phase "ready" only once the engine itself has answered."""
        with self._changed:
            if self._state.phase == "ready" and self._welcome is None:
                return msgspec.structs.replace(
                    self._state, phase="starting", detail="connecting to the engine"
                )
            return self._state

    def beat(self) -> m.EngineBeat | None:
        """The engine's last heartbeat; None while there is no engine."""
        return self._beat

    def silent_s(self) -> float:
        """Seconds since the engine's last message; pauses of this process itself do not count."""
        return max(0.0, time.monotonic() - self._heard_engine)

    def wait_ready(self, timeout_s: float) -> m.Limits:
        """Block until the engine is ready. EngineDownError with the supervisor's text if it is not."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._welcome is None:
                if self._state.phase in ("failed", "stopping"):
                    raise EngineDownError(self._state.detail)
                left = deadline - time.monotonic()
                if left <= 0:
                    last = f"{self._state.phase}, {self._state.detail}"
                    raise EngineDownError(f"the engine was not ready after {timeout_s:.0f} s: {last}")
                self._changed.wait(left)
            return self._welcome.limits

    def close(self) -> None:
        """Say Goodbye, fail what is open, end the thread."""
        self._closed = True
        self._command(lambda: None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5)

    def _command(self, call: Callable[..., None], *arguments) -> None:
        self._commands.append((call, arguments))
        try:
            self._wake_write.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # full: it is awake already; closed: nobody is left to wake

    # ------------------------------------------------------------ the link's thread

    def _run(self) -> None:
        self._poller.register(self._wake_read, zmq.POLLIN)
        watch = PauseWatch(time.monotonic(), _POLL_MS / 1000)
        self._look()
        try:
            while not self._closed:
                self._poller.poll(_POLL_MS)
                self._turn(watch)
        finally:
            self._leave()

    def _turn(self, watch: PauseWatch) -> None:
        now = time.monotonic()
        if pause := watch.turn(now):
            self._heard_supervisor = self._heard_engine = now
            self._open.forgive(pause)
        self._guarded(self._run_commands)
        self._guarded(self._receive, self._supervisor, m.FromSupervisor)
        self._guarded(self._receive, self._engine, m.FromEngine)
        self._guarded(self._tick, now)

    def _guarded(self, call: Callable[..., None], *arguments) -> None:
        """A fault of ours in one part of a turn stops neither the other parts nor the thread."""
        try:
            call(*arguments)
        except Exception:
            _log.exception("engine link: %s failed", call.__name__)

    def _run_commands(self) -> None:
        try:
            while self._wake_read.recv(4096):
                pass
        except BlockingIOError:
            pass
        while self._commands:
            call, arguments = self._commands.popleft()
            self._guarded(call, *arguments)

    def _receive(self, socket: zmq.Socket | None, expected: object) -> None:
        while socket is not None and not socket.closed:
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = m.decode(frame, expected)
            except msgspec.DecodeError as error:
                _log.error(
                    "engine link: a frame of %d bytes does not follow the protocol: %s", len(frame), error
                )
                continue
            self._guarded(self._on_message, socket, message)

    def _on_message(self, socket: zmq.Socket, message: msgspec.Struct) -> None:
        now = time.monotonic()
        if socket is self._supervisor:
            self._heard_supervisor = now
            if isinstance(message, m.EngineState):
                self._on_state(message)
            elif isinstance(message, m.Unknown):
                self._send(socket, self._hello)
            return
        self._heard_engine = now
        if isinstance(message, m.Events):
            if self._welcome and message.epoch == self._welcome.epoch:
                for event in message.events:
                    self._on_event(event)
        elif isinstance(message, m.EngineBeat):
            self._beat = message
        elif isinstance(message, m.Welcome):
            self._on_welcome(message)
        elif isinstance(message, m.Unknown):
            self._on_unknown()

    def _tick(self, now: float) -> None:
        if os.getppid() != self._server_pid:
            _log.error("engine link: the server %d is gone; leaving", self._server_pid)
            os._exit(1)
        if now - self._last_ping >= m.PING_S:
            self._last_ping = now
            self._send(self._supervisor, m.Ping())
            self._send(self._engine, m.Ping())
            self._end_expired(now)
        self._check_supervisor(now)
        self._check_engine(now)
        if self._welcome is None:
            for entry in self._open.late(now):
                self._refuse(entry.request)

    def _end_expired(self, now: float) -> None:
        for entry in self._open.expired(now):
            text = f"the engine has not ended the request {_OVERDUE_S:g} s after its deadline"
            self._open.fail(entry.request, text, TridecodeError.code)
            self._send(self._engine, m.Cancel(entry.request))

    # ------------------------------------------------------------ supervisor

    def _look(self) -> None:
        """Find or start the supervisor in a thread of its own, as that may take seconds."""
        self._looking = True

        def look() -> None:
            found: object
            try:
                found = self._ensure(self._engine_dir, self._server_pid, self._on_replacing)
            except Exception as error:
                found = error
            self._command(self._found, found)

        threading.Thread(target=look, name="engine-look", daemon=True).start()

    def _on_replacing(self, reason: str) -> None:
        """On the looking thread: the supervisor is replaced, so its engine ends too."""
        down = m.EngineState(self._state.epoch, "down", reason, "")
        self._command(lambda: self._on_state(down) if self._state.phase == "ready" else None)

    def _found(self, found: object) -> None:
        self._looking = False
        self._heard_supervisor = time.monotonic()
        if isinstance(found, str):
            self._supervisor = self._connect(self._supervisor, found)
            return
        text = str(found) if isinstance(found, TridecodeError) else f"{type(found).__name__}: {found}"
        phase = "failed" if isinstance(found, ConfigError) else "down"
        self._look_at = time.monotonic() + _RETRY_S
        self._on_state(m.EngineState(self._state.epoch, phase, text, ""))

    def _check_supervisor(self, now: float) -> None:
        if self._looking:
            return
        if self._supervisor is None:
            if now >= self._look_at:
                self._look()
        elif now - self._heard_supervisor > self._silent_s:
            _log.warning(
                "engine link: the supervisor has been silent for %.1f s; looking for it", self._silent_s
            )
            self._disconnect(self._supervisor)
            self._supervisor = None
            self._look()

    def _on_state(self, state: m.EngineState) -> None:
        before = self._state
        same_engine = state.phase == "ready" and (state.epoch, state.endpoint) == (
            before.epoch,
            before.endpoint,
        )
        if not same_engine and before.phase == "ready":
            self._lose_engine(_down_text(state))
        with self._changed:
            self._state = state
            self._changed.notify_all()
        if state.phase == "ready" and self._engine is None:
            self._join_engine(state.endpoint)
        elif state.phase not in ("ready", "starting"):
            self._open.fail_all(_down_text(state), EngineDownError.code)

    # ------------------------------------------------------------ engine

    def _join_engine(self, endpoint: str) -> None:
        self._heard_engine = time.monotonic()
        self._engine = self._connect(self._engine, endpoint)

    def _lose_engine(self, text: str) -> None:
        """End what the engine holds, and the connection to it."""
        with self._changed:
            self._welcome = None
        self._beat = None
        self._disconnect(self._engine)
        self._engine = None
        self._open.fail_all(text, EngineDownError.code, sent_only=True)

    def _check_engine(self, now: float) -> None:
        """An engine that is silent while its supervisor speaks: the connection is broken, make a new one."""
        if self._engine is None or now - self._heard_engine <= self._engine_silent_s:
            return
        text = f"the engine has been silent for {now - self._heard_engine:.1f} s"
        if now - self._heard_supervisor > self._silent_s:  # whoever looks for the supervisor will tell more
            text += ", and its supervisor too"
        _log.warning("engine link: %s; connecting to it again", text)
        self._lose_engine(text)
        if self._state.phase == "ready":
            self._join_engine(self._state.endpoint)

    def _on_unknown(self) -> None:
        """The engine has dropped this door and cancelled its requests."""
        if self._welcome is None:
            return  # a Hello is under way; this answers something older
        with self._changed:
            self._welcome = None
        text = "the engine had not heard of this model for a while and cancelled its requests"
        self._open.fail_all(f"{text}; send it again", EngineDownError.code, sent_only=True)
        self._send(self._engine, self._hello)

    def _on_welcome(self, welcome: m.Welcome) -> None:
        if welcome.epoch != self._state.epoch:
            return  # an engine of another epoch at the same address: the supervisor will tell
        if welcome.protocol != m.PROTOCOL:
            detail = (
                f"the engine speaks protocol {welcome.protocol}, this door {m.PROTOCOL}: versions are mixed"
            )
            self._on_state(m.EngineState(welcome.epoch, "failed", detail, ""))
            return
        with self._changed:
            self._welcome, self._limits = welcome, welcome.limits
            self._changed.notify_all()
        for entry in self._open.unsent():
            self._send_submit(entry)

    def _on_event(self, event: m.Event) -> None:
        if self._open.take(
            event
        ):  # one sequence failed: the client gets one error, so the others are in vain
            self._send(self._engine, m.Cancel(event.request))

    def _do_submit(self, entry: OpenRequest) -> None:
        self._open.add(entry)
        if self._welcome is not None:
            self._send_submit(entry)
        elif self._state.phase not in ("ready", "starting") or self._hold_s <= 0:
            self._refuse(entry.request)

    def _send_submit(self, entry: OpenRequest) -> None:
        entry.sent = True
        timeout_s = entry.timeout_s or (self._limits.request_timeout_s if self._limits else 0.0)
        entry.expires_at = time.monotonic() + timeout_s + _OVERDUE_S if timeout_s else 0.0
        if not self._send_frame(self._engine, entry.frame):
            self._open.fail(entry.request, "the engine takes no messages", EngineDownError.code)

    def _do_cancel(self, request: int) -> None:
        entry = self._open.remove(request)
        if entry is not None and entry.sent:
            self._send(self._engine, m.Cancel(request))

    def _refuse(self, request: int) -> None:
        state = self.state()
        text = f"the engine is not ready ({state.phase}): {state.detail}"
        self._open.fail(request, text, EngineDownError.code)

    # ------------------------------------------------------------ sockets

    def _connect(self, old: zmq.Socket | None, endpoint: str) -> zmq.Socket:
        self._disconnect(old)
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(endpoint)
        self._poller.register(socket, zmq.POLLIN)
        self._send(socket, self._hello)
        return socket

    def _disconnect(self, socket: zmq.Socket | None, linger_ms: int = 0) -> None:
        if socket is not None:
            self._poller.unregister(socket)
            socket.close(linger_ms)

    def _send(self, socket: zmq.Socket | None, message: msgspec.Struct) -> bool:
        return self._send_frame(socket, m.encode(message))

    def _send_frame(self, socket: zmq.Socket | None, frame: bytes) -> bool:
        if socket is None:
            return False
        try:
            socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _leave(self) -> None:
        self._guarded(self._run_commands)
        self._open.fail_all("the model is being unloaded", EngineDownError.code)
        for socket in (self._engine, self._supervisor):
            self._send(socket, m.Goodbye())
            self._disconnect(socket, linger_ms=200)
        self._engine = self._supervisor = None
        self._wake_read.close()
        self._wake_write.close()


def _encode(submit: m.Submit) -> bytes:
    """The frame of a request, known to be one that the engine can decode: it could answer no other."""
    try:
        frame = m.encode(submit)
        m.decode(frame, m.ToEngine)
    except (msgspec.MsgspecError, OverflowError, TypeError, ValueError) as error:
        raise RequestError(f"the request cannot be handed to the engine: {error}") from None
    return frame


def _down_text(state: m.EngineState) -> str:
    if state.phase == "ready":
        return "the engine was rebuilt while it held the request"
    return f"the engine is {state.phase}: {state.detail}"
