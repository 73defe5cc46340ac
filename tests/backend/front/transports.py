"""The two ways from the front to an engine: its socket, and a Triton server before it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.backend.doors.real_server import RealServer, server_before
from tests.fake_engine import FakeEngine, FakeSupervisor
from tridecode.model_repo_templates.repository import RepositoryModel, repository_models

#: parameters of a fixture
TRANSPORTS = ["socket", pytest.param("triton", marks=pytest.mark.server)]


@dataclass(frozen=True)
class Route:
    """Options and environment of a front."""

    options: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)


def token_models() -> list[RepositoryModel]:
    """The two models of a server that the front needs: a stream of token ids, and the health model."""
    models = repository_models(contracts=("fastertransformer",), decoupled=("fastertransformer",))
    return [model for model in models if model.name in ("fastertransformer", "tridecode_health")]


@contextlib.contextmanager
def triton_before(
    root: Path,
    engine: FakeEngine,
    supervisor: FakeSupervisor,
    ports: Sequence[int] = (),
    options: Sequence[str] = (),
) -> Iterator[RealServer]:
    with server_before(root, token_models(), engine, supervisor, ports, options) as server:
        yield server


@contextlib.contextmanager
def route_to(kind: str, root: Path, engine: FakeEngine, supervisor: FakeSupervisor) -> Iterator[Route]:
    """The route to this engine. kind: one of TRANSPORTS."""
    if kind == "socket":
        yield Route(environment={"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint})
        return
    with triton_before(root, engine, supervisor) as server:
        yield Route(("--triton", server.grpc))
