"""The front as a child process, before a fake engine or a real one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.checkpoints import tiny_tokenizer

ROOT = Path(__file__).parents[3]
TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if message['role'] not in ('user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}
[{{ message['role'] }}] {{ message['content'] }}{% endfor %}
{% if add_generation_prompt %} [assistant]{% endif %}"""


#: the interpreter of the front, which may have less installed than that of the tests
PYTHON = os.environ.get("TRIDECODE_TEST_FRONT_PYTHON", sys.executable)
ENVIRONMENT = {"TRIDECODE_ENGINE_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


def repository(folder: Path, template: str | None = TEMPLATE, **parameters: str) -> Path:
    """A repository without weights, for fake engines. parameters: of the engine's config.pbtxt."""
    engine, text = folder / "fastertransformer", folder / "text"
    weights = engine / "1" / "1-gpu"
    weights.mkdir(parents=True)
    (weights / "manifest.json").write_text('{"format": "of a fake engine"}')
    tokenizer = tiny_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(text / "1" / "tokenizer")
    (engine / "config.pbtxt").write_text(_pbtxt(parameters))
    (text / "config.pbtxt").write_text(_pbtxt({"tokenizer_dir": "text/1/tokenizer", "stop_ids": ""}))
    return folder


def _pbtxt(parameters: dict[str, str]) -> str:
    return "".join(
        f'parameters {{ key: "{k}" value: {{ string_value: "{v}" }} }}\n' for k, v in parameters.items()
    )


class Front:
    """`tridecode front` on a free port."""

    def __init__(self, repository: Path, log: Path, *options: str, ready: bool = True, **environment: str):
        """ready: wait until the engine is."""
        self.log = log
        self._file = log.open("wb")
        self.process = subprocess.Popen(
            [PYTHON, "-m", "tridecode.backend.front", str(repository), "--port", "0", *options],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=self._file, stderr=self._file,
            env={**os.environ, **ENVIRONMENT, **environment},
        )  # fmt: skip
        self.port = self._find_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        if ready:
            self.wait_ready()

    def _find_port(self, timeout_s: float = 30.0) -> int:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"port (\d+), with", self.text()):
                return int(found.group(1))
            time.sleep(0.02)
        raise AssertionError(f"the front did not start: {self.text()}")

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert self.process.poll() is None, self.text()
            time.sleep(0.05)
        raise AssertionError(f"the front was not ready: {self.text()}")

    def text(self) -> str:
        """Its log."""
        return self.log.read_text(errors="replace")

    def post(self, path: str, body: Any = None, **named: Any) -> httpx.Response:
        return self.http.post(path, json=body, **named) if body is not None else self.http.post(path, **named)

    def close(self) -> int:
        self.http.close()
        self.openai.close()
        self.process.terminate()
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self._file.close()

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.close() == 0


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, which has OpenAI's shape and nothing else."""
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    return body["error"]


def joined(chunks: Sequence[Any]) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)
