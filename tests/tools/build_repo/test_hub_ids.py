"""The id of a repository on the hub as the argument of each command and of `LLM`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.checkpoints import save, tiny_llama
from tests.fake_hub import fake_hub
from tridecode.tools.serve.ports import free_ports
from tridecode.tools.serve.server_process import running_server

MODEL = "org/tiny-llama@v1"
TRIDECODE = (sys.executable, "-m", "tridecode.tools.cli")
PROGRAM = """
import sys
from tridecode import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    (found,) = llm.generate("The history of", SamplingParams(temperature=0, max_tokens=4))
    print(llm.model_name, len(found.outputs[0].token_ids))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A hub with one model, and the variables of programs that find it there. They share a cache."""
    folder = tmp_path_factory.mktemp("hub")
    with fake_hub() as hub:
        checkpoint = save(tiny_llama(max_position_embeddings=512), folder / "checkpoint")
        hub.repositories["org/tiny-llama"] = {"v1": checkpoint}
        yield {
            **os.environ,
            **hub.environment(folder / "home"),
            "NO_PROXY": "127.0.0.1",
            "TRIDECODE_CACHE": str(folder / "cache"),
            "TRIDECODE_RUNTIME_DIR": str(folder / "run"),
            "OMP_NUM_THREADS": "1",
        }


def run(environment: dict[str, str], *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, env=environment, input=text, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert f"{MODEL}: no such folder; asking the hub" in done.stderr
    return done


@pytest.mark.slow
def test_llm_takes_the_id(environment) -> None:
    done = run(environment, sys.executable, "-c", PROGRAM, MODEL)
    name, tokens = done.stdout.split()
    assert name and tokens == "4"
    cache = Path(environment["TRIDECODE_CACHE"])
    (entry,) = cache.glob("tiny-llama-*")  # named as the repository, not as the commit
    again = run(environment, sys.executable, "-c", PROGRAM, MODEL)
    assert again.stdout == done.stdout
    assert list(cache.glob("tiny-llama-*")) == [entry]


@pytest.mark.slow
def test_batch_takes_the_id(environment, tmp_path) -> None:
    body = {"model": "m", "prompt": "The history of", "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    files = (str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
    run(environment, *TRIDECODE, "batch", *files, "--model", MODEL, "--served-model-name", "m")
    (answer,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert answer["response"]["body"]["usage"]["completion_tokens"] == 4


@pytest.mark.slow
def test_chat_takes_the_id(environment) -> None:
    done = run(
        environment, *TRIDECODE, "chat", MODEL, "--set", "max_tokens=4", text="The history of\n/exit\n"
    )
    assert done.stdout.strip() and re.search(r"[1-4] tokens, the first after", done.stderr), done.stderr


@pytest.mark.server
@pytest.mark.slow
def test_serve_takes_the_id(environment, tmp_path) -> None:
    (port,) = free_ports(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        options = ("--openai-port", str(port))
        with running_server(MODEL, 400, tmp_path / "serve.log", options=options) as server:
            request = {"text_input": "The history of", "max_tokens": 4}
            url = f"http://{server.http_url}/v2/models/tensorrt_llm_bls/generate"
            answer = httpx.post(url, json=request, timeout=60, trust_env=False).json()
            assert answer["num_output_tokens"] == 4
