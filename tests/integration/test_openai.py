"""The OpenAI service next to the real server, which starts and ends it, with the texts of the text model."""

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
    wait_until(lambda: not front_pids(repository), 60, "the end of the service")


def get(port: int, path: str) -> int:
    """Return the status; 0 without an answer."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}").status_code
    except httpx.TransportError:
        return 0


def healthy(port: int) -> bool:
    return get(port, "/health") == 200


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


#: as many tokens as the model has places for, so that streams are open when a signal comes
LONG = {
    "model": "hf",
    "prompt": PROMPT,
    "max_tokens": 900,
    "temperature": 0,
    "stream": True,
    "extra_body": {"ignore_eos": True},
}


def test_sigterm_lets_the_streams_of_the_service_end(repository: Path) -> None:
    (port,), before = free_ports(1), set(front_pids(repository))
    with running_server(repository, options=["--openai-port", str(port)], drain_s=200.0) as server:
        wait_until(lambda: healthy(port), 30, "the OpenAI service")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        streams = [client.completions.create(**LONG) for _ in range(16)]
        texts = [next(stream).choices[0].text for stream in streams]
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: get(port, "/health") == 503, 20, "the drain")
        refused = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": PROMPT})
        assert refused.status_code == 503 and "about to stop" in refused.json()["error"]["message"]
        for number, stream in enumerate(streams):
            last = None
            for last in stream:
                texts[number] += last.choices[0].text
            assert last is not None and last.choices[0].finish_reason == "length"
        assert len(set(texts)) == 1
        assert server.process.wait(60) == 0
    wait_until(lambda: set(front_pids(repository)) <= before, 60, "the end of the service")


def ending(stream: openai.Stream) -> str:
    """Return how a stream ended: "" for a whole one, "closed", or the text of its error."""
    try:
        list(stream)
    except openai.APIError as error:
        return str(error)
    except httpx.TransportError:
        return "closed"
    return ""


def test_sigterm_ends_streams_that_take_too_long_with_a_reason(repository: Path) -> None:
    (port,), before = free_ports(1), set(front_pids(repository))
    with running_server(repository, options=["--openai-port", str(port)], drain_s=0.0) as server:
        wait_until(lambda: healthy(port), 30, "the OpenAI service")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        streams = [client.completions.create(n=6, **LONG) for _ in range(8)]
        for stream in streams:
            next(stream)
        server.process.send_signal(signal.SIGTERM)
        ends = [end for end in map(ending, streams) if end]
        assert ends, "every stream had ended before the signal"
        # on an overloaded machine the service may be killed before it has written the errors
        assert all("SIGTERM" in end for end in ends if end != "closed"), ends
        assert server.process.wait(60) == 0
    wait_until(lambda: set(front_pids(repository)) <= before, 60, "the end of the service")
