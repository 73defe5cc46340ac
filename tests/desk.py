"""A folder with a served repository: tests run commands of the guide and send its sample requests in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tests.checkpoints import TINY_VOCAB, save, tiny_gpt2
from tests.lora_adapters import make_adapter
from tridecode.tools.serve.server_process import ServerProcess, running_server

ROOT = Path(__file__).parents[1]
REQUESTS = ROOT / "tools" / "requests"
PROGRAM_S = 90
#: as in README.md, and every contract that the sample requests need
BUILD = "tridecode build-repo --model {checkpoint} --output models"
CONTRACTS = " --contract fastertransformer,tensorrt_llm,tensorrt_llm_tokens,vllm --owner fastertransformer"


@dataclass
class Desk:
    """A folder with the files that the commands name (`models`, `tools/requests`), and a server of it."""

    folder: Path
    server: ServerProcess
    model: PreTrainedModel
    adapted: torch.nn.Module  # the model with the adapter `french`, by peft

    def run(self, text: str) -> str:
        text = text.replace("localhost:8000", self.server.http_url)
        text = text.replace("localhost:8001", self.server.grpc_url)
        if text.startswith("tridecode generate ") and " --url " not in text:
            text += f" --url {self.server.grpc_url}"
        if "send-request" in text and self.server.http_url not in text:
            url = self.server.grpc_url if "stream" in text else self.server.http_url
            text += f""" --params '{{"config": {{"url": "{url}"}}}}'"""
        return shell(text, self.folder)


def shell(text: str, folder: Path) -> str:
    """Run `text` with bash in `folder` and return its output. Fails with both outputs on a nonzero exit
    code."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def open_desk(folder: Path) -> Iterator[Desk]:
    model = tiny_gpt2(
        vocab_size=50_304, n_positions=256
    )  # above the ids of FasterTransformer's request files
    with torch.no_grad():  # answers are of ids that the tokenizer has, so that they have text
        model.get_input_embeddings().weight[TINY_VOCAB:] *= 0.2
    checkpoint = save(model, folder / "checkpoint")
    adapted = make_adapter(model, folder / "french", seed=5)
    (folder / "tools").mkdir()
    (folder / "tools" / "requests").symlink_to(REQUESTS)
    shell(BUILD.format(checkpoint=checkpoint) + CONTRACTS, folder)
    shell("tridecode adapters add models french ./french", folder)
    with running_server(folder / "models") as server:
        yield Desk(folder, server, model.eval(), adapted)
