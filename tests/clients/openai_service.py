"""The OpenAI service for `make clients`: what its clients are given, and what Triton answers to the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoTokenizer

from tests.clients.openai_programs import LAMBADA_ITEMS

READY_S = 120.0


def wait_ready(url: str) -> str:
    """Return the name of the served model. url: ends in /v1. Raises RuntimeError."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url.removesuffix('/v1')}/health").status_code == 200:
                return httpx.get(f"{url}/models").json()["data"][0]["id"]
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the OpenAI service at {url} was not ready after {READY_S:g} s")


@contextmanager
def tools_service(repository: Path, template: Path, port: int, log: Path) -> Iterator[str]:
    """Run `tridecode front` with the running server of the repository, with a template that shows tools."""
    command = [sys.executable, "-m", "tridecode.tools.cli", "front", str(repository), "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--chat-template", str(template)], stdout=out, stderr=out, stdin=subprocess.DEVNULL
        )
    try:
        url = f"http://127.0.0.1:{port}/v1"
        wait_ready(url)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def chat_prompt(tokenizer: Path, prompt: str) -> str:
    """The text of a chat with one message, by transformers."""
    messages = [{"role": "user", "content": prompt}]
    found: Any = AutoTokenizer.from_pretrained(tokenizer)
    return found.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def lambada_accuracy(grpc: str, file: Path, tokenizer: Path, work: Path) -> float:
    """Return the last-word accuracy in percent, measured by `tridecode evaluate-lambada` through Triton."""
    report = work / "evaluate-lambada.json"
    command = [sys.executable, "-m", "tridecode.tools.cli", "evaluate-lambada", "--data", str(file)]
    command += ["--url", grpc, "--definition", "last-word", "--limit", str(LAMBADA_ITEMS)]
    command += ["--tokenizer", str(tokenizer), "--output", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, env=dict(os.environ))
    if done.returncode != 0:
        raise RuntimeError(f"evaluate-lambada: {done.stderr.strip()[-300:]}")
    return json.loads(report.read_text())["scores"][0]["served_accuracy"]
