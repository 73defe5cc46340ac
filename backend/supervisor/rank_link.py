"""A rank's connection to its supervisor: sends heartbeats, receives Stop, ends an orphaned rank. No torch."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import zmq

from tridecode.backend.base.pauses import PauseWatch
from tridecode.backend.supervisor.loop_watch import LoopWatch, place_of
from tridecode.backend.wire.messages import (
    BEAT_S,
    EngineBeat,
    FromSupervisor,
    RankDigest,
    RankFailed,
    RankProgress,
    RankReady,
    Stop,
    decode,
    encode,
)

SUPERVISOR_SILENCE_S = 5.0  # a supervisor that is silent for longer is considered dead
FLUSH_S = 2.0  # longest time that `close` waits for its messages to be sent
_POLL_S = 0.02

_log = logging.getLogger("tridecode.rank")


class Exchange(Protocol):
    """waits: the exchange with other ranks, or the GPU synchronisation, in which this rank waits; "" for
    none.
    """

    waits: str


class RankStatus:
    """Status of the engine's loop. Plain attributes, set without locks; the link reads them each
    BEAT_S.

    busy_since: time.monotonic() when the current step began; 0.0 between steps. metrics: replaced whole,
    never changed in place. digest: (steps, RankDigest.tokens after them), replaced whole. exchange: what the
    rank waits in. loop: the thread that runs the steps, while it does; idles: whether that thread may sleep
    for long between steps.
    """

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.loop: threading.Thread | None = None
        self.idles = False
        self.digest = (0, 0)
        self.steps = 0
        self.busy_since = 0.0
        self.running = 0
        self.waiting = 0
        self.free_blocks = 0
        self.total_blocks = 0
        self.metrics: dict[str, float] = {}

    @property
    def waits(self) -> str:
        return "" if self.exchange is None else self.exchange.waits

    def forgive(self, pause_s: float) -> None:
        """Subtract a pause of this process, of pause_s seconds, from the time of the step."""
        if self.busy_since:
            self.busy_since += pause_s


class RankLink:
    """A daemon thread that sends this rank's heartbeats.

    control: the supervisor's endpoint. epoch, rank: from the command line. on_stop, which may also be set
    later: called in the link's thread when the supervisor asks the rank to stop, two seconds before it kills
    the rank; without it the process exits at once. If the supervisor is gone (another parent, or silence for
    SUPERVISOR_SILENCE_S) the process ends with os._exit(1).
    """

    def __init__(
        self, control: str, epoch: int, rank: int, on_stop: Callable[[], None] | None = None
    ) -> None:
        self.status = RankStatus()
        self._control = control
        self._epoch = epoch
        self._rank = rank
        self.on_stop = on_stop
        self._watch, self._asleep = LoopWatch(), (0.0, "")
        self._parent = os.getppid()
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-link", daemon=True)
        self._thread.start()

    def progress(self, what: str, waits_for: Sequence[int] = ()) -> None:
        """Report what a starting rank is doing, as text ("loading layer 3 of 24"), and the ranks that it
        waits for.
        """
        self._outbox.put(RankProgress(self._epoch, self._rank, what, list(waits_for)))

    def tell(self, digest: RankDigest) -> None:
        self._outbox.put(digest)

    def ready(self) -> None:
        self._outbox.put(RankReady(self._epoch, self._rank))

    def failed(self, error: str, fatal: bool, cause: str = "self") -> None:
        """Report why this rank ends, and close. fatal, cause: see RankFailed."""
        self._outbox.put(RankFailed(self._epoch, self._rank, error, fatal, cause))
        self.close()

    def close(self) -> None:
        """Send pending messages and stop the heartbeats; waits at most FLUSH_S.

        The process should exit now.
        """
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(FLUSH_S)

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, int(FLUSH_S * 1000))
        socket.connect(self._control)
        try:
            self._serve(socket)
        finally:
            socket.close()
            context.term()

    def _serve(self, socket: zmq.Socket) -> None:
        heard_at = time.monotonic()
        watch = PauseWatch(heard_at, _POLL_S)
        beat_at = 0.0
        while True:
            closing = self._closing.is_set()
            self._send_outbox(socket)
            now = time.monotonic()
            if closing:
                return
            if pause := watch.turn(now):
                heard_at = now
                self.status.forgive(pause)
                self._watch.reset()
            if now - beat_at >= BEAT_S:
                self._look_at_loop(now)
                socket.send(encode(self.beat()))
                beat_at = now
            if socket.poll(int(_POLL_S * 1000)):
                self._receive(socket.recv())
                heard_at = time.monotonic()
            self._check_supervisor(now - heard_at)

    def _send_outbox(self, socket: zmq.Socket) -> None:
        while True:
            try:
                socket.send(encode(self._outbox.get_nowait()))
            except queue.Empty:
                return

    def _look_at_loop(self, now: float) -> None:
        status, thread = self.status, self.status.loop
        if thread is None or status.waits or (status.idles and not status.busy_since):
            self._watch.reset()
            self._asleep = 0.0, ""
            return
        asleep_s = self._watch.look(now, thread)
        self._asleep = asleep_s, place_of(thread) if asleep_s else ""

    def beat(self) -> EngineBeat:
        """Return the current status. Any thread: rank 0 sends it to the doors too."""
        status, now = self.status, time.monotonic()
        busy_since = status.busy_since
        return EngineBeat(
            epoch=self._epoch,
            rank=self._rank,
            steps=status.steps,
            busy_s=now - busy_since if busy_since else 0.0,
            running=status.running,
            waiting=status.waiting,
            free_blocks=status.free_blocks,
            total_blocks=status.total_blocks,
            metrics=status.metrics,
            waits=status.waits,
            digest_steps=status.digest[0],
            digest=status.digest[1],
            asleep_s=self._asleep[0],
            asleep_in=self._asleep[1],
        )

    def _receive(self, frame: bytes) -> None:
        try:
            message = decode(frame, FromSupervisor)
        except msgspec.DecodeError as error:
            _log.warning("a message that is none of ours: %s", error)
            return
        if isinstance(message, Stop):
            if self.on_stop is None:
                os._exit(0)
            self.on_stop()

    def _check_supervisor(self, silent_s: float) -> None:
        if os.getppid() != self._parent:
            reason = "the supervisor has ended"
        elif silent_s > SUPERVISOR_SILENCE_S:
            reason = f"the supervisor has been silent for {silent_s:.1f} s"
        else:
            return
        _log.error("rank %d of epoch %d ends: %s", self._rank, self._epoch, reason)
        os._exit(1)
