"""Plays a load against an engine in this process: the loop that serves, over doors without a socket."""

from __future__ import annotations

import time
from collections import deque
from typing import cast

import numpy as np

from tridecode.backend.base.errors import BY_CODE, TridecodeError
from tridecode.backend.engine.cache.prompt_keys import HashedSubmit, PromptHasher
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.pending import Pending
from tridecode.backend.engine.door_socket import DoorSocket
from tridecode.backend.engine.loop import DecodeLoop
from tridecode.backend.engine.parts.host_copies import HostCopies
from tridecode.backend.engine.scheduler_factory import make_scheduler
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.supervisor.rank_link import RankStatus
from tridecode.backend.wire import messages as m
from tridecode.tools.bench.prefix.figures import Played, PlayedStep
from tridecode.tools.bench.prefix.traffic import Traffic

_DOOR = b"bench"


class _ConversationDoors:
    """Submits each conversation's next request when its last one has ended; stops the loop after the last."""

    def __init__(self, traffic: Traffic, hasher: PromptHasher, end_id: int, use: str, salt: str):
        self._conversations, self._hasher = traffic.conversations, hasher
        self._end_id, self._use, self._salt = end_id, use, salt
        self._turns = [0] * len(traffic.conversations)
        self._answers: list[list[int]] = [[] for _ in traffic.conversations]
        self._sent = [0.0] * len(traffic.conversations)
        self._ready: deque[HashedSubmit] = deque()
        self._open = traffic.requests
        self.played = Played()
        self.loop: DecodeLoop | None = None

    def begin(self) -> None:
        for number in range(len(self._conversations)):
            self._submit(number)

    def _submit(self, number: int) -> None:
        one, turn = self._conversations[number], self._turns[number]
        length = one.turns[turn].answer
        params = m.SamplingParams(
            max_tokens=length, min_tokens=length, end_id=self._end_id, cache=self._use, cache_salt=self._salt
        )
        ids = np.ascontiguousarray(one.prompt(turn), "<i4").tobytes()
        submit = m.Submit(number, [m.SequenceRequest(ids, params)])
        self._answers[number], self._sent[number] = [], time.perf_counter()
        self._ready.append(HashedSubmit(submit, self._hasher.keys(submit)))

    def drain(self) -> list[tuple[bytes, HashedSubmit]]:
        arrived = [(_DOOR, submit) for submit in self._ready]
        self._ready.clear()
        if not self._open and self.loop is not None:
            self.loop.stop()
        return arrived

    def wait(self, timeout_s: float) -> None: ...

    def wake(self) -> None: ...

    def send(self, events: list[tuple[bytes, m.Event]]) -> None:
        now, played = time.perf_counter(), self.played
        for _, event in events:
            if event.finish == "error":
                raise BY_CODE.get(event.code, TridecodeError)(event.error)
            number, answer = event.request, self._answers[event.request]
            if event.tokens and not answer:
                played.first_ms.append((event.cached_tokens > 0, 1000 * (now - self._sent[number])))
            answer += event.tokens
            if event.finish:
                played.output_tokens += len(answer)
                self._open -= 1
                self._conversations[number].answered(answer)
                self._turns[number] += 1
                if self._turns[number] < len(self._conversations[number].turns):
                    self._submit(number)


class _RecordedLoop(DecodeLoop):
    """The serving loop, which also records its steps."""

    played: Played

    def _commit(self, plan: StepPlan, pending: Pending) -> None:
        super()._commit(plan, pending)
        copies = plan.part(HostCopies) or HostCopies()
        decoded = int(plan.query_starts[plan.num_decodes])
        prompts = plan.num_tokens - decoded
        step = PlayedStep(time.perf_counter(), plan.num_decodes, prompts, len(copies.ins), len(copies.outs))
        self.played.steps.append(step)


class Player:
    """Plays loads through one engine, whose prefix cache is on."""

    def __init__(self, engine: Engine):
        self.engine, self.scheduler = engine, make_scheduler(engine)
        engine.pin_host_memory()
        if engine.state.host is not None:
            engine.state.host.pinning.join()

    def play(self, traffic: Traffic, use: str, salt: str) -> Played:
        """Return the figures of a load. use: SamplingParams.cache, or "device": on, without the host tier.
        salt: separates the load from other runs.
        """
        scheduler = self.scheduler
        if scheduler.cache.tier is not None:
            scheduler.cache.tier.is_used = use != "device"
        use = "on" if use == "device" else use
        end_id = self.engine.model_config.end_id
        doors = _ConversationDoors(traffic, scheduler.prompt_hasher, end_id, use, salt)
        loop = _RecordedLoop(self.engine, scheduler, cast(DoorSocket, doors), RankStatus())
        doors.loop, loop.played = loop, doors.played
        computed, cached = scheduler.counters.computed_prompt_tokens, scheduler.cache.cached_tokens
        host = 0 if scheduler.cache.tier is None else scheduler.cache.tier.tokens
        doors.begin()
        began = time.perf_counter()
        loop.run()
        played = doors.played
        played.seconds = time.perf_counter() - began
        played.computed = scheduler.counters.computed_prompt_tokens - computed
        played.cached = scheduler.cache.cached_tokens - cached
        tier = scheduler.cache.tier
        played.host = 0 if tier is None else tier.tokens - host
        return played
