"""The contract of TensorRT-LLM's LLM API at its door, with a scripted model."""

from __future__ import annotations

import contextlib
import json

import msgspec
import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import only, refusal, running
from tests.backend.doors.tokenizers_at_hand import byte_level
from tests.fake_engine import LIMITS, FakeEngine, scripted, toy_log_prob
from tests.waiting import wait_until
from tridecode.backend.doors.contracts.llmapi import LLMAPI
from tridecode.backend.doors.llmapi import TritonPythonModel

OUTPUTS = {output.name: f"TYPE_{output.dtype}" for output in LLMAPI.outputs}
ANSWER = " world, hello streaming 東京 text! 😀 A stop word"
EOS = byte_level().token_to_id("<|endoftext|>")
PREFIX = "sampling_param_"
DTYPES = {
    "STRING": object, "BOOL": np.bool_, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32,
}  # fmt: skip
FLAGS = ("return_finish_reason", "return_stop_reason", "return_cumulative_logprob")


def ids_of(text: str) -> list[int]:
    return byte_level().encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository") / "bytes"
    folder.mkdir()
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder.parent


@contextlib.contextmanager
def serving(repository, says=None, decoupled=True, **engine):
    tokens = [*ids_of(ANSWER), EOS] if says is None else says
    limits = msgspec.structs.replace(LIMITS, vocab_size=600, end_id=EOS, start_id=EOS)
    settings = fake_triton.model_config("llmapi", {}, OUTPUTS, {"tokenizer_dir": "bytes"}, decoupled, 0)
    fake = FakeEngine(limits=limits, next_token=scripted(tokens), **engine)
    with running(TritonPythonModel, settings, fake, repository) as door:
        yield door


@pytest.fixture(scope="module")
def door(repository):
    with serving(repository) as door:
        yield door


def tensors(*texts: str, **others) -> dict[str, np.ndarray]:
    arrays = {"text_input": array_of(*(texts or ("Hello",)))}
    for name, value in others.items():
        key = PREFIX + name if PREFIX + name in LLMAPI.by_name else name
        dtype = DTYPES[LLMAPI.by_name[key].dtype]
        arrays[key] = array_of(*value) if dtype is object else np.array([value], dtype)
    return arrays


def array_of(*texts: str) -> np.ndarray:
    return np.array([text.encode() for text in texts], object)


def ask(door, arrays, **request):
    return fake_triton.ask(door, fake_triton.InferenceRequest(arrays, **request))


def texts_of(outputs) -> list[str]:
    return [text.decode() for text in outputs["text_output"]]


def last_params(door):
    return door.test_engine.submits[-1].sequences[0].params


def test_a_whole_answer_begins_with_the_prompt(door):
    outputs = only(ask(door, tensors(max_tokens=100)))
    assert texts_of(outputs) == ["Hello" + ANSWER] and list(outputs) == ["text_output"]
    assert texts_of(only(ask(door, tensors(exclude_input_from_output=True)))) == [ANSWER]


def test_several_texts_are_answered_in_one_response(door):
    outputs = only(ask(door, tensors("Hello", "fox", max_tokens=3, **dict.fromkeys(FLAGS, True))))
    first = byte_level().decode(ids_of(ANSWER)[:3])
    assert texts_of(outputs) == ["Hello" + first, "fox" + first]
    assert outputs["finish_reason"].tolist() == [b"length"] * 2
    assert outputs["stop_reason"].tolist() == [b"None"] * 2
    log_prob = sum(toy_log_prob(token) for token in ids_of(ANSWER)[:3])
    assert outputs["cumulative_logprob"].tolist() == [log_prob] * 2


def test_a_stream_has_deltas_and_says_at_its_end_why_it_ended(repository):
    with serving(repository, step_s=0.003) as door:
        flags = dict.fromkeys(FLAGS, True)
        sent = ask(door, tensors("Hello", "fox", streaming=True, max_tokens=100, stop=["東", "xyz"], **flags))
    answers = ["".join(parts) for parts in zip(*(texts_of(one.outputs) for one in sent))]
    assert answers == [ANSWER.split("東")[0]] * 2 and len(sent) > 4
    reasons = [one.outputs["finish_reason"].tolist() for one in sent]
    assert reasons[0] == [b"None"] * 2 and reasons[-1] == [b"stop"] * 2
    assert sent[-1].outputs["stop_reason"].tolist() == ["東".encode()] * 2
    totals = [one.outputs["cumulative_logprob"][0] for one in sent]
    assert totals == sorted(totals, reverse=True) and sent[-1].final


def test_performance_metrics_come_with_the_whole_answer(door):
    outputs = only(ask(door, tensors(max_tokens=2, return_perf_metrics=True)))
    assert set(outputs) == set(OUTPUTS) - {"finish_reason", "stop_reason", "cumulative_logprob"}
    assert all(array.shape == (1,) for array in outputs.values())
    blocks = {name: int(outputs[f"kv_cache_{name}"][0]) for name in ("reused_block", "missed_block")}
    assert blocks == {"reused_block": 1, "missed_block": 2}, "those of the prompt"
    assert outputs["kv_cache_alloc_new_blocks"][0] == 5 and outputs["kv_cache_alloc_total_blocks"][0] == 6
    assert outputs["kv_cache_hit_rate"][0] == np.float32(1 / 3)
    assert last_params(door).return_perf_metrics


def test_a_stop_request_ends_the_running_request_of_its_id(repository):
    with serving(repository, says=ids_of(" a"), step_s=0.01) as door:
        running_one = fake_triton.InferenceRequest(tensors(max_tokens=400), request_id="7")
        door.execute([running_one])
        wait_until(lambda: door.test_engine.running == 1)
        assert texts_of(only(ask(door, {**tensors(""), "stop": np.array([True])}, request_id="7"))) == [""]
        assert running_one.sender.wait(60)
        assert texts_of(running_one.sender.sent[0].outputs)[0].startswith("Hello")
        wait_until(lambda: door.test_engine.running == 0)


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        ({}, {"top_k": 1, "max_tokens": 32, "seed": 0}),
        ({"temperature": 0.5}, {"top_k": 0, "temperature": 0.5, "top_p": 1.0}),
        ({"temperature": 0.0, "top_k": 5}, {"top_k": 1}),
        ({"top_p": 0.0, "top_k": 5}, {"top_k": 1}),
        ({"top_p": 0.5}, {"top_k": 0, "top_p": 0.5, "temperature": 1.0}),
        ({"top_k": 5, "seed": 2**64 - 1}, {"top_k": 5, "top_p": 1.0, "seed": 2**64 - 1}),
        ({"top_k": 0}, {"top_k": 0, "top_p": 1.0}),
        ({"frequency_penalty": 0.5, "presence_penalty": 1.0}, {"frequency_penalty": 0.5}),
        ({"best_of": 1, "return_perf_metrics": False, "lora_id": 3, "lora_ckpt_source": ["hf"]}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_names_become_the_engines_parameters(door, sent, found):
    only(ask(door, tensors(**sent)))
    params = last_params(door)
    assert {name: getattr(params, name) for name in found} == found and params.end_id == EOS


def test_the_most_likely_of_several_samples_is_returned_for_each_text(repository):
    """The toy engine draws by the seed; a token's log probability depends on its id."""
    answers = {20: " world", 21: " fox", 22: " stop word"}

    def says(history, generated, params, vocab_size):
        return [*ids_of(answers[params.seed]), EOS][generated]

    def log_prob(text):
        return sum(toy_log_prob(token) for token in [*ids_of(text), EOS])

    with serving(repository) as door:
        door.test_engine.next_token = says
        flags = {"return_cumulative_logprob": True, "return_finish_reason": True}
        asked = tensors("Hello", "the", best_of=3, seed=20, temperature=0.5, max_tokens=40, **flags)
        outputs = only(ask(door, {**asked, "sampling_param_exclude_input_from_output": np.array([True])}))
    best = max(answers.values(), key=log_prob)
    assert texts_of(outputs) == [best, best]
    assert outputs["cumulative_logprob"].tolist() == [log_prob(best)] * 2
    assert outputs["finish_reason"].tolist() == [b"stop"] * 2


def test_an_adapter_is_named(door):
    only(ask(door, tensors(lora_name=["french"])))
    assert door.test_engine.submits[-1].sequences[0].lora_name == "french"


@pytest.mark.parametrize(
    ("sent", "code", "text"),
    [
        ({"best_of": 2}, "INVALID_ARG", "sampling_param_best_of is 2 and the answer is greedy"),
        ({"best_of": 0}, "INVALID_ARG", "sampling_param_best_of is 0"),
        ({"best_of": 65, "temperature": 0.5}, "INVALID_ARG", "sampling_param_best_of is 65"),
        (
            {"best_of": 2, "temperature": 0.5, "streaming": True},
            "INVALID_ARG",
            "sampling_param_best_of is 2 and streaming is true",
        ),
        ({"temperature": np.nan}, "INVALID_ARG", "sampling_param_temperature is nan"),
        ({"top_p": 1.5}, "INVALID_ARG", "sampling_param_top_p is 1.5"),
        ({"top_k": -1}, "INVALID_ARG", "sampling_param_top_k is -1"),
        ({"max_tokens": 0}, "INVALID_ARG", "sampling_param_max_tokens is 0"),
        ({"max_tokens": 10**6}, "INVALID_ARG", "sampling_param_max_tokens asks for 1,000,000 more"),
        ({"stop": ["w"] * 2000}, "INVALID_ARG", "sampling_param_stop has 2,000 words"),
        ({"stop": [str(i) for i in range(300)]}, "INVALID_ARG", "sampling_param_stop has 300 words"),
        ({"image_url": ["http://x"]}, "UNSUPPORTED", "image_url is 'http://x'"),
        ({"lora_path": ["/x"]}, "UNSUPPORTED", "lora_path is"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_refused_by_name(door, sent, code, text):
    before = len(door.test_engine.submits)
    found = refusal(ask(door, tensors(**sent)))
    assert found[0] == code and text in found[1]
    assert len(door.test_engine.submits) == before


def test_a_misspelt_field_of_generate_is_refused_with_the_input_that_was_meant(door):
    found = refusal(ask(door, tensors(), parameters={"sampling_param_topk": 5}))
    assert found[1].endswith("did you mean the input sampling_param_top_k?")


def test_a_model_that_is_not_decoupled_refuses_to_stream(repository):
    with serving(repository, decoupled=False) as door:
        assert "streaming is true; this model cannot stream" in refusal(ask(door, tensors(streaming=True)))[1]
        assert texts_of(only(ask(door, tensors()))) == ["Hello" + ANSWER]
