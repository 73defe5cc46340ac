"""The memory of the host tier is populated and pinned piece by piece, here by a fake driver."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tridecode.backend.base.memory_file import create_file
from tridecode.backend.engine.host_tier import pinning as module
from tridecode.backend.engine.host_tier.pinning import Pinning
from tridecode.backend.engine.host_tier.readiness import SHARES
from tridecode.backend.engine.host_tier.region import HostRegion
from tridecode.backend.engine.host_tier.store import HostStore

SLOT, SLOTS = 1 << 20, 64
GPU = torch.device("cuda", 0)


class _Driver:
    """A driver that refuses piece number `fails`. pinned: addresses and sizes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.pinned: dict[int, int] = {}
        self.fails, self.calls = -1, 0
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls += 1
        if self.calls - 1 == self.fails:
            return 2
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    return _Driver(monkeypatch)


@pytest.fixture
def memory() -> Iterator[int]:
    fd = create_file(SLOT * (SLOTS + 1))
    yield fd
    os.close(fd)


def pieces_of(memory: int) -> list[Tensor]:
    region = HostRegion(memory)
    region.lay_out(bytes(32), SLOT, SLOTS)
    return HostStore(region, [SLOT], torch.device("cpu")).pinning._pieces


def test_all_pieces_are_populated_and_pinned_in_order(driver: _Driver, memory: int) -> None:
    pieces = pieces_of(memory)
    pinning = Pinning(pieces, GPU)
    assert pinning.shares == 0 and len(pieces) == 4
    pinning.start()
    pinning.join()
    assert pinning.is_done and pinning.shares == SHARES and not pinning.fault
    assert list(driver.pinned) == [piece.data_ptr() for piece in pieces]
    assert sum(driver.pinned.values()) == SLOT * SLOTS
    assert os.fstat(memory).st_blocks * 512 >= SLOT * SLOTS, "memory is given before it is pinned"


def test_memory_is_unpinned_before_it_is_unmapped(driver: _Driver, memory: int) -> None:
    """A process may open several engines one after another."""
    pinning = Pinning(pieces_of(memory), GPU)
    pinning.start()
    pinning.join()
    assert len(driver.pinned) == 4
    del pinning
    gc.collect()
    assert not driver.pinned


def test_a_piece_that_cannot_be_pinned_is_reported_and_all_are_unpinned(
    driver: _Driver, memory: int, caplog: pytest.LogCaptureFixture
) -> None:
    driver.fails = 2
    pinning = Pinning(pieces_of(memory), GPU)
    ends: list[int] = []
    with caplog.at_level("WARNING", logger="tridecode.engine"):
        pinning.start(lambda: ends.append(pinning.shares))
        pinning.join()
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"{32 * SLOT:,} of {64 * SLOT:,} bytes" in said and "cudaHostRegister returned 2" in said
    assert ends == [-1] and len(driver.pinned) == 2
    pinning.undo()
    assert not driver.pinned


def test_a_host_whose_memory_others_have_taken_turns_the_tier_off(
    driver: _Driver, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter([1 << 30, 1 << 30, 1 << 20])
    monkeypatch.setattr(module, "available_memory", lambda: next(left))
    pinning = Pinning(pieces_of(memory), GPU)
    pinning.start()
    pinning.join()
    assert pinning.shares == -1 and f"only {1 << 20:,} left" in pinning.fault
    assert len(driver.pinned) == 2


def test_a_fault_of_another_rank_ends_pinning_without_a_message(
    driver: _Driver, memory: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pinning = Pinning(pieces_of(memory), GPU)
    monkeypatch.setattr(module, "_populate", lambda piece: setattr(pinning, "_stops", True))
    with caplog.at_level("WARNING", logger="tridecode.engine"):
        pinning.start()
        pinning.undo()
    assert not driver.pinned and pinning.shares == -1 and not caplog.records
