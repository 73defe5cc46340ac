"""Predicts the tokens per second of a load with the real scheduler and a cost model of the device."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import numpy as np

from tridecode.backend.engine.schedule.admission import SchedulerLimits
from tridecode.backend.engine.schedule.scheduler import Scheduler
from tridecode.backend.engine.step.plan import StepPlan, StepResult
from tridecode.backend.wire import messages as m
from tridecode.tools.bench.measure import Job
from tridecode.tools.bench.prefix.traffic import Traffic
from tridecode.tools.bench.studies.step_model import BLOOM, LLAMA, StepCost

_DOOR = b"model"
#: shapes with known costs, on an H200 with 16-bit weights and cache
_COSTS = {"llama-3-8b": LLAMA, "bloom-7b1": BLOOM}
#: card -> time per byte of memory relative to an H200: a step of LLaMA-3-8B with one sequence
#: takes 5.16 ms on an H100 and 3.90 on an H200; GEMMs of many rows take the same time
_BYTE_TIMES = {"H200": 1.0, "H100": 1.315}


def cost_of(job: Job, card: str) -> StepCost | None:
    """Return the cost of a job's steps on the card of this name; None if its constants are unknown."""
    byte_time = next((factor for name, factor in _BYTE_TIMES.items() if name in card), 0.0)
    is_plain = not (job.quantization or job.int8_head) and job.tensor_para_size == 1
    if not is_plain or job.kv_cache_dtype != "auto" or job.preset not in _COSTS:
        return None
    if not byte_time or job.chosen_dtype == "fp32":
        return None
    cost = _COSTS[job.preset]
    return replace(cost, weights=byte_time * cost.weights, cached_token=byte_time * cost.cached_token)


def predicted_rate(traffic: Traffic, limits: SchedulerLimits, cost: StepCost, use: str) -> float:
    """Return the output tokens per second of a load. use: SamplingParams.cache.

    The simulation keeps two steps in flight, as the serving loop does. It neglects the host and has
    no host tier.
    """
    return _Simulation(traffic, limits, cost, use).rate()


class _Simulation:
    def __init__(self, traffic: Traffic, limits: SchedulerLimits, cost: StepCost, use: str):
        self._traffic, self._cost, self._use = traffic, cost, use
        self._scheduler = Scheduler(limits, time.monotonic)
        self._turns = [0] * len(traffic.conversations)
        self._tokens = 0

    def rate(self) -> float:
        for number in range(len(self._turns)):
            self._submit(number)
        pending: deque[tuple[StepPlan, float]] = deque()
        free = known = 0.0  # seconds: end of the device's last step; end of the last committed one
        while pending or self._scheduler.has_work:
            plan = self._scheduler.plan()
            if plan is not None:
                free = max(free, known) + self._cost.of(plan) / 1000
                pending.append((plan, free))
            if pending and (plan is None or len(pending) == 2):
                done, known = pending.popleft()
                self._commit(done)
        return self._tokens / known

    def _submit(self, number: int) -> None:
        one, turn = self._traffic.conversations[number], self._turns[number]
        length = one.turns[turn].answer
        params = m.SamplingParams(max_tokens=length, min_tokens=length, end_id=-1, cache=self._use)
        ids = np.ascontiguousarray(one.prompt(turn), "<i4").tobytes()
        self._scheduler.submit(_DOOR, m.Submit(number, [m.SequenceRequest(ids, params)]))

    def _commit(self, plan: StepPlan) -> None:
        count = int(plan.samples.sum())
        result = StepResult(np.zeros(count, np.int32), np.zeros(count, np.float32))
        for _, event in self._scheduler.commit(plan, result):
            self._tokens += len(event.tokens)
            if event.finish:
                number = event.request
                one = self._traffic.conversations[number]
                one.answered([0] * one.turns[self._turns[number]].answer)
                self._turns[number] += 1
                if self._turns[number] < len(one.turns):
                    self._submit(number)
