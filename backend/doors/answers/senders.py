"""Sends the responses of a door: a few sender threads, and one that polls for cancelled requests.

A send takes about 120 us, most of it waiting for the server (Triton 2.51, one response at a time), so neither
the engine nor the link's thread ever sends. A stream is pinned to one sender, which preserves its order. A
sender takes all pending events of a stream, and the door turns them into what its contract allows: one merged
response, or one per step while the sender keeps up (Stream.behind).
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable

from tridecode.backend.base.errors import RequestCancelled, TridecodeError
from tridecode.backend.doors.answers.stream import Stream
from tridecode.backend.doors.monitoring.request_times import GapCounts
from tridecode.backend.service.engine_link import EngineLink
from tridecode.backend.wire.taken_requests import TakenRequests

#: one cancellation query is a round trip of 55 us; the sweep sleeps nine times as long as its queries take
_SWEEP_S = 0.075
_SWEEP_SHARE = 0.1
_SWEEP_CHUNK = 8
#: initial estimate of the time per response, and moving-average weight of each measurement
_RESPONSE_S = 1e-4
_RESPONSE_WEIGHT = 1 / 16
#: bytes of the responses of one request, and of all open requests of a door. Triton 2.51 keeps each response
#: of a gRPC stream until the request has ended, even if the client reads it
_REQUEST_BYTES = 16 << 20
_DOOR_BYTES = 512 << 20

_log = logging.getLogger("tridecode.door")


class SenderThread(threading.Thread):
    """Serves the streams that are pinned to it, in the order in which they were woken."""

    def __init__(self, name: str):
        super().__init__(name=name, daemon=True)
        self.inbox: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self.gaps = GapCounts()  # gaps between the tokens of its streams
        self.response_s = _RESPONSE_S  # mean time to make and send a response, including waits

    def measure(self, seconds: float) -> None:
        """Add a measurement, clipped to twice the mean so that a single pause changes little."""
        self.response_s += _RESPONSE_WEIGHT * (min(seconds, 2 * self.response_s) - self.response_s)

    def run(self) -> None:
        while (stream := self.inbox.get()) is not None:
            try:
                stream.serve()
            except Exception:  # the other streams of this thread must continue
                _log.exception("request %s: its sender failed", stream.label)


class Senders:
    """The sender threads of one door and its poll for cancelled streams."""

    def __init__(
        self,
        link: EngineLink,
        num_senders: int = 4,
        on_end: Callable[[Stream, str], None] = lambda stream, outcome: None,
        behind_s: float = math.inf,
        request_bytes: int = _REQUEST_BYTES,
        door_bytes: int = _DOOR_BYTES,
        taken: TakenRequests | None = None,
    ):
        """on_end(stream, outcome): called once per stream; outcome is "ok" or an error's code in lower case.
        behind_s: see Stream.behind. request_bytes, door_bytes: see budget. taken: counts the streams.
        """
        self._taken = taken or TakenRequests()
        self._request_bytes, self._door_bytes = request_bytes, door_bytes
        self.link, self.behind_s, self._on_end = link, behind_s, on_end
        self._turn = itertools.count()
        self._open: set[Stream] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._some_open = threading.Event()
        self._threads = [SenderThread(f"sender-{index}") for index in range(num_senders)]
        self._sweeper = threading.Thread(target=self._sweep_loop, name="cancel-sweep", daemon=True)

    def start(self) -> Senders:
        for thread in (*self._threads, self._sweeper):
            thread.start()
        return self

    def open(self, sender, label: str = "") -> Stream:
        """Return a stream for this response sender's request; the caller must answer or fail it."""
        stream = Stream(self, sender, label)
        self._taken.begin(stream)
        with self._lock:
            self._open.add(stream)
        self._some_open.set()
        return stream

    def open_streams(self) -> list[Stream]:
        with self._lock:
            return list(self._open)

    def budget(self) -> int:
        """Return the byte budget of one request's responses: its own limit or its share of the door's."""
        return min(self._request_bytes, self._door_bytes // max(1, len(self._open)))

    def gaps(self) -> list[GapCounts]:
        """Return the gaps between tokens, one GapCounts for each sender thread."""
        return [thread.gaps for thread in self._threads]

    def assign(self) -> SenderThread:
        return self._threads[next(self._turn) % len(self._threads)]

    def ended(self, stream: Stream, outcome: str) -> None:
        self._taken.end(stream)
        with self._lock:
            self._open.discard(stream)
            if not self._open:
                self._some_open.clear()
        self._on_end(stream, outcome)
        stream.on_end(outcome)

    def close(self, error: TridecodeError, timeout_s: float = 5.0) -> None:
        """Fail all open streams, wait until the errors are sent, end the threads."""
        for stream in self.open_streams():
            stream.fail(error)
        self._closing.set()
        self._some_open.set()
        for sender in self._threads:
            sender.inbox.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in (*self._threads, self._sweeper):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _sweep_loop(self) -> None:
        while not self._closing.is_set():
            self._some_open.wait()
            streams = self.open_streams()
            for start in range(0, len(streams), _SWEEP_CHUNK):
                self._sweep(streams[start : start + _SWEEP_CHUNK], len(streams))
                if self._closing.is_set():
                    return

    def _sweep(self, streams: list[Stream], total: int) -> None:
        began = time.monotonic()
        for stream in streams:
            try:
                if stream.is_cancelled():
                    stream.fail(RequestCancelled("the client has cancelled the request"))
            except Exception:
                _log.exception("request %s: the cancellation query failed", stream.label)
        spent = time.monotonic() - began
        self._closing.wait(max(_SWEEP_S * len(streams) / total, spent / _SWEEP_SHARE))
