"""The models of a repository: the list of tridecode_health, and the model that streams."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import only, refusal, running
from tests.fake_engine import FakeEngine
from tests.waiting import wait_until
from tridecode.backend.doors import health, token_model
from tridecode.backend.doors.siblings import siblings, streaming_sibling
from tridecode.model_repo_templates.repository import engine_texts, repository_models, write_models


def written(root: Path, **options) -> Path:
    models = repository_models(**options)
    write_models(
        root, models, engine=engine_texts({}, "test"), model_type="GPT", checkpoint_path="1", stop_ids=""
    )
    return root


EVERY = {
    "contracts": ["fastertransformer", "tensorrt_llm", "vllm", "llmapi"],
    "unbatched_text": True,
    "stand_ins": True,
}


def test_every_model_is_listed_and_no_stand_in(tmp_path):
    found = {model.name: model.streams for model in siblings(written(tmp_path, **EVERY))}
    wanted = {
        model.name: model.values.get("decoupled") == "true"
        for model in repository_models(**{**EVERY, "stand_ins": False})
    }
    del wanted["tridecode_health"]
    assert found == wanted


@pytest.mark.parametrize(
    ("name", "able"),
    [
        ("tensorrt_llm_bls_plain", "tensorrt_llm_bls"),
        ("tensorrt_llm_bls_unbatched", "tensorrt_llm_bls"),
        ("vllm_model_plain", "vllm_model"),
        ("tensorrt_llm", "tensorrt_llm_streaming"),
        ("fastertransformer", "fastertransformer_streaming"),
        ("nobody", ""),
        ("ensemble", ""),  # an ensemble sends what its steps send
    ],
)
def test_the_model_that_streams_has_the_same_contract(tmp_path, name, able):
    assert streaming_sibling(written(tmp_path, **EVERY), name) == able


def test_files_that_cannot_be_read_name_nobody(tmp_path):
    assert streaming_sibling(tmp_path / "nowhere", "a") == ""
    repository = written(tmp_path)
    (repository / "tensorrt_llm_bls" / "config.pbtxt").write_bytes(b"\xff" * 100)
    assert streaming_sibling(repository, "tensorrt_llm_bls_plain") == ""
    config = repository / "tensorrt_llm_bls" / "config.pbtxt"
    config.write_text("# model_transaction_policy { decoupled: true }\n")
    assert streaming_sibling(repository, "tensorrt_llm_bls_plain") == ""


def test_the_error_of_a_model_that_cannot_stream_names_the_one_that_can(tmp_path):
    repository = written(tmp_path, contracts=["tensorrt_llm_tokens"])
    inputs = {"input_ids": "TYPE_INT32", "streaming": "TYPE_BOOL"}
    config = fake_triton.model_config("tensorrt_llm", inputs, {"output_ids": "TYPE_INT32"})
    numbers = {"input_ids": 5, "input_lengths": 1, "request_output_len": 1}
    arrays = {name: np.array([[value]], np.int32) for name, value in numbers.items()}
    arrays["streaming"] = np.array([[True]])
    with running(token_model.TritonPythonModel, config, FakeEngine(), str(repository)) as door:
        for _ in range(2):
            code, text = refusal(fake_triton.ask(door, fake_triton.InferenceRequest(arrays)))
            wanted = "this model cannot stream: send the request to model tensorrt_llm_streaming, which does"
            assert code == "INVALID_ARG" and wanted in text


def test_health_lists_the_models_and_notices_a_new_one(tmp_path):
    repository = written(tmp_path)
    outputs = {"READY": "TYPE_BOOL", "MODELS": "TYPE_STRING", "STREAMS": "TYPE_BOOL"}
    config = fake_triton.model_config("tridecode_health", {"PROBE": "TYPE_BOOL"}, outputs)
    with running(health.TritonPythonModel, config, FakeEngine(beat_s=0.02), str(repository)) as door:
        wait_until(lambda: door.link.beat())

        def listed() -> dict[str, bool]:
            out = only(fake_triton.ask(door, fake_triton.InferenceRequest({})))
            names = [name.decode() for name in out["MODELS"].tolist()]
            return dict(zip(names, out["STREAMS"].tolist()))

        found = listed()
        assert found["tensorrt_llm_bls"] and not found["tensorrt_llm_bls_plain"] and len(found) == 8
        assert "tridecode_health" not in found
        time.sleep(0.01)
        os.rename(repository / "tensorrt_llm_bls", repository / "mine")
        assert "mine" in listed() and "tensorrt_llm_bls" not in listed()
