"""The loop of a rank > 0: plans arrive in a thread, and the next one is launched before the step in flight
ends."""

from __future__ import annotations

import re
import threading
import time
from queue import Queue
from types import SimpleNamespace

import numpy as np
import pytest

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.loop import follow
from tridecode.backend.engine.step import plan_frame, plan_wire
from tridecode.backend.engine.step.decode_graphs import decode_plan
from tridecode.backend.engine.step.plan import LateSamples, StepPlan
from tridecode.backend.supervisor.rank_link import RankStatus

WAIT_S = 60.0
WORDS = 3  # per mask


class Ranks:
    """Plans from a queue; None is the end, an exception is raised."""

    def __init__(self) -> None:
        self.plans: Queue[StepPlan | Exception | None] = Queue()

    def broadcast_plan(self, plan: None) -> StepPlan | None:
        found = self.plans.get(timeout=WAIT_S)
        if isinstance(found, Exception):
            raise found
        return found


class Step:
    """A step that the device ends when the test says so."""

    def __init__(self, number: int, log: list[str]):
        self.number, self.log, self.end = number, log, threading.Event()

    @property
    def is_done(self) -> bool:
        return self.end.is_set()

    def wait(self) -> None:
        assert self.end.wait(WAIT_S)
        self.log.append(f"waited {self.number}")


class Engine:
    def __init__(self, is_asynchronous: bool):
        self.ranks, self.is_asynchronous = Ranks(), is_asynchronous
        self.log: list[str] = []
        self.steps: dict[int, Step] = {}
        sampling = SimpleNamespace(masks=np.zeros((2, WORDS), np.int32))
        self.state = SimpleNamespace(sampling=sampling)

    def launch(self, plan: StepPlan) -> Step:
        self.log.append(f"launched {plan.step}")
        step = Step(plan.step, self.log)
        if not self.is_asynchronous:
            step.end.set()
        self.steps[plan.step] = step
        return step

    def sample_late(self, plan: StepPlan, pending: Step, rows: list[int], masks: np.ndarray) -> Step:
        assert masks.shape == (len(rows), WORDS)
        self.log.append(f"sampled {rows} of {plan.step}")
        return pending


def numbered(step: int) -> StepPlan:
    plan = decode_plan(1)
    plan.step = step
    return plan


def until(condition) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def started(engine: Engine) -> tuple[threading.Thread, RankStatus, list[BaseException]]:
    status, errors = RankStatus(), []  # type: ignore[var-annotated]

    def run() -> None:
        try:
            follow(engine, status)  # type: ignore[arg-type]
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, status, errors


def test_a_device_has_the_next_step_before_the_one_before_has_ended() -> None:
    engine = Engine(is_asynchronous=True)
    thread, status, errors = started(engine)
    for step in (1, 2, 3):
        engine.ranks.plans.put(numbered(step))
    until(lambda: 2 in engine.steps)
    time.sleep(0.02)
    assert engine.log == ["launched 1", "launched 2"] and status.busy_since  # two in flight, never three
    engine.steps[1].end.set()
    until(lambda: 3 in engine.steps)
    assert engine.log == ["launched 1", "launched 2", "waited 1", "launched 3"]
    engine.steps[2].end.set()
    engine.steps[3].end.set()
    until(lambda: not status.busy_since)  # idle: a supervisor must not count the wait for a plan as a step
    assert status.steps == 3
    engine.ranks.plans.put(None)
    thread.join(WAIT_S)
    assert not thread.is_alive() and not errors


def test_a_step_ends_although_no_further_plan_comes() -> None:
    engine = Engine(is_asynchronous=True)
    thread, status, _ = started(engine)
    engine.ranks.plans.put(numbered(1))
    until(lambda: 1 in engine.steps)
    engine.steps[1].end.set()
    until(lambda: engine.log == ["launched 1", "waited 1"])
    engine.ranks.plans.put(None)
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_on_a_cpu_each_step_ends_before_the_next() -> None:
    engine = Engine(is_asynchronous=False)
    for step in (1, 2):
        engine.ranks.plans.put(numbered(step))
    engine.ranks.plans.put(None)
    thread, status, errors = started(engine)
    thread.join(WAIT_S)
    assert engine.log == ["launched 1", "waited 1", "launched 2", "waited 2"] and not errors
    assert status.steps == 2 and not status.busy_since


def test_late_rows_are_sampled_once_rank_0_has_sent_their_masks() -> None:
    """Rank 0 sends the masks after the previous step has ended, so the follower must end that step first."""
    engine = Engine(is_asynchronous=True)
    thread, _, errors = started(engine)
    first, second = numbered(1), numbered(2)
    second.late = [0]
    for one in (first, second):
        engine.ranks.plans.put(one)
    until(lambda: 2 in engine.steps)
    engine.steps[1].end.set()
    until(lambda: "waited 1" in engine.log)
    assert engine.log == ["launched 1", "launched 2", "waited 1"]
    engine.ranks.plans.put(LateSamples(2, [0], np.zeros((1, WORDS), np.int32)))
    engine.ranks.plans.put(numbered(3))
    until(lambda: 3 in engine.steps)
    assert engine.log[3:] == ["sampled [0] of 2", "launched 3"]
    for step in engine.steps.values():
        step.end.set()
    engine.ranks.plans.put(None)
    thread.join(WAIT_S)
    assert not thread.is_alive() and not errors


@pytest.mark.parametrize("late", [[3], [0]])
def test_late_samples_that_do_not_fit_end_the_rank(late: list[int]) -> None:
    engine = Engine(is_asynchronous=False)
    plan = numbered(5)
    plan.late = [0]
    engine.ranks.plans.put(plan)
    engine.ranks.plans.put(LateSamples(5, late, np.zeros((1, WORDS + 1), np.int32)))
    thread, _, errors = started(engine)
    thread.join(WAIT_S)
    (error,) = errors
    assert re.search("plan 5 from rank 0 has late rows|masks of 4 words; wanted 3", str(error))


def test_rank_0_may_end_before_it_samples_late_rows() -> None:
    engine = Engine(is_asynchronous=False)
    plan = numbered(5)
    plan.late = [0]
    engine.ranks.plans.put(plan)
    engine.ranks.plans.put(None)
    thread, _, errors = started(engine)
    thread.join(WAIT_S)
    assert not thread.is_alive() and not errors


def test_a_damaged_plan_ends_the_rank_with_its_text() -> None:
    engine = Engine(is_asynchronous=False)
    engine.ranks.plans.put(TridecodeError("plan 7 from rank 0 is damaged"))
    thread, _, errors = started(engine)
    thread.join(WAIT_S)
    assert [str(error) for error in errors] == ["plan 7 from rank 0 is damaged"]


@pytest.mark.parametrize("size", [1, 100, plan_wire.FIRST_BYTES - 8, plan_wire.FIRST_BYTES - 7, 100_000])
def test_a_frame_is_one_message_up_to_its_size_and_two_beyond(size: int) -> None:
    frame = np.random.default_rng(size).bytes(size)
    first, *more = plan_wire.messages(frame)
    assert len(first) == plan_wire.FIRST_BYTES and len(more) == (size > plan_wire.FIRST_BYTES - 8)
    head, missing = plan_wire.read_first(first)
    assert missing == sum(map(len, more))
    assert head + b"".join(part.tobytes() for part in more) == frame


def test_the_end_is_a_message_and_a_damaged_length_is_refused() -> None:
    (first,) = plan_wire.messages(b"")
    assert plan_wire.read_first(first) == (b"", 0)
    for size in (-1, plan_frame.MAX_BYTES + 1):
        first[:8].view("<i8")[0] = size
        with pytest.raises(TridecodeError, match="a plan has"):
            plan_wire.read_first(first)
