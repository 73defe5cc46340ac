"""Tensor ranks sum through peer memory; if one of them cannot, all sum through NCCL and log the reason.

Ranks are threads here, and PeerSums is a stand-in with the same handles: nothing is summed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.ranks import peer_memory
from tridecode.backend.engine.ranks.peer_memory import join_peers
from tridecode.kernels import peer_sums
from tridecode.kernels.cuda import Cuda
from tridecode.kernels.library import KernelError

COLUMNS, DTYPE = 256, torch.bfloat16
CONFIG = EngineConfig(max_step_tokens=16, max_sequences=4)
#: how a log line without peer memory begins
WITHOUT = "tensor ranks sum through NCCL, and each has the whole vocabulary: "


class Ranks:
    """The part of ProcessRanks that join_peers uses, of threads."""

    stage, num_stages = 0, 1

    def __init__(self, rank: int, size: int, shared: list, barrier: threading.Barrier):
        self.rank = self.tensor_rank = rank
        self.tensor_size, self._shared, self._barrier = size, shared, barrier
        self.exchanges = 0

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        self.exchanges += 1
        self._shared[self.rank] = data
        self._barrier.wait(60)
        found = list(self._shared)
        self._barrier.wait(60)
        return found


class Sums:
    """The part of PeerSums that join_peers uses. broken: (rank, step) that fails: "allocate" or "connect"."""

    made: list[Sums] = []
    broken: tuple[int, str] | None = None

    def __init__(self, ops, rank, ranks, max_tokens, columns, dtype, limit_s, sampled_rows):
        if self.broken == (rank, "allocate"):
            raise KernelError("cudaMalloc: out of memory")
        self.rank, self.rows, self.bytes, self.columns = rank, max_tokens, 1 << 20, columns
        self.chain_fields = {"peer": 1 - rank}
        self.handle, self.given, self.closed = bytes([65 + rank]) * 64, [], False
        self.made.append(self)

    def connect(self, handles):
        self.given = handles
        if self.broken == (self.rank, "connect"):
            raise KernelError("cudaIpcOpenMemHandle: peer access is not supported")

    def close(self):
        self.closed = True


def gpu(shared: bool, multiprocessors: int = 132) -> Cuda:
    """Operations of a GPU; only their properties are read."""
    ops = Cuda.__new__(Cuda)
    sizes = dict(capability=90, multiprocessors=multiprocessors, shared_bytes=232448)
    device = SimpleNamespace(shared=shared, **sizes)
    ops.gpu = SimpleNamespace(gemm_device=device)  # type: ignore[assignment]
    return ops


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """joined(size, ops of a rank, ...) -> what each rank gets, its ranks, and the log lines."""
    monkeypatch.setattr(peer_sums, "PeerSums", Sums)
    monkeypatch.setattr(peer_memory, "_probe", lambda *_: "")  # needs a GPU
    Sums.made, Sums.broken = [], None
    caplog.set_level(logging.INFO, "tridecode.engine")

    def join(size: int, ops: Callable[[int], Cuda] = lambda _: gpu(False), config=CONFIG):
        shared, barrier = [b""] * size, threading.Barrier(size)
        ranks = [Ranks(rank, size, shared, barrier) for rank in range(size)]
        found: list = ["nothing"] * size

        def run(rank: int) -> None:
            found[rank] = join_peers(ranks[rank], ops(rank), config, COLUMNS, DTYPE)  # type: ignore[arg-type]

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return found, ranks, [record.getMessage() for record in caplog.records]

    return join


def test_ranks_that_can_get_each_others_handles(joined) -> None:
    found, _, lines = joined(3)
    assert found == sorted(Sums.made, key=lambda sums: sums.rank) and not any(sums.closed for sums in found)
    assert all(sums.given == [b"A" * 64, b"B" * 64, b"C" * 64] for sums in found)
    shared = "tensor ranks sum and share the vocabulary through the memory of their peers"
    assert lines == [f"{shared}: 1 MiB a rank, 16 rows a launch"] * 3


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ((1, "allocate"), "rank 1: cudaMalloc: out of memory"),
        ((0, "connect"), "rank 0: cudaIpcOpenMemHandle: peer access is not supported"),
    ],
)
def test_where_one_rank_cannot_all_sum_through_nccl_and_name_it(joined, broken, reason) -> None:
    Sums.broken = broken
    found, _, lines = joined(3)
    assert found == [None] * 3
    assert lines == [f"{WITHOUT}{reason}"] * 3
    assert len(Sums.made) == (2 if broken[1] == "allocate" else 3) and all(sums.closed for sums in Sums.made)


@pytest.mark.parametrize(("others", "alike"), [(132, True), (114, False)])
def test_products_of_one_launch_sum_over_ranks_with_equal_gpus_only(joined, others: int, alike: bool) -> None:
    found, _, _ = joined(2, lambda rank: gpu(False, others if rank else 132))
    assert [sums.chain_fields is not None for sums in found] == [alike] * 2


def test_a_gpu_that_is_shared_through_mps_is_left_to_nccl(joined) -> None:
    found, _, lines = joined(2, lambda rank: gpu(shared=rank == 1))
    assert found == [None, None]
    reason = f"{WITHOUT}rank 1: its GPU is shared through MPS"
    assert len(lines) == 2 and all(line.startswith(reason) for line in lines)


def test_ranks_that_may_not_exchange_nothing(joined) -> None:
    config = EngineConfig(max_step_tokens=16, max_sequences=4, enable_custom_all_reduce=False)
    found, ranks, lines = joined(2, config=config)
    assert found == [None, None] and not Sums.made and [rank.exchanges for rank in ranks] == [0, 0]
    assert lines == [f"{WITHOUT}enable_custom_all_reduce is false"] * 2


def test_ranks_of_two_hosts_sum_through_nccl(joined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "_host", lambda: threading.current_thread().name.encode())
    found, _, lines = joined(2)
    assert found == [None, None] and all(sums.closed for sums in Sums.made)
    assert lines == [f"{WITHOUT}the tensor ranks of stage 0 are on several hosts"] * 2
