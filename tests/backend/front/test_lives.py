"""The service's reaction when clients leave, and when engines and workers die."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from tests.backend.front.conftest import TEXT
from tests.backend.front.fronts import ROOT, Front, error_of
from tests.fake_engine import FakeEngine, FakeSupervisor, rebuilt, scripted
from tests.waiting import wait_until
from tridecode.backend.front.access import digest_of
from tridecode.backend.supervisor import processes

Ids = Callable[[str], list[int]]


@pytest.fixture
def slow(ids: Ids) -> Iterator[FakeEngine]:
    with FakeEngine(next_token=scripted(ids(TEXT)), step_s=0.02) as engine:
        yield engine


@pytest.fixture
def its_supervisor(slow: FakeEngine) -> Iterator[FakeSupervisor]:
    with FakeSupervisor(slow) as supervisor:
        yield supervisor


@pytest.fixture
def slow_front(its_supervisor: FakeSupervisor, toy_repository: Path, tmp_path: Path) -> Iterator[Front]:
    with Front(toy_repository, tmp_path / "log", TRIDECODE_CONTROL_ENDPOINT=its_supervisor.endpoint) as front:
        yield front


def begun(front: Front, **wanted: object) -> socket.socket:
    """A connection on which a request was sent."""
    body = json.dumps({"prompt": "x", "max_tokens": 400, **wanted}).encode()
    connection = socket.create_connection(("127.0.0.1", front.port), timeout=20)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_frees_its_request_at_once(
    slow_front: Front, slow: FakeEngine, streaming: bool
) -> None:
    connection = begun(slow_front, stream=streaming)
    wait_until(lambda: slow.running == 1, what="the request")
    connection.close()
    assert wait_until(lambda: slow.running == 0, what="the cancellation") < 2.0  # its steps take 8 s
    wait_until(lambda: "outcome=cancelled" in slow_front.text(), what="the line in the log")


def test_an_engine_that_dies_is_a_pause_in_the_stream(
    slow_front: Front, slow: FakeEngine, its_supervisor: FakeSupervisor, ids: Ids
) -> None:
    stream = slow_front.openai.completions.create(
        model="toy", prompt="When?", max_tokens=len(ids(TEXT)), stream=True
    )
    text = next(stream).choices[0].text
    slow.stop()
    its_supervisor.set_phase("down", "it was killed")
    wait_until(lambda: slow_front.http.get("/health").status_code == 503, what="the engine's end")
    with pytest.raises(openai.InternalServerError) as found:
        slow_front.openai.completions.create(model="toy", prompt="x")
    assert found.value.status_code == 503 and found.value.response.headers["retry-after"] == "2"
    with rebuilt(slow, its_supervisor) as following:
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == TEXT and following.submits[0].sent


def test_a_worker_that_dies_is_started_again(slow_front: Front) -> None:
    (worker,) = processes.children(slow_front.process.pid)
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: processes.children(slow_front.process.pid) not in ([], [worker]), 60)
    slow_front.wait_ready()
    assert slow_front.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_worker_that_is_stopped_by_a_signal_is_continued_and_its_streams_with_it(
    slow_front: Front, ids: Ids
) -> None:
    asked = {"model": "toy", "prompt": "When?", "max_tokens": len(ids(TEXT)), "stream": True}
    stream = slow_front.openai.completions.create(**asked)
    text = next(stream).choices[0].text
    (worker,) = processes.children(slow_front.process.pid)
    os.kill(worker, signal.SIGSTOP)
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == TEXT and processes.children(slow_front.process.pid) == [worker]
    assert "was stopped by a signal; it is continued" in slow_front.text()


def test_a_worker_that_hangs_is_replaced(
    slow: FakeEngine, its_supervisor: FakeSupervisor, toy_repository: Path, tmp_path: Path
) -> None:
    """Its event loop waits for a file of keys that nobody writes; its state is that of a healthy process."""
    keys = tmp_path / "keys"
    keys.write_text(f"{digest_of('secret')}\n")
    options = ("--workers", "1", "--api-key-file", str(keys))
    control = {"TRIDECODE_CONTROL_ENDPOINT": its_supervisor.endpoint}
    with Front(toy_repository, tmp_path / "log", *options, **control) as front:
        front.http.headers["authorization"] = "Bearer secret"
        assert front.http.get("/v1/models").status_code == 200
        (worker,) = processes.children(front.process.pid)
        os.mkfifo(tmp_path / "fifo")
        keys.rename(tmp_path / "kept")
        (tmp_path / "fifo").rename(keys)
        time.sleep(1.5)  # keys are looked at once a second
        with pytest.raises(httpx.TimeoutException):
            front.http.get("/v1/models", timeout=2.0)
        assert processes.state(worker) == "S"
        (tmp_path / "kept").rename(keys)  # for the next worker; this one waits for the file that was there
        wait_until(lambda: processes.children(front.process.pid) not in ([], [worker]), 60, "a new worker")
        assert "worker 0 has done nothing for 20 s; it is killed" in front.text()
        front.wait_ready()
        assert front.http.get("/v1/models").status_code == 200


def test_no_worker_outlives_the_first_process(slow_front: Front) -> None:
    (worker,) = processes.children(slow_front.process.pid)
    slow_front.process.kill()
    slow_front.process.wait()
    wait_until(lambda: processes.identify(worker) is None, what="the worker's end")
    slow_front.close = lambda: 0  # type: ignore[method-assign]


def test_several_workers_share_the_port(
    its_supervisor: FakeSupervisor, toy_repository: Path, tmp_path: Path
) -> None:
    environment = {"TRIDECODE_CONTROL_ENDPOINT": its_supervisor.endpoint}
    with Front(toy_repository, tmp_path / "log", "--workers", "2", **environment) as front:
        assert len(processes.children(front.process.pid)) == 2
        wait_until(lambda: len(its_supervisor.hellos) == 2, 20, "both workers")
        time.sleep(0.3)
        for _ in range(20):  # on a connection each
            response = httpx.post(f"{front.url}/v1/completions", json={"prompt": "x", "max_tokens": 1})
            assert response.status_code == 200
        page = front.http.get("/metrics").text
        assert 'tridecode_requests_total{model="openai",outcome="ok"} 20' in page


def test_before_the_first_engine_the_service_says_so(toy_repository: Path, tmp_path: Path) -> None:
    with (
        FakeSupervisor() as starting,
        Front(
            toy_repository,
            tmp_path / "log",
            ready=False,
            TRIDECODE_CONTROL_ENDPOINT=starting.endpoint,
        ) as front,
    ):
        wait_until(lambda: starting.hellos, 20, "the front")
        response = front.post("/v1/completions", {"prompt": "x"})
        assert (response.status_code, error_of(response)["code"]) == (503, "engine_not_ready")
        assert front.http.get("/health").status_code == 503
        assert front.openai.models.list().data


def test_a_full_queue_and_a_deadline_have_their_own_statuses(slow_front: Front, slow: FakeEngine) -> None:
    late = slow_front.post("/v1/completions", {"prompt": "x", "max_tokens": 500, "timeout_s": 0.2})
    assert (late.status_code, error_of(late)["code"]) == (504, "deadline_exceeded")
    slow.limits = msgspec.structs.replace(slow.limits, max_queued_requests=0)
    full = slow_front.post("/v1/completions", {"prompt": "x"})
    assert (full.status_code, error_of(full)["code"]) == (429, "queue_full")
    assert full.headers["retry-after"] == "1"


def test_an_error_in_a_stream_is_its_last_event(slow_front: Front, slow: FakeEngine) -> None:
    wanted = {"prompt": "x", "max_tokens": 500, "timeout_s": 0.5, "stream": True}
    events = [line[6:] for line in slow_front.post("/v1/completions", wanted).text.splitlines() if line]
    assert len(events) > 2 and json.loads(events[-1])["error"]["code"] == "deadline_exceeded"


def test_a_silent_stream_has_comments(slow_front: Front, slow: FakeEngine) -> None:
    """An engine that stands still does not make proxies close the stream."""
    connection = begun(slow_front, stream=True)
    wait_until(lambda: slow.running == 1, what="the request")
    slow.freeze()
    found = b""
    connection.settimeout(30)
    while b"\n: waiting\n\n" not in found and b"\r\n: waiting\n\n" not in found:
        piece = connection.recv(65_536)
        assert piece, found[-300:]
        found += piece
    slow.thaw()
    connection.close()


def test_a_worker_is_light() -> None:
    """Neither torch nor pydantic nor gRPC, and half a second of a CPU at most."""
    program = """
import resource, sys
import tridecode.backend.front.process.worker
heavy = {"torch", "transformers", "pydantic", "grpc", "tritonclient", "triton_python_backend_utils"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert float(done.stdout) < 1.0  # 0.3 s on an idle machine


def test_while_the_server_drains_streams_go_on_and_new_requests_are_refused(
    slow_front: Front, its_supervisor: FakeSupervisor, ids: Ids
) -> None:
    asked = {"model": "toy", "prompt": "When?", "max_tokens": len(ids(TEXT)) + 40}
    stream = slow_front.openai.completions.create(stream=True, **asked)
    text = next(stream).choices[0].text
    its_supervisor.drain()
    wait_until(lambda: slow_front.http.get("/health").status_code == 503, what="the drain")
    refused = slow_front.post("/v1/completions", {"prompt": "x"})
    assert (refused.status_code, error_of(refused)["code"]) == (503, "engine_not_ready")
    assert "about to stop" in error_of(refused)["message"] and refused.headers["retry-after"] == "2"
    assert slow_front.http.get("/v1/models").status_code == 200
    last = None
    for last in stream:
        text += last.choices[0].text
    assert last is not None and last.choices[0].finish_reason == "length" and text.startswith(TEXT)


def test_a_stop_lets_streams_end_and_says_goodbye(
    its_supervisor: FakeSupervisor, slow: FakeEngine, toy_repository: Path, tmp_path: Path, ids: Ids
) -> None:
    environment = {"TRIDECODE_CONTROL_ENDPOINT": its_supervisor.endpoint}
    with Front(toy_repository, tmp_path / "log", **environment) as front:
        stream = front.openai.completions.create(
            model="toy", prompt="When?", max_tokens=len(ids(TEXT)), stream=True
        )
        text = next(stream).choices[0].text
        front.process.terminate()
        assert text + "".join(chunk.choices[0].text for chunk in stream) == TEXT
        assert front.process.wait(20) == 0
    assert its_supervisor.goodbyes == 1 and len(slow.goodbyes) == 1
