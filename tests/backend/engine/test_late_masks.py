"""Rows that are launched before their masks are known, and sampled later, get the tokens of a loop that
waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backend.engine.grammar_models import constrained_engine, random_model, sampled, tokenizer_folder
from tests.backend.engine.loop_in_thread import LoopInThread, run_loop
from tests.backend.engine.thread_ranks import on_ranks
from tests.checkpoints import TINY_VOCAB, save
from tests.waiting import wait_until
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.grammars.guidance import Guidance
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.schedule.scheduler import Scheduler
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.wire.messages import Cancel, SequenceRequest, Submit
from tridecode.backend.wire.structured_output import StructuredOutput
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

PROMPTS = [[5, 6, 7], [9] * 30, [11, 12]]
OUTPUTS = [
    None,
    StructuredOutput("regex", "[a-z]{3}-[0-9]{2,9}"),
    StructuredOutput("json_schema", '{"type": "array", "items": {"enum": ["x", 12, null]}, "maxItems": 9}'),
    StructuredOutput("choice", '["yes", "no, but"]'),
    None,
    StructuredOutput("regex", "[a-z0-9 ]{70}"),
]


class _DeepEngine(Engine):
    """Two steps are in flight, as on a GPU. late: rows that were sampled late; missed: rows that were not."""

    late = missed = 0

    @property
    def depth(self) -> int:
        return 2

    def sample_late(self, plan: StepPlan, pending: Any, rows: list[int], masks: np.ndarray) -> Any:
        self.late += len(rows)
        self.missed += len(plan.missed)
        return super().sample_late(plan, pending, rows, masks)


@contextmanager
def deep_loop(offline: OfflineEngine) -> Iterator[tuple[LoopInThread, Scheduler]]:
    limits = replace(offline.scheduler.limits, late_masks=True)
    scheduler = Scheduler(limits, time.monotonic, grammars=offline.scheduler.grammars)
    offline.engine.__class__ = _DeepEngine
    try:
        with run_loop(offline.engine, scheduler) as running:
            yield running, scheduler
    finally:
        offline.engine.__class__ = Engine


def requests(**params: Any) -> list[SequenceRequest]:
    return [
        SequenceRequest(
            np.array(PROMPTS[i % len(PROMPTS)], "<i4").tobytes(),
            sampled(**{"seed": i, "max_tokens": 60, **params}),
            structured_output=output,
        )
        for i, output in enumerate(OUTPUTS)
    ]


def waiting(offline: OfflineEngine, wanted: list[SequenceRequest]) -> list[list[int]]:
    """Return the tokens of each request where every mask comes before its step."""
    numbers = [
        offline.submit(
            np.frombuffer(one.prompt, "<i4").tolist(), one.params, structured_output=one.structured_output
        )
        for one in wanted
    ]
    offline.run()
    return [offline.generations[number].tokens for number in numbers]


def late(offline: OfflineEngine, wanted: list[SequenceRequest]) -> list[list[int]]:
    with deep_loop(offline) as (running, scheduler):
        for number, one in enumerate(wanted):
            running.doors.put(Submit(number, [one]))
        wait_until(lambda: len(running.doors.ends) == len(wanted), 60.0)
        assert set(running.doors.ends.values()) <= {"end_id", "length"}
        wait_until(lambda: scheduler.cache.num_free_slots == scheduler.limits.max_sequences, 60.0)
        return [running.doors.tokens[number] for number in range(len(wanted))]


def delay(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Delay every third call for masks."""
    calls, advance = [0], Guidance.advance

    def slow(self: Guidance, *given: Any) -> Any:
        calls[0] += 1
        if calls[0] % 3 == 0:
            time.sleep(seconds)
        return advance(self, *given)

    monkeypatch.setattr(Guidance, "advance", slow)


PARAMETERS = [
    {},
    {"max_tokens": 7},
    {"repetition_penalty": 1.3, "top_p": 0.8, "top_p_decay": 0.9, "bad_words": [[20], [21, 22]]},
    {"top_k": 1, "return_log_probs": True},
]


@pytest.mark.parametrize("params", PARAMETERS)
def test_tokens_are_those_of_a_loop_that_waits(params: dict[str, Any]) -> None:
    offline, wanted = constrained_engine(), requests(**params)
    assert late(offline, wanted) == waiting(offline, wanted)
    assert offline.engine.__dict__.get("late", 0) > 0


def test_rows_whose_masks_are_late_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third call for masks takes 15 ms. Neighbours get their tokens meanwhile, and no token changes."""
    offline, wanted = constrained_engine(), requests()
    expected = waiting(offline, wanted)
    delay(monkeypatch, 0.015)
    assert late(offline, wanted) == expected
    assert offline.engine.__dict__.get("missed", 0) > 5


def test_preempted_rows_are_computed_again() -> None:
    large, small = constrained_engine(), constrained_engine(cache_bytes=20 * 8 * 2 * 32 * 4)
    wanted = [requests()[5] for _ in range(4)]
    assert late(small, wanted) == waiting(large, wanted)


@pytest.mark.parametrize("slow_s", [0.0, 0.015])
def test_tensor_ranks_sample_late_as_rank_0_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_s: float
) -> None:
    """The ranks share a vocabulary of odd size. slow_s: time of every third call for masks."""
    model, folder = random_model(TINY_VOCAB + 51, layers=2), tokenizer_folder()
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(tmp_path / "w")
    settings = {"max_sequences": 8, "max_sequence_tokens": 256, "tokenizer_dir": folder}
    wanted = requests(repetition_penalty=1.2, return_log_probs=True)
    expected, _ = on_ranks(tmp_path / "w", 1, 1, lambda offline: waiting(offline, wanted), **settings)
    if slow_s:
        delay(monkeypatch, slow_s)
    found, engines = on_ranks(tmp_path / "w", 2, 1, lambda offline: late(offline, wanted), **settings)
    assert found == expected
    assert engines[0].__dict__.get("late", 0) > 20
    assert slow_s == 0.0 or engines[0].__dict__.get("missed", 0) > 3


def test_a_cancelled_request_leaves_the_others_alone() -> None:
    offline, wanted = constrained_engine(), requests()
    expected = waiting(offline, wanted)
    with deep_loop(offline) as (running, scheduler):
        for number, one in enumerate(wanted):
            running.doors.put(Submit(number, [one]))
        wait_until(lambda: running.doors.tokens.get(5), 60.0)
        running.doors.put(Cancel(5))
        wait_until(lambda: len(running.doors.ends) == len(wanted), 60.0)
        assert running.doors.ends[5] == "cancelled"
        assert [running.doors.tokens[i] for i in range(5)] == expected[:5]
        wait_until(lambda: scheduler.cache.num_free_slots == scheduler.limits.max_sequences, 60.0)
