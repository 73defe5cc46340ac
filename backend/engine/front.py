"""Rank 0's socket to the doors. One I/O thread owns it, so that the loop never waits for a client."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Callable, Union

import msgspec
import zmq

from tridecode.backend import messages as m

log = logging.getLogger("tridecode.engine")

Incoming = Union[m.Submit, m.Cancel, m.Goodbye]
#: a door that has not been heard of for so long is frozen or gone; its requests are cancelled
DOOR_SILENCE_S = 10.0


class Front:
    """ROUTER at `endpoint`. Requests pile up in an inbox that the loop drains; events go out in the order of
    `send`.

    drain, wait, send: for the loop's thread. A door is known by its zmq identity.
    """

    def __init__(self, endpoint: str, epoch: int, limits: m.Limits, beat: Callable[[], m.EngineBeat]):
        self._epoch, self._limits, self._make_beat = epoch, limits, beat
        self._inbox: deque[tuple[bytes, Incoming]] = deque()
        self._arrived = threading.Event()
        self._outbox: deque[list[tuple[bytes, m.Event]]] = deque()
        self._doors: dict[bytes, float] = {}  # identity -> when it was last heard of
        context: zmq.Context = zmq.Context.instance()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(endpoint)
        bell = f"inproc://front-{id(self)}"
        self._bell_in = context.socket(zmq.PAIR)
        self._bell_in.bind(bell)
        self._bell_out = context.socket(zmq.PAIR)
        self._bell_out.connect(bell)
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="front", daemon=True)
        self._thread.start()

    def drain(self) -> list[tuple[bytes, Incoming]]:
        """What arrived since the last call, in order."""
        self._arrived.clear()
        arrived = []
        while self._inbox:
            arrived.append(self._inbox.popleft())
        return arrived

    def wait(self, timeout_s: float) -> None:
        """Until something arrives, at most timeout_s."""
        self._arrived.wait(timeout_s)

    def wake(self) -> None:
        """End a `wait` under way. For any thread."""
        self._arrived.set()

    def send(self, events: list[tuple[bytes, m.Event]]) -> None:
        """Queue events for their doors; returns at once."""
        if events:
            self._outbox.append(events)
            self._bell_out.send(b"")

    def close(self) -> None:
        """Send what is queued, then end the thread."""
        self._stopping = True
        self._bell_out.send(b"")
        self._thread.join(2.0)
        self._bell_out.close(0)

    # ------------------------------------------------------------ the I/O thread

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell_in, zmq.POLLIN)
        next_beat = time.monotonic()
        while True:
            wait_ms = max(0, int((next_beat - time.monotonic()) * 1000))
            ready = dict(poller.poll(wait_ms))
            if self._bell_in in ready:
                while self._bell_in.poll(0):
                    self._bell_in.recv()
            self._send_queued()
            if self._stopping:
                break
            if self._socket in ready:
                self._receive_all()
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + m.BEAT_S
                self._beat()
        self._socket.close()
        self._bell_in.close(0)

    def _receive_all(self) -> None:
        while self._socket.poll(0):
            door, frame = self._socket.recv_multipart()
            try:
                self._receive(door, m.decode(frame, m.ToEngine))
            except msgspec.DecodeError as error:
                log.error("a message that is none of the protocol was dropped: %s", error)

    def _receive(self, door: bytes, message: object) -> None:
        if isinstance(message, m.Hello):
            self._doors[door] = time.monotonic()
            welcome = m.Welcome(self._epoch, self._limits)
            self._socket.send_multipart([door, m.encode(welcome)])
            return
        if door not in self._doors:
            return  # of an engine before this one: its door will say Hello
        self._doors[door] = time.monotonic()
        if isinstance(message, (m.Submit, m.Cancel, m.Goodbye)):
            if isinstance(message, m.Goodbye):
                del self._doors[door]
            self._inbox.append((door, message))
            self._arrived.set()

    def _send_queued(self) -> None:
        while self._outbox:
            by_door: dict[bytes, list[m.Event]] = {}
            for door, event in self._outbox.popleft():
                by_door.setdefault(door, []).append(event)
            for door, events in by_door.items():
                self._socket.send_multipart([door, m.encode(m.Events(self._epoch, events))])

    def _beat(self) -> None:
        now, frame = time.monotonic(), m.encode(self._make_beat())
        for door, heard in list(self._doors.items()):
            if now - heard > DOOR_SILENCE_S:
                log.warning("a door has been silent for %.0f s; its requests are cancelled", now - heard)
                del self._doors[door]
                self._inbox.append((door, m.Goodbye()))
                self._arrived.set()
            else:
                self._socket.send_multipart([door, frame])
