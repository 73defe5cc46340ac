"""Sockets of a front end (a "door"): to the supervisor, and to the engine that the supervisor names.

If the supervisor is silent, the door looks it up again and replaces it if it does not answer. If the engine
is silent while its supervisor answers, the door reconnects to it. A peer that answers Unknown has forgotten
this door, which sends Hello again. Pauses of this process do not count as silence of a peer.

Locking: see engine_link.py. Everything runs on the link's thread, except the search for the supervisor, which
runs on a separate thread and returns its result through `call`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import zmq

from tridecode.backend.base.errors import ConfigError, TridecodeError
from tridecode.backend.service.open_requests import OpenRequests
from tridecode.backend.service.owner import Owner
from tridecode.backend.wire import messages as m

#: seconds between two searches for the supervisor
_RETRY_S = 2.0
#: seconds between two looks at the owner, which may cost a read from /proc
_OWNER_S = 0.25

_log = logging.getLogger("tridecode.door")


class Peer:
    """A DEALER socket to the supervisor or to the engine; not connected at first."""

    def __init__(self, poller: zmq.Poller, hello: m.Hello, expected: object):
        """hello: the first message of each connection. expected: union type of this peer's messages."""
        self._poller, self.hello, self._expected = poller, hello, expected
        self.socket: zmq.Socket | None = None
        self.heard_at = 0.0  # monotonic seconds of its last message, or of the connect

    def connect(self, endpoint: str) -> None:
        self.close()
        socket: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(0)
        socket.connect(endpoint)
        self._poller.register(socket, zmq.POLLIN)
        self.socket = socket  # assigned last: stays None if the endpoint cannot be connected to
        self.heard_at = time.monotonic()
        self.send(self.hello)

    def close(self, linger_ms: int = 0) -> None:
        if self.socket is not None:
            self._poller.unregister(self.socket)
            self.socket.close(linger_ms)
            self.socket = None

    def send(self, message: msgspec.Struct | bytes) -> bool:
        """Send a message or its frame.

        Return False without a connection, or if the socket does not accept it.
        """
        if self.socket is None:
            return False
        try:
            self.socket.send(message if isinstance(message, bytes) else m.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> Iterator[Any]:
        """Yield the messages that have arrived, until the connection is closed or replaced."""
        socket = self.socket
        while socket is not None and not socket.closed and int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            try:
                frame = socket.recv(zmq.NOBLOCK)
                message = m.decode(frame, self._expected)
            except zmq.Again:
                return
            except msgspec.DecodeError as error:
                _log.error("engine link: %d bytes do not follow the protocol: %s", len(frame), error)
                continue
            self.heard_at = time.monotonic()
            yield message


class EngineConnection:
    """Tracks the engine's state as reported by the supervisor, and notifies the open requests."""

    def __init__(
        self,
        hello: m.Hello,
        owner: Owner,
        search: Callable[..., str],
        call: Callable[..., None],
        silent_s: float,
        engine_silent_s: float,
    ):
        """search(on_replacing): returns the supervisor's endpoint, see launch.ensure. call(function,
        *arguments): runs it on the link's thread. silent_s, engine_silent_s: seconds of silence after which a
        peer is lost.
        """
        self._search, self._call, self._owner = search, call, owner
        self._silent_s, self._engine_silent_s = silent_s, engine_silent_s
        # read by other threads; state and welcome are written under `changed`
        self.changed = threading.Condition()
        self.state = m.EngineState(0, "starting", "looking for the engine's supervisor", "")
        self.welcome: m.Welcome | None = None  # welcome of the engine that is ready now
        self.limits: m.Limits | None = None  # welcome of the last engine that was ready
        self.beat: m.EngineBeat | None = None
        # of the link's thread
        self.poller = zmq.Poller()
        self.supervisor = Peer(self.poller, hello, m.FromSupervisor)
        self.engine = Peer(self.poller, hello, m.FromEngine)
        self.requests = OpenRequests(self.engine.send, self.seen_state)
        self._looking = False
        self._look_at = self._last_ping = self._owner_seen = 0.0

    def seen_state(self) -> m.EngineState:
        """Return the state last reported by the supervisor; "ready" only once the engine has answered.

        Any thread.
        """
        with self.changed:
            if self.state.phase == "ready" and self.welcome is None:
                return msgspec.structs.replace(
                    self.state, phase="starting", detail="connecting to the engine"
                )
            return self.state

    def forgive(self, now: float, pause_s: float) -> None:
        """Ignore a pause of this process itself, of pause_s seconds."""
        self.supervisor.heard_at = self.engine.heard_at = now
        self.requests.forgive(pause_s)

    def tick(self, now: float) -> None:
        """Handle pings, silences and deadlines. now: time before this turn's messages were received."""
        if now - self._owner_seen >= _OWNER_S:
            self._owner_seen = now
            if self._owner.is_gone():
                _log.error("engine link: the server %d is gone; leaving", self._owner.pid)
                os._exit(1)
        if now - self._last_ping >= m.PING_S:
            self._last_ping = now
            self.supervisor.send(m.Ping())
            self.engine.send(m.Ping())
            self.requests.end_overdue(now)
        self._check_supervisor(now)
        self._check_engine(now)
        self.requests.refuse_late(now)

    def leave(self) -> None:
        """Send Goodbye and close both sockets."""
        for peer in (self.engine, self.supervisor):
            peer.send(m.Goodbye())
            peer.close(linger_ms=200)

    # ------------------------------------------------------------ supervisor

    def look(self) -> None:
        """Find or start the supervisor on a separate thread, since that may take seconds."""
        self._looking = True

        def look() -> None:
            found: object
            try:
                found = self._search(self._on_replacing)
            except Exception as error:
                found = error
            self._call(self._found, found)

        threading.Thread(target=look, name="engine-look", daemon=True).start()

    def _on_replacing(self, reason: str) -> None:
        """Note that the supervisor is replaced, so its engine ends too. Runs on the search thread."""
        down = m.EngineState(self.state.epoch, "down", reason, "")
        self._call(lambda: self._on_state(down) if self.state.phase == "ready" else None)

    def _found(self, found: object) -> None:
        self._looking = False
        if isinstance(found, str):
            self.supervisor.connect(found)
            return
        text = str(found) if isinstance(found, TridecodeError) else f"{type(found).__name__}: {found}"
        phase = "failed" if isinstance(found, ConfigError) else "down"
        self._look_at = time.monotonic() + _RETRY_S
        self._on_state(m.EngineState(self.state.epoch, phase, text, ""))

    def _check_supervisor(self, now: float) -> None:
        if self._looking:
            return
        if self.supervisor.socket is None:
            if now >= self._look_at:
                self.look()
        elif now - self.supervisor.heard_at > self._silent_s:
            _log.warning("engine link: the supervisor is silent for %.1f s; looking for it", self._silent_s)
            self.supervisor.close()
            self.look()

    def hear_supervisor(self) -> None:
        for message in self.supervisor.receive():
            if isinstance(message, m.EngineState):
                self._on_state(message)
            elif isinstance(message, m.Unknown):
                self.supervisor.send(self.supervisor.hello)

    def _on_state(self, state: m.EngineState) -> None:
        before = self.state
        same = (state.phase, state.epoch, state.endpoint) == (before.phase, before.epoch, before.endpoint)
        if before.phase == "ready" and not same:
            self._lose_engine(_down_text(state))
        with self.changed:
            self.state = state
            self.changed.notify_all()
        if state.phase == "ready" and self.engine.socket is None:
            self.engine.connect(state.endpoint)
        elif state.phase in ("down", "stopping"):  # a supervisor that stops alone is replaced by a door
            self.requests.fail_new(_down_text(state))
        elif state.phase not in ("ready", "starting"):
            self.requests.fail_all(_down_text(state))

    # ------------------------------------------------------------ engine

    def hear_engine(self) -> None:
        for message in self.engine.receive():
            if isinstance(message, m.Events):
                if self.welcome and message.epoch == self.welcome.epoch:
                    for event in message.events:
                        self.requests.take(event)
            elif isinstance(message, m.EngineBeat):
                self.beat = message
            elif isinstance(message, m.Welcome):
                self._on_welcome(message)
            elif (
                isinstance(message, m.Unknown) and self.welcome
            ):  # otherwise it answers a message that preceded our Hello
                text = "the engine had not heard from this model for a while and cancelled its requests"
                self._forget_welcome(f"{text}; send it again")
                self.engine.send(self.engine.hello)

    def _on_welcome(self, welcome: m.Welcome) -> None:
        if welcome.epoch != self.state.epoch:
            return  # an engine of another epoch at the same address: the supervisor will report it
        if welcome.protocol != m.PROTOCOL:
            found = f"the engine speaks protocol {welcome.protocol}, this door {m.PROTOCOL}"
            self._on_state(m.EngineState(welcome.epoch, "failed", f"{found}: versions are mixed", ""))
            return
        with self.changed:
            self.welcome, self.limits = welcome, welcome.limits
            self.changed.notify_all()
        self.requests.engine_ready(welcome.limits)

    def _forget_welcome(self, text: str) -> None:
        """Let the engine's requests wait for the next engine, or end them."""
        with self.changed:
            self.welcome = None
        self.requests.engine_lost(text)

    def _lose_engine(self, text: str) -> None:
        self.beat = None
        self.engine.close()
        self._forget_welcome(text)

    def _check_engine(self, now: float) -> None:
        """Reconnect to an engine that is silent while its supervisor answers."""
        if self.engine.socket is None or now - self.engine.heard_at <= self._engine_silent_s:
            return
        text = f"the engine has been silent for {now - self.engine.heard_at:.1f} s"
        # the search for the supervisor will find out more
        if now - self.supervisor.heard_at > self._silent_s:
            text += ", and its supervisor too"
        _log.warning("engine link: %s; connecting to it again", text)
        self._lose_engine(text)
        if self.state.phase == "ready":
            self.engine.connect(self.state.endpoint)


def _down_text(state: m.EngineState) -> str:
    if state.phase == "ready":
        return "the engine was rebuilt while it held the request"
    return f"the engine is {state.phase}: {state.detail}"
