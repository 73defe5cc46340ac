"""Requests with `sampling_params`: parameters reach the engine as sent, and its events come back as made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import only, refusal, running
from tests.fake_engine import LIMITS, FakeEngine, toy_log_prob, toy_logits, toy_tokens
from tridecode.backend.doors import fastertransformer, token_model
from tridecode.backend.doors.contracts.fastertransformer import FASTERTRANSFORMER
from tridecode.backend.doors.contracts.field import Contract
from tridecode.backend.doors.contracts.tensorrt_llm_tokens import TENSORRT_LLM_TOKENS
from tridecode.backend.wire.messages import Event, Limits, SamplingParams, Welcome, decode
from tridecode.backend.wire.structured_output import StructuredOutput

#: each value has no exact float32
PARAMS = SamplingParams(
    max_tokens=6, temperature=0.7, top_k=0, top_p=0.93, min_p=0.01, presence_penalty=0.3, count_prompt=False,
    seed=2**64 - 1, end_id=2, more_end_ids=[3, 4], bad_words=[[5, 6]], num_return_sequences=2,
    top_log_probs=2, return_context_logits=True,
)  # fmt: skip
MODELS = {
    "fastertransformer": (fastertransformer.TritonPythonModel, FASTERTRANSFORMER),
    "tensorrt_llm": (token_model.TritonPythonModel, TENSORRT_LLM_TOKENS),
}


def door_of(model: type, contract: Contract, decoupled: bool, limits: Limits = LIMITS) -> Any:
    inputs = {field.name: f"TYPE_{field.dtype}" for field in contract.inputs if field.declared}
    outputs = {output.name: f"TYPE_{output.dtype}" for output in contract.outputs}
    config = fake_triton.model_config("tokens", inputs, outputs, {}, decoupled, 64)
    return running(model, config, FakeEngine(limits=limits))


@pytest.fixture(scope="module", params=sorted(MODELS))
def door(request: pytest.FixtureRequest) -> Iterator[Any]:
    with door_of(*MODELS[request.param], decoupled=True) as door:
        yield door


def request_of(*rows: list[int], count: int = 6, params: bytes | None = None, **others: Any) -> Any:
    width = max(map(len, rows))
    text = msgspec.json.encode(PARAMS) if params is None else params
    arrays = {
        "input_ids": np.array([row + [0] * (width - len(row)) for row in rows], np.int32),
        "input_lengths": np.array([[len(row)] for row in rows], np.int32),
        "request_output_len": np.full((len(rows), 1), count, np.int32),
        "sampling_params": np.array([[text]] * len(rows), object),
        **others,
    }
    return fake_triton.InferenceRequest(arrays)


def events_of(sent: list[fake_triton.Sent]) -> list[Event]:
    assert [one.error for one in sent if one.error] == [] and sent[-1].final
    return [decode(data, Event) for one in sent if one.outputs for data in one.outputs["events"].reshape(-1)]


def test_parameters_are_exact_and_events_complete(door: Any) -> None:
    events = events_of(fake_triton.ask(door, request_of([7, 8, 9], [10])))
    asked = [one for submit in door.test_engine.submits[-2:] for one in submit.sequences][-2:]
    assert [one.params for one in asked] == [PARAMS, PARAMS]
    assert [np.frombuffer(one.prompt, "<i4").tolist() for one in asked] == [[7, 8, 9], [10]]
    for row, prompt in enumerate(([7, 8, 9], [10])):
        for sample in range(2):
            mine = [event for event in events if event.sequence == 2 * row + sample]
            params = msgspec.structs.replace(PARAMS, seed=PARAMS.seed + sample)
            tokens = [token for event in mine for token in event.tokens]
            assert tokens == toy_tokens(prompt, 6, params, LIMITS.vocab_size)
            tops = [top for event in mine for top in event.top_log_probs]
            assert [(top.log_prob, len(top.ids)) for top in tops] == [(toy_log_prob(t), 2) for t in tokens]
            assert [event.finish for event in mine if event.finish] == ["length"]
        context = b"".join(e.extra.context_logits for e in events if e.sequence == 2 * row and e.extra)
        assert context == toy_logits(prompt, LIMITS.vocab_size, 1.0).tobytes()


def test_a_model_that_does_not_stream_sends_all_events_at_once() -> None:
    for name in MODELS:
        with door_of(*MODELS[name], decoupled=False) as door:
            out = only(fake_triton.ask(door, request_of([7])))
            assert set(out) == {"events"} and out["events"].shape[0] == 1
            found = [decode(data, Event) for data in out["events"][0]]
            assert sum(len(event.tokens) for event in found) == 12


#: JSON text, part of the refusal
BAD = [
    (b"{", "not a JSON object"),
    (b"[" * 5000, "not a JSON object"),
    (b'{"temprature": 1}', "temprature"),
    (b'{"temperature": "hot"}', "temperature"),
    (b'{"temperature": -1}', "temperature is -1.0; wanted a number from 0 to 1e6"),
    (b'{"top_k": 99999999999999999999}', "top_k is 99999999999999999999; wanted 0"),
    (b'{"beam_width": 2}', "beam_width 2"),
    (b'{"top_log_probs": 21}', "wanted -1 (none) to 20"),
    (b'{"end_id": 1000}', "end_id has the token id 1000; wanted -1 to 999"),
    (b'{"more_end_ids": [-1]}', "more_end_ids has the token id -1; wanted 0 to 999"),
    (b'{"more_end_ids": [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]}', "17 tokens"),
    (b'{"stop_words": [[7], [-3]]}', "stop_words has the token id -3"),
    (b'{"bad_words": [[]]}', "empty word"),
    (b'{"bad_words": [[' + b"5," * 64 + b"5]]}", "65 token ids"),
    (b"\xff\xfe", "not a JSON object"),
    (
        b'{"structured_output": {"kind": "yaml"}}',
        "structured_output has the kind 'yaml'; wanted one of json_schema",
    ),
    (b'{"structured_output": {"kind": "regex"}}', "structured_output has the kind regex and 0 bytes"),
    (
        b'{"structured_output": {"kind": "json", "text": "{}"}}',
        "kind json and 2 bytes of text; wanted nothing",
    ),
    (b'{"num_return_sequences": 65}', "num_return_sequences is 65"),
]


@pytest.mark.parametrize(("text", "part"), BAD)
def test_a_wrong_object_is_refused_with_its_place(door: Any, text: bytes, part: str) -> None:
    code, message = refusal(fake_triton.ask(door, request_of([7], params=text)))
    assert code == ("UNSUPPORTED" if "beam" in part else "INVALID_ARG") and part in message
    assert "sampling_params of row 0" in message


def test_inputs_that_the_object_replaces_are_refused(door: Any) -> None:
    sent = fake_triton.ask(door, request_of([7], temperature=np.array([[0.5]], np.float32)))
    assert refusal(sent)[1].startswith("temperature was sent with sampling_params")


def test_logits_beyond_the_limit_are_refused_before_the_engine_has_them() -> None:
    limits = msgspec.structs.replace(LIMITS, max_logits_bytes=1000)
    with door_of(*MODELS["fastertransformer"], decoupled=True, limits=limits) as door:
        code, text = refusal(fake_triton.ask(door, request_of([7])))
        assert (code, door.test_engine.submits) == ("INVALID_ARG", []) and "max_logits_bytes" in text


def test_a_welcome_has_a_form_in_json() -> None:
    text = msgspec.json.encode(Welcome(3, LIMITS))
    assert msgspec.json.decode(text, type=Welcome) == Welcome(3, LIMITS)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_structured_output_reaches_the_engine_as_sent(model: str) -> None:
    output = StructuredOutput("regex", "[0-9]+ €")
    text = json.dumps({"max_tokens": 6, "structured_output": msgspec.to_builtins(output)}).encode()
    with door_of(*MODELS[model], decoupled=True) as door:
        events_of(fake_triton.ask(door, request_of([1, 2], params=text)))
        (submit,) = door.test_engine.submits
    assert [one.structured_output for one in submit.sequences] == [output]


@pytest.mark.parametrize("model", sorted(MODELS))
def test_an_engine_without_grammars_is_named_before_it_gets_the_request(model: str) -> None:
    limits = msgspec.structs.replace(LIMITS, grammar_fault="this engine has no tokenizer")
    text = json.dumps({"structured_output": {"kind": "json"}}).encode()
    with door_of(*MODELS[model], decoupled=True, limits=limits) as door:
        code, message = refusal(fake_triton.ask(door, request_of([1, 2], params=text)))
        assert door.test_engine.submits == []
    assert code == "UNSUPPORTED" and "structured_output is json, and this engine has no tokenizer" in message
