"""Sampling from a vocabulary split over ranks, in processes on one or several GPUs, gives one rank's
tokens."""

from __future__ import annotations

import pytest

from tests.kernels import shared_sampling_process as process
from tests.kernels.peer_process import on_ranks
from tridecode.kernels.scratch import exchange_bytes

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize(
    ("what", "ranks"),
    [
        ("all_settings", 2),
        ("all_settings", 4),
        ("one_setting", 2),
        ("special_numbers", 2),
        ("special_numbers", 3),
        ("replayed", 2),
        ("replayed", 3),
        ("abandoned", 2),
    ],
)
def test_ranks_give_the_tokens_of_one(what: str, ranks: int) -> None:
    assert on_ranks(ranks, getattr(process, what)) == [""] * ranks


def test_the_memory_of_the_exchange_is_that_of_its_header() -> None:
    """The memory has two buffers of 4 KiB per row and peer, after the round numbers."""
    assert exchange_bytes(2, 64) == 256 + 64 * 2 * 4096
    assert exchange_bytes(8, 100) == 512 + 100 * 2 * 7 * 4096
