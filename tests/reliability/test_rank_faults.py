"""A short part of the schedule in rank_faults.py: the rank at fault is named, and the next engine serves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.reliability.faulty_rank import SLOW_S
from tests.reliability.rank_faults import PROMPT, TOKENS, Accident, RankRange, cells, schedule
from tests.reliability.rank_service import RankService
from tridecode.backend.supervisor.blame import ASLEEP_S

pytestmark = pytest.mark.slow

#: every kind and every degree
SHORT = [
    (2, 1, Accident(1, "step", "leave")),  # its neighbour is the first to report a failure
    (2, 1, Accident(1, "disagree", "flip")),
    (1, 2, Accident(1, "joining", "kill")),
    (1, 2, Accident(1, "adapter", "fail")),
    (1, 2, Accident(1, "step", "hang")),
    (2, 1, Accident(1, "step", "spin")),
    (2, 2, Accident(0, "loading", "stop")),
    (2, 1, Accident(1, "copy-out", "kill")),
    (1, 2, Accident(0, "copy-in", "kill")),
    (2, 2, Accident(3, "disagree", "torch")),
]
#: with SHORT, every phase, and each rank of four at least once
NIGHTLY = [
    (1, 2, Accident(1, "cache", "stop")),
    (1, 2, Accident(0, "idle", "stop")),
    (1, 2, Accident(0, "plan", "kill")),
    (2, 2, Accident(0, "verify", "kill")),
    (2, 2, Accident(1, "step", "stop")),
    (2, 2, Accident(2, "step", "kill")),
    (2, 2, Accident(3, "end", "stop")),
]


@pytest.fixture(scope="module")
def strikes(tmp_path_factory) -> Iterator[RankRange]:
    held = RankRange(tmp_path_factory.mktemp("ranks"))
    yield held
    print("\n" + held.table())


def test_the_short_schedules_have_every_kind_and_phase_of_the_whole_one() -> None:
    whole = schedule(2, 2)
    phases = {accident.point for accident in whole} - {"python"}  # until it does anything, it has no phase
    assert {accident.kind for accident in whole} == {accident.kind for _, _, accident in SHORT}
    assert phases == {accident.point for _, _, accident in [*SHORT, *NIGHTLY]}


@pytest.mark.parametrize(
    ("tensor", "stages", "accident"),
    [*SHORT, *(pytest.param(*one, marks=pytest.mark.nightly) for one in NIGHTLY)],
    ids=str,
)
def test_the_rank_at_fault_is_named_in_time_and_the_next_engine_gives_the_same_tokens(
    strikes: RankRange, tensor: int, stages: int, accident: Accident
) -> None:
    assert accident in schedule(tensor, stages)
    row = strikes.strike(tensor, stages, accident)
    assert not row.complaint, cells(row)


def test_a_step_that_takes_long_because_it_computes_is_nobody_s_fault(strikes: RankRange) -> None:
    """Rank 0 waits for it all the time, longer than for a rank that sleeps."""
    assert SLOW_S > 1.5 * ASLEEP_S
    service = RankService(strikes.weights, 2, 1)
    try:
        service.start("1:step:slow").wait("ready")
        answer = service.submit(PROMPT, TOKENS)
        assert answer.done.wait(SLOW_S + 20)
        assert service.struck.exists() and (answer.finish, len(answer.tokens)) == ("length", TOKENS)
        assert [state.phase for _, state in service.states if state.phase == "down"] == []
    finally:
        service.close()
