"""Threads that compile grammars, so that typical grammars do not wait for large ones. No torch.

One thread at a time, the leader, takes new jobs. If a job takes long, its thread keeps it and an idle
thread becomes the leader. If all other threads are busy, the leader gives up a job that takes long, and the
next idle thread starts it again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any


@dataclass(frozen=True)
class Turn:
    """One job of a thread.

    number: number of the thread. is_short: give up the job if it takes long. give_way: lets another thread
    take new jobs.
    """

    number: int
    is_short: bool
    give_way: Callable[[], None]


class CompileThreads:
    """Jobs for at least two threads, which execute `run`.

    work: does a job, and must not raise. It calls `give_way` of its turn if the job takes long, and returns
    False if the job was given up.
    """

    def __init__(self, work: Callable[[Any, Turn], bool]):
        self._work = work
        self._new: SimpleQueue[Any] = SimpleQueue()
        self._long: deque[Any] = deque()
        self._changed = threading.Condition()
        self._leader: int | None = None
        self._idle = 0
        self._is_closed = False

    def put(self, job: Any) -> None:
        """Add a job. Any thread."""
        self._new.put(job)

    def close(self) -> None:
        """End the threads after their current jobs."""
        self._new.put(None)

    def run(self, number: int) -> None:
        """Do jobs until `close`. number: number of this thread."""
        while True:
            job = self._next_long(number)
            if job is not None:
                self._work(job, Turn(number, False, lambda: None))
                continue
            job = self._new.get() if self._leader == number else None
            if job is None:
                self._end()
                return
            with self._changed:
                # idle threads take jobs of _long first
                is_short = self._idle <= len(self._long)
            is_done = self._work(job, Turn(number, is_short, lambda: self._give_way(number)))
            with self._changed:
                if not is_done:
                    self._long.append(job)
                    self._changed.notify()
            self._give_way(number)

    def _next_long(self, number: int) -> Any:
        """Return a job that was given up; None if this thread has become the leader or should end."""
        with self._changed:
            self._idle += 1
            while self._leader is not None and not self._long and not self._is_closed:
                self._changed.wait()
            self._idle -= 1
            if self._is_closed:
                return None
            if self._leader is None:
                self._leader = number
                return None
            return self._long.popleft()

    def _give_way(self, number: int) -> None:
        """Let another thread take new jobs; more calls have no effect."""
        with self._changed:
            if self._leader == number:
                self._leader = None
                self._changed.notify()

    def _end(self) -> None:
        with self._changed:
            self._is_closed = True
            self._leader = None
            self._changed.notify_all()
