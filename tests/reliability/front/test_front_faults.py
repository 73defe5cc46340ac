"""A part of the kills and stops under streams of the OpenAI service; all of them are `make soak`'s."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.reliability.front.faults import FAULTS, Range, by_name

pytestmark = [pytest.mark.server, pytest.mark.slow]

STREAMS, SEED, TOKENS = 64, 20, 80
SHORT = ("kill:front:0", "stop:front:0", "kill:front", "kill:rank0")


@pytest.fixture(scope="module")
def strikes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Range]:
    held = Range(tmp_path_factory.mktemp("front-faults"), STREAMS, SEED, TOKENS)
    yield held
    held.close()
    print("\n" + held.table())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(fault.name, marks=() if fault.name in SHORT else pytest.mark.nightly)
        for fault in FAULTS
        if fault.name != "kill:serve"
    ],
)
def test_streams_go_on_and_the_service_returns(strikes: Range, name: str) -> None:
    (fault,) = by_name([name])
    row = strikes.strike(fault)
    assert not row.complaints
    assert row.open > 0 and (fault.breaks or row.whole == row.open)


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_nothing_is_left_of_a_server_that_ends(strikes: Range, killed: bool) -> None:
    """Neither processes nor sockets, shared memory, folders or the port."""
    if killed:
        (fault,) = by_name(["kill:serve"])
        row = strikes.strike(fault)
        assert not row.complaints and not row.left
    else:
        strikes.start()
        assert not strikes.stop()
