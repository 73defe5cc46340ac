"""A start of four ranks of which one never joins the others: who is late, who waits for whom, and where."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.reliability.rank_service import RankService, write_model

pytestmark = pytest.mark.slow

START_S = 25.0  # a loaded machine takes most of it to start four pythons


@pytest.fixture
def service(tmp_path) -> Iterator[RankService]:
    _, weights, adapters = write_model(tmp_path)
    held = RankService(weights, 2, 2, adapters, start_timeout_s=START_S)
    yield held
    held.close()


def test_a_rank_that_sleeps_while_it_loads_is_named_with_those_that_wait_for_it(service: RankService) -> None:
    service.start("2:loading:hang")
    _, state = service.wait("down", "failed", timeout_s=2 * START_S)
    text = (
        rf"not ready after {START_S:g} s \(start_timeout_s\): ranks 0, 1, 3 wait in '(?P<where>[^']+)' for "
        r"rank 2, which is 'loading weights: model\.[\w.]+( \(\d+ %\))?'"
    )
    found = re.match(text, state.detail)
    assert found, state.detail
    progress = [
        one.detail for _, one in service.states if one.phase == "starting" and one.epoch == state.epoch
    ]
    last = progress[-1].split("; ")
    assert [line.partition(":")[0] for line in last] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    for rank in (0, 1, 3):
        assert last[rank] == f"rank {rank}: {found['where']} (waits for rank 2)"
    assert last[2].startswith("rank 2: loading weights: model.")
    service.wait("ready", epoch=state.epoch + 1)
