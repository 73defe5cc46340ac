"""A model with several end ids: each ends a text in every contract, unless the request names another one."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import only, refusal, running
from tests.backend.doors.test_sequences_of_a_request import DOORS, llm_rows, text_rows, texts, token_rows
from tests.backend.doors.tokenizers_at_hand import byte_level
from tests.fake_engine import LIMITS, FakeEngine, scripted
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.service.sampling_rules import chosen_ends, model_ends

ENDS = (2, 13, 17)  # of the model
SAYS = [11, 12, 13, 14, 15, 16]
MODEL = msgspec.structs.replace(LIMITS, vocab_size=600, end_id=ENDS[0], more_end_ids=list(ENDS[1:]))


def served_at(tmp_path, name: str, **parameters):
    """A door that does not stream, before an engine that generates SAYS."""
    module, contract, _ = DOORS[name]
    (tmp_path / "bytes").mkdir()
    byte_level().save(str(tmp_path / "bytes" / "tokenizer.json"))
    (tmp_path / "bytes" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    outputs = {output.name: f"TYPE_{output.dtype}" for output in contract.outputs}
    settings = {"tokenizer_dir": "bytes", **parameters}
    config = fake_triton.model_config("model", {}, outputs, settings, False, 64)
    limits = msgspec.structs.replace(MODEL, **({"more_end_ids": []} if parameters else {}))
    engine = FakeEngine(limits=limits, next_token=scripted(SAYS))
    return running(module.TritonPythonModel, config, engine, tmp_path)


def text_request(least: int, **end) -> dict[str, np.ndarray]:
    return text_rows(1, max_tokens=6, min_tokens=least, **end)


def token_request(least: int, **end) -> dict[str, np.ndarray]:
    return token_rows(1, request_output_len=6, min_tokens=least, **end)


def ft_request(least: int, **end) -> dict[str, np.ndarray]:
    arrays = token_rows(1, np.uint32, request_output_len=6, **end)
    return {**arrays, "min_length": np.array([[least]], np.int32)}


def vllm_request(least: int, **sampling) -> dict[str, np.ndarray]:
    keys = json.dumps({"max_tokens": 6, "min_tokens": least, **sampling}).encode()
    wanted = {"return_num_output_tokens": np.array([True])}
    return {"text_input": texts(1), "sampling_parameters": np.array([keys], object), **wanted}


def new_tokens(out: dict[str, np.ndarray]) -> int:
    """In FasterTransformer's contract the end id is part of the row."""
    return (out["num_output_tokens"] if "num_output_tokens" in out else out["sequence_length"] - 3).item()


#: contract -> a request, and what it sends to end nowhere
CONTRACTS = {
    "tensorrt_llm_bls": (text_request, {"end_id": -1}),
    "tensorrt_llm": (token_request, {"end_id": -1}),
    "fastertransformer": (ft_request, {"end_id": 2**32 - 1}),
    "vllm_model": (vllm_request, {"ignore_eos": True}),
}
OWN = [name for name in CONTRACTS if name != "vllm_model"]  # the others, with an end_id of the request


@pytest.mark.parametrize("name", CONTRACTS)
def test_every_end_id_of_the_model_ends_a_text_and_waits_for_min_tokens(tmp_path, name):
    request, nowhere = CONTRACTS[name]
    with served_at(tmp_path, name) as door:
        # the scripted engine continues after an end id before min_tokens
        for arrays, count in ((request(0), 3), (request(3), 6), (request(0, **nowhere), 6)):
            out = only(fake_triton.ask(door, fake_triton.InferenceRequest(arrays)))
            assert new_tokens(out) == count
        asked = [submit.sequences[0].params for submit in door.test_engine.submits]
    assert [params.end_ids for params in asked] == [list(ENDS), list(ENDS), []]
    assert not any(params.stop_words for params in asked)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize(
    ("end_id", "count", "ends"),
    [(2, 3, [2, 13, 17]), (13, 3, [13, 2, 17]), (14, 4, [14]), (599, 6, [599]), (600, 6, [])],
)
def test_another_end_id_takes_the_place_of_the_models(tmp_path, name, end_id, count, ends):
    request, _ = CONTRACTS[name]
    with served_at(tmp_path, name) as door:
        out = only(fake_triton.ask(door, fake_triton.InferenceRequest(request(0, end_id=end_id))))
        assert new_tokens(out) == count
        assert door.test_engine.submits[-1].sequences[0].params.end_ids == ends


def test_the_llm_api_ends_at_each_of_them_unseen(tmp_path):
    with served_at(tmp_path, "llmapi") as door:
        arrays = {**llm_rows(1, max_tokens=6), "return_finish_reason": np.array([True])}
        out = only(fake_triton.ask(door, fake_triton.InferenceRequest(arrays)))
        assert out["text_output"][0].decode() == "Hello" + byte_level().decode(SAYS[:2])
        assert out["finish_reason"][0] == b"stop"
        assert door.test_engine.submits[-1].sequences[0].params.end_ids == list(ENDS)


@pytest.mark.parametrize("name", ["tensorrt_llm_bls", "tensorrt_llm", "vllm_model"])
def test_stop_ids_of_an_older_repository_are_end_ids(tmp_path, name):
    request, nowhere = CONTRACTS[name]
    with served_at(tmp_path, name, stop_ids="13, 17, 600") as door:
        for arrays, count in ((request(0), 3), (request(0, **nowhere), 6)):
            assert new_tokens(only(fake_triton.ask(door, fake_triton.InferenceRequest(arrays)))) == count
        assert door.test_engine.submits[0].sequences[0].params.end_ids == list(ENDS)


def test_stop_token_ids_are_held_back_with_the_models(tmp_path):
    with served_at(tmp_path, "vllm_model") as door:
        arrays = vllm_request(1, stop_token_ids=[14, 13, 16])
        assert new_tokens(only(fake_triton.ask(door, fake_triton.InferenceRequest(arrays)))) == 3
        assert door.test_engine.submits[-1].sequences[0].params.end_ids == [2, 13, 17, 14, 16]
        many = list(range(100, 120))
        only(fake_triton.ask(door, fake_triton.InferenceRequest(vllm_request(0, stop_token_ids=many))))
        params = door.test_engine.submits[-1].sequences[0].params
        assert params.end_ids + [token for (token,) in params.stop_words] == [*ENDS, *many]
        sent = fake_triton.ask(door, fake_triton.InferenceRequest(vllm_request(1, stop_token_ids=many)))
        code, said = refusal(sent)
        assert code == "UNSUPPORTED" and "stop_token_ids and the model's end tokens are 23 ids" in said


def test_too_many_end_ids_of_two_files_are_refused_by_name():
    ends = model_ends(MODEL, range(100, 113))
    assert ends == [*ENDS, *range(100, 113)] and chosen_ends(100, ends, MODEL)["end_id"] == 100
    with pytest.raises(ConfigError, match="stop_ids in config.pbtxt name 17 end tokens; wanted 16 at most"):
        model_ends(MODEL, range(100, 114))
