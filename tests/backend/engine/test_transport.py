"""Tensors through host memory, and results that are sent by a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest
import torch
from torch import Tensor

from tests.backend.engine.thread_ranks import Meeting
from tridecode.backend.engine.ranks.transport import Staged, shares_a_gpu
from tridecode.backend.engine.step.results import Outbox

WAIT_S = 10.0


class ThreadGloo:
    """The interface of transport.Direct for two threads. It takes bytes or float32."""

    captures = True

    def __init__(self, meeting: Meeting, rank: int):
        self.meeting, self.rank = meeting, rank

    def all_reduce(self, x: Tensor) -> None:
        assert x.dtype == torch.float32
        x.copy_(torch.stack(self.meeting.gather("all", self.rank, x.clone())).sum(0))

    def gather(self, parts: list[Tensor], x: Tensor) -> None:
        assert x.dtype == torch.uint8
        for part, found in zip(parts, self.meeting.gather("all", self.rank, x.clone()), strict=True):
            part.copy_(found)

    def broadcast(self, x: Tensor, source: int) -> None:
        assert x.dtype == torch.uint8
        x.copy_(self.meeting.gather("all", self.rank, x.clone())[source])

    def send(self, x: Tensor, rank: int) -> None:
        assert x.dtype == torch.uint8
        self.meeting.queues["activations", rank].put(x.clone())

    def receive(self, x: Tensor, rank: int) -> None:
        x.copy_(self.meeting.queues["activations", self.rank].get(timeout=WAIT_S))


def on_two(use: Callable[[Staged, int], Tensor]) -> list[Tensor]:
    meeting = Meeting(2, 1)
    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(use, Staged(ThreadGloo(meeting, rank)), rank) for rank in range(2)]  # type: ignore[arg-type]
        return [rank.result(WAIT_S) for rank in ranks]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_staged_tensors_arrive_and_sums_round_once(dtype: torch.dtype) -> None:
    parts = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)

    def use(ranks: Staged, rank: int) -> Tensor:
        total, first, other = parts[rank].clone(), parts[rank].clone(), torch.empty(3, 5, dtype=dtype)
        ranks.all_reduce(total)
        ranks.broadcast(first, 0)
        gathered = torch.empty(2, 3, 5, dtype=dtype)
        ranks.gather(list(gathered.unbind(0)), parts[rank])
        if rank == 0:
            ranks.send(parts[0], 1)
        else:
            ranks.receive(other, 0)
            assert torch.equal(other, parts[0])
        assert torch.equal(gathered, parts) and torch.equal(first, parts[0])
        return total

    wanted = parts.double().sum(0).float().to(dtype)
    assert all(torch.equal(found, wanted) for found in on_two(use))


def test_ranks_on_one_gpu_are_noticed() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert shares_a_gpu(gpu, ["a", "b", "a"])
    assert not shares_a_gpu(gpu, ["a", "b", "c"]) and not shares_a_gpu(cpu, ["", ""])


def test_an_outbox_sends_in_order_what_the_tensor_was_and_never_waits() -> None:
    may_send, sent = threading.Event(), Queue()  # type: ignore[var-annotated]

    def send(host: Tensor) -> None:
        assert may_send.wait(WAIT_S)
        sent.put(host)

    box, x = Outbox(send), torch.zeros(2)
    for value in (1, 2, 3):
        box.put(x.fill_(value))
    may_send.set()
    assert [sent.get(timeout=WAIT_S)[0].item() for _ in range(3)] == [1, 2, 3]
    box.close()


def test_an_outbox_raises_what_a_sending_raised() -> None:
    failed = threading.Event()

    def send(host: Tensor) -> None:
        failed.set()
        raise RuntimeError("Connection closed by peer")

    box = Outbox(send)
    box.put(torch.zeros(1))
    assert failed.wait(WAIT_S)
    box.close()
    with pytest.raises(RuntimeError, match="closed by peer"):
        box.put(torch.zeros(1))
