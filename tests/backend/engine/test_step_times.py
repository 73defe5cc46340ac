"""The time that steps take in service decides whether drafts are worth it, not only costs of the start."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tridecode.backend.engine.speculation.depth import DepthPolicy, StepCosts
from tridecode.backend.engine.speculation.learning import Learning
from tridecode.backend.engine.speculation.records import DraftRecord
from tridecode.backend.engine.speculation.step_times import StepTimes
from tridecode.backend.engine.step.decode_graphs import decode_plan
from tridecode.backend.engine.step.plan import StepResult

COSTS = StepCosts({1: 1.0, 4: 1.0}, {(1, 2): 1.05, (1, 4): 1.1, (4, 2): 1.1, (4, 4): 1.2})


def run(policy: DepthPolicy, now: float, steps: int, seconds: float, width: int, rows: int = 1) -> float:
    """Take the results of equal steps; return the time of the last."""
    for _ in range(steps):
        now += seconds
        policy.took(rows, width, now)
    return now


def drafts_of(policy: DepthPolicy) -> int:
    (count,) = policy.choose([DraftRecord(matched=8, source=1)], [3])
    return count


def test_drafts_end_where_steps_with_drafts_take_longer_than_measured_and_are_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = DepthPolicy(COSTS, 7)
    learning = Learning(policy, None)
    assert drafts_of(policy) == 3
    now = run(policy, 0.0, 6, 1.3, 1)  # plain steps also take longer than measured
    now = run(policy, now, 100, 1.3 * 1.1, 4)
    assert drafts_of(policy) == 3 and policy.times.seconds((1, 4), 1.1) == pytest.approx(1.43)
    now = run(policy, now, 9, 4.4, 4)
    assert drafts_of(policy) == 0 and policy.times.seconds((1, 4), 1.1) == pytest.approx(4.4)
    clock = itertools.count(now, 1.3)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    step = decode_plan(1), StepResult(np.ones(1, np.int32), np.zeros(1, np.float32))
    for _ in range(4095):
        learning.end_step(*step)
    assert drafts_of(policy) == 0
    learning.end_step(*step)
    assert drafts_of(policy) == 3


def test_a_few_slow_steps_do_not_count() -> None:
    """The first steps with drafts take long, and later the host pauses now and then."""
    policy = DepthPolicy(COSTS, 7)
    now = run(policy, 0.0, 6, 1.0, 1)
    for _ in range(4):
        now = run(policy, now, 1, 1.1, 4)
        now = run(policy, now, 1, 4.0, 4)
        assert drafts_of(policy) == 3
        now = run(policy, now, 1, 1.1, 4)
    assert policy.times.seconds((1, 4), 1.1) == pytest.approx(1.1)


def test_each_width_has_its_own_time() -> None:
    """Steps of four tokens wait for the host, steps of eight do not."""
    policy = DepthPolicy(StepCosts({1: 1.0}, {(1, 4): 1.1, (1, 8): 1.3}), 7)
    now = run(policy, 0.0, 6, 1.0, 1)
    now = run(policy, now, 6, 2.2, 4)
    assert policy.times.seconds((1, 8), 1.3) == pytest.approx(2.6), "not known yet: as the other width"
    run(policy, now, 6, 1.3, 8)
    assert policy.times.seconds((1, 4), 1.1) == pytest.approx(2.2)
    assert policy.times.seconds((1, 8), 1.3) == pytest.approx(1.3)
    assert policy.choose([DraftRecord(matched=8, source=1)], [7]) == [7]


def test_drafts_end_within_a_few_steps_where_no_plain_step_came_before() -> None:
    policy = DepthPolicy(COSTS, 7)
    run(policy, 0.0, 6, 3.0, 4)
    assert drafts_of(policy) == 0


def test_only_intervals_between_equal_steps_count() -> None:
    policy = DepthPolicy(COSTS, 7)
    now = run(policy, 0.0, 6, 1.0, 1)
    for _ in range(50):  # steps of several shapes, steps with prompts, and pauses
        now = run(policy, now, 1, 4.0, 4)
        now = run(policy, now, 1, 3.0, 1, rows=4)
        now = run(policy, now, 1, 3.0, 1, rows=3)
        now = run(policy, now, 1, 3.0, 1, rows=0)
        now = run(policy, now, 2, 900.0, 4)
        now = run(policy, now, 1, 3.0, 1, rows=0)
    assert [policy.times.seconds(shape, 1.0) for shape in ((1, 1), (1, 4), (4, 1))] == [1.0, 1.0, 1.0]


def test_a_width_that_is_not_known_is_not_faster_than_plain_steps() -> None:
    times = StepTimes()
    for step in range(1, 20):
        times.take(1, (1, 1), float(step), 1.0)
    for step in range(20, 40):
        times.take(1, (1, 4), 20 + 0.5 * step, 1.0)
    assert times.seconds((1, 4), 1.0) == 0.5 and times.seconds((1, 8), 1.0) == 1.0


def test_shapes_that_were_not_measured_are_left_out() -> None:
    policy = DepthPolicy(COSTS, 7)
    run(policy, 0.0, 10, 2.0, 16)
    run(policy, 0.0, 10, 2.0, 1, rows=64)
    assert policy.times.seconds((1, 4), 1.0) == policy.times.seconds((1, 1), 1.0) == 1.0
