"""The host's work for a step with lookup that finds nothing, counted in calls of functions: times vary."""

from __future__ import annotations

import sys
from collections import deque
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch

from tests.backend.engine.offline_models import offline_engine
from tests.backend.hf_models import gpt2
from tridecode.backend.engine.device import preparation
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.scheduler_factory import make_scheduler
from tridecode.backend.engine.speculation.depth import StepCosts
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.wire.messages import SamplingParams, SequenceRequest, Submit

ROWS, PROMPT, NEW, VOCAB = 16, 12, 40, 1000
SIZES = (1, 2, 4, 8, 16)
#: ids that no prompt has; with 16 rows a row repeats none of its ids within NEW steps
IDS = 900


class Calls:
    """Counts calls of functions of Python and C within `counted`."""

    def __init__(self) -> None:
        self.number, self._counts = 0, False

    def __call__(self, frame: object, event: str, argument: object) -> None:
        self.number += self._counts and event in ("call", "c_call")

    @contextmanager
    def counted(self, counts: bool = True):
        before, self._counts = self._counts, counts
        try:
            yield
        finally:
            self._counts = before


def engine_of(speculation: str) -> Engine:
    costs = StepCosts(
        {size: 1.0 for size in SIZES}, {(size, width): 1.1 for size in SIZES for width in (2, 4, 8)}
    )
    with mock.patch.object(preparation, "measured_costs", lambda engine, most_queries: costs):
        offline = offline_engine(
            gpt2(positions=64, vocab=VOCAB), device="cpu", keep_logits=False, speculation=speculation,
            max_sequences=ROWS, max_step_tokens=ROWS * PROMPT, max_sequence_tokens=64, block_tokens=64,
        )  # fmt: skip
    return offline.engine


def calls_per_step(engine: Engine, rows: int, speculate: bool) -> float:
    """Run `rows` sequences with two steps in flight, as on a GPU, where the model and the search belong to a
    graph; return the median calls of a step of decode rows apart from these."""
    calls, counts = Calls(), []

    def replay(plan: StepPlan, parts: list) -> bool:
        with calls.counted(False), torch.inference_mode():
            batch = engine.buffers.load(plan)
            engine.sampler.start(plan)
            ids = np.arange(plan.num_samples) + plan.step * plan.num_samples
            engine.sampler.tokens[: plan.num_samples] = torch.from_numpy(ids % IDS)
            if engine.drafter is not None:
                engine.drafter.sampled(batch)
        return True

    scheduler = make_scheduler(engine)
    for number in range(rows):
        prompt = np.random.default_rng(number).integers(IDS, VOCAB, PROMPT).astype(np.int32).tobytes()
        params = SamplingParams(max_tokens=NEW, min_tokens=NEW, speculate=speculate, cache="off")
        scheduler.submit(b"door", Submit(number, [SequenceRequest(prompt, params)]))
    pending: deque = deque()
    with mock.patch.object(engine, "_replay", replay):
        sys.setprofile(calls)
        try:
            while scheduler.has_work or pending:
                before = calls.number
                with calls.counted():
                    plan = scheduler.plan()
                    if plan is not None:
                        pending.append((plan, engine.launch(plan)))
                    if pending and (plan is None or len(pending) == 2):
                        oldest, step = pending.popleft()
                        scheduler.commit(oldest, step.wait())
                if plan is not None and plan.num_decodes == rows:
                    counts.append(calls.number - before)
        finally:
            sys.setprofile(None)
    drafts = scheduler.planner.drafts
    assert drafts is None or (drafts.learning is not None and not any(drafts.learning.drafted.values()))
    assert len(counts) >= NEW - 5
    return float(np.median(counts))


def test_a_step_that_finds_nothing_costs_the_host_little_more_than_a_plain_one() -> None:
    """The difference does not grow with the number of rows."""
    lookup, without = engine_of("lookup"), engine_of("off")
    for rows in (1, ROWS):
        declined, found_nothing = (calls_per_step(lookup, rows, speculate) for speculate in (False, True))
        assert 0 < found_nothing - declined <= 12
        assert 0 < declined - calls_per_step(without, rows, True) <= 60
