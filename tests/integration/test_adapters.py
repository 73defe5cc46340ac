"""Adapters through the real server: by token ids and by text, added while it runs, over two tensor ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.backend.engine.offline_models import hf_greedy
from tests.checkpoints import save, tiny_bloom
from tests.integration.clients import infer, standard_inputs, text_inputs
from tests.lora_adapters import make_adapter
from tridecode.tools.adapters.folder import add_adapter, remove_adapter
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.serve.server_process import ServerProcess, running_server

pytestmark = [pytest.mark.server, pytest.mark.slow]


@dataclass
class Stack:
    server: ServerProcess
    repository: Path
    folder: Path
    models: dict = field(default_factory=dict)  # name of an adapter -> PEFT's model; "": transformers'

    def add(self, name: str, seed: int) -> None:
        self.models[name] = make_adapter(self.models[""], self.folder / name, seed)
        add_adapter(self.repository, name, self.folder / name)


@pytest.fixture(scope="module")
def stack(tmp_path_factory) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("bloom")
    model = tiny_bloom(**{"n_head": 6, "hidden_size": 48})
    settings = {"cache_bytes": "16777216", "max_loras": "2"}
    repository = build_repo(
        str(save(model, folder / "hf")), folder / "repo", tensor_para_size=2, engine_settings=settings
    )
    with running_server(repository) as server:
        yield Stack(server, repository, folder, {"": model})


def names(*values: str) -> np.ndarray:
    return np.array([[value.encode()] for value in values], object)


def test_adapters_that_are_added_while_it_serves_answer_by_name(stack: Stack) -> None:
    for seed, name in enumerate(("one", "two", "three")):  # more than are in memory
        stack.add(name, seed)
    prompts, rows = [[5, 9, 11], [7], [5, 9, 11], [4, 4]], ("one", "", "two", "one")
    inputs = {**standard_inputs(prompts, [6] * 4), "lora_name": names(*rows)}
    ids = infer("grpc", stack.server.grpc_url, "fastertransformer", inputs).as_numpy("output_ids")
    for row, (prompt, name) in enumerate(zip(prompts, rows)):
        wanted = prompt + hf_greedy(stack.models[name], prompt, 6)[0]
        assert ids[row, 0, : len(wanted)].tolist() == wanted
    texts = {
        name: infer(
            "http", stack.server.http_url, "tensorrt_llm_bls_plain",
            {**text_inputs("the cat sat", 5), "lora_name": names(name)},
        ).as_numpy("text_output").flatten()[0]
        for name in ("three", "two", "", "one")
    }  # fmt: skip
    assert len(set(texts.values())) == 4


def test_an_unknown_name_is_refused_with_those_that_there_are(stack: Stack) -> None:
    stack.add("kept", 7)
    stack.add("gone", 8)
    remove_adapter(stack.repository, "gone")
    for name in ("gone", "../kept"):
        inputs = {**standard_inputs([[5]], [2]), "lora_name": names(name)}
        with pytest.raises(InferenceServerException) as caught:
            infer("grpc", stack.server.grpc_url, "fastertransformer", inputs)
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        assert f"lora_name is '{name}'" in caught.value.message()
    assert "kept" in infer_error(stack, "gone")


def infer_error(stack: Stack, name: str) -> str:
    inputs = {**text_inputs("a", 1), "lora_name": names(name)}
    with pytest.raises(InferenceServerException) as caught:
        infer("http", stack.server.http_url, "tensorrt_llm_bls_plain", inputs)
    return caught.value.message()
