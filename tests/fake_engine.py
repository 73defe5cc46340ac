"""An engine and a supervisor without torch: a toy model with the protocol of backend/wire/messages.py.

`FakeEngine` acts as rank 0 towards doors, and `FakeSupervisor` as the supervisor at a control endpoint. Both
run in threads of the test. `python -m tests.fake_engine --control ... --epoch ... --rank ... --endpoint ...`
acts as one rank towards the supervisor: it reports progress, readiness and heartbeats, obeys Stop, and has an
option for each kind of failure.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import zmq

from tridecode.backend.wire import messages as m

LIMITS = m.Limits(
    vocab_size=1000,
    max_sequence_tokens=512,
    max_sequences=64,
    max_queued_requests=256,
    max_bad_word_tokens=64,
    max_stop_word_tokens=64,
    start_id=1,
    end_id=2,
    model_name="toy",
    hidden_size=4,
)

REASON = "rank 0 was killed by signal 9"
TOY_PERF = (10**18, 10**18 + 1, 10**18 + 2, 10**18 + 3, 5, 1, 0, 0, 2)  # the fields of messages.Perf

#: maps (prompt and generated ids, number of generated ids, params, vocab_size) to the next id; -1: a failure
NextToken = Callable[[list, int, m.SamplingParams, int], int]


def toy_next(history: list[int], generated: int, params: m.SamplingParams, vocab_size: int) -> int:
    """Return the next id, at least 3: a hash of the last three ids, the length and, unless greedy, the
    seed."""
    mixed = len(history) * 7919 + (
        0 if params.top_k == 1 or params.temperature == 0 else params.seed * 31 + 1
    )
    for weight, token in zip((3, 17, 257), reversed(history[-3:])):
        mixed += weight * token
    return 3 + mixed % (vocab_size - 3)


def toy_tokens(prompt: list[int], count: int, params: m.SamplingParams, vocab_size: int) -> list[int]:
    """Return the first `count` ids that the toy model generates after `prompt`, without stop criteria."""
    history = list(prompt)
    for generated in range(count):
        history.append(toy_next(history, generated, params, vocab_size))
    return history[len(prompt) :]


def scripted(tokens: list[int]) -> NextToken:
    """Return a model that generates `tokens` after any prompt, then repeats the last one."""
    return lambda history, generated, params, vocab_size: tokens[min(generated, len(tokens) - 1)]


def toy_log_prob(token: int) -> float:
    return -(token % 7 + 1) / 8.0  # exact in float32


def toy_beam_steps(params: m.SamplingParams) -> list[m.BeamStep]:
    """Return the toy engine's beam search: max_tokens steps in which parents swap places; the best beam ends
    before the last step."""
    width, count = params.beam_width, params.max_tokens
    steps = []
    for step in range(count):
        parents = [(k * 2 + step) % width if step else 0 for k in range(width)]
        tokens = [3 + (31 * step + 7 * k) % 500 for k in range(width)]
        log_probs = [toy_log_prob(token) for token in tokens]
        if step == count - 1 and step:
            tokens[0], log_probs[0] = -1, 0.0
        steps.append(m.BeamStep(parents, tokens, log_probs))
    return steps


@dataclass
class _Beams:
    """State of a beam search without a pool."""

    params: m.SamplingParams
    steps: list[m.BeamStep]
    finish: str = ""


def toy_tops(token: int, count: int, vocab_size: int) -> m.TopLogProbs:
    """Return the most likely ids: the token, then the ids after it modulo the vocabulary."""
    ids = [(token + step) % vocab_size for step in range(count)]
    return m.TopLogProbs(toy_log_prob(token), 1, ids, [toy_log_prob(token) - step for step in range(count)])


def toy_logits(tokens: list[int], vocab_size: int, scale: float) -> np.ndarray:
    """Return logits (len(tokens), vocab_size) float32: of the prompt (scale 1) or of new tokens (scale
    -1)."""
    return np.repeat(np.array(tokens, np.float32)[:, None] * scale, vocab_size, axis=1)


def toy_context_log_prob(prompt: list[int]) -> float:
    return -sum(prompt) / 8.0


def toy_pooled(prompt: list[int], pooling: str, hidden_size: int) -> np.ndarray:
    """(hidden_size,) float32: "last" or "mean" over the toy model's hidden states, token ** (i / 2)."""
    states = np.array(prompt, np.float64)[:, None] ** (np.arange(hidden_size) / 2)
    return (states[-1] if pooling == "last" else states.mean(0)).astype(np.float32)


@dataclass
class _Sequence:
    history: list[int]
    params: m.SamplingParams
    generated: int = 0
    finish: str = ""

    def step(self, next_token: NextToken, vocab_size: int) -> int:
        token = next_token(self.history, self.generated, self.params, vocab_size)
        self.history.append(token)
        self.generated += 1
        if token in self.params.end_ids and self.generated > self.params.min_tokens:
            self.finish = "end_id"
        elif any(w and self.history[-len(w) :] == w for w in self.params.stop_words):
            self.finish = "stop_word"
        elif self.generated >= self.params.max_tokens:
            self.finish = "length"
        return token


@dataclass
class _Request:
    door: bytes
    submit: m.Submit
    sequences: list[_Sequence | _Beams]
    deadline: float
    embedded: set[int] = field(default_factory=set)


def _sequences(wanted: m.SequenceRequest) -> list[_Sequence | _Beams]:
    """Return the sequences of one prompt; samples, and here also the beams of a pool, have their own
    seeds."""
    prompt, params = np.frombuffer(wanted.prompt, "<i4").tolist(), wanted.params
    if params.beam_width > 1 and not params.beam_pool:
        return [_Beams(params, toy_beam_steps(params))]
    return [
        _Sequence(list(prompt), msgspec.structs.replace(params, seed=params.seed + i))
        for i in range(params.num_sequences)
    ]


def _resume(sequences: list[_Sequence | _Beams], sent: list[m.Sent]) -> None:
    """Continue after the tokens that another engine has sent."""
    for sequence, before in zip(sequences, sent):
        if isinstance(sequence, _Beams):
            sequence.steps = sequence.steps[len(before.steps) :]
        else:
            tokens = np.frombuffer(before.tokens, "<i4").tolist()
            sequence.history += tokens
            sequence.generated = len(tokens)
        sequence.finish = "ended before" if before.ended else ""


class FakeEngine:
    """Rank 0 on a ROUTER socket in its own thread: each step gives every running sequence one token."""

    def __init__(
        self,
        endpoint: str = "",
        epoch: int = 1,
        limits: m.Limits = LIMITS,
        next_token: NextToken = toy_next,
        step_s: float = 0.0,
        beat_s: float = m.BEAT_S,
        chunk: int = 1,
    ):
        self.endpoint = endpoint or "ipc://" + tempfile.mktemp(prefix="fake-engine-", dir="/tmp")
        self.epoch, self.limits, self.next_token = epoch, limits, next_token
        self.step_s, self.beat_s, self.chunk = step_s, beat_s, chunk
        self.steps = 0
        self.submits: list[m.Submit] = []
        self.cancels: list[int] = []
        self.goodbyes: list[bytes] = []
        self.sessions: dict[tuple[bytes, int], list[list[int]]] = {}  # the tokens of each row
        self.ended_sessions: list[int] = []
        self.hellos: list[m.Hello] = []
        self.before_step: Callable[[int], None] = lambda step: None
        self.protocol = m.PROTOCOL
        self.busy_s, self.metrics = 0.0, {}  # reported in its heartbeats
        self.cached_tokens = 0  # of each prompt
        self._doors: dict[bytes, m.Hello] = {}
        self._running: dict[tuple[bytes, int], _Request] = {}
        self._frozen = threading.Event()
        self._is_frozen = threading.Event()
        self._forget = threading.Event()
        self._stop = threading.Event()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fake-engine", daemon=True)

    def start(self) -> FakeEngine:
        self._thread.start()
        assert self._bound.wait(60), f"the fake engine did not bind {self.endpoint}"
        return self

    def stop(self) -> None:
        """End like a killed process, without a message."""
        self._stop.set()
        self._frozen.clear()
        self._thread.join(5)

    def freeze(self) -> None:
        """Stop steps, answers and heartbeats until thaw()."""
        self._is_frozen.clear()
        self._frozen.set()
        assert self._is_frozen.wait(60), "the fake engine did not freeze"

    def thaw(self) -> None:
        self._frozen.clear()

    def forget_doors(self) -> None:
        """Drop every door and its requests, as after a long silence."""
        self._forget.set()

    @property
    def running(self) -> int:
        return len(self._running)

    def __enter__(self) -> FakeEngine:
        return self.start()

    def __exit__(self, *_) -> None:
        self.stop()

    # ------------------------------------------------------------ the thread

    def _serve(self) -> None:
        socket = zmq.Context.instance().socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.bind(self.endpoint)
        self._bound.set()
        last_beat = 0.0
        try:
            while not self._stop.is_set():
                if self._frozen.is_set():
                    self._is_frozen.set()
                    time.sleep(0.005)
                    continue
                if self._forget.is_set():
                    self._doors, self._running, self.sessions = {}, {}, {}
                    self._forget.clear()
                while socket.poll(0 if self._running else 20) and not self._frozen.is_set():
                    door, frame = socket.recv_multipart()
                    self._receive(socket, door, m.decode(frame, m.ToEngine))
                if self._running:
                    self._step(socket)
                if time.monotonic() - last_beat > self.beat_s:
                    last_beat = time.monotonic()
                    self._beat(socket)
        finally:
            socket.close(0)

    def _receive(self, socket: zmq.Socket, door: bytes, message: m.ToEngine) -> None:
        if isinstance(message, m.Hello):
            self.hellos.append(message)
            self._doors[door] = message
            welcome = m.Welcome(self.epoch, self.limits, self.protocol)
            socket.send_multipart([door, m.encode(welcome)])
        elif door not in self._doors:
            socket.send_multipart([door, m.encode(m.Unknown())])
        elif isinstance(message, m.Submit):
            self.submits.append(message)
            self._submit(socket, door, message)
        elif isinstance(message, m.Cancel):
            self.cancels.append(message.request)
            self._finish(socket, door, message.request, "cancelled", "the request was cancelled", "CANCELLED")
        elif isinstance(message, m.EndSession):
            self.ended_sessions.append(message.session)
            self.sessions.pop((door, message.session), None)
        elif isinstance(message, m.Goodbye):
            self.goodbyes.append(door)
            self._doors.pop(door)
            self._running = {key: value for key, value in self._running.items() if key[0] != door}

    def _submit(self, socket: zmq.Socket, door: bytes, submit: m.Submit) -> None:
        if len(self._running) >= self.limits.max_queued_requests:
            text = f"{len(self._running)} requests are open; the limit is {self.limits.max_queued_requests}"
            self._send(
                socket, door, [m.Event(submit.request, 0, finish="error", error=text, code="UNAVAILABLE")]
            )
            return
        sequences = [one for wanted in submit.sequences for one in _sequences(wanted)]
        if submit.session is not None and submit.session.retained:
            rows = self.sessions.get((door, submit.session.session))
            if rows is None and submit.session.history:
                rows = [np.frombuffer(row, "<i4").tolist() for row in submit.session.history]
            if rows is None:
                lost = m.Event(
                    submit.request, 0, finish="error", error="the engine lost it", code="NOT_FOUND"
                )
                self._send(socket, door, [lost])
                return
            for sequence, row, retained in zip(sequences, rows, submit.session.retained):
                sequence.history[:0] = row[:retained]
        _resume(sequences, submit.sent)
        deadline = time.monotonic() + submit.timeout_s if submit.timeout_s else float("inf")
        self._running[door, submit.request] = _Request(door, submit, sequences, deadline)

    def _finish(self, socket, door: bytes, request: int, finish: str, error: str, code: str) -> None:
        entry = self._running.pop((door, request), None)
        if entry is None:
            return
        events = [
            m.Event(request, index, finish=finish, error=error, code=code)
            for index, sequence in enumerate(entry.sequences)
            if not sequence.finish
        ]
        self._send(socket, door, events)

    def _step(self, socket: zmq.Socket) -> None:
        self.before_step(self.steps)
        self.steps += 1
        events: dict[bytes, list[m.Event]] = {}
        for key, request in list(self._running.items()):
            if time.monotonic() > request.deadline:
                self._finish(socket, *key, "deadline", "the request's deadline passed", "CANCELLED")
                continue
            for index, sequence in enumerate(request.sequences):
                if not sequence.finish:
                    events.setdefault(key[0], []).append(self._advance(request, index, sequence))
            if all(sequence.finish for sequence in request.sequences):
                del self._running[key]
                if request.submit.session is not None:
                    rows = [sequence.history for sequence in request.sequences]
                    self.sessions[key[0], request.submit.session.session] = rows
        for door, batch in events.items():
            self._send(socket, door, batch)
        if self.step_s:
            time.sleep(self.step_s)

    def _advance(self, request: _Request, index: int, sequence: _Sequence | _Beams) -> m.Event:
        if isinstance(sequence, _Beams):
            step = sequence.steps.pop(0) if sequence.steps else None
            sequence.finish = "" if sequence.steps else "length"
            return m.Event(request.submit.request, index, finish=sequence.finish, beams=step)
        embedding = b""
        if sequence.params.return_context_embedding and index not in request.embedded:
            request.embedded.add(index)
            total = float(sum(sequence.history))
            embedding = np.full(self.limits.hidden_size, total, np.float32).tobytes()
        elif sequence.params.pooling:
            embedding = toy_pooled(
                sequence.history, sequence.params.pooling, self.limits.hidden_size
            ).tobytes()
        is_first, prompt = sequence.generated == 0, list(sequence.history)
        tokens: list[int] = []
        if sequence.params.max_tokens == 0:
            sequence.finish = "length"
        chunk = sequence.params.max_tokens if sequence.params.beam_width > 1 else self.chunk
        while not sequence.finish and len(tokens) < chunk:
            tokens.append(sequence.step(self.next_token, self.limits.vocab_size))
        if tokens and tokens[-1] < 0:
            sequence.finish, text = "error", "the toy model failed"
            return m.Event(request.submit.request, index, finish="error", error=text, code="INTERNAL")
        log_probs = [toy_log_prob(token) for token in tokens] if sequence.params.return_log_probs else []
        return m.Event(
            request.submit.request,
            index,
            tokens=tokens,
            log_probs=log_probs,
            finish=sequence.finish,
            context_embedding=embedding,
            top_log_probs=[toy_tops(t, sequence.params.top_log_probs, self.limits.vocab_size) for t in tokens]
            if sequence.params.top_log_probs >= 0
            else [],
            extra=self._extra(sequence, prompt if is_first else [], tokens),
            cached_tokens=self.cached_tokens if is_first else 0,
        )

    def _extra(self, sequence: _Sequence, prompt: list[int], tokens: list[int]) -> m.EventExtra | None:
        params, vocab_size = sequence.params, self.limits.vocab_size
        perf = None
        if params.return_perf_metrics:
            perf = m.Perf(*TOY_PERF)
        extra = m.EventExtra(
            toy_logits(prompt, vocab_size, 1).tobytes() if params.return_context_logits else b"",
            toy_logits(tokens, vocab_size, -1).tobytes() if params.return_generation_logits else b"",
            toy_context_log_prob(prompt) if params.return_context_log_prob else 0.0,
            perf,
        )
        return None if extra == m.EventExtra() else extra

    def _send(self, socket: zmq.Socket, door: bytes, events: list[m.Event]) -> None:
        if events:
            socket.send_multipart([door, m.encode(m.Events(self.epoch, events))])

    def _beat(self, socket: zmq.Socket) -> None:
        beat = m.EngineBeat(
            self.epoch,
            0,
            self.steps,
            self.busy_s,
            running=len(self._running),
            free_blocks=90,
            total_blocks=100,
            metrics=self.metrics,
        )
        for door in self._doors:
            socket.send_multipart([door, m.encode(beat)])


class FakeSupervisor:
    """Sends the engine's state to doors: on Hello, on each change and with each heartbeat."""

    def __init__(self, engine: FakeEngine | None = None, endpoint: str = "", beat_s: float = m.BEAT_S):
        self.endpoint = endpoint or "ipc://" + tempfile.mktemp(prefix="fake-control-", dir="/tmp")
        self.beat_s = beat_s
        self.hellos: list[m.Hello] = []
        self.goodbyes = 0
        self.pings = 0
        self._state = m.EngineState(0, "starting", "the engine is loading", "")
        if engine is not None:
            self._state = self._ready(engine)
        self._changes: deque[m.EngineState] = deque()
        self._silent = threading.Event()
        self._forget = threading.Event()
        self._stop = threading.Event()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fake-supervisor", daemon=True)

    @staticmethod
    def _ready(engine: FakeEngine) -> m.EngineState:
        return m.EngineState(engine.epoch, "ready", "", engine.endpoint)

    def start(self) -> FakeSupervisor:
        self._thread.start()
        assert self._bound.wait(60), f"the fake supervisor did not bind {self.endpoint}"
        return self

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(5)

    def __enter__(self) -> FakeSupervisor:
        return self.start()

    def __exit__(self, *_) -> None:
        self.stop()

    def set_ready(self, engine: FakeEngine) -> None:
        self._changes.append(self._ready(engine))

    def set_phase(self, phase: str, detail: str) -> None:
        self._changes.append(msgspec.structs.replace(self._state, phase=phase, detail=detail))

    def drain(self) -> None:
        """Say that the server is about to end."""
        self._changes.append(msgspec.structs.replace(self._state, draining=True))

    def forget_doors(self) -> None:
        """Forget all doors, like a supervisor that was restarted."""
        self._forget.set()

    def silence(self, silent: bool = True) -> None:
        """Send nothing, like a frozen process."""
        if silent:
            self._silent.set()
        else:
            self._silent.clear()

    def _serve(self) -> None:
        socket = zmq.Context.instance().socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(self.endpoint)
        self._bound.set()
        doors: set[bytes] = set()
        last_beat = 0.0
        try:
            while not self._stop.is_set():
                if self._silent.is_set():
                    time.sleep(0.005)
                    continue
                while socket.poll(10):
                    door, frame = socket.recv_multipart()
                    message = m.decode(frame, m.ToSupervisor)
                    if isinstance(message, m.Hello):
                        self.hellos.append(message)
                        doors.add(door)
                        socket.send_multipart([door, m.encode(self._state)])
                    elif isinstance(message, m.Goodbye):
                        self.goodbyes += 1
                        doors.discard(door)
                    elif isinstance(message, m.Ping):
                        self.pings += 1
                        if door not in doors:
                            socket.send_multipart([door, m.encode(m.Unknown())])
                if self._forget.is_set():
                    doors.clear()
                    self._forget.clear()
                changed = bool(self._changes)
                if changed:
                    self._state = self._changes.popleft()
                if changed or time.monotonic() - last_beat > self.beat_s:
                    last_beat = time.monotonic()
                    for door in doors:
                        socket.send_multipart([door, m.encode(self._state)])
        finally:
            socket.close(0)


@contextlib.contextmanager
def rebuilt(engine: FakeEngine, supervisor: FakeSupervisor, **options) -> Iterator[FakeEngine]:
    """Report that the engine died and that the next one is ready."""
    engine.stop()
    supervisor.set_phase("down", REASON)
    shape = {"limits": engine.limits, "next_token": engine.next_token, "step_s": 0.0}
    with FakeEngine(epoch=engine.epoch + 1, **{**shape, **options}) as following:
        supervisor.set_phase("starting", "loading weights")
        supervisor.set_ready(following)
        yield following


# ---------------------------------------------------------------- one rank as a process


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", required=True, help="zmq endpoint of the supervisor")
    parser.add_argument("--endpoint", default="", help="zmq endpoint to serve doors at; rank 0 only")
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--load-s", type=float, default=0.0, help="how long loading takes")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--fail", default="", help="report this error instead of becoming ready")
    parser.add_argument("--fatal", action="store_true", help="with --fail: a restart would fail again")
    parser.add_argument(
        "--exit-after-s", type=float, default=0.0, help="os._exit(9) this long after readiness"
    )
    parser.add_argument("--exit-at-step", type=int, default=0, help="os._exit(9) in that step")
    parser.add_argument("--hang-at-step", type=int, default=0, help="never end that step, still beating")
    parser.add_argument("--never-ready", action="store_true", help="report progress for ever")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 500)
    socket.connect(arguments.control)

    def tell(message: msgspec.Struct) -> None:
        socket.send(m.encode(message))

    tell(m.RankProgress(arguments.epoch, arguments.rank, "loading the toy model"))
    time.sleep(arguments.load_s)
    if arguments.fail:
        tell(m.RankFailed(arguments.epoch, arguments.rank, arguments.fail, arguments.fatal))
        socket.close()
        zmq.Context.instance().term()
        raise SystemExit(1)
    engine = None
    if arguments.rank == 0:
        engine = FakeEngine(arguments.endpoint, arguments.epoch, step_s=arguments.step_s)
        busy = _misbehave(engine, arguments)
        engine.start()
    else:
        busy = lambda: 0.0  # noqa: E731
    if not arguments.never_ready:
        tell(m.RankReady(arguments.epoch, arguments.rank))
    started = time.monotonic()
    while True:
        if socket.poll(int(m.BEAT_S * 1000)) and isinstance(
            m.decode(socket.recv(), m.FromSupervisor), m.Stop
        ):
            break
        if arguments.exit_after_s and time.monotonic() - started > arguments.exit_after_s:
            os._exit(9)
        steps = engine.steps if engine else 0
        running = engine.running if engine else 0
        tell(m.EngineBeat(arguments.epoch, arguments.rank, steps, busy(), running=running))
    if engine is not None:
        engine.stop()
    socket.close()


def _misbehave(engine: FakeEngine, arguments: argparse.Namespace) -> Callable[[], float]:
    """Set up --exit-at-step and --hang-at-step; returns a function that gives the busy time of the step."""
    began = [0.0]

    def before_step(step: int) -> None:
        if arguments.exit_at_step and step >= arguments.exit_at_step:
            os._exit(9)
        if arguments.hang_at_step and step >= arguments.hang_at_step:
            began[0] = time.monotonic()
            while True:
                time.sleep(1)

    engine.before_step = before_step
    return lambda: time.monotonic() - began[0] if began[0] else 0.0


if __name__ == "__main__":
    main()
