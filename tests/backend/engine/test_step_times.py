"""The time that steps take in service decides whether drafts are worth it, not only costs of the start."""

from __future__ import annotations

import pytest

from tridecode.backend.engine.speculation.depth import DepthPolicy, StepCosts
from tridecode.backend.engine.speculation.records import DraftRecord
from tridecode.backend.engine.speculation.step_times import StepTimes

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


def test_drafts_end_where_steps_with_drafts_take_longer_than_measured_and_are_tried_again() -> None:
    policy = DepthPolicy(COSTS, 7)
    assert drafts_of(policy) == 3
    now = run(policy, 0.0, 5, 1.3, 1)  # plain steps also take longer than measured
    now = run(policy, now, 100, 1.3 * 1.1, 4)
    assert drafts_of(policy) == 3 and policy.times.overhead == pytest.approx(1.0, abs=1e-6)
    now = run(policy, now, 100, 1.3 * 4.0, 4)
    assert drafts_of(policy) == 0 and policy.times.overhead == pytest.approx(4.0 / 1.1, rel=0.02)
    now = run(policy, now, 1000, 1.3, 1)
    assert drafts_of(policy) == 0
    run(policy, now, 20_000, 1.3, 1)
    assert drafts_of(policy) > 0


def test_drafts_end_within_a_few_steps_where_no_plain_step_came_before() -> None:
    policy = DepthPolicy(COSTS, 7)
    run(policy, 0.0, 3, 3.0, 4)
    assert drafts_of(policy) == 0


def test_only_intervals_between_equal_steps_count() -> None:
    policy = DepthPolicy(COSTS, 7)
    now = run(policy, 0.0, 3, 1.0, 1)
    for _ in range(50):  # steps of several shapes, steps with prompts, and pauses
        now = run(policy, now, 1, 4.0, 4)
        now = run(policy, now, 1, 3.0, 1, rows=4)
        now = run(policy, now, 1, 3.0, 1, rows=0)
        now = run(policy, now, 2, 900.0, 4)
        now = run(policy, now, 1, 3.0, 1, rows=0)
    assert policy.times.overhead == 1.0


def test_faster_steps_with_drafts_do_not_count_as_cheaper() -> None:
    times = StepTimes()
    for step in range(1, 20):
        times.take((1, 1), float(step), 1.0)
    for step in range(20, 40):
        times.take((1, 4), 20 + 0.5 * step, 1.2)
    assert times.overhead == 1.0


def test_shapes_that_were_not_measured_are_left_out() -> None:
    policy = DepthPolicy(COSTS, 7)
    run(policy, 0.0, 10, 1.0, 16)
    run(policy, 0.0, 10, 1.0, 1, rows=64)
    assert policy.times.overhead == 1.0
