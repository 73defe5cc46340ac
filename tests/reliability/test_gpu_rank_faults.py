"""A tensor rank that dies, is stopped or hangs while graphs sum over peer memory is named in time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.reliability.gpu_rank_faults import SCHEDULE, GpuRankRange
from tests.reliability.rank_faults import Accident, cells

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def strikes(tmp_path_factory) -> Iterator[GpuRankRange]:
    held = GpuRankRange(tmp_path_factory.mktemp("ranks"))
    yield held
    held.close()
    print("\n" + held.table())


@pytest.mark.parametrize("accident", SCHEDULE, ids=str)
def test_the_rank_at_fault_is_named_and_the_next_engine_gives_the_same_tokens(
    strikes: GpuRankRange, accident: Accident
) -> None:
    row = strikes.strike(accident)
    assert not row.complaint, cells(row)
