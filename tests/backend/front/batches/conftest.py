"""A front of two workers with a store, before a fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backend.front.batches.clients import LIMITS
from tests.backend.front.fronts import Front, repository
from tests.fake_engine import FakeEngine, FakeSupervisor
from tridecode.backend.front.batches.store import Store


@pytest.fixture(scope="session")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("batches") / "repo")


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(step_s=0.002) as engine:
        yield engine


@pytest.fixture(scope="module")
def supervisor(engine: FakeEngine) -> Iterator[FakeSupervisor]:
    with FakeSupervisor(engine) as supervisor:
        yield supervisor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "batches"


@pytest.fixture(scope="module")
def front(
    supervisor: FakeSupervisor, repo: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    log = tmp_path_factory.mktemp("log") / "front.log"
    control = {"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint}
    with Front(repo, log, "--workers", "2", "--batch-dir", str(folder), *LIMITS, **control) as front:
        yield front


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store", 100_000, 5)
    made.create()
    return made
