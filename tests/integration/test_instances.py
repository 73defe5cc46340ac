"""Two instances of a model in the real tritonserver: two engines, side by side."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.backend.doors.metrics_page import families, text_of, value
from tests.backend.engine.offline_models import hf_greedy
from tests.checkpoints import save, tiny_llama
from tests.integration.clients import infer, standard_inputs, stream
from tests.reliability.service import Service
from tests.waiting import wait_until
from tridecode.backend.supervisor import processes, state_file
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.serve.ports import free_ports

pytestmark = [pytest.mark.server, pytest.mark.slow]

DOORS = ("fastertransformer", "fastertransformer_streaming")
PROMPT = [5, 9, 11, 3]
LONG = 900  # tokens of an answer that is open while an engine is killed


@dataclass
class TwoEngines:
    service: Service
    model: object  # the Hugging Face model that was converted
    openai_port: int

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        return hf_greedy(self.model, prompt, count)[0]

    def gauges(self, name: str) -> dict[str, float]:
        """The value of a metric on the metrics page, by engine."""
        url = f"http://127.0.0.1:{self.service.server.metrics_port}/metrics"
        page = urllib.request.urlopen(url, timeout=5).read().decode()
        rows = [line.rpartition(" ") for line in page.splitlines() if line.startswith(name + "{")]
        return {labels.split('"')[1]: float(value) for labels, _, value in rows}

    def states(self) -> dict[Path, state_file.StateFile]:
        """Return the state of each engine by its runtime folder."""
        found = {folder: state_file.read(folder) for folder in self.service.engine_folders()}
        return {folder: content for folder, content in found.items() if content is not None}

    def engine_pid(self, folder: Path) -> int:
        """The only rank of the engine."""
        (pid,) = [
            process.pid
            for process in self.service.processes()
            if "--rank" in (line := processes.command_line(process.pid))
            and any(str(folder) in p for p in line)
        ]
        return pid


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Iterator[TwoEngines]:
    folder: Path = tmp_path_factory.mktemp("instances")
    model = tiny_llama(max_position_embeddings=1024)
    (port,) = free_ports(1)
    settings = {"cache_bytes": "67108864", "num_threads": "1", "device": "cpu", "openai_port": str(port)}
    repository = build_repo(str(save(model, folder / "hf")), folder / "repo", engine_settings=settings)
    for door in DOORS:
        config = repository / door / "config.pbtxt"
        text = config.read_text()
        assert "instance_group { count: 1 kind: KIND_CPU }" in text
        config.write_text(text.replace("instance_group { count: 1", "instance_group { count: 2"))
    service = Service(repository)
    try:
        yield TwoEngines(service, model, port)
    finally:
        service.close()


def test_requests_use_both_engines_and_get_transformers_tokens(two: TwoEngines) -> None:
    prompts = [[number, 9, 11] for number in range(3, 15)]

    def ask(prompt: list[int]) -> list[int]:
        answer = infer("grpc", two.service.grpc, DOORS[0], standard_inputs([prompt], [20]))
        return answer.as_numpy("output_ids")[0, 0, len(prompt) :].tolist()

    before = two.gauges("tridecode_engine_steps_total")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, prompts))
    assert answers == [two.greedy(prompt, 20) for prompt in prompts]

    def used() -> list[str]:
        steps = two.gauges("tridecode_engine_steps_total")
        return sorted(engine for engine, number in steps.items() if number >= before.get(engine, 0) + 20)

    wait_until(lambda: used() == ["fastertransformer:0", "fastertransformer:1"], 60, "steps of both engines")
    assert sorted({content.state.epoch for content in two.states().values()}) == [1]
    address, name = f"127.0.0.1:{two.service.server.metrics_port}", "tridecode_request_seconds_count"
    # the doors of both engines add to one series
    wait_until(lambda: value(text_of(address), name, model=DOORS[0]) == len(prompts), 60, "the requests")
    families(text_of(address))


def test_a_killed_engine_is_rebuilt_and_does_not_disturb_the_other(two: TwoEngines) -> None:
    wanted = two.greedy(PROMPT, LONG)
    inputs = {**standard_inputs([PROMPT], [LONG]), "resume": np.array([[False]])}

    def ask(_: int) -> list[int] | str:
        """The tokens of a whole stream, or its error."""
        try:
            last = list(stream(two.service.grpc, DOORS[1], inputs))[-1]
        except InferenceServerException as error:
            return str(error)
        return last.as_numpy("output_ids")[0, 0, len(PROMPT) :].tolist()

    before = {folder: content.state.epoch for folder, content in two.states().items()}
    assert len(before) == 2
    with ThreadPoolExecutor(4) as pool:
        open_requests = [pool.submit(ask, number) for number in range(4)]
        wait_until(
            lambda: all(content.running for content in two.states().values()), 20, "requests at both engines"
        )
        killed = next(iter(before))
        os.kill(two.engine_pid(killed), signal.SIGKILL)
        ends = [request.result(120) for request in open_requests]
    errors = [end for end in ends if isinstance(end, str)]
    answers = [end for end in ends if not isinstance(end, str)]
    assert errors and all("rank 0 was killed by signal 9" in error for error in errors)
    assert answers and all(answer == wanted for answer in answers)

    def rebuilt() -> bool:
        state = two.states()[killed].state
        return state.phase == "ready" and state.epoch > before[killed]

    wait_until(rebuilt, 30, "the next engine")
    (other,) = set(before) - {killed}
    assert two.states()[other].state.epoch == before[other], "the other engine was rebuilt too"
    for _ in range(4):
        answer = infer("http", two.service.server.http_url, DOORS[0], standard_inputs([PROMPT], [8]))
        assert answer.as_numpy("output_ids")[0, 0, 4:].tolist() == wanted[:8]


def test_the_openai_service_uses_both_engines_and_serves_while_one_is_rebuilt(two: TwoEngines) -> None:
    url = f"http://127.0.0.1:{two.openai_port}"
    wanted = two.greedy(PROMPT, LONG)
    body = {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": LONG, "temperature": 0, "ignore_eos": True},
    }

    def healthy() -> bool:
        try:
            engines = httpx.get(f"{url}/health").json()["engines"]
            return [engine["phase"] for engine in engines] == ["ready", "ready"]
        except httpx.TransportError:
            return False

    def ask(_: int) -> list[int]:
        answer = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    wait_until(healthy, 30, "the service with both engines")
    with ThreadPoolExecutor(4) as pool:
        open_requests = [pool.submit(ask, number) for number in range(4)]
        wait_until(
            lambda: all(content.running for content in two.states().values()), 30, "requests at both engines"
        )
        killed = next(folder for folder, content in two.states().items())
        os.kill(two.engine_pid(killed), signal.SIGKILL)
        wait_until(lambda: two.states()[killed].state.phase != "ready", 60, "the engine's end")
        short = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "temperature": 0}}
        answer = httpx.post(f"{url}/inference/v1/generate", json=short, timeout=60)
        assert answer.json()["choices"][0]["token_ids"] == wanted[:4]
        assert [request.result(120) for request in open_requests] == [wanted] * 4
    wait_until(lambda: two.states()[killed].state.phase == "ready", 30, "the next engine")


def test_health_is_that_of_all_engines(two: TwoEngines) -> None:
    def probe() -> np.ndarray:
        return infer("grpc", two.service.grpc, "tridecode_health", {}).as_numpy("DETAIL")

    assert probe()[0].decode().startswith("0: engine ") and "; 1: engine " in probe()[0].decode()
    folder, content = next(iter(two.states().items()))
    os.kill(two.engine_pid(folder), signal.SIGSTOP)  # silent: down within 3 s, then rebuilt

    def refused() -> bool:
        try:
            probe()
        except InferenceServerException as error:
            assert "of 2: " in str(error)
            return True
        return False

    wait_until(refused, 60, "an unhealthy answer")
    wait_until(lambda: not refused(), 30, "a healthy answer")
    assert two.states()[folder].state.epoch > content.state.epoch
