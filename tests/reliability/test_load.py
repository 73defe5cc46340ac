"""Fuzz, clients that do not read, a flood and a leak test: short, seeded runs against one real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reliability import fuzz, load
from tests.reliability.service import Service
from tests.reliability.traffic import Clients

pytestmark = [pytest.mark.server, pytest.mark.slow]

SEED = 21


@pytest.fixture(scope="module")
def service(repository: Path) -> Iterator[Service]:
    held = Service(repository)
    try:
        yield held
        left = "" if held.ended() else held.stop()
        print(held.log()[-4000:])
    finally:
        held.close()
    assert not left, "left behind after the stop"


@pytest.fixture
def clients(service: Service) -> Iterator[Clients]:
    held = Clients(service.grpc, service.http)
    yield held
    held.close()


def test_no_request_harms_another_or_the_server(service: Service, clients: Clients) -> None:
    result = fuzz.Fuzzer(service, clients, SEED).run(count=4000, seconds=18.0)
    print(result.table())
    assert result.sent > 400 and result.controls > 20
    assert not result.complaints()


@pytest.mark.nightly
def test_memory_is_flat_at_a_steady_mix(service: Service) -> None:
    result = load.leaks(service, SEED, warm_s=12.0, seconds=20.0, windows=4)
    print(result.table())
    assert result.requests > 50
    assert not result.complaints


def test_clients_that_do_not_read_cost_little_and_disturb_nobody(service: Service) -> None:
    result = load.slow_readers(service)
    print(result.table())
    assert not result.complaints


def test_a_flood_is_answered_or_refused_and_health_stays_true(service: Service) -> None:
    """A machine that others use may be late for one of some forty probes, not in three floods in a row."""
    for _ in range(3):
        result = load.flood(service, SEED)
        print(result.table())
        late = [complaint for complaint in result.complaints if complaint.startswith("health took")]
        if not late or late != result.complaints:
            break
    assert not result.complaints


def test_serve_brings_back_a_server_that_a_request_has_aborted(repository: Path) -> None:
    held = Service(repository)
    try:
        rows = fuzz.send_lethal(held)
        print(fuzz.lethal_table(rows))
        left = "" if held.ended() else held.stop()
    finally:
        held.close()
    assert not [f"{row.name}: {row.complaint}" for row in rows if row.complaint]
    assert len(rows) == len(fuzz.LETHAL) and not left
