"""The OpenAI service beside the real server, which starts and ends it, with the texts of the text model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.reliability.service import build_repository
from tests.waiting import wait_until
from tridecode.backend.supervisor import processes
from tridecode.tools.serve.ports import free_ports
from tridecode.tools.serve.server_process import ServerProcess, running_server

pytestmark = pytest.mark.server
PROMPT = "the ferry leaves at seven"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_repository(tmp_path_factory.mktemp("openai"))


@pytest.fixture(scope="module")
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def server(repository: Path, port: int) -> Iterator[ServerProcess]:
    with running_server(repository, options=["--openai-port", str(port)]) as server:
        wait_until(lambda: healthy(port), 30, "the OpenAI service")
        yield server
    wait_until(lambda: not front_pids(repository), 10, "the end of the service")


def healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


def front_pids(repository: Path) -> list[int]:
    lines = {pid: processes.command_line(pid) or [] for pid in processes.all_pids()}
    return [
        pid
        for pid, words in lines.items()
        if "tridecode.backend.front" in words and any(str(repository) in word for word in words)
    ]


def test_its_texts_are_those_of_the_text_model(server: ServerProcess, port: int) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    found = client.completions.create(model="hf", prompt=PROMPT, max_tokens=24, temperature=0)
    url = f"http://{server.http_url}/v2/models/tensorrt_llm_bls/generate"
    body = {"text_input": PROMPT, "max_tokens": 24, "exclude_input_in_output": True}
    assert found.choices[0].text == httpx.post(url, json=body).json()["text_output"]


def test_a_supervisor_that_is_killed_is_a_pause_and_a_front_that_is_killed_comes_back(
    server: ServerProcess, repository: Path, port: int
) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    asked = {"model": "hf", "prompt": PROMPT, "max_tokens": 400, "temperature": 0}
    wanted = client.completions.create(**asked).choices[0].text
    stream = client.completions.create(stream=True, **asked)
    text = next(stream).choices[0].text
    (front,) = front_pids(repository)
    (supervisor,) = [
        pid
        for pid in processes.all_pids()
        if "tridecode.backend.supervisor" in (words := processes.command_line(pid) or [])
        and any(str(repository) in word for word in words)
    ]
    os.kill(supervisor, signal.SIGKILL)
    text += "".join(choice.text for chunk in stream for choice in chunk.choices)
    assert text == wanted
    wait_until(lambda: healthy(port), 30, "the next engine")
    assert front_pids(repository) == [front]
    os.kill(front, signal.SIGKILL)
    wait_until(lambda: front_pids(repository) not in ([], [front]), 20, "the next service")
    wait_until(lambda: healthy(port), 20)
    assert client.completions.create(**asked).choices[0].text == wanted
