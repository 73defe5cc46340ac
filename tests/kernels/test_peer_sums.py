"""All-reduce over peer memory, one process per tensor rank, on separate GPUs if there are enough, else on
one."""

from __future__ import annotations

import pytest

from tests.kernels.peer_process import on_ranks
from tridecode.kernels.scratch import (
    HALVED_TOKENS,
    PeerPlan,
    copied_bytes,
    peer_bytes,
    peer_limits,
    plan_peers,
)

gpu = pytest.mark.gpu
ROW = 8192


@gpu
@pytest.mark.parametrize(
    "what", ["every_form", "special_numbers", "replayed", "abandoned", "halves", "abandoned_half"]
)
def test_two_ranks(what: str) -> None:
    assert on_ranks(2, what) == ["", ""]


@gpu
@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("what", ["every_form special_numbers replayed", "abandoned"])
def test_one_and_two_shots_of_more_ranks(world: int, what: str) -> None:
    assert on_ranks(world, *what.split()) == [""] * world


def plan(ranks: int, max_tokens: int, row_bytes: int) -> PeerPlan:
    limits = peer_limits(ranks)
    assert limits is not None
    return plan_peers(limits, ranks, max_tokens, row_bytes)


def test_two_ranks_send_a_step_or_what_a_launch_takes_in_one_shot() -> None:
    assert plan(2, 256, ROW) == (256, 0, 256 * ROW)
    assert plan(2, 8192, ROW) == (2048, 0, 16 << 20)
    assert plan(2, 1, 64 << 20) == (1, 0, 64 << 20)


def test_more_ranks_send_long_steps_in_two_shots_and_longer_ones_through_nccl() -> None:
    assert plan(4, 16, ROW) == (16, 0, 16 * ROW)
    assert plan(4, 256, ROW) == (64, 256, 2 * 64 * ROW)
    assert plan(3, 256, ROW) == (64, 256, 2 * 86 * ROW)
    assert plan(8, 8192, ROW) == (32, 1024, 2 * 128 * ROW)
    assert plan(8, 8192, 32 << 10) == (8, 256, 2 * 32 * (32 << 10))
    assert peer_limits(9) is None


def test_every_rank_owns_a_row_of_two_shots() -> None:
    """Otherwise a rank would blame the owner of a row for another rank that is missing (SharedPatience)."""
    for ranks in range(3, 9):
        for row_bytes in (16, ROW, 32 << 10):
            assert plan(ranks, 1 << 16, row_bytes).one_shot >= ranks - 1


def test_two_ranks_of_long_steps_allocate_two_buffers_for_each_half() -> None:
    assert copied_bytes(2, 8192, ROW) == 256 + 4 * 4096 * ROW
    assert copied_bytes(2, 8193, ROW) == 256 + 4 * 4097 * ROW
    assert copied_bytes(2, HALVED_TOKENS - 1, ROW) == copied_bytes(4, 8192, ROW) == 0


def test_a_rank_allocates_two_buffers_for_each_peer() -> None:
    assert peer_bytes(4, 16, ROW) == 256 + 2 * 3 * 16 * ROW
    assert peer_bytes(3, 256, ROW) == 256 + 2 * 2 * 2 * 86 * ROW
    assert peer_bytes(9, 16, ROW) == 0
