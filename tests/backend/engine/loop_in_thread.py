"""The decode loop in a thread, with a stand-in for the DoorSocket that a test fills and reads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.loop import DecodeLoop
from tridecode.backend.engine.schedule.scheduler import Scheduler
from tridecode.backend.supervisor.rank_link import RankStatus
from tridecode.backend.wire import messages as m


class FakeDoorSocket:
    """The methods of DoorSocket that the loop calls, without sockets. Any thread may put messages.

    waits: how often the loop waited. tokens: of each request. ends: the finish of each request that ended.
    """

    def __init__(self) -> None:
        self.waits = 0
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self._inbox: queue.SimpleQueue[m.Submit | m.Cancel] = queue.SimpleQueue()
        self._arrived = threading.Event()

    def submit(self, request: int, prompt: list[int], lora_name: str = "", **params: Any) -> None:
        ids, wanted = np.array(prompt, np.int32).tobytes(), m.SamplingParams(**params)
        self.put(m.Submit(request, [m.SequenceRequest(ids, wanted, lora_name)]))

    def put(self, message: m.Submit | m.Cancel) -> None:
        self._inbox.put(message)
        self._arrived.set()

    def drain(self) -> list[tuple[bytes, m.Submit | m.Cancel]]:
        self._arrived.clear()
        arrived: list[tuple[bytes, m.Submit | m.Cancel]] = []
        while not self._inbox.empty():  # the loop is the only reader
            arrived.append((b"door", self._inbox.get()))
        return arrived

    def wait(self, timeout_s: float) -> None:
        self.waits += 1
        self._arrived.wait(timeout_s)

    def wake(self) -> None:
        self._arrived.set()

    def send(self, events: list[tuple[bytes, m.Event]]) -> None:
        for _, event in events:
            self.tokens.setdefault(event.request, []).extend(event.tokens)
            if event.finish:
                self.ends[event.request] = event.finish


@dataclass
class LoopInThread:
    doors: FakeDoorSocket
    status: RankStatus
    loop: DecodeLoop
    thread: threading.Thread


@contextmanager
def run_loop(engine: Engine, scheduler: Scheduler) -> Iterator[LoopInThread]:
    """Run the loop until the context ends."""
    doors, status = FakeDoorSocket(), RankStatus()
    loop = DecodeLoop(engine, scheduler, doors, status)  # type: ignore[arg-type]
    if engine.state.adapters is not None:
        engine.state.adapters.on_finished = doors.wake
    thread = threading.Thread(target=loop.run, daemon=True)  # one that hangs keeps no process from ending
    thread.start()
    try:
        yield LoopInThread(doors, status, loop, thread)
    finally:
        loop.stop()
        thread.join(60)
        assert not thread.is_alive()
