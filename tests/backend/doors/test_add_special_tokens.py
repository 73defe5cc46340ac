"""`add_special_tokens` at every model that tokenises: a templated prompt gets no second BOS."""

from __future__ import annotations

from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import only, refusal, running
from tests.checkpoints import tiny_tokenizer
from tests.fake_engine import LIMITS, FakeEngine, scripted
from tridecode.backend.doors import (
    interactive_preprocessing,
    llmapi,
    preprocessing,
    tensorrt_llm_preprocessing,
    text,
    text_v05,
    vllm,
)

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "How deep is the harbour?"}]
DOORS = {"text": text, "text_v05": text_v05, "vllm": vllm, "llmapi": llmapi}
PREPROCESSING = {
    "ensemble": preprocessing,
    "interactive": interactive_preprocessing,
    "tensorrt_llm": tensorrt_llm_preprocessing,
}


@pytest.fixture(scope="module")
def original():
    tokenizer = tiny_tokenizer(adds_bos=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def repository(tmp_path_factory, original):
    root = tmp_path_factory.mktemp("repository")
    original.save_pretrained(root / "tokenizer")
    return root


@contextmanager
def serving(module, repository, **parameters):
    door = module.TritonPythonModel
    outputs = {output.name: f"TYPE_{output.dtype}" for output in door.contract.outputs}
    settings = {"tokenizer_dir": "tokenizer", "add_special_tokens": "true", **parameters}
    batch = 64 if door.contract.batched else 0
    config = fake_triton.model_config("text", {}, outputs, settings, True, batch)
    limits = msgspec.structs.replace(LIMITS, vocab_size=600)
    with running(door, config, FakeEngine(limits=limits, next_token=scripted([5])), repository) as one:
        yield one


def inputs(module, prompt: str, **others) -> dict[str, np.ndarray]:
    contract = module.TritonPythonModel.contract
    shape = (1, 1) if contract.batched else (1,)
    arrays = {"text_input": np.array([prompt.encode()], object).reshape(shape)}
    if "max_tokens" in contract.by_name:
        arrays["max_tokens"] = np.full(shape, 1, np.int32)
    return {**arrays, **{name: np.full(shape, value) for name, value in others.items()}}


def prompt_ids(door, arrays) -> list[int]:
    only(fake_triton.ask(door, fake_triton.InferenceRequest(arrays)))
    (sequence,) = door.test_engine.submits[-1].sequences
    return np.frombuffer(sequence.prompt, "<i4").tolist()


@pytest.mark.parametrize("name", DOORS)
def test_a_templated_prompt_has_the_ids_of_transformers_template(name, repository, original) -> None:
    module = DOORS[name]
    wanted = original.apply_chat_template(MESSAGES, return_dict=False)
    prompt = original.apply_chat_template(MESSAGES, tokenize=False)
    bos = original.bos_token_id
    assert wanted.count(bos) == 1
    with serving(module, repository) as door:
        assert prompt_ids(door, inputs(module, prompt, add_special_tokens=False)) == wanted
        for others in ({}, {"add_special_tokens": True}):  # the tokenizer's own
            assert prompt_ids(door, inputs(module, prompt, **others)) == original(prompt).input_ids
        assert original(prompt).input_ids == [bos, *wanted]
    with serving(module, repository, add_special_tokens="false") as door:
        assert prompt_ids(door, inputs(module, prompt)) == wanted
        assert prompt_ids(door, inputs(module, prompt, add_special_tokens=True)) == [bos, *wanted]


def test_rows_of_one_request_cannot_differ(repository) -> None:
    arrays = {
        "text_input": np.array([[b"a"], [b"b"]], object),
        "max_tokens": np.ones((2, 1), np.int32),
        "add_special_tokens": np.array([[True], [False]]),
    }
    with serving(text, repository) as door:
        sent = fake_triton.ask(door, fake_triton.InferenceRequest(arrays))
    code, said = refusal(sent)
    assert code == "INVALID_ARG" and said.startswith("add_special_tokens differs between the rows")


@pytest.mark.parametrize("name", PREPROCESSING)
@pytest.mark.parametrize("sent", [None, False, True])
def test_preprocessing_follows_the_flag(name, sent, repository, original) -> None:
    door = PREPROCESSING[name].TritonPythonModel()
    outputs = {output.name: f"TYPE_{output.dtype}" for output in door.contract.outputs}
    settings = {"tokenizer_dir": "tokenizer", "add_special_tokens": "true"}
    config = fake_triton.model_config("preprocessing", {}, outputs, settings)
    door.initialize(fake_triton.initialize_arguments(config, str(repository)))
    prompt = original.apply_chat_template(MESSAGES, tokenize=False)
    shape = (1, 1, 1) if name == "interactive" else (1, 1)
    arrays = {"QUERY": np.array([prompt.encode()], object), "REQUEST_OUTPUT_LEN": np.array([5], np.uint32)}
    if sent is not None:
        arrays["ADD_SPECIAL_TOKENS"] = np.array([sent])
    reshaped = {key: value.reshape(shape) for key, value in arrays.items()}
    (response,) = door.execute([fake_triton.InferenceRequest(reshaped)])
    assert not response.has_error(), response.error()
    found = next(one for one in response.output_tensors() if one.name() == "INPUT_ID").as_numpy()
    assert found.reshape(-1).tolist() == original(prompt, add_special_tokens=sent is not False).input_ids
