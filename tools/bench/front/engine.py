"""A fake supervisor and engine in one process: every step gives each running sequence its next tokens.

    python -m tridecode.tools.bench.front.engine CONTROL ENDPOINT SETTINGS

SETTINGS is EngineSettings as JSON. On SIGTERM it prints EngineCounts as JSON.
"""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass, field

import msgspec
import zmq

from tridecode.backend.wire import messages as m

_EPOCH = 1
#: id of the tokenizer's end of text; no sequence ends with it
_END_ID = 0


class EngineSettings(msgspec.Struct, frozen=True):
    """tokens: ids that every sequence repeats. step_s: interval of steps; 0: as fast as possible.
    tokens_per_event: of each sequence and step. pause_after: events after which a sequence gets no more, and
    does not end either; 0: none.
    """

    tokens: list[int]
    vocab_size: int
    step_s: float = 0.0
    tokens_per_event: int = 1
    pause_after: int = 0
    max_sequences: int = 1 << 16


class EngineCounts(msgspec.Struct):
    """cancelled_at: monotonic seconds. late_steps: those that began more than a step after their time."""

    requests: int = 0
    events: int = 0
    tokens: int = 0
    steps: int = 0
    late_steps: int = 0
    cpu_s: float = 0.0
    cancelled_at: list[float] = []


@dataclass
class _Sequence:
    request: int
    index: int
    left: int
    place: int = 0
    events: int = 0


@dataclass
class _Door:
    running: dict[int, list[_Sequence]] = field(default_factory=dict)


class Engine:
    def __init__(self, control: str, endpoint: str, settings: EngineSettings):
        self._settings, self._endpoint = settings, endpoint
        self._tokens = settings.tokens * 2  # a run of tokens from any place is one slice
        self._control, self._socket = _router(control), _router(endpoint)
        self._doors: dict[bytes, _Door] = {}
        self._listeners: set[bytes] = set()
        self._stopping = False
        self.counts = EngineCounts()

    def run(self) -> None:
        """Serve until SIGTERM."""
        signal.signal(signal.SIGTERM, self._stop)
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        next_beat = next_step = time.monotonic()
        while not self._stopping:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + m.BEAT_S
                self._beat()
            busy = any(door.running for door in self._doors.values())
            if busy and now >= next_step:
                self.counts.late_steps += now > next_step + self._settings.step_s
                next_step = max(now, next_step + self._settings.step_s)
                self._step()
            wake = min(next_beat, next_step) if busy else next_beat
            if poller.poll(max(0, round(1e3 * (wake - time.monotonic())))):
                self._hear()
                if not busy:
                    next_step = time.monotonic()
        self.counts.cpu_s = time.process_time()

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _hear(self) -> None:
        for door, frame in _received(self._control):
            if isinstance(m.decode(frame, m.ToSupervisor), m.Hello):
                self._listeners.add(door)
                self._send_state(door)
        for door, frame in _received(self._socket):
            self._take(door, m.decode(frame, m.ToEngine))

    def _take(self, door: bytes, message: m.ToEngine) -> None:
        if isinstance(message, m.Hello):
            self._doors[door] = _Door()
            self._send(door, m.Welcome(_EPOCH, self._limits()))
        elif isinstance(message, m.Submit):
            self.counts.requests += 1
            params = [one.params for one in message.sequences for _ in range(one.params.num_sequences)]
            place = 7 * message.request % len(self._settings.tokens)
            self._doors[door].running[message.request] = [
                _Sequence(message.request, index, one.max_tokens, place) for index, one in enumerate(params)
            ]
        elif isinstance(message, m.Cancel):
            self.counts.cancelled_at.append(time.monotonic())
            self._doors[door].running.pop(message.request, None)
        elif isinstance(message, m.Goodbye):
            self._doors.pop(door, None)

    def _step(self) -> None:
        self.counts.steps += 1
        for name, door in self._doors.items():
            events = []
            for request, sequences in list(door.running.items()):
                for sequence in list(sequences):
                    if (event := self._advance(sequence)) is not None:
                        events.append(event)
                        if event.finish:
                            sequences.remove(sequence)
                if not sequences:
                    del door.running[request]
            if events:
                self._send(name, m.Events(_EPOCH, events))

    def _advance(self, sequence: _Sequence) -> m.Event | None:
        if self._settings.pause_after and sequence.events >= self._settings.pause_after:
            return None
        count = min(sequence.left, self._settings.tokens_per_event)
        place = sequence.place
        sequence.place = (place + count) % len(self._settings.tokens)
        sequence.left -= count
        sequence.events += 1
        self.counts.events += 1
        self.counts.tokens += count
        finish = "" if sequence.left else "length"
        return m.Event(sequence.request, sequence.index, self._tokens[place : place + count], [], finish)

    def _beat(self) -> None:
        running = sum(len(door.running) for door in self._doors.values())
        for door in self._doors:
            self._send(door, m.EngineBeat(_EPOCH, 0, self.counts.steps, 0.0, running, running))
        for door in self._listeners:
            self._send_state(door)

    def _send(self, door: bytes, message: msgspec.Struct) -> None:
        self._socket.send_multipart([door, m.encode(message)])

    def _send_state(self, door: bytes) -> None:
        state = m.EngineState(_EPOCH, "ready", "", self._endpoint)
        self._control.send_multipart([door, m.encode(state)])

    def _limits(self) -> m.Limits:
        return m.Limits(
            vocab_size=self._settings.vocab_size,
            max_sequence_tokens=1 << 20,
            max_sequences=self._settings.max_sequences,
            max_queued_requests=1 << 16,
            max_bad_word_tokens=64,
            max_stop_word_tokens=64,
            start_id=_END_ID,
            end_id=_END_ID,
            model_name="fake",
        )


def _router(endpoint: str) -> zmq.Socket:
    socket: zmq.Socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.set_hwm(0)
    socket.bind(endpoint)
    return socket


def _received(socket: zmq.Socket) -> list[list[bytes]]:
    found = []
    while socket.poll(0):
        found.append(socket.recv_multipart())
    return found


def main() -> None:
    control, endpoint, settings = sys.argv[1:4]
    engine = Engine(control, endpoint, msgspec.json.decode(settings, type=EngineSettings))
    engine.run()
    print(msgspec.json.encode(engine.counts).decode())


if __name__ == "__main__":
    main()
