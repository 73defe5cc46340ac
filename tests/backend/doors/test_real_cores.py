"""A door in a real stub of tritonserver keeps its threads on one core."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.backend.doors import real_server
from tests.integration.clients import post
from tridecode.backend.supervisor import processes
from tridecode.model_repo_templates.repository import repository_models

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core"),
]
TEXT, TOKENS = "tensorrt_llm_bls", "fastertransformer_streaming"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    write = real_server.write_repository

    def with_cores(root, models):
        repository = write(root, models)
        for model, cores in ((TEXT, 1), (TOKENS, 0)):
            with open(repository / model / "config.pbtxt", "a") as file:
                file.write(f'\nparameters {{ key: "door_cores" value: {{ string_value: "{cores}" }} }}\n')
        return repository

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(real_server, "write_repository", with_cores)
        models = repository_models(contracts=("fastertransformer", "tensorrt_llm"))
        with real_server.real_server(tmp_path_factory.mktemp("cores"), models) as server:
            yield server


def cores_of_threads(server, model: str) -> list[frozenset[int]]:
    """The cores that each thread of the model's door may use."""
    (stub,) = [
        pid
        for pid in processes.children(server.process.pid)
        if any(f"/{model}/" in word for word in processes.command_line(pid))
    ]
    return [frozenset(os.sched_getaffinity(int(task.name))) for task in Path(f"/proc/{stub}/task").iterdir()]


def test_all_threads_but_the_one_for_long_prompts_share_a_core(server):
    found = cores_of_threads(server, TEXT)
    free = [cores for cores in found if len(cores) > 1]
    assert free == [frozenset(os.sched_getaffinity(0))]
    assert len(found) > 8 and len(set(found)) == 2
    status, text = post(server.http, f"{TEXT}/generate", {"text_input": "Hello", "max_tokens": 8})
    assert status == 200, text


def test_a_door_with_0_uses_all_cores(server):
    assert set(cores_of_threads(server, TOKENS)) == {frozenset(os.sched_getaffinity(0))}
