"""Requests through the decode loop that serves, over doors without a socket, and a record of every step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np

from tridecode.backend.base.errors import BY_CODE, TridecodeError
from tridecode.backend.engine.adapters.table import Adapters
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.pending import Pending
from tridecode.backend.engine.door_socket import DoorSocket
from tridecode.backend.engine.grammars.service import Grammars
from tridecode.backend.engine.loop import DecodeLoop
from tridecode.backend.engine.schedule.scheduler import Scheduler
from tridecode.backend.engine.scheduler_factory import limits_of
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.supervisor.rank_link import RankStatus
from tridecode.backend.wire import messages as m
from tridecode.backend.wire.structured_output import StructuredOutput
from tridecode.tools.bench.measure import Run, Step, output_lengths

_DOOR = b"bench"
_POLL_S = 0.001


class BatchDoors:
    """Submits each request at its time, seconds after the start, and stops the loop when all have ended."""

    def __init__(self, submits: list[m.Submit], arrivals: Sequence[float]):
        self._coming = deque(sorted(zip(arrivals, submits), key=lambda pair: pair[0]))
        self._open = len(submits)
        self.started = time.perf_counter()
        self.run = Run([0.0] * len(submits), [[] for _ in submits], [])
        self.ended_at = 0.0
        self.loop: DecodeLoop | None = None

    def drain(self) -> list[tuple[bytes, m.Submit]]:
        arrived, now = [], time.perf_counter()
        while self._coming and self.started + self._coming[0][0] <= now:
            after, submit = self._coming.popleft()
            self.run.arrivals[submit.request] = self.started + after
            arrived.append((_DOOR, submit))
        if not self._open and self.loop is not None:
            self.loop.stop()
        return arrived

    def wait(self, timeout_s: float) -> None:
        """Sleep until the next request, or briefly if none is left: requests may wait for an adapter, whose
        loader needs the interpreter lock."""
        wait_s = self.started + self._coming[0][0] - time.perf_counter() if self._coming else _POLL_S
        time.sleep(max(min(wait_s, timeout_s), 0.0))

    def wake(self) -> None: ...

    def send(self, events: list[tuple[bytes, m.Event]]) -> None:
        now = time.perf_counter()
        for _, event in events:
            self.run.token_times[event.request] += [now] * len(event.tokens)
            if event.finish == "error":
                raise BY_CODE.get(event.code, TridecodeError)(event.error)
            if event.finish:
                self._open -= 1
        self.ended_at = now


class RecordedLoop(DecodeLoop):
    """The serving loop, which also records when each step ended and its rows."""

    steps: list[Step]

    def _commit(self, plan: StepPlan, pending: Pending) -> None:
        super()._commit(plan, pending)
        decoded = int(plan.query_starts[plan.num_decodes])
        self.steps.append(Step(time.perf_counter(), plan.num_decodes, plan.num_tokens - decoded))


class LoopRunner:
    """Runs requests through the decode loop of a loaded engine.

    rate: arrivals per second, with exponentially distributed intervals determined by seed; 0: all at once.
    grammars: the engine's grammars, for `generate` with structured outputs. params: parameters of all
    requests, or a list with one per request; length and cache use are set separately.
    """

    def __init__(
        self,
        engine: Engine,
        rate: float = 0.0,
        seed: int = 0,
        grammars: Grammars | None = None,
        params: m.SamplingParams | Sequence[m.SamplingParams] | None = None,
    ):
        self.engine, self._rate, self._seed = engine, rate, seed
        self.params = params or m.SamplingParams()
        store = engine.state.adapters
        adapters = None if store is None else Adapters(store)
        self.scheduler = Scheduler(limits_of(engine), time.monotonic, adapters, grammars=grammars)
        self._run: Run | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        output_tokens: int | Sequence[int],
        outputs: Sequence[StructuredOutput | None] = (),
        adapters: Sequence[str] = (),
    ) -> float:
        """Return the seconds until each prompt has its number of new tokens; implements measure.Generate.

        outputs: the grammar of each answer; (): no grammars. adapters: the name of each prompt's adapter, ""
        for none; (): no adapters. min_tokens suppresses the end token. Raises TridecodeError if a request
        fails.
        """
        end_id, lengths = self.engine.model_config.end_id, output_lengths(prompts, output_tokens)
        submits = []
        for number, (prompt, length) in enumerate(zip(prompts, lengths)):
            # rounds repeat their prompts, and each is to compute them
            one = self.params if isinstance(self.params, m.SamplingParams) else self.params[number]
            params = msgspec.structs.replace(
                one, max_tokens=length, min_tokens=length, end_id=end_id, cache="off"
            )
            ids = np.asarray(prompt, np.int32).tobytes()
            output = outputs[number] if outputs else None
            name = adapters[number] if adapters else ""
            sequence = m.SequenceRequest(ids, params, name, structured_output=output)
            submits.append(m.Submit(number, [sequence]))
        doors = BatchDoors(submits, self._arrivals(len(prompts)))
        loop = RecordedLoop(self.engine, self.scheduler, cast(DoorSocket, doors), RankStatus())
        loop.steps, doors.loop = doors.run.steps, loop
        doors.started = time.perf_counter()
        loop.run()
        found = sum(map(len, doors.run.token_times))
        if found != sum(lengths):
            raise TridecodeError(f"{len(prompts)} requests gave {found} tokens; wanted {sum(lengths)}")
        self._run = doors.run
        return doors.ended_at - doors.started

    def take_run(self) -> Run:
        """Return the record of the last `generate`."""
        assert self._run is not None
        return self._run

    def _arrivals(self, count: int) -> Sequence[float]:
        """Seconds after the start."""
        if not self._rate:
            return [0.0] * count
        gaps = np.random.default_rng(self._seed).exponential(1 / self._rate, count)
        return (np.cumsum(gaps) - gaps[0]).tolist()
