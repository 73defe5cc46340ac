"""A request of more sequences than the engine ever holds is refused before any work, at every door."""

from __future__ import annotations

import json
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import only, refusal, running
from tests.backend.doors.tokenizers_at_hand import byte_level
from tests.fake_engine import LIMITS, FakeEngine
from tridecode.backend.doors import fastertransformer, llmapi, text, token_model, vllm
from tridecode.backend.doors.contracts.fastertransformer import FASTERTRANSFORMER
from tridecode.backend.doors.contracts.llmapi import LLMAPI
from tridecode.backend.doors.contracts.tensorrt_llm import TENSORRT_LLM
from tridecode.backend.doors.contracts.tensorrt_llm_tokens import TENSORRT_LLM_TOKENS
from tridecode.backend.doors.contracts.vllm import VLLM

MOST = 3 + 2  # max_sequences + max_queued_requests
FEW = msgspec.structs.replace(LIMITS, vocab_size=600, max_sequences=3, max_queued_requests=2)


def texts(rows: int) -> np.ndarray:
    return np.array([b"Hello"] * rows, object)


def text_rows(rows: int, **others) -> dict[str, np.ndarray]:
    each = {"max_tokens": 2, **others}
    columns = {name: np.full((rows, 1), value, np.int32) for name, value in each.items()}
    return {"text_input": texts(rows)[:, None], **columns}


def token_rows(rows: int, dtype: type = np.int32, **others) -> dict[str, np.ndarray]:
    each = {"input_lengths": 3, "request_output_len": 2, **others}
    ids = np.full((rows, 3), 5, dtype)
    return {"input_ids": ids, **{name: np.full((rows, 1), value, dtype) for name, value in each.items()}}


def llm_rows(rows: int, **others) -> dict[str, np.ndarray]:
    columns = {f"sampling_param_{name}": np.array([value], np.int32) for name, value in others.items()}
    return {"text_input": texts(rows), "sampling_param_max_tokens": np.array([2], np.int32), **columns}


def vllm_samples(n: int) -> dict[str, np.ndarray]:
    sampling = json.dumps({"n": n, "max_tokens": 2})
    return {"text_input": texts(1), "sampling_parameters": np.array([sampling.encode()], object)}


DOORS = {
    "tensorrt_llm_bls": (text, TENSORRT_LLM, text_rows),
    "llmapi": (llmapi, LLMAPI, llm_rows),
    "tensorrt_llm": (token_model, TENSORRT_LLM_TOKENS, token_rows),
    "fastertransformer": (
        fastertransformer,
        FASTERTRANSFORMER,
        lambda rows: token_rows(rows, np.uint32),
    ),
    "vllm_model": (vllm, VLLM, vllm_samples),
    "tensorrt_llm_bls, samples": (
        text,
        TENSORRT_LLM,
        lambda count: text_rows(1, num_return_sequences=count, top_k=9),
    ),
    "tensorrt_llm, beams": (
        token_model,
        TENSORRT_LLM_TOKENS,
        lambda count: token_rows(1, beam_width=count),
    ),
    "fastertransformer, beams": (
        fastertransformer,
        FASTERTRANSFORMER,
        lambda count: token_rows(1, np.uint32, beam_width=count),
    ),
}


@pytest.fixture(params=DOORS)
def served(request, tmp_path):
    """A door that does not stream, before an engine for five sequences; and how its requests are made."""
    module, contract, make = DOORS[request.param]
    (tmp_path / "bytes").mkdir()
    byte_level().save(str(tmp_path / "bytes" / "tokenizer.json"))
    (tmp_path / "bytes" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    outputs = {output.name: f"TYPE_{output.dtype}" for output in contract.outputs}
    settings = fake_triton.model_config("model", {}, outputs, {"tokenizer_dir": "bytes"}, False, 64)
    with running(module.TritonPythonModel, settings, FakeEngine(limits=FEW), tmp_path) as door:
        door.test_engine.limits = LIMITS  # the fake engine itself refuses nothing here
        yield SimpleNamespace(door=door, make=make, module=module)


def test_more_sequences_than_ever_fit_are_an_invalid_argument(served, monkeypatch):
    only(fake_triton.ask(served.door, fake_triton.InferenceRequest(served.make(MOST))))
    taken = len(served.door.test_engine.submits)
    if hasattr(served.door, "_tokenise"):
        monkeypatch.setattr(served.door, "_tokenise", None)  # nothing is tokenised
    request = fake_triton.InferenceRequest(served.make(MOST + 1))
    code, said = refusal(fake_triton.ask(served.door, request))
    assert code == "INVALID_ARG" and "the request has 6 sequences" in said, said
    assert "accepts 5 (max_sequences and max_queued_requests in config.pbtxt)" in said
    assert len(served.door.test_engine.submits) == taken
