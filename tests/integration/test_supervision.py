"""The real tritonserver under `tridecode serve`: killed processes, clients' errors, and that nothing is left.

The engine is tests/fake_engine.py behind the real supervisor, the doors are real.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.fake_engine import LIMITS, toy_tokens
from tests.integration.supervised import (
    ECHO_CONFIG,
    END_S,
    ERROR_S,
    SHM,
    Service,
    command_line,
    marked_processes,
    post,
    services,
)
from tests.waiting import wait_until
from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.supervisor import shared_memory
from tridecode.backend.wire.sampling_params import SamplingParams
from tridecode.tools.serve import triton_install
from tridecode.tools.serve.ports import free_ports
from tridecode.tools.serve.triton_http import TritonHttp, TritonHttpError

pytestmark = [pytest.mark.server, pytest.mark.slow]

#: as of one of our unary models
COUNTING_ECHO = """
import numpy as np
import triton_python_backend_utils as pb

from tridecode.backend.wire.taken_requests import TakenRequests


class TritonPythonModel:
    def initialize(self, args):
        self.taken = TakenRequests()

    def execute(self, requests):
        return [pb.InferenceResponse([pb.Tensor("ECHO", np.zeros(1, np.uint32))]) for _ in requests]
"""
ECHO_BODY = b'{"inputs": [{"name": "TEXT", "shape": [1], "datatype": "UINT32", "data": [0]}]}'
HEALTH_CONFIG = """
name: "tridecode_health"
backend: "python"
instance_group { count: 1 kind: KIND_CPU }
output { name: "READY" data_type: TYPE_BOOL dims: [ 1 ] }
parameters { key: "engine_model" value: { string_value: "fastertransformer" } }
"""
ENSEMBLE_CONFIG = """
name: "both"
platform: "ensemble"
input { name: "TEXT" data_type: TYPE_UINT32 dims: [ -1 ] }
output { name: "ECHO" data_type: TYPE_UINT32 dims: [ -1 ] }
ensemble_scheduling { step {
  model_name: "echo"
  model_version: -1
  input_map { key: "TEXT" value: "TEXT" }
  output_map { key: "ECHO" value: "ECHO" }
} }
"""


@pytest.fixture
def repository() -> Iterator[Callable[..., Service]]:
    with services() as start:
        yield start


def test_a_zombie_counts_as_gone(monkeypatch):
    mark = uuid.uuid4().hex
    monkeypatch.setenv("TRIDECODE_TEST_MARK", mark)
    with subprocess.Popen(["sleep", "60"]) as process:
        wait_until(lambda: marked_processes(mark), what="exec")
        (seen,) = marked_processes(mark)
        assert seen.pid == process.pid
        process.kill()
        wait_until(lambda: seen.status() == psutil.STATUS_ZOMBIE)
        assert command_line(seen) == [] and marked_processes(mark) == []


def test_a_killed_door_is_brought_back_and_harms_nothing_else(repository):
    service = repository()
    triton, other = service.triton, service.streaming("second", tokens=80)
    service.door("fastertransformer").kill()
    seconds = service.wait_reloaded()
    assert service.answers("fastertransformer")
    assert other.done.wait(60) and not other.error
    assert service.triton == triton
    print(f"a killed door was back after {seconds:.1f} s")


def test_a_door_killed_under_load_is_brought_back(repository):
    service = repository(options=["--orphans", "leave"])
    triton = service.triton
    service.streaming("fastertransformer")
    for times in (1, 2):
        service.door("fastertransformer").kill()
        service.wait_reloaded(times)
        assert service.answers()
    assert service.triton == triton


def test_a_stopped_door_does_not_take_the_server_along(repository):
    service = repository()
    triton, other = service.triton, service.streaming("second", tokens=150)
    service.door("fastertransformer").suspend()
    service.wait_reloaded()
    assert service.answers("fastertransformer")
    assert other.done.wait(60) and not other.error
    assert service.triton == triton


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_of_a_dead_or_frozen_engine_that_decline_end_with_its_reason(repository, how):
    service = repository()
    triton = service.triton
    doors = [model for model in ("fastertransformer", "second") for _ in range(8)]
    streams = [service.streaming(model, resume=False) for model in doors]
    start = time.monotonic()
    service.engine.send_signal(how)
    for stream in streams:
        assert stream.done.wait(ERROR_S + 1)
        assert stream.ended_at - start < ERROR_S
        assert ("killed by signal 9" if how == signal.SIGKILL else "silent for ") in stream.error
    wait_until(lambda: service.answers() and service.answers("second"), 60, "answers")
    assert service.triton == triton


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_of_a_dead_or_frozen_engine_are_unbroken(repository, how):
    service = repository()
    triton = service.triton
    doors = [model for model in ("fastertransformer", "second") for _ in range(8)]
    streams = [service.streaming(model, tokens=150) for model in doors]
    service.engine.send_signal(how)
    wanted = toy_tokens([5, 6, 7], 150, SamplingParams(), LIMITS.vocab_size)
    for stream in streams:
        assert stream.done.wait(20) and not stream.error
        assert stream.last[0, 0].tolist() == [5, 6, 7, *wanted]
    print(f"{how.name}: longest gap {max(stream.longest_gap_s for stream in streams):.1f} s")
    assert "requests are waiting for another engine" in service.server.log()
    assert "another engine continues 8 requests" in service.server.log()
    assert service.triton == triton


def test_a_supervisor_that_is_stopped_alone_breaks_no_stream(repository):
    service = repository()
    streams = [service.streaming(tokens=150) for _ in range(4)]
    service.process("tridecode.backend.supervisor").terminate()
    for stream in streams:
        assert stream.done.wait(20) and not stream.error
        assert stream.last[0, 0, 3:].tolist() == toy_tokens(
            [5, 6, 7], 150, SamplingParams(), LIMITS.vocab_size
        )


def test_a_killed_supervisor_is_replaced_by_a_door(repository):
    service = repository()
    triton, stream = service.triton, service.streaming(resume=False)
    other = service.streaming(tokens=150)
    start = time.monotonic()
    service.process("tridecode.backend.supervisor").kill()
    assert stream.done.wait(60) and stream.error
    wait_until(service.answers, 15, "answers")
    assert other.done.wait(15) and not other.error
    print(f"a killed supervisor: error after {stream.ended_at - start:.1f} s")
    assert service.triton == triton


KILLERS = {
    "a tensor of 4 TiB": b'{"inputs": [{"name": "TEXT", "datatype": "UINT32", "shape": [1099511627776], '
    b'"data": [1]}]}',
    "SIGKILL": b"",
}


@pytest.mark.parametrize("how", KILLERS)
def test_a_dead_server_is_started_again_and_the_engine_is_kept(repository, how):
    service = repository()
    stream, engine, dead = service.streaming(), service.engine_epochs(), service.triton
    start = time.monotonic()
    if KILLERS[how]:
        assert "Error" in post(service, "echo", KILLERS[how]), "Triton 2.51 aborts"
    else:
        dead.kill()
    assert stream.done.wait(ERROR_S) and stream.error
    service.wait_back()
    assert service.answers() and service.answers("second")
    print(f"{how}: answers again after {time.monotonic() - start:.1f} s")
    assert service.triton != dead
    assert service.engine_epochs() == engine, "the engine was not loaded again"
    assert "the engine was kept" in service.server.log()


def test_a_server_that_stays_stopped_is_started_again_and_the_engine_is_kept(repository):
    service = repository()
    stream, engine, stopped = service.streaming(), service.engine_epochs(), service.triton
    start = time.monotonic()
    stopped.suspend()
    assert stream.done.wait(60) and stream.error
    print(f"a stopped server: error after {stream.ended_at - start:.1f} s")
    assert stream.ended_at - start < ERROR_S
    service.wait_back()
    assert service.answers() and service.triton != stopped
    assert service.engine_epochs() == engine


@pytest.mark.nightly  # shows what Triton does, not what we do
def test_requests_of_a_dead_door_never_end_in_triton_unless_it_is_started_again(repository):
    """The smallest case: one stream, its stub killed. `leave` shows what Triton does by itself."""
    service = repository(options=["--orphans", "leave"])
    triton, stream = service.triton, service.streaming()
    service.door("fastertransformer").kill()
    service.wait_reloaded()
    assert service.answers(), "new requests have a door again"
    assert not stream.done.wait(ERROR_S), "neither the reload nor anything else ends it"
    assert service.triton == triton


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_of_a_dead_door_end_in_time_on_a_busy_server(repository, how):
    service = repository()
    streams, engine = [service.streaming() for _ in range(4)], service.engine_epochs()
    other, start = service.streaming("second"), time.monotonic()
    service.door("fastertransformer").send_signal(how)
    service.wait_reloaded()
    for stream in [*streams, other]:
        assert stream.done.wait(60) and stream.error
        assert stream.ended_at - start < ERROR_S + (1.0 if how == signal.SIGSTOP else 0.0)
    print(f"{how.name}: ended after {other.ended_at - start:.1f} s")
    service.wait_back()
    assert service.answers() and service.answers("second")
    assert service.engine_epochs() == engine


def test_requests_of_a_dead_door_end_when_nothing_else_is_open(repository):
    service = repository(options=["--orphans", "idle"])
    stream, engine = service.streaming(), service.engine_epochs()
    other = service.streaming("second", tokens=150)
    service.door("fastertransformer").kill()
    assert other.done.wait(15) and not other.error, "other doors are not affected"
    assert stream.done.wait(15) and stream.error
    print(f"ended {stream.ended_at - other.ended_at:.1f} s after the last other request")
    service.wait_back()
    assert service.answers()
    assert service.engine_epochs() == engine
    assert "with 1 request open, which Triton cannot end" in service.server.log()


def during_reload(service: Service, send: Callable[[], str]) -> list[str]:
    """The errors of requests that are sent one after the other until the dead door is back."""
    errors: list[str] = []
    wait_until(lambda: errors.append(send()) or "is back after" in service.server.log(), 60, "the reload")
    return errors


def ask_health(service: Service) -> str:
    return post(service, "tridecode_health", b'{"inputs": []}')


@pytest.mark.parametrize(
    "door", ["fastertransformer", pytest.param("tridecode_health", marks=pytest.mark.nightly), "echo"]
)
def test_a_request_at_a_dying_door_ends_no_stream(repository, door):
    """Triton answers it ("Stub process … is not healthy") and keeps the door's memory: nothing is open."""
    root = Path(os.environ["TRIDECODE_RUNTIME_DIR"]).parent
    (root / "repo" / "tridecode_health" / "1").mkdir(parents=True)
    (root / "repo" / "tridecode_health" / "config.pbtxt").write_text(HEALTH_CONFIG)
    (root / "repo" / "tridecode_health" / "1" / "model.py").write_text(
        "from tridecode.backend.doors.health import TritonPythonModel  # noqa: F401\n"
    )
    (root / "repo" / "echo" / "1" / "model.py").write_text(COUNTING_ECHO)
    service = repository()
    triton, others = service.triton, [service.streaming("second") for _ in range(4)]
    assert service.answers() and "READY" in ask_health(service)
    service.door(door).kill()

    def send() -> str:
        if door == "fastertransformer":
            request = service.request()
            assert request.done.wait(60)
            return request.error
        return ask_health(service) if door == "tridecode_health" else post(service, "echo", ECHO_BODY)

    assert any("is not healthy" in error for error in during_reload(service, send))
    time.sleep(ERROR_S + 1)
    assert "has died with no requests open" in service.server.log()
    assert service.triton == triton
    assert not any(other.done.is_set() for other in others)


def test_a_packet_that_kills_its_door_ends_no_stream(repository):
    """A model whose process such a packet does end, as any model of another author."""
    root = Path(os.environ["TRIDECODE_RUNTIME_DIR"]).parent
    (root / "repo" / "echo" / "config.pbtxt").write_text(ECHO_CONFIG.replace("[ -1 ]", "[ -1, -1, -1 ]", 1))
    (root / "repo" / "echo" / "1" / "model.py").write_text(COUNTING_ECHO)
    service = repository()
    triton, other = service.triton, service.streaming("second")
    with grpcclient.InferenceServerClient(service.server.grpc_url) as client:
        tensor = grpcclient.InferInput("TEXT", [2**22, 2**21, 2**21], "UINT32")
        tensor._raw_content = b""
        with pytest.raises(InferenceServerException, match="is not healthy"):
            client.infer("echo", [tensor], client_timeout=20)
    service.wait_reloaded()
    time.sleep(ERROR_S + 1)
    assert "ECHO" in post(service, "echo", ECHO_BODY.replace(b"[1]", b"[1, 1, 1]"))
    assert service.triton == triton and not other.done.is_set()


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)], ids=int
)
def test_streams_of_a_dead_door_end_although_somebody_has_unlinked_its_memory(repository, how):
    service = repository()
    streams = [service.streaming() for _ in range(8)]
    assert shared_memory.unlink_prefix(service._shm_prefix)
    start = time.monotonic()
    service.door("fastertransformer").send_signal(how)
    for stream in streams:
        assert stream.done.wait(60) and stream.error
        assert stream.ended_at - start < ERROR_S + (1.0 if how == signal.SIGSTOP else 0.0)
    service.wait_back()
    assert service.answers()
    assert "has died with 8 requests open" in service.server.log()


def test_streams_of_a_dead_door_end_although_it_cannot_be_loaded_again(repository):
    service = repository()
    stream = service.streaming()
    other = service.streaming("second")
    model = service.root / "repo" / "fastertransformer" / "1" / "model.py"
    code = model.read_text()
    model.write_text("raise ValueError('no such weights')")
    start = time.monotonic()
    service.door("fastertransformer").kill()
    for one in (stream, other):
        assert one.done.wait(60) and one.error
    assert one.ended_at - start < ERROR_S
    model.write_text(code)
    service.wait_back()
    wait_until(service.answers, 20, "answers")


def test_a_path_that_bash_would_execute_is_served(repository):
    root = Path(os.environ["TRIDECODE_RUNTIME_DIR"]).parent
    unsafe = "a b'\";$(touch executed)\n&"
    (root / "repo").rename(root / unsafe)
    service = repository(repo=unsafe)
    assert service.answers()
    assert not list(root.rglob("executed")) and not Path("executed").exists()


def test_doors_come_back_although_the_runtime_folder_was_removed(repository):
    service = repository()
    (folder,) = (service.root / "run").iterdir()
    shutil.rmtree(folder / "backends")
    wait_until(lambda: "removed: recreated" in service.server.log(), 60, "a look at the folder")
    service.door("fastertransformer").kill()
    service.wait_reloaded()
    assert service.answers()


def test_a_model_that_fails_to_load_is_the_last_line(repository):
    root = Path(os.environ["TRIDECODE_RUNTIME_DIR"]).parent
    (root / "repo" / "echo" / "1" / "model.py").write_text("raise ValueError('no such weights')")
    (root / "repo" / "both" / "1").mkdir(parents=True)
    (root / "repo" / "both" / "config.pbtxt").write_text(ENSEMBLE_CONFIG)
    with pytest.raises(TridecodeError, match="serve ended with 1"):
        repository()
    last = (root / "serve.log").read_text().splitlines()[-1]
    assert "model echo could not be loaded" in last and "no such weights" in last


def test_nothing_is_left_when_serve_is_killed(repository):
    service = repository()
    service.streaming()
    service.server.process.kill()
    service.server.process.wait()
    print(f"nothing left after {wait_until(lambda: not service.left(), END_S, 'an end of everything'):.1f} s")


def test_nothing_is_left_when_the_guard_is_killed(repository):
    service = repository()
    service.streaming()
    service.triton.parent().kill()
    service.wait_back()
    assert service.answers()
    assert service.server.stop() == 0
    assert not service.left()


def test_nothing_is_left_when_serve_and_guard_are_killed_at_once(repository):
    service = repository()
    service.streaming()
    for process in (service.triton.parent(), service.server.process):
        process.kill()
    service.server.process.wait()
    print(f"nothing left after {wait_until(lambda: not service.left(), END_S, 'an end of everything'):.1f} s")


def test_what_a_killed_machine_of_processes_leaves_is_removed_by_the_next_start(repository):
    service = repository()
    service.streaming()
    for process in service.processes():
        process.kill()
    service.server.process.wait()
    wait_until(lambda: not service.processes(), END_S, "the end of all processes")
    assert service.left(), "nobody was left to clean up"
    next_service = repository()
    assert next_service.answers()
    assert next_service.server.stop() == 0
    assert not service.left() and not next_service.left()


def test_sigterm_lets_requests_finish(repository):
    service = repository()
    stream = service.streaming(tokens=100)
    service.server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not service.server.ready(), 10, "readiness false")
    late = service.request()
    assert late.done.wait(60) and late.error, "new requests are refused while the server drains"
    assert stream.done.wait(60) and not stream.error
    assert service.server.process.wait(60) == 0
    assert not service.left()


def test_sigterm_ends_requests_that_take_too_long_with_a_reason(repository):
    service = repository(drain_s=2)
    stream = service.streaming()
    start = time.monotonic()
    assert service.server.stop() == 0
    assert time.monotonic() - start < 2 + 10, "of the twenty seconds that tritonserver would wait"
    assert stream.done.wait(1) and "SIGTERM" in stream.error
    assert not service.left()


def test_a_second_sigterm_kills(repository):
    service = repository()
    service.streaming()
    service.server.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    service.server.process.send_signal(signal.SIGTERM)
    assert service.server.process.wait(5) == 1, "before the requests have ended"
    assert not service.left()


def test_the_drop_in_serves_nvidia_s_command_line_with_closed_apis_and_leaves_nothing(repository):
    root = Path(os.environ["TRIDECODE_RUNTIME_DIR"]).parent
    http_port, grpc, metrics = free_ports(3)
    command = [sys.executable, "-m", "tridecode.tools.cli", "tritonserver"]
    command += ["--model-repository", str(root / "repo")]
    command += [f"--http-port={http_port}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    with (root / "serve.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    triton = TritonHttp(f"127.0.0.1:{http_port}")
    wait_until(triton.ready, 40, "readiness")
    with pytest.raises(TritonHttpError, match="403 This API is restricted"):
        triton.load("echo")
    server.terminate()
    assert server.wait(40) == 0
    assert not marked_processes(os.environ["TRIDECODE_TEST_MARK"]) and not list((root / "run").iterdir())


def test_nothing_is_left_of_a_killed_server_that_runs_without_serve(repository):
    root = Path(os.environ["TRIDECODE_RUNTIME_DIR"]).parent
    install = triton_install.prepare(root / "triton")
    http_port, grpc, metrics = free_ports(3)
    command = [install.binary, *install.arguments, f"--model-repository={root / 'repo'}"]
    command += [f"--http-port={http_port}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    before = set(os.listdir(SHM))
    with (root / "serve.log").open("wb") as log:
        server = subprocess.Popen(command, env=install.environment, stdout=log, stderr=log)
    try:
        wait_until(TritonHttp(f"127.0.0.1:{http_port}").ready, 30, "readiness")
        regions = {stub.region for stub in shared_memory.stubs_of(server.pid)}
        assert len(regions) == 3 and regions <= set(os.listdir(SHM)) - before
    finally:
        server.kill()
        server.wait()
    wait_until(lambda: not marked_processes(os.environ["TRIDECODE_TEST_MARK"]), END_S, "an end of everything")
    assert not regions & set(os.listdir(SHM))
    assert not list((root / "run").iterdir())
