"""Threads that compile grammars: a long job holds up no short one, on as few threads as there are."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tridecode.backend.engine.grammars.compile_threads import CompileThreads, Turn

TIMEOUT_S = 60.0


@dataclass
class Job:
    """is_long: it gives way, or is given up, and ends when `may_end` is set."""

    name: str
    is_long: bool = False
    may_end: threading.Event = field(default_factory=threading.Event)


class Harness:
    """Two threads, and what they did: (name, "done" | "waits" | "given up")."""

    def __init__(self, count: int = 2):
        self.threads = CompileThreads(self.work)
        self.events: queue.Queue[tuple[str, str]] = queue.Queue()
        self.long_jobs: list[Job] = []
        self.started = [
            threading.Thread(target=self.threads.run, args=(i,), daemon=True) for i in range(count)
        ]
        for thread in self.started:
            thread.start()

    def work(self, job: Job, turn: Turn) -> bool:
        if job.is_long and turn.is_short:
            self.events.put((job.name, "given up"))
            return False
        if job.is_long:
            turn.give_way()
            self.events.put((job.name, "waits"))
            assert job.may_end.wait(TIMEOUT_S)
        self.events.put((job.name, "done"))
        return True

    def put(self, name: str, is_long: bool = False) -> Job:
        job = Job(name, is_long)
        if is_long:
            self.long_jobs.append(job)
        self.threads.put(job)
        return job

    def next(self) -> tuple[str, str]:
        return self.events.get(timeout=TIMEOUT_S)

    def first_long(self, name: str = "long") -> Job:
        """Put a long job that a thread keeps. The other thread may not have reached its wait yet."""
        job = self.put(name, True)
        while (found := self.next()) != (name, "waits"):
            assert found == (name, "given up")
        return job

    def close(self) -> None:
        for job in self.long_jobs:
            job.may_end.set()
        self.threads.close()
        for thread in self.started:
            thread.join(TIMEOUT_S)
        assert not any(thread.is_alive() for thread in self.started)


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.close()


def test_short_jobs_end_while_a_long_one_continues(harness: Harness) -> None:
    job = harness.first_long()
    for number in range(20):
        harness.put(str(number))
    assert [harness.next() for _ in range(20)] == [(str(number), "done") for number in range(20)]
    job.may_end.set()
    assert harness.next() == ("long", "done")


def test_a_long_job_is_given_up_while_no_other_thread_is_idle_and_done_later(harness: Harness) -> None:
    first = harness.first_long()
    second = harness.put("second", True)
    assert harness.next() == ("second", "given up")
    harness.put("short")
    assert harness.next() == ("short", "done")
    first.may_end.set()
    assert harness.next() == ("long", "done")
    assert harness.next() == ("second", "waits")
    harness.put("another")
    assert harness.next() == ("another", "done")
    second.may_end.set()
    assert harness.next() == ("second", "done")


def test_every_job_is_done_once_whatever_comes() -> None:
    made = Harness(3)
    try:
        names = []
        for number in range(300):
            job = made.put(f"{number}", is_long=number % 5 == 0)
            job.may_end.set()
            names.append(job.name)
        done: list[str] = []
        while len(done) < len(names):
            name, event = made.next()
            done += [name] * (event == "done")
        assert sorted(done) == sorted(names)
    finally:
        made.close()


def test_closing_ends_the_threads_after_their_jobs() -> None:
    made = Harness()
    job = made.first_long()
    made.threads.close()
    job.may_end.set()
    for thread in made.started:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert made.next() == ("long", "done")
