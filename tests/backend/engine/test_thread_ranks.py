"""Checks the helper that runs ranks in threads, which other tests use."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import torch

from tests.backend.engine import thread_ranks
from tests.backend.engine.thread_ranks import Meeting, ThreadRanks


class SlowQueue(Queue):
    """A queue whose construction takes so long that another thread runs meanwhile."""

    def __init__(self):
        time.sleep(0.02)
        super().__init__()


def test_the_first_send_and_the_first_receive_use_one_queue(monkeypatch):
    monkeypatch.setattr(thread_ranks, "Queue", SlowQueue)
    monkeypatch.setattr(thread_ranks, "_WAIT_S", 5)
    meeting, received = Meeting(1, 2), torch.zeros(1)
    first, last = ThreadRanks(meeting, 0), ThreadRanks(meeting, 1)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(last.receive, received), pool.submit(first.send, torch.ones(1))]
        for call in calls:
            call.result(10)
    assert received.item() == 1
