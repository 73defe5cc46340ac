"""A short part of the schedule in faults.py: kills, stops, deletions and a full disk under 80 streams.

`make nightly` runs the faults of NIGHTLY, which tests/integration/test_supervision.py and
tests/backend/supervisor cause one at a time, without that load.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reliability.faults import Range, by_name

pytestmark = [pytest.mark.server, pytest.mark.slow]

SEED = 20
SHORT = [
    "kill:rank0",
    "freeze:supervisor",
    "kill:door:fastertransformer_streaming",
    "delete:engine-socket+kill:door",
    "kill:tritonserver",
]
NIGHTLY = [
    "pause:all:12",
    "fill:disk+kill:rank0",
    "ask:dying:tridecode_health",
    "kill:checker",
    "kill:serve+guard",
]


@pytest.fixture(scope="module")
def strikes(repository: Path) -> Iterator[Range]:
    held = Range(repository, SEED, tokens=64)
    yield held
    try:
        left = held.stop()
    finally:
        held.close()
        print("\n" + held.table())
    assert not left, "left behind after the stop"


@pytest.mark.parametrize(
    "name", [*SHORT, *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)]
)
def test_after_a_fault_requests_end_health_is_true_to_life_and_service_returns(
    strikes: Range, name: str
) -> None:
    (fault,) = by_name([name])
    row = strikes.strike(fault)
    if row.skipped:
        pytest.skip(row.skipped)
    assert row.open > strikes.streams // 2
    if fault.unbroken:
        assert row.whole == row.begun > 0
    assert not row.complaints
