"""A server whose engine is killed: the next engine finds the blocks of the first one in the host tier."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.backend.doors.metrics_page import text_of, value
from tests.checkpoints import tiny_llama
from tests.integration.clients import infer, standard_inputs
from tests.lora_adapters import make_adapter
from tests.reliability.service import POSITIONS, build_repository
from tests.waiting import wait_until
from tridecode.tools.adapters.folder import add_adapter
from tridecode.tools.serve.server_process import ServerProcess

pytestmark = [pytest.mark.server, pytest.mark.slow]
MODEL = "fastertransformer"
ADAPTER = "accent"
PROMPTS = [[(7 * i + 31 * row) % 300 + 3 for i in range(330)] for row in range(3)]


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("tier")
    repository = build_repository(folder, request.param, host_cache_bytes=64 << 20)
    make_adapter(tiny_llama(max_position_embeddings=POSITIONS), folder / "adapter", 1)
    add_adapter(repository, ADAPTER, folder / "adapter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIDECODE_RUNTIME_DIR", str(folder / "run"))
        server = ServerProcess(repository, folder / "serve.log", drain_s=5.0)
    try:
        server.wait_ready(120)
        yield server
    finally:
        server.stop()


def metric(server: ServerProcess, name: str, **labels: str) -> float:
    page = text_of(f"127.0.0.1:{server.metrics_port}")
    return value(page, f"tridecode_engine_{name}", engine=MODEL, **labels)


def ask(server: ServerProcess) -> list[list[int]]:
    """Return the answers of the model and of the adapter to each prompt."""
    rows = [(prompt, name) for prompt in PROMPTS for name in ("", ADAPTER)]
    inputs = standard_inputs([prompt for prompt, _ in rows], [4] * len(rows))
    inputs["lora_name"] = np.array([[name.encode()] for _, name in rows], object)
    return infer("grpc", server.grpc_url, MODEL, inputs).as_numpy("output_ids")[:, 0].tolist()


def ranks(server: ServerProcess) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if "--rank" in command and any(str(server.log_file.parent) in part for part in command):
            found.append(process)
    return found


def test_a_rebuilt_engine_finds_at_least_95_percent_of_the_blocks(server: ServerProcess) -> None:
    wanted = ask(server)
    assert all(plain != adapted for plain, adapted in zip(wanted[::2], wanted[1::2]))
    full = 2 * sum((len(prompt) - 1) // 32 for prompt in PROMPTS)
    wait_until(lambda: metric(server, "host_blocks", state="cached") >= full, 30, "the blocks in the tier")
    os.kill(ranks(server)[-1].pid, signal.SIGKILL)
    wait_until(lambda: metric(server, "epoch") == 2 and metric(server, "ready") == 1, 120, "another engine")
    computed = metric(server, "computed_prompt_tokens_total")
    assert ask(server) == wanted
    wait_until(
        lambda: metric(server, "cached_prompt_tokens_total", tier="host") >= 0.95 * 32 * full, 20, "the hits"
    )
    tokens = 2 * sum(map(len, PROMPTS))
    wait_until(lambda: metric(server, "computed_prompt_tokens_total") > computed, 20, "the count")
    assert metric(server, "computed_prompt_tokens_total") - computed <= tokens - 0.95 * 32 * full
    assert metric(server, "host_faults_total") == 0
