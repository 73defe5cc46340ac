"""Metrics and logs of `tridecode serve` with a real engine: counters continue after a process is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.backend.doors.metrics_page import families, text_of, value
from tests.integration.clients import infer, post, standard_inputs, stream, text_inputs
from tests.reliability.service import build_repository
from tests.waiting import wait_until
from tridecode.tools.serve.server_process import ServerProcess

pytestmark = [pytest.mark.server, pytest.mark.slow]
MODEL = "fastertransformer"
STREAMS = "tensorrt_llm_bls"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("metrics")
    repository = build_repository(folder, max_sequences=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIDECODE_RUNTIME_DIR", str(folder / "run"))
        patch.delenv("TRIDECODE_REQUEST_LOG", raising=False)
        server = ServerProcess(
            repository, folder / "serve.log", drain_s=5.0, options=("--log-format", "json")
        )
    try:
        server.wait_ready(60)
        yield server
    finally:
        server.stop()


def process_of(server: ServerProcess, *words: str) -> psutil.Process:
    """The process of this server that has all of the words on its command line."""
    words = (*words, str(server.log_file.parent))  # where its repository and its runtime folder are
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if all(any(word in part for part in command) for word in words):
            return process
    raise AssertionError(f"no process has {words}")


def page(server: ServerProcess) -> str:
    return text_of(f"127.0.0.1:{server.metrics_port}")


def requests_of(server: ServerProcess, model: str = MODEL) -> float:
    return value(page(server), "tridecode_request_seconds_count", model=model)


def generated(server: ServerProcess) -> float:
    return value(page(server), "tridecode_engine_output_tokens_total", engine=MODEL)


def ask(server: ServerProcess, count: int = 10) -> None:
    infer("grpc", server.grpc_url, MODEL, standard_inputs([[5, 6, 7]], [count]))


def test_requests_that_wait_for_a_slot_show_in_the_queue_s_histogram_and_in_the_log(server):
    inputs = standard_inputs([[5, 6, 7]] * 6, [200] * 6)  # two slots
    infer("grpc", server.grpc_url, MODEL, inputs, request_id="six")
    wait_until(lambda: requests_of(server) == 1, 60, "the request")
    name = "tridecode_queue_seconds"
    assert value(page(server), f"{name}_count", model=MODEL) == 1
    list(stream(server.grpc_url, STREAMS, text_inputs("abc", 40, stream=True), request_id="streamed"))
    wait_until(lambda: "streamed" in server.log(), 60, "the line of the stream")
    lines = {line["id"]: line for line in our_lines(server) if line.get("event") == "request"}
    assert (lines["six"]["sequences"], lines["six"]["output_tokens"]) == (6, 1200)
    for line in (lines["six"], lines["streamed"]):
        assert 0 < line["queue_s"] <= line["first_token_s"] <= line["total_s"]


def our_lines(server: ServerProcess) -> list[dict]:
    """The log's lines that are JSON objects."""
    return [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]


def test_counters_of_a_door_that_is_killed_and_loaded_again_go_on(server):
    ask(server)
    wait_until(lambda: requests_of(server) >= 1, 60, "the request")
    time.sleep(2.2)  # every door has published all that was asked before
    before, tokens = requests_of(server), generated(server)
    door = process_of(server, "triton_python_backend_stub", f"/{MODEL}/")
    os.kill(door.pid, signal.SIGKILL)

    def answers() -> bool:
        try:
            ask(server)
        except Exception:
            return False
        return True

    wait_until(answers, 30, "the door to be loaded again")
    wait_until(lambda: requests_of(server) == before + 1, 60, "the count to go on")
    wait_until(lambda: generated(server) == tokens + 10, 60, "the engine's total")
    families(page(server))


def test_the_engine_s_totals_go_on_when_it_is_rebuilt(server):
    before = generated(server)
    os.kill(process_of(server, "--rank", "--epoch").pid, signal.SIGKILL)
    wait_until(lambda: value(page(server), "tridecode_engine_ready", engine=MODEL) == 0, 60, "a dead engine")
    wait_until(lambda: value(page(server), "tridecode_engine_epoch", engine=MODEL) == 2, 60, "another one")
    assert generated(server) == before
    ask(server, 25)
    wait_until(lambda: generated(server) == before + 25, 60, "its tokens")
    time.sleep(2.2)  # every door publishes twice
    assert generated(server) == before + 25


def test_every_process_writes_json_where_it_writes_at_all(server):
    post(server.http_url, f"{STREAMS}/generate", {"text_input": "a", "max_tokens": -1, "id": "wrong"})
    wait_until(lambda: '"wrong"' in server.log(), 60, "the refusal")
    lines = our_lines(server)
    assert {line["process"] for line in lines if "process" in line} >= {
        "serve",
        "supervisor",
        "engine rank 0",
    }
    assert all(("level" in line and "message" in line) or "event" in line for line in lines)
    (wrong,) = [line for line in lines if line.get("id") == "wrong"]
    assert wrong["outcome"] == "invalid_arg" and "max_tokens is -1" in wrong["error"]
    assert "tritonserver" in {line.get("logger") for line in lines}
    assert not [line for line in server.log().splitlines() if line and not line.startswith("{")]
