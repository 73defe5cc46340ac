"""The decode loop in a thread, with a front that a test fills and reads: no sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tridecode.backend.engine.loop import DecodeLoop
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.supervisor.rank_link import RankStatus
from tridecode.backend.wire import messages as m


class TestFront:
    """The part of Front that the loop uses. waits: how often the loop waited."""

    __test__ = False

    def __init__(self) -> None:
        self.waits = 0
        self.tokens: list[int] = []
        self.finishes: list[str] = []
        self._inbox: list[tuple[bytes, m.Submit]] = []
        self._arrived = threading.Event()

    def ask(self, prompt: list[int], params: m.SamplingParams, lora_name: str) -> None:
        request = m.SequenceRequest(np.array(prompt, np.int32).tobytes(), params, lora_name)
        self._inbox.append((b"door", m.Submit(1, [request])))
        self._arrived.set()

    def drain(self) -> list[tuple[bytes, m.Submit]]:
        self._arrived.clear()
        arrived, self._inbox = self._inbox, []
        return arrived

    def wait(self, timeout_s: float) -> None:
        self.waits += 1
        self._arrived.wait(timeout_s)

    def wake(self) -> None:
        self._arrived.set()

    def send(self, events: list[tuple[bytes, m.Event]]) -> None:
        for _, event in events:
            self.tokens += event.tokens
            self.finishes += [event.finish] if event.finish else []


@contextmanager
def run_loop(offline: OfflineEngine) -> Iterator[tuple[TestFront, RankStatus]]:
    front, status = TestFront(), RankStatus()
    loop = DecodeLoop(offline.engine, offline.scheduler, front, status)  # type: ignore[arg-type]
    if offline.engine.state.adapters is not None:
        offline.engine.state.adapters.on_finished = front.wake
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield front, status
    finally:
        loop.stop()
        thread.join(10)
