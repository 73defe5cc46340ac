"""A front before a fake engine, and batches that it answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backend.front.fronts import Front, repository
from tests.fake_engine import FakeEngine, FakeSupervisor


@pytest.fixture(scope="session")
def batch_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("batch") / "repo")


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(step_s=0.002) as engine:
        yield engine


@pytest.fixture(scope="module")
def supervisor(engine: FakeEngine) -> Iterator[FakeSupervisor]:
    with FakeSupervisor(engine) as supervisor:
        yield supervisor


@pytest.fixture(scope="module")
def front(
    supervisor: FakeSupervisor, batch_repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    log = tmp_path_factory.mktemp("log") / "front.log"
    with Front(batch_repository, log, TRIDECODE_CONTROL_ENDPOINT=supervisor.endpoint) as front:
        yield front
