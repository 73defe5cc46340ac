"""Sums over tensor ranks through peer memory: two processes, on two GPUs where there are two, else on one."""

from __future__ import annotations

import pytest

from tests.kernels.peer_process import on_ranks
from tridecode.kernels.scratch import PEER_SLOT_BYTES, peer_bytes, peer_slot_bytes

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("what", ["every_form", "special_numbers", "replayed", "abandoned"])
def test_two_ranks(what: str) -> None:
    assert on_ranks(2, what) == ["", ""]


@gpu
def test_three_ranks_sum_too() -> None:
    assert on_ranks(3, "special_numbers") == [""] * 3


def test_a_launch_takes_a_step_or_what_a_slot_holds() -> None:
    row = 8192
    assert peer_slot_bytes(2, 256, row) == 256 * row
    assert peer_slot_bytes(2, 8192, row) == PEER_SLOT_BYTES[0][1]
    assert peer_slot_bytes(8, 8192, 32 << 10) == 8 * (32 << 10)
    assert peer_bytes(4, 16, row) == 256 + 2 * 3 * 16 * row
