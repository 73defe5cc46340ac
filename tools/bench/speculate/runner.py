"""Runs one batch through the serving loop, with and without drafts, and records tokens and steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from msgspec.structs import replace as with_fields

from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.door_socket import DoorSocket
from tridecode.backend.engine.scheduler_factory import make_scheduler
from tridecode.backend.engine.speculation.learning import Learning
from tridecode.backend.supervisor.rank_link import RankStatus
from tridecode.backend.wire import messages as m
from tridecode.tools.bench.loop_runner import BatchDoors, RecordedLoop
from tridecode.tools.bench.measure import steady_gaps


@dataclass(frozen=True)
class Ran:
    """One run. decode_s: from the first token of every sequence to the last token of all. step_ms: median of
    steps without prompts. tokens: of each sequence, in the order of the prompts. steps: those that decode.
    """

    decode_s: float
    step_ms: float
    tokens: list[list[int]]
    drafted: int
    accepted: int
    steps: int

    @property
    def tokens_per_s(self) -> float:
        return sum(len(one) - 1 for one in self.tokens) / self.decode_s

    @property
    def tokens_per_step(self) -> float:
        """Return the tokens of a sequence per step that decodes."""
        return (len(self.tokens[0]) - 1) / max(self.steps, 1)


class _Doors(BatchDoors):
    """Keeps the tokens, too."""

    def __init__(self, submits: list[m.Submit]):
        super().__init__(submits, [0.0] * len(submits))
        self.tokens: list[list[int]] = [[] for _ in submits]

    def send(self, events: list[tuple[bytes, m.Event]]) -> None:
        for _, event in events:
            self.tokens[event.request] += event.tokens
        super().send(events)


class SpeculationRunner:
    """Runs batches on an engine with `speculation`. A scheduler of its own for each run: nothing is learned
    from another one, and no answer of another one is found.
    """

    def __init__(self, engine: Engine):
        self._engine = engine

    def run(
        self, prompts: Sequence[Sequence[int]], params: m.SamplingParams, speculate: bool, forced: int = 0
    ) -> Ran:
        """Generate params.max_tokens tokens for each prompt. forced: drafts of every row in every step,
        instead of the number that the engine chooses; 0: the engine's choice."""
        engine, scheduler = self._engine, make_scheduler(self._engine)
        learning = cast(Learning, scheduler.planner.drafts.learning)  # type: ignore[union-attr]
        if forced:
            learning.policy = replace(learning.policy, costs=None, most=forced)
        submits = []
        for number, prompt in enumerate(prompts):
            own = with_fields(params, seed=number, speculate=speculate, cache="off")
            request = m.SequenceRequest(np.asarray(prompt, np.int32).tobytes(), own)
            submits.append(m.Submit(number, [request]))
        doors = _Doors(submits)
        loop = RecordedLoop(engine, scheduler, cast(DoorSocket, doors), RankStatus())
        loop.steps, doors.loop = doors.run.steps, loop
        doors.started = time.perf_counter()
        loop.run()
        times = doors.run.token_times
        decode_s = max(one[-1] for one in times) - max(one[0] for one in times)
        steps = doors.run.steps
        gaps = steady_gaps(steps, len(prompts))
        step_ms = 1000 * statistics.median(gaps) if gaps else float("nan")
        drafted, accepted = sum(learning.drafted.values()), sum(learning.accepted.values())
        decoding = sum(step.decodes > 0 for step in steps)
        return Ran(max(decode_s, 1e-9), step_ms, doors.tokens, drafted, accepted, decoding)
