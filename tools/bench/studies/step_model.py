"""Simulates a load with the real scheduler and a cost model of the device, to predict the gain of admission
rules.

    python -m tridecode.tools.bench.studies.step_model

A step takes the time of its cached tokens, plus the longer of reading all weights and multiplying its tokens,
plus a constant, which is larger if it has prompts (StepCost). The constants are an H200's with 16-bit weights
(docs/lab/loads.md); the host is never the limit. Two steps are in flight, as in the serving loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tridecode.backend.engine.schedule.admission import SchedulerLimits
from tridecode.backend.engine.schedule.scheduler import Scheduler
from tridecode.backend.engine.step.plan import StepPlan, StepResult
from tridecode.backend.wire import messages as m
from tridecode.tools.bench.load.workloads import LAMBADA, LAMBADA_OUTPUT, mix_requests, workload_prompts

_DOOR, _BLOCK = b"model", 16


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of a step of an engine.

    weights: reading all weights once. token: the GEMMs of one token. cached_token: reading one token of the
    cache. step: constant of every step; prompt_step: additional constant of a step with prompts.
    """

    weights: float
    token: float
    cached_token: float
    step: float = 0.55
    prompt_step: float = 0.5

    def of(self, plan: StepPlan) -> float:
        prompts = plan.num_tokens - plan.num_decodes
        cached = float(plan.context_lens[: plan.num_decodes].sum()) * self.cached_token
        return (
            self.step
            + cached
            + max(self.weights, self.token * plan.num_tokens)
            + (self.prompt_step if prompts else 0.0)
        )


#: BLOOM-7B1 in fp16 and LLaMA-3-8B in bf16: weight bytes at 4.3 TB/s, 64 prompts of 512 tokens, and cached
#: bytes at 4.0 TB/s; the rest fits the steps of 1 to 256 sequences to 7 %
BLOOM = StepCost(weights=3.29, token=0.0205, cached_token=1.23e-4)
LLAMA = StepCost(weights=3.49, token=0.0222, cached_token=3.3e-5)


@dataclass
class Outcome:
    """seconds: of the whole load. kinds: of each step, (milliseconds, decoding rows, tokens of prompts).
    gaps: milliseconds between the tokens of each sequence.
    """

    seconds: float = 0.0
    kinds: list[tuple[float, int, int]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    @property
    def mixed(self) -> list[tuple[float, int, int]]:
        return [kind for kind in self.kinds if kind[2]]


def simulate(
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[int],
    slots: int,
    cost: StepCost,
    max_step_tokens: int = 8192,
    spread_tokens: int = 0,
    arrivals: Sequence[float] | None = None,
    cache_scope: str = "none",
) -> Outcome:
    """The load through a Scheduler with `slots` slots and cache for all of them. spread_tokens: of
    SchedulerLimits. arrivals: seconds; None: all requests at once. cache_scope: "all": equal beginnings of
    prompts are computed once.
    """
    longest = max(len(prompt) + output for prompt, output in zip(prompts, outputs))
    limits = SchedulerLimits(
        num_blocks=slots * -(-longest // _BLOCK),
        block_tokens=_BLOCK,
        max_sequences=slots,
        max_sequence_tokens=longest,
        max_step_tokens=max_step_tokens,
        max_queued_requests=len(prompts),
        vocab_size=max(map(max, prompts)) + 1,
        request_timeout_s=1e9,
        spread_tokens=spread_tokens,
        cache_scope=cache_scope,
    )
    return _Run(Scheduler(limits, lambda: 0.0), cost).all_of(
        prompts, outputs, arrivals or [0.0] * len(prompts)
    )


class _Run:
    def __init__(self, scheduler: Scheduler, cost: StepCost):
        self.scheduler, self.cost, self.found = scheduler, cost, Outcome()
        self.now = 0.0  # seconds, when the device is free
        self._last: dict[int, float] = {}

    def all_of(
        self, prompts: Sequence[Sequence[int]], outputs: Sequence[int], arrivals: Sequence[float]
    ) -> Outcome:
        coming = deque(sorted(zip(arrivals, range(len(prompts)))))
        pending: deque[tuple[StepPlan, float]] = deque()
        known = 0.0  # time of the host: the end of the newest step that it has committed
        while coming or pending or self.scheduler.has_work:
            while coming and coming[0][0] <= known:
                _, number = coming.popleft()
                self._submit(number, prompts[number], outputs[number])
            plan = self.scheduler.plan()
            if plan is not None:
                self.now = max(self.now, known) + self._take(plan)
                pending.append((plan, self.now))
            if pending and (plan is None or len(pending) == 2):
                done, known = pending.popleft()
                self._commit(done, known)
            elif plan is None and coming:
                known = max(known, coming[0][0])
        self.found.seconds = self.now
        return self.found

    def _submit(self, number: int, prompt: Sequence[int], output: int) -> None:
        params = m.SamplingParams(max_tokens=output, min_tokens=output, end_id=-1)
        ids = np.asarray(prompt, np.int32).tobytes()
        self.scheduler.submit(_DOOR, m.Submit(number, [m.SequenceRequest(ids, params)]))

    def _take(self, plan: StepPlan) -> float:
        milliseconds = self.cost.of(plan)
        self.found.kinds.append((milliseconds, plan.num_decodes, plan.num_tokens - plan.num_decodes))
        return milliseconds / 1000

    def _commit(self, plan: StepPlan, at: float) -> None:
        count = int(plan.samples.sum())
        result = StepResult(np.zeros(count, np.int32), np.zeros(count, np.float32))
        for _, event in self.scheduler.commit(plan, result):
            if event.tokens and event.request in self._last:
                self.found.gaps.append(1000 * (at - self._last[event.request]))
            if event.tokens:
                self._last[event.request] = at


def lambada(slots: int, cost: StepCost = BLOOM, count: int = 5153, **changes: Any) -> Outcome:
    """`count` prompts of LAMBADA's lengths, 3 new tokens each. changes: as arguments of simulate."""
    prompts = workload_prompts(LAMBADA, 1000, count)
    return simulate(prompts, [LAMBADA_OUTPUT] * len(prompts), slots, cost, **changes)


def mix(slots: int, cost: StepCost = LLAMA, rate: float = 0.0, count: int = 1000, **changes: Any) -> Outcome:
    """`count` chats, all at once or `rate` a second."""
    prompts, outputs = mix_requests(1000, count)
    gaps = np.random.default_rng(0).exponential(1 / rate, count) if rate else np.zeros(count)
    return simulate(prompts, outputs, slots, cost, arrivals=np.cumsum(gaps).tolist(), **changes)


def _row(name: str, found: Outcome) -> str:
    p50, p95, p99 = np.percentile(found.gaps, (50, 95, 99))
    mean = sum(kind[2] for kind in found.mixed) / max(len(found.mixed), 1)
    return (
        f"{name:44} {found.seconds:6.2f} s  {len(found.kinds):5d} steps, {len(found.mixed):4d} with prompts "
        f"of {mean:6.0f} tokens  gaps {p50:5.1f} / {p95:5.1f} / {p99:5.1f} ms"
    )


def main() -> None:
    for overhead in (0.5, 1.5, 2.3):
        bloom, llama = replace(BLOOM, prompt_step=overhead), replace(LLAMA, prompt_step=overhead)
        print(f"a step with prompts costs {overhead} ms besides")
        for spread in (0, 512):
            found = lambada(16, bloom, spread_tokens=spread)
            print(_row(f"lambada, 16 at a time, spread_tokens {spread}", found))
        for tokens in (8192, 16384):
            found = lambada(256, bloom, max_step_tokens=tokens)
            print(_row(f"lambada, 256 at a time, max_step_tokens {tokens}", found))
            print(_row(f"mix, 256 slots, max_step_tokens {tokens}", mix(256, llama, max_step_tokens=tokens)))


if __name__ == "__main__":
    main()
