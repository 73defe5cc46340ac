"""A front before a fake engine, which generates TEXT after every prompt; by both transports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.backend.front.fronts import Front, repository
from tests.backend.front.transports import TRANSPORTS, Route, route_to
from tests.fake_engine import FakeEngine, FakeSupervisor, scripted

TEXT = " the ferry leaves at seven and returns at nine"


@pytest.fixture(scope="session")
def toy_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("front") / "repo")


@pytest.fixture(scope="session")
def tokenizer(toy_repository: Path) -> Tokenizer:
    return Tokenizer.from_file(str(toy_repository / "text" / "1" / "tokenizer" / "tokenizer.json"))


@pytest.fixture(scope="session")
def ids(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def engine(ids: Callable[[str], list[int]]) -> Iterator[FakeEngine]:
    with FakeEngine(next_token=scripted(ids(TEXT)), step_s=0.002) as engine:
        yield engine


@pytest.fixture(scope="module")
def supervisor(engine: FakeEngine) -> Iterator[FakeSupervisor]:
    with FakeSupervisor(engine) as supervisor:
        yield supervisor


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine_route(
    transport: str, engine: FakeEngine, supervisor: FakeSupervisor, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Route]:
    with route_to(transport, tmp_path_factory.mktemp("route"), engine, supervisor) as route:
        yield route


@pytest.fixture(scope="module")
def front(
    engine_route: Route, toy_repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    log = tmp_path_factory.mktemp("log") / "front.log"
    with Front(toy_repository, log, *engine_route.options, **engine_route.environment) as front:
        yield front
