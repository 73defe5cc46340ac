"""Rank 0's socket to the doors, owned by an I/O thread so that the loop never waits for a client.

A door is known by its zmq identity, from its Hello until its Goodbye, its death, or DOOR_SILENCE_S without
a message. Then its requests are cancelled, and each later message is answered with Unknown, so that the door
sends Hello again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from tridecode.backend.base.pauses import PauseWatch
from tridecode.backend.engine.cache.prompt_keys import HashedSubmit, PromptHasher
from tridecode.backend.supervisor import processes
from tridecode.backend.wire import messages as m

log = logging.getLogger("tridecode.engine")

Incoming = m.Submit | HashedSubmit | m.Cancel | m.EndSession | m.Goodbye
#: a door that is silent for longer is frozen or dead; pauses of this process do not count
DOOR_SILENCE_S = 10.0
_LARGE = 1 << 20  # bytes of a message, such as logits, that ZeroMQ sends without a copy of its own
_LOOK_S = 1.0  # interval at which the doors' processes and the socket's file are checked


@dataclass
class _Door:
    name: str
    process: processes.ProcessId | None
    heard_at: float


class DoorSocket:
    """ROUTER at `endpoint`. Requests queue in an inbox that the loop drains; events are sent in the order of
    `send`.

    drain, wait, send: for the loop's thread. beat: makes the heartbeat that doors get each BEAT_S.
    broken(reason): called once, on the I/O thread, if that thread fails: no door can be served any more.
    """

    def __init__(
        self,
        endpoint: str,
        epoch: int,
        limits: m.Limits,
        beat: Callable[[], m.EngineBeat],
        broken: Callable[[str], None] = lambda reason: None,
        hasher: PromptHasher | None = None,
    ):
        """hasher: hashes prompts on the I/O thread; requests then arrive as HashedSubmit."""
        self._endpoint, self._epoch, self._limits, self._make_beat = endpoint, epoch, limits, beat
        self._broken, self._hasher = broken, hasher
        self._inbox: deque[tuple[bytes, Incoming]] = deque()
        self._arrived = threading.Event()
        self._outbox: deque[list[tuple[bytes, m.Event]]] = deque()
        self._doors: dict[bytes, _Door] = {}  # by zmq identity
        context: zmq.Context = zmq.Context.instance()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(endpoint)
        bell = f"inproc://doors-{id(self)}"
        self._bell_in = context.socket(zmq.PAIR)
        self._bell_in.bind(bell)
        self._bell_out = context.socket(zmq.PAIR)
        self._bell_out.connect(bell)
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="doors", daemon=True)
        self._thread.start()

    def drain(self) -> list[tuple[bytes, Incoming]]:
        """Return the messages that arrived since the last call, in order."""
        self._arrived.clear()
        arrived = []
        while self._inbox:
            arrived.append(self._inbox.popleft())
        return arrived

    def wait(self, timeout_s: float) -> None:
        """Wait until something arrives, at most timeout_s."""
        self._arrived.wait(timeout_s)

    def wake(self) -> None:
        """End a `wait` that is in progress. Any thread."""
        self._arrived.set()

    def send(self, events: list[tuple[bytes, m.Event]]) -> None:
        """Queue events for their doors; returns at once."""
        if events:
            self._outbox.append(events)
            self._bell_out.send(b"")

    def close(self) -> None:
        """Send queued events, then end the thread."""
        self._stopping = True
        self._bell_out.send(b"")
        self._thread.join(2.0)
        self._bell_out.close(0)

    # ------------------------------------------------------------ the I/O thread

    def _serve(self) -> None:
        try:
            self._run()
        except Exception as error:
            log.exception("the thread that serves the doors failed")
            self._broken(f"the thread that serves the doors failed: {type(error).__name__}: {error}")
        finally:
            self._socket.close()
            self._bell_in.close(0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell_in, zmq.POLLIN)
        next_beat = next_look = time.monotonic()
        watch = PauseWatch(next_beat, m.BEAT_S)
        while True:
            wait_ms = max(0, int((next_beat - time.monotonic()) * 1000))
            ready = dict(poller.poll(wait_ms))
            now = time.monotonic()
            if watch.turn(now):
                self._forgive(now)
            if self._bell_in in ready:
                while self._bell_in.poll(0):
                    self._bell_in.recv()
            self._send_queued()
            if self._stopping:
                break
            if self._socket in ready:
                self._receive_all(now)
            if now >= next_beat:
                next_beat = now + m.BEAT_S
                self._beat(now)
            if now >= next_look:
                next_look = now + _LOOK_S
                self._look_around()

    def _forgive(self, now: float) -> None:
        """Ignore the doors' silence during a pause of this process: their messages have not been read yet."""
        for door in self._doors.values():
            door.heard_at = now

    def _receive_all(self, now: float) -> None:
        while self._socket.poll(0):
            identity, *frames = self._socket.recv_multipart()
            try:
                message = m.decode(frames[-1], m.ToEngine)
            except (msgspec.DecodeError, IndexError) as error:
                log.error("a message that does not follow the protocol was dropped: %s", error)
                continue
            self._receive(identity, message, now)

    def _receive(self, identity: bytes, message: object, now: float) -> None:
        if isinstance(message, m.Hello):
            self._hello(identity, message, now)
            return
        door = self._doors.get(identity)
        if door is None:
            self._send(identity, m.Unknown())
            return
        door.heard_at = now
        if isinstance(message, m.Goodbye):
            del self._doors[identity]
        if isinstance(message, m.Submit) and self._hasher is not None:
            message = HashedSubmit(message, self._hasher.keys(message))
        if isinstance(message, (m.Submit, HashedSubmit, m.Cancel, m.EndSession, m.Goodbye)):
            self._inbox.append((identity, message))
            self._arrived.set()

    def _hello(self, identity: bytes, hello: m.Hello, now: float) -> None:
        """Register a door. Requests of its earlier connections are cancelled."""
        for other, door in list(self._doors.items()):
            if door.name == hello.door:
                self._drop(other)
        self._doors[identity] = _Door(hello.door, processes.identify(hello.pid), now)
        self._send(identity, m.Welcome(self._epoch, self._limits))

    def _drop(self, identity: bytes) -> None:
        """Cancel the door's requests and forget it."""
        del self._doors[identity]
        self._inbox.append((identity, m.Goodbye()))
        self._arrived.set()

    def _send(self, identity: bytes, message: msgspec.Struct) -> None:
        frame = m.encode(message)
        self._socket.send_multipart([identity, frame], copy=len(frame) < _LARGE)

    def _send_queued(self) -> None:
        while self._outbox:
            by_door: dict[bytes, list[m.Event]] = {}
            for door, event in self._outbox.popleft():
                by_door.setdefault(door, []).append(event)
            for door, events in by_door.items():
                self._send(door, m.Events(self._epoch, events))

    def _beat(self, now: float) -> None:
        frame = m.encode(self._make_beat())
        for identity, door in list(self._doors.items()):
            if now - door.heard_at > DOOR_SILENCE_S:
                log.warning(
                    "door %s has been silent for %.0f s; cancelling its requests", door.name, DOOR_SILENCE_S
                )
                self._drop(identity)
                self._send(identity, m.Unknown())  # the first message it reads when it runs again
            else:
                self._socket.send_multipart([identity, frame])

    def _look_around(self) -> None:
        """Drop doors whose process has ended; recreate the socket's file if it was deleted."""
        for identity, door in list(self._doors.items()):
            if door.process is not None and not processes.alive(door.process):
                log.warning("door %s has died; cancelling its requests", door.name)
                self._drop(identity)
        path = self._endpoint.removeprefix("ipc://")
        if path != self._endpoint and not os.path.exists(path):
            try:
                self._socket.bind(self._endpoint)  # the old connections stay open
                log.warning("the socket %s was deleted and has been recreated", path)
            except zmq.ZMQError:
                pass  # its folder is missing: the supervisor recreates it
