"""A door's connection to the engine: one thread that owns the sockets, and a table of what is open.

Any thread may submit and cancel; everything else happens on the link's own thread, which sleeps in poll()
until a message, a command or the next heartbeat is due. The supervisor says which engine is the present one
(its epoch and endpoint); what was submitted to an engine that is gone ends with an error at once.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket as posix
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Callable

import msgspec
import zmq

from tridecode.backend import messages as m
from tridecode.backend.errors import ConfigError, EngineDownError, TridecodeError
from tridecode.backend.supervisor import launch

#: supervisor (and engine) silent for so long: look for them again
SILENT_S = m.SILENCE_S + 1.5
#: a longer gap between two turns of the loop was our own: a frozen process must not blame the others
_OWN_GAP_S = 1.5
_RETRY_S = 2.0
_POLL_MS = 250

Sink = Callable[[m.Event], None]

_log = logging.getLogger("tridecode.door")


@dataclass
class _Open:
    """A request that has not ended: held until the engine is there (sent False), or with the engine."""

    submit: m.Submit
    sink: Sink
    unfinished: int
    hold_until: float
    sent: bool = False


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
        ensure: Callable[[str, int], str] = launch.ensure,
        silent_s: float = SILENT_S,
    ):
        """hold_s: how long a request waits for an engine that is starting before it is refused."""
        self._engine_dir, self._hold_s, self._ensure, self._silent_s = engine_dir, hold_s, ensure, silent_s
        self._server_pid = os.getppid()
        self._hello = m.Hello(f"{door}:{os.getpid()}", os.getpid(), self._server_pid, shared_memory_region())
        self._ids = itertools.count(1)
        self._commands: deque[tuple] = deque()
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
        self._open: dict[int, _Open] = {}
        self._looking = False
        self._look_at = 0.0
        self._heard_supervisor = self._heard_engine = self._last_turn = self._last_ping = 0.0
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
        """Hand a request to the engine, under an id from reserve(). EngineDownError if the link is closed."""
        if self._closed:
            raise EngineDownError("the model is being unloaded")
        submit = m.Submit(request, sequences, priority, timeout_s, label)
        entry = _Open(submit, sink, len(sequences), time.monotonic() + self._hold_s)
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
        self._last_turn = time.monotonic()
        self._look()
        try:
            while not self._closed:
                self._poller.poll(_POLL_MS)
                self._turn()
        finally:
            self._leave()

    def _turn(self) -> None:
        try:
            self._run_commands()
            self._receive(self._supervisor, m.FromSupervisor)
            self._receive(self._engine, m.FromEngine)
            self._tick(time.monotonic())
        except Exception:
            _log.exception("engine link: a turn failed")
            self._fail_open("the door failed while it held the request; its log says why", "INTERNAL")

    def _run_commands(self) -> None:
        try:
            while self._wake_read.recv(4096):
                pass
        except BlockingIOError:
            pass
        while self._commands:
            call, arguments = self._commands.popleft()
            call(*arguments)

    def _receive(self, socket: zmq.Socket | None, expected: object) -> None:
        while socket is not None and not socket.closed:
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = m.decode(frame, expected)
            except msgspec.DecodeError as error:
                _log.error("engine link: a frame of %d bytes is none of ours: %s", len(frame), error)
                continue
            self._on_message(message)

    def _on_message(self, message: msgspec.Struct) -> None:
        now = time.monotonic()
        if isinstance(message, m.EngineState):
            self._heard_supervisor = now
            self._on_state(message)
            return
        self._heard_engine = now
        if isinstance(message, m.Welcome):
            self._on_welcome(message)
        elif isinstance(message, m.EngineBeat):
            self._beat = message
        elif isinstance(message, m.Events) and self._welcome and message.epoch == self._welcome.epoch:
            for event in message.events:
                self._on_event(event)

    def _tick(self, now: float) -> None:
        if os.getppid() != self._server_pid:
            _log.error("engine link: the server %d is gone; leaving", self._server_pid)
            os._exit(1)
        if now - self._last_turn > _OWN_GAP_S:
            self._heard_supervisor = self._heard_engine = now
        self._last_turn = now
        if now - self._last_ping >= m.PING_S:
            self._last_ping = now
            self._send(self._supervisor, m.Ping())
            self._send(self._engine, m.Ping())
        self._check_silence(now)
        if self._welcome is None:
            for request in [r for r, entry in self._open.items() if now > entry.hold_until]:
                self._refuse(request)

    # ------------------------------------------------------------ supervisor

    def _look(self) -> None:
        """Find or start the supervisor in a thread of its own, as that may take seconds."""
        self._looking = True

        def look() -> None:
            found: object
            try:
                found = self._ensure(self._engine_dir, self._server_pid)
            except Exception as error:
                found = error
            self._command(self._found, found)

        threading.Thread(target=look, name="engine-look", daemon=True).start()

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

    def _check_silence(self, now: float) -> None:
        if self._looking:
            return
        if self._supervisor is None:
            if now >= self._look_at and self._state.phase != "failed":
                self._look()
        elif now - self._heard_supervisor > self._silent_s:
            if now - self._heard_engine > self._silent_s:
                detail = f"engine and supervisor have been silent for {self._silent_s:.1f} s"
                self._on_state(m.EngineState(self._state.epoch, "down", detail, ""))
            _log.warning("engine link: the supervisor is silent; looking for it again")
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
            self._lose_engine(state)
        with self._changed:
            self._state = state
            self._changed.notify_all()
        if state.phase == "ready" and self._engine is None:
            self._heard_engine = time.monotonic()
            self._engine = self._connect(self._engine, state.endpoint)
        elif state.phase not in ("ready", "starting"):
            self._fail_open(_down_text(state), EngineDownError.code)

    def _lose_engine(self, state: m.EngineState) -> None:
        with self._changed:
            self._welcome = None
        self._beat = None
        self._disconnect(self._engine)
        self._engine = None
        self._fail_open(_down_text(state), EngineDownError.code, sent_only=True)

    # ------------------------------------------------------------ engine

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
        for entry in list(self._open.values()):
            if not entry.sent:
                self._send_submit(entry)

    def _on_event(self, event: m.Event) -> None:
        entry = self._open.get(event.request)
        if entry is None:
            return
        if event.finish:
            entry.unfinished -= 1
        failed = event.finish in ("error", "cancelled", "deadline")
        if failed or entry.unfinished == 0:
            del self._open[event.request]
            if (
                entry.unfinished > 0
            ):  # one sequence failed: the client gets one error, so the others are in vain
                self._send(self._engine, m.Cancel(event.request))
        self._deliver(entry, event)

    def _deliver(self, entry: _Open, event: m.Event) -> None:
        try:
            entry.sink(event)
        except Exception:
            _log.exception("engine link: the sink of request %d failed", event.request)
            self._do_cancel(event.request)

    def _do_submit(self, entry: _Open) -> None:
        request = entry.submit.request
        self._open[request] = entry
        if self._welcome is not None:
            self._send_submit(entry)
        elif self._state.phase not in ("ready", "starting") or self._hold_s <= 0:
            self._refuse(request)

    def _send_submit(self, entry: _Open) -> None:
        entry.sent = True
        if not self._send(self._engine, entry.submit):
            self._fail(entry.submit.request, "the engine takes no messages", EngineDownError.code)

    def _do_cancel(self, request: int) -> None:
        entry = self._open.pop(request, None)
        if entry is not None and entry.sent:
            self._send(self._engine, m.Cancel(request))

    def _refuse(self, request: int) -> None:
        state = self.state()
        self._fail(request, f"the engine is not ready ({state.phase}): {state.detail}", EngineDownError.code)

    def _fail(self, request: int, text: str, code: str) -> None:
        entry = self._open.pop(request)
        self._deliver(entry, m.Event(request, 0, finish="error", error=text, code=code))

    def _fail_open(self, text: str, code: str, sent_only: bool = False) -> None:
        for request in [r for r, entry in self._open.items() if entry.sent or not sent_only]:
            self._fail(request, text, code)

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
        if socket is None:
            return False
        try:
            socket.send(m.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _leave(self) -> None:
        self._run_commands()
        self._fail_open("the model is being unloaded", EngineDownError.code)
        for socket in (self._engine, self._supervisor):
            self._send(socket, m.Goodbye())
            self._disconnect(socket, linger_ms=200)
        self._engine = self._supervisor = None
        self._wake_read.close()
        self._wake_write.close()


def _down_text(state: m.EngineState) -> str:
    if state.phase == "ready":
        return "the engine was rebuilt while it held the request"
    return f"the engine is {state.phase}: {state.detail}"
