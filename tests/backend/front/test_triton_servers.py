"""The front before Triton servers: what ends, moves or waits when they or their engines die."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from tests.backend.doors.real_server import RealServer
from tests.backend.front.conftest import TEXT
from tests.backend.front.fronts import Front, error_of
from tests.backend.front.transports import triton_before
from tests.fake_engine import LIMITS, FakeEngine, FakeSupervisor, rebuilt, scripted
from tests.waiting import wait_until
from tridecode.tools.serve.ports import free_ports

pytestmark = pytest.mark.server
Ids = Callable[[str], list[int]]


class Machine:
    """A server with an engine of its own. The server can be killed, and started again at its ports."""

    def __init__(self, root: Path, ids: Ids, step_s: float = 0.02, **limits: Any):
        self.engine = FakeEngine(
            next_token=scripted(ids(TEXT)), step_s=step_s, limits=msgspec.structs.replace(LIMITS, **limits)
        )
        self.ports, self._root, self._starts = free_ports(3), root, 0
        self.stack, self._server = contextlib.ExitStack(), contextlib.ExitStack()
        self.server: RealServer | None = None

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.ports[1]}"

    def start(self) -> None:
        self._starts += 1
        root = self._root / str(self._starts)
        root.mkdir(parents=True)
        self.server = self._server.enter_context(
            triton_before(root, self.engine, self.supervisor, self.ports)
        )

    def kill(self) -> None:
        """End the server without a word, and its models with it."""
        assert self.server is not None
        os.killpg(self.server.process.pid, signal.SIGKILL)
        self.server.process.wait()
        self._server.close()

    def __enter__(self) -> Machine:
        self.stack.enter_context(self.engine)
        self.supervisor = self.stack.enter_context(FakeSupervisor(self.engine))
        self.stack.push(self._server)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()


@pytest.fixture
def machine(tmp_path: Path, ids: Ids) -> Iterator[Machine]:
    with Machine(tmp_path / "one", ids) as machine:
        yield machine


@pytest.fixture
def other(tmp_path: Path, ids: Ids) -> Iterator[Machine]:
    with Machine(tmp_path / "two", ids) as machine:
        yield machine


@pytest.fixture
def front(machine: Machine, toy_repository: Path, tmp_path: Path) -> Iterator[Front]:
    with Front(toy_repository, tmp_path / "log", "--triton", machine.grpc) as front:
        yield front


@pytest.fixture
def pair(machine: Machine, other: Machine, toy_repository: Path, tmp_path: Path) -> Iterator[Front]:
    """A front before two servers, once both are ready."""
    hosts = f"{machine.grpc},{other.grpc}"
    with Front(toy_repository, tmp_path / "log", "--triton", hosts) as front:
        wait_until(lambda: phases(front) == ["ready", "ready"], 30, "both servers")
        yield front


def phases(front: Front) -> list[str]:
    return [engine["phase"] for engine in front.http.get("/health").json()["engines"]]


def begun(front: Front, **wanted: object) -> socket.socket:
    """A connection on which a request was sent."""
    body = json.dumps({"prompt": "x", "max_tokens": 400, **wanted}).encode()
    connection = socket.create_connection(("127.0.0.1", front.port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def streamed(front: Front, ids: Ids, text: str = TEXT) -> Any:
    return front.openai.completions.create(
        model="toy", prompt="When?", max_tokens=len(ids(text)), stream=True
    )


def test_a_client_that_leaves_frees_its_request_a_little_later(front: Front, machine: Machine) -> None:
    """The exception over gRPC: the engine's socket is faster, because Triton is polled for cancellations."""
    engine = machine.engine
    for streaming in (True, False):
        connection = begun(front, stream=streaming)
        wait_until(lambda: engine.running == 1, 60, "the request")
        connection.close()
        wait_until(lambda: engine.running == 0, 20, "the cancellation")
    engine.freeze()  # before the first token
    connection = begun(front, stream=True)
    time.sleep(1.0)  # the server has it; after 2 s it would report that its engine is silent
    connection.close()
    wait_until(lambda: front.text().count("outcome=cancelled") == 3, 20, "the lines in the log")
    engine.thaw()
    wait_until(lambda: len(engine.cancels) == 3 and not engine.running, 20, "the early cancellation")
    assert front.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_an_engine_that_dies_behind_its_server_is_a_pause(front: Front, machine: Machine, ids: Ids) -> None:
    stream = streamed(front, ids)
    text = next(stream).choices[0].text
    machine.engine.stop()
    machine.supervisor.set_phase("down", "it was killed")
    wait_until(lambda: front.http.get("/health").status_code == 503, 20, "the engine's end")
    assert "it was killed" in front.http.get("/health").text
    with pytest.raises(openai.InternalServerError) as found:
        front.openai.completions.create(model="toy", prompt="x")
    assert found.value.status_code == 503 and found.value.response.headers["retry-after"] == "2"
    with rebuilt(machine.engine, machine.supervisor) as following:
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == TEXT and following.submits[0].sent
        front.wait_ready()


def test_a_full_queue_and_a_deadline_have_their_own_statuses(front: Front, machine: Machine) -> None:
    late = front.post("/v1/completions", {"prompt": "x", "max_tokens": 500, "timeout_s": 0.2})
    assert (late.status_code, error_of(late)["code"]) == (504, "deadline_exceeded")
    wanted = {"prompt": "x", "max_tokens": 500, "timeout_s": 0.5, "stream": True}
    events = [line[6:] for line in front.post("/v1/completions", wanted).text.splitlines() if line]
    assert len(events) > 2 and json.loads(events[-1])["error"]["code"] == "deadline_exceeded"
    machine.engine.limits = msgspec.structs.replace(machine.engine.limits, max_queued_requests=0)
    full = front.post("/v1/completions", {"prompt": "x"})
    assert (full.status_code, error_of(full)["code"], full.headers["retry-after"]) == (429, "queue_full", "1")


def test_servers_take_turns_and_a_dead_one_is_left_out(
    pair: Front, machine: Machine, other: Machine, ids: Ids
) -> None:
    engines = machine.engine, other.engine
    for _ in range(6):
        assert pair.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
    assert min(len(engine.submits) for engine in engines) >= 1

    streams = [pair.openai.completions.create(model="toy", prompt="x", max_tokens=400, stream=True)
               for _ in range(2)]  # one on each  # fmt: skip
    for stream in streams:
        next(stream)
    wait_until(lambda: [engine.running for engine in engines] == [1, 1], 60)
    machine.kill()
    lost, kept = [], []
    for stream in streams:
        try:
            for _ in stream:
                pass
            kept.append(stream)
        except openai.APIError as error:
            lost.append(error)
    assert len(kept) == 1 and [error.code for error in lost] == ["engine_not_ready"]
    assert "is lost" in str(lost[0])

    before = len(other.engine.submits)
    for _ in range(4):
        assert pair.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
    assert len(other.engine.submits) == before + 4
    assert phases(pair) == ["down", "ready"]
    page = pair.http.get("/metrics").text
    assert f'tridecode_engine_ready{{engine="{machine.grpc}"}} 0' in page
    assert f'tridecode_engine_ready{{engine="{other.grpc}"}} 1' in page

    other.kill()
    wait_until(lambda: pair.http.get("/health").status_code == 503, 20, "the end of both")
    refused = pair.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert (refused.status_code, error_of(refused)["code"]) == (503, "engine_not_ready")
    assert refused.headers["retry-after"] == "2"

    machine.start()  # at the same address
    wait_until(lambda: phases(pair) == ["ready", "down"], 60, "the first one's return")
    found = pair.openai.completions.create(model="toy", prompt="x", max_tokens=len(ids(TEXT)))
    assert found.choices[0].text == TEXT


def test_a_request_whose_server_dies_before_its_first_token_moves(
    pair: Front, machine: Machine, other: Machine, ids: Ids
) -> None:
    machine.engine.freeze()
    connections = [begun(pair, max_tokens=len(ids(TEXT))) for _ in range(2)]  # one to each
    wait_until(lambda: other.engine.submits, 60, "the request of the other server")
    time.sleep(1.0)  # the frozen one has its own, too
    machine.kill()
    for connection in connections:
        answer = b""
        while TEXT.encode() not in answer:
            piece = connection.recv(65_536)
            assert piece, answer
            answer += piece
        assert answer.startswith(b"HTTP/1.1 200")
        connection.close()
    machine.engine.thaw()
    assert len(other.engine.submits) == 2


def test_a_server_of_another_model_is_refused_by_name(
    machine: Machine, toy_repository: Path, tmp_path: Path, ids: Ids
) -> None:
    with Machine(tmp_path / "odd", ids, vocab_size=999, model_name="odd") as odd:
        hosts = f"{machine.grpc},{odd.grpc}"
        with Front(toy_repository, tmp_path / "log", "--triton", hosts) as front:
            wait_until(lambda: "starting" not in phases(front), 30, "both probes")
            states = front.http.get("/health").json()["engines"]
            assert sorted(state["phase"] for state in states) == ["down", "ready"]
            down = next(state["detail"] for state in states if state["phase"] == "down")
            assert "vocabulary of" in down and "wanted" in down and "127.0.0.1:" in down
            assert front.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_what_is_no_triton_server_is_said(toy_repository: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = f"127.0.0.1:{free_ports(1)[0]},127.0.0.1:{silent.getsockname()[1]}"
        with Front(toy_repository, tmp_path / "log", "--triton", hosts, ready=False) as front:
            wait_until(lambda: phases(front) == ["down", "down"], 30, "both probes")
            states = front.http.get("/health").json()["engines"]
            assert "connect" in states[0]["detail"] and "does not answer" in states[1]["detail"]
            assert front.openai.models.list().data
