"""The supervisor's memory files: one for each rank, kept over epochs, replaced when their size changes."""

from __future__ import annotations

import os
import sys

import pytest

from tests.waiting import wait_until
from tridecode.backend.supervisor.host_cache import HostCache, inherited
from tridecode.backend.supervisor.rank import LocalProcess


def fd_of(options: list[str]) -> int:
    (fd,) = inherited(options)
    return fd


def test_a_rank_gets_the_same_file_in_every_epoch() -> None:
    cache = HostCache()
    try:
        first, other = fd_of(cache.options(0, 2, 1 << 20)), fd_of(cache.options(1, 2, 1 << 20))
        os.pwrite(first, b"kept", 100)
        again = fd_of(cache.options(0, 2, 1 << 20))
        assert again == first != other and os.pread(again, 4, 100) == b"kept"
        assert os.fstat(first).st_size == 1 << 19
        assert os.pread(first, 32, 0) != os.pread(other, 32, 0), "each has a secret of its own"
    finally:
        cache.close()


def test_another_size_makes_a_new_file_and_none_closes_it() -> None:
    cache = HostCache()
    try:
        first = fd_of(cache.options(0, 1, 1 << 20))
        os.pwrite(first, b"gone", 100)
        second = fd_of(cache.options(0, 1, 1 << 21))
        assert os.fstat(second).st_size == 1 << 21 and os.pread(second, 4, 100) == bytes(4)
        assert cache.options(0, 1, 0) == [] and not cache._files
    finally:
        cache.close()


def test_a_file_that_cannot_be_made_leaves_the_rank_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", fail)
    assert HostCache().options(0, 1, 1 << 20) == []


def test_the_process_of_a_rank_inherits_its_file() -> None:
    cache = HostCache()
    try:
        options = cache.options(0, 1, 1 << 16)
        code = "import os, sys; os.pwrite(int(sys.argv[2]), b'hello', 64)"
        process = LocalProcess([sys.executable, "-c", code, *options])
        wait_until(lambda: process.poll() is not None, 30, "the end of the process")
        assert process.poll() == 0 and os.pread(fd_of(options), 5, 64) == b"hello"
    finally:
        cache.close()
