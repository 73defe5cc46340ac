"""Starts in which one rank never joins the others: who is late, who waits for whom, and where."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reliability.rank_service import RankService, write_model
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

START_S = 25.0  # a loaded machine takes most of it to start four pythons
GRAPH = "the capture of CUDA graph 3 of 3, of 1 rows"
SUM = "waits in the sum over the tensor ranks"
#: point of faulty_rank.py, the phase that the late rank is in, and the phase and wait of the other one
PHASES = {
    "peers": ("the joining of peers", "exchanging the handles of memory", "waits for rank 1"),
    "warm-up": ("the warm-up, step 2 of 3", "the warm-up, step 2 of 3", SUM),
    "cache": ("the allocation of the cache", "agreeing on the smallest size", "waits for rank 1"),
    "graphs": (GRAPH, GRAPH, SUM),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, Path]:
    """Weights and adapters."""
    return write_model(tmp_path_factory.mktemp("model"))[1:]


@pytest.fixture
def service(model) -> Iterator[RankService]:
    weights, adapters = model
    held = RankService(weights, 2, 2, adapters, start_timeout_s=START_S)
    yield held
    held.close()


@pytest.mark.nightly  # four ranks; below, two of them run into the same limit
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


@pytest.mark.parametrize("point", PHASES)
def test_a_rank_that_hangs_in_a_phase_after_loading_is_named_with_who_waits_for_it(point, model) -> None:
    """The phases of a GPU's start, with stand-ins on the CPU; the last one until its time is over."""
    ends = point == "graphs"
    late, phase, wait = PHASES[point]
    service = RankService(model[0], 2, 1, start_timeout_s=10 if ends else 600)
    if point != "cache":  # every start has a cache
        service.environment["TRIDECODE_TEST_GPU_PHASES"] = "1"
    try:
        service.start(f"1:{point}:hang")
        service.struck_at()
        progress = f"rank 0: {phase} ({wait}); rank 1: {late}"
        wait_until(lambda: service.states[-1][1].detail == progress, 5, progress)
        if ends:
            _, state = service.wait("down", timeout_s=20)
            assert state.detail == (
                f"not ready after 10 s (start_timeout_s): rank 0 {wait} ({phase!r}); rank 1 is {late!r}"
            )
            service.wait("ready", epoch=state.epoch + 1)
    finally:
        print(service.states[-1])
        service.close()
