"""Every command and program of docs/guides/quick_start.md, with the server that its own command starts.

Each fence runs alone, in a folder of its own; ports and the checkpoint are those of the test.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_docs import PLACEHOLDER, ROOT, fences, split
from tests.tools.llm.models import tiny_checkpoint
from tridecode.tools.serve.ports import free_ports
from tridecode.tools.serve.server_process import ServerProcess, running_server

pytestmark = [pytest.mark.server, pytest.mark.slow]
PAGE = ROOT / "docs" / "guides" / "quick_start.md"
FENCES = [(language, text) for _, language, text in fences(PAGE)]
SERVE = next(text for _, text in FENCES if text.startswith("tridecode serve <"))
#: beginnings of fences that do not run here, and why
OTHERS = {
    "make install": "installs; the test of the wheel does so",
    "tridecode serve <": "the server of this file",
    "tridecode build-repo": "tests/test_docs.py and its server run these",
}
RUN = [fence for fence in FENCES if not fence[1].startswith(tuple(OTHERS))]
PROGRAM_S = 300


class Served(NamedTuple):
    server: ServerProcess
    openai_port: int

    def with_ports(self, text: str) -> str:
        ports = {8000: self.server.http_port, 8001: self.server.grpc_port, 9000: self.openai_port}
        return re.sub(r"localhost:(8000|8001|9000)", lambda one: f"localhost:{ports[int(one[1])]}", text)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("quick")
    checkpoint = tiny_checkpoint(folder)
    words = shlex.split(SERVE.replace(PLACEHOLDER, str(checkpoint)), comments=True)
    assert words[:3] == ["tridecode", "serve", str(checkpoint)]
    (port,) = free_ports(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIDECODE_CACHE", str(folder / "cache"))
        patch.setenv("TRIDECODE_RUNTIME_DIR", str(folder / "run"))
        options = [*words[3:], "--openai-port", str(port)]
        with running_server(str(checkpoint), 400, folder / "serve.log", options=options) as server:
            yield Served(server, port)


def run(command: list[str], folder: Path, text: str = "") -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, "NO_PROXY": "localhost,127.0.0.1", "COLUMNS": "120"},
        input=text,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_page_has_every_kind_of_client() -> None:
    whole = "\n".join(text for _, text in RUN)
    for part in ("generate_stream", "tridecode chat", "tridecode batch", "LLM.connect", "import OpenAI"):
        assert part in whole
    for model in ("tensorrt_llm_bls", "vllm_model", '"fastertransformer"'):
        assert model in whole


@pytest.mark.parametrize("fence", RUN, ids=lambda fence: " ".join(fence[1].split())[:50])
def test_it_runs(served: Served, tmp_path: Path, fence: tuple[str, str]) -> None:
    language, text = fence
    text = served.with_ports(text)
    if language == "python":
        assert run([sys.executable, "-c", text], tmp_path).strip()
        return
    shown = ""
    for command in split(text):
        if command.startswith("tridecode generate "):
            command += f" --url localhost:{served.server.grpc_port}"
        shown += run(["bash", "-euo", "pipefail", "-c", command], tmp_path, "The ferry\n/exit\n")
    assert shown.strip() and '"error"' not in shown.replace('"error":null', "")


def test_its_serve_command_prints_a_curl_that_answers(served: Served, tmp_path: Path) -> None:
    lines = [line.strip() for line in served.server.log().splitlines()]
    curls = [line[line.index("curl ") :] for line in lines if "curl " in line]
    assert len(curls) >= 2
    for command in curls:
        assert "choices" in run(["bash", "-c", command], tmp_path)
