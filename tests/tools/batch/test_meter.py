"""The figures of a batch's progress."""

from __future__ import annotations

import time

import msgspec
import pytest

from tridecode.backend.batches.meter import WINDOW_S, Meter
from tridecode.tools.batch.progress import clock_time, duration, state_line, summary

ANSWER = msgspec.Raw(b'{"choices":[{"text":"x"}],"usage":{"prompt_tokens":5,"completion_tokens":20}}')
EMBEDDING = msgspec.Raw(b'{"data":[],"usage":{"prompt_tokens":5,"total_tokens":5}}')


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def answered(meter: Meter, clock: Clock, per_second: int, seconds: int) -> None:
    for _ in range(seconds):
        clock.now += 1
        for _ in range(per_second):
            meter.add_answer(ANSWER)
        meter.sample()


def test_the_end_is_estimated_from_lines_of_this_run_alone() -> None:
    clock = Clock()
    meter = Meter(clock)
    for _ in range(5000):
        meter.skip(is_answer=True)
    assert meter.seconds_left() is None  # nothing is known yet
    answered(meter, clock, 10, 10)
    assert meter.seconds_left() is None  # the lines are not counted yet
    meter.counted, meter.empty = 6101, 1
    assert meter.seconds_left() == pytest.approx(100)
    assert "5,100 of 6,100 lines, 0 errors, 200 tokens/s, 1 min 40 s left" in state_line(meter, "", 0.0)


def test_the_estimate_follows_a_service_that_slows_down_or_stops() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.counted = 100_000
    answered(meter, clock, 100, 60)
    fast = meter.seconds_left()
    assert fast == pytest.approx(940)
    clock.now += 60  # a minute without an answer
    meter.sample()
    assert meter.seconds_left() == pytest.approx(2 * fast)
    answered(meter, clock, 10, int(2 * WINDOW_S))
    assert meter.seconds_left() == pytest.approx((94_000 - 6000) / 10, rel=0.02)
    assert "waiting for the service (503: no engine)" in state_line(meter, "503: no engine", 0.0)


def test_a_few_answers_are_no_estimate() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.counted = 1000
    answered(meter, clock, 1, 9)
    assert meter.seconds_left() is None
    answered(meter, clock, 1, 1)
    assert meter.seconds_left() == pytest.approx(990)


def test_a_summary_says_what_was_done() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.counted = 10
    answered(meter, clock, 2, 4)
    meter.skip(is_answer=False)
    meter.add_error()
    done = summary(meter, "out.errors.jsonl", stopped=False)
    assert done == (
        "10 lines: 8 answers, 2 errors in out.errors.jsonl, 1 of them done before, "
        "160 tokens in 4 s (40 tokens/s)"
    )
    assert summary(meter, "e", stopped=True).startswith("stopped after 10 of 10 lines: 8 answers")
    only = Meter(clock)
    only.add_answer(EMBEDDING)
    only.add_answer(msgspec.Raw(b'{"usage":"none"}'))
    clock.now += 1
    assert summary(only, "e", stopped=False) == (
        "2 lines: 2 answers, no errors, 5 prompt tokens in 1 s (5 prompt tokens/s)"
    )


def test_times_are_readable() -> None:
    assert [duration(s) for s in (0.4, 59.6, 3599, 3600, 90_061)] == [
        *("0 s", "1 min 0 s", "59 min 59 s", "1 h 0 min", "25 h 1 min")
    ]
    noon = time.mktime((2026, 11, 26, 12, 0, 0, 0, 0, -1))
    assert clock_time(noon, 300) == "12:05" and clock_time(noon, 86_400) == "2026-11-27 12:00"
