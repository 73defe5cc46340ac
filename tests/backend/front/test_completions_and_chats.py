"""/v1/completions and /v1/chat/completions, called by OpenAI's own client, with a fake engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx_sse
import numpy as np
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from transformers import AutoTokenizer

from tests.backend.front.conftest import TEXT
from tests.backend.front.fronts import Front, error_of, joined
from tests.fake_engine import FakeEngine, toy_log_prob
from tests.waiting import wait_until

Ids = Callable[[str], list[int]]
MESSAGES = [{"role": "user", "content": "When does it leave?"}]


def sent_prompt(engine: FakeEngine, row: int = -1) -> list[int]:
    return np.frombuffer(engine.submits[row].sequences[0].prompt, "<i4").tolist()


def test_a_whole_completion(front: Front, engine: FakeEngine, ids: Ids) -> None:
    found = front.openai.completions.create(model="toy", prompt="When?", max_tokens=len(ids(TEXT)))
    Completion.model_validate(found.model_dump())
    assert (found.model, found.object) == ("toy", "text_completion")
    assert (found.choices[0].text, found.choices[0].finish_reason) == (TEXT, "length")
    assert found.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": len(ids("When?")), "completion_tokens": len(ids(TEXT)),
        "total_tokens": len(ids("When?")) + len(ids(TEXT)), "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert found.system_fingerprint.startswith("fp_")
    assert sent_prompt(engine) == ids("When?")


def test_a_streamed_completion_is_read_by_two_parsers(front: Front, ids: Ids) -> None:
    wanted = {
        "model": "toy", "prompt": "When?", "max_tokens": len(ids(TEXT)), "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    chunks = list(front.openai.completions.create(**wanted))
    assert joined(chunks) == TEXT and len(chunks) > 2
    *pieces, last = chunks
    assert pieces[-1].choices[0].finish_reason == "length" and all(c.usage is None for c in pieces)
    assert last.choices == [] and last.usage.completion_tokens == len(ids(TEXT))
    with httpx_sse.connect_sse(front.http, "POST", "/v1/completions", json=wanted) as source:
        events = [event.data for event in source.iter_sse()]
    assert events[-1] == "[DONE]"
    bodies = [json.loads(data) for data in events[:-1]]
    assert "".join(choice["text"] for body in bodies for choice in body["choices"]) == TEXT
    assert len({body["id"] for body in bodies}) == 1
    Completion.model_validate(bodies[-2])  # OpenAI's model of a whole answer requires a finish_reason


def test_a_stop_word_ends_the_text_and_the_engines_work(front: Front, engine: FakeEngine) -> None:
    before = len(engine.cancels)
    found = front.openai.completions.create(model="toy", prompt="x", max_tokens=300, stop=[" seven"])
    assert (found.choices[0].text, found.choices[0].finish_reason) == (" the ferry leaves at", "stop")
    wait_until(lambda: len(engine.cancels) == before + 1, what="the cancellation")


def test_lists_of_prompts_and_several_samples(front: Front, engine: FakeEngine, ids: Ids) -> None:
    count = len(ids(TEXT))
    found = front.openai.completions.create(model="toy", prompt=["one", "two"], n=2, max_tokens=count, seed=7)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in found.choices} == {TEXT}
    assert found.usage.prompt_tokens == len(ids("one")) + len(ids("two"))
    assert found.usage.completion_tokens == 4 * count
    assert sorted(s.sequences[0].params.seed for s in engine.submits[-2:]) == [7, 9]
    tokens = front.openai.completions.create(model="toy", prompt=[[3, 4], [5]], max_tokens=1)
    assert len(tokens.choices) == 2 and sorted(sent_prompt(engine, row) for row in (-2, -1)) == [[3, 4], [5]]


def test_a_stream_of_no_tokens_has_its_echo_and_its_end(front: Front) -> None:
    wanted = {"model": "toy", "prompt": "When?", "max_tokens": 0, "echo": True, "stream": True}
    (chunk,) = front.openai.completions.create(**wanted)
    assert chunk.choices[0].text == "When?" and chunk.choices[0].finish_reason == "length"


def test_an_echo_goes_before_the_text(front: Front, ids: Ids) -> None:
    wanted = {"model": "toy", "prompt": "When?", "max_tokens": len(ids(TEXT)), "echo": True}
    assert front.openai.completions.create(**wanted).choices[0].text == "When?" + TEXT
    assert joined(list(front.openai.completions.create(stream=True, **wanted))) == "When?" + TEXT


def test_log_probabilities_in_both_styles(front: Front, ids: Ids) -> None:
    tokens = ids(TEXT)[:3]
    found = front.openai.completions.create(model="toy", prompt="x", max_tokens=3, logprobs=2)
    logprobs = found.choices[0].logprobs
    assert logprobs.token_logprobs == [toy_log_prob(token) for token in tokens]
    assert "".join(logprobs.tokens) == found.choices[0].text
    lengths = [len(text) for text in logprobs.tokens]
    assert logprobs.text_offset == [sum(lengths[:i]) for i in range(3)]
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    chat = front.openai.chat.completions.create(
        model="toy", messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content
    assert [one.logprob for one in content] == [toy_log_prob(token) for token in tokens]
    assert [bytes(one.bytes).decode() for one in content] == logprobs.tokens
    assert [len(one.top_logprobs) for one in content] == [2, 2, 2]


def test_a_chat_whole_and_streamed(front: Front, engine: FakeEngine, ids: Ids, toy_repository: Path) -> None:
    count = len(ids(TEXT))
    found = front.openai.chat.completions.create(model="toy", messages=MESSAGES, max_completion_tokens=count)
    ChatCompletion.model_validate(found.model_dump())
    message = found.choices[0].message
    assert (message.role, message.content, found.choices[0].finish_reason) == ("assistant", TEXT, "length")
    theirs = AutoTokenizer.from_pretrained(toy_repository / "text" / "1" / "tokenizer")
    wanted = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert sent_prompt(engine) == ids(wanted) and "[user] When does it leave?" in wanted
    chunks = list(
        front.openai.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=count, stream=True)
    )
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump())
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks].count("length") == 1


def test_a_chat_can_score_its_prompt(front: Front, ids: Ids, toy_repository: Path) -> None:
    """The toy engine's logits at a token are all equal, so every alternative has the same probability."""
    asked = {"model": "toy", "messages": MESSAGES, "max_tokens": 2}
    found = front.openai.chat.completions.create(extra_body={"prompt_logprobs": 1}, **asked)
    first, *others = found.prompt_logprobs
    assert first is None and len(others) == found.usage.prompt_tokens - 1
    values = {entry["logprob"] for one in others for entry in one.values()}
    assert len(values) == 1 and all(1 <= len(one) <= 2 for one in others)
    assert not hasattr(front.openai.chat.completions.create(**asked), "prompt_logprobs")
    refused = front.post("/v1/chat/completions", {**asked, "prompt_logprobs": 1, "stream": True})
    assert refused.status_code == 400 and error_of(refused)["param"] == "prompt_logprobs"


def test_a_chat_without_a_limit_has_the_room_that_is_left(front: Front, engine: FakeEngine) -> None:
    with front.openai.chat.completions.create(model="toy", messages=MESSAGES, stream=True) as stream:
        next(iter(stream))
    sequence = engine.submits[-1].sequences[0]
    assert len(sequence.prompt) // 4 + sequence.params.max_tokens == engine.limits.max_sequence_tokens


def test_sampling_fields_reach_the_engine(front: Front, engine: FakeEngine) -> None:
    front.post(
        "/v1/completions",
        {"prompt": "x", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1,
         "seed": 3, "presence_penalty": 1.0, "min_tokens": 2, "stop_token_ids": [9], "priority": -3},
    )  # fmt: skip
    submit = engine.submits[-1]
    params = submit.sequences[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.seed, params.min_tokens, params.presence_penalty, submit.priority) == (3, 2, 2.0, -3)
    assert params.end_ids == [2, 9] and not params.count_prompt
    assert (params.cache, params.cache_salt) == ("on", "")
    front.post("/v1/completions", {"prompt": "x", "temperature": 0, "cache": "off", "cache_salt": "mine"})
    params = engine.submits[-1].sequences[0].params
    assert (params.top_k, params.cache, params.cache_salt) == (1, "off", "mine")
    fields = {"logit_bias": {"5": 1, "7": -100}, "allowed_token_ids": [9, 5], "no_repeat_ngram_size": 3}
    for path, body in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": MESSAGES})):
        front.post(f"/v1/{path}", {**body, **fields, "typical_p": 0.5, "max_tokens": 2})
        params = engine.submits[-1].sequences[0].params
        assert (params.logit_bias, params.allowed_token_ids) == ({5: 1.0, 7: -100.0}, [9, 5])
        assert (params.no_repeat_ngram_size, params.typical_p) == (3, 0.5)
    front.post("/v1/completions", {"prompt": "x", "skip_reading_prefix_cache": True})
    assert engine.submits[-1].sequences[0].params.cache == "write"


def test_the_usage_has_the_cached_tokens_of_each_prompt_once(front: Front, engine: FakeEngine) -> None:
    engine.cached_tokens = 2
    try:
        body = {"prompt": ["When?", "Where?"], "n": 2, "max_tokens": 3, "seed": 1}
        whole = front.post("/v1/completions", body).json()["usage"]
        stream = front.openai.completions.create(
            model="toy", prompt="When?", max_tokens=3, stream=True, stream_options={"include_usage": True}
        )
        last = list(stream)[-1].usage
    finally:
        engine.cached_tokens = 0
    assert whole["prompt_tokens_details"]["cached_tokens"] == 8 // 2
    assert last.prompt_tokens_details.cached_tokens == 2


#: body -> param, code, part of the message
BAD = [
    ({"prompt": "a", "max_tokns": 3}, "max_tokns", "unknown_parameter", "did you mean max_tokens?"),
    ({"prompt": "a", "max_tokens": "x"}, "max_tokens", "invalid_type", 'is "x"; wanted a whole number'),
    ({"prompt": "a", "stream_options": {"include_usag": True}}, "stream_options.include_usag",
     "unknown_parameter", "did you mean include_usage?"),
    ({"prompt": "a", "temperature": -1}, "temperature", "invalid_type", "is -1; wanted a number >= 0.0"),
    ({"prompt": "a", "cache": "never"}, "cache", "invalid_value", 'is "never"; wanted one of off, on, write'),
    ({"prompt": "a", "cache_salt": "x" * 257}, "cache_salt", "invalid_value", "257 bytes; wanted 256"),
    ({"prompt": "a", "max_tokens": 5000}, "prompt", "context_length_exceeded", "accepts 512 in all"),
    ({"prompt": "a", "logit_bias": {"5": 100.5}}, "logit_bias", "invalid_value", "token id 5 is 100.5"),
    ({"prompt": "a", "logit_bias": {"5": "1"}}, "logit_bias[...]", "invalid_type", ""),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "invalid_value", "has 'x'"),
    ({"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias", "invalid_value", "'99999'"),
    ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "invalid_value",
     "1,025 token ids"),
    ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", "invalid_value", "is empty"),
    ({"prompt": "a", "allowed_token_ids": [5, 99999]}, "allowed_token_ids", "invalid_value", "has 99999"),
    ({"prompt": "a", "no_repeat_ngram_size": 65}, "no_repeat_ngram_size", "invalid_type", "is 65"),
    ({"prompt": "a", "typical_p": 0}, "typical_p", "invalid_type", "is 0"),
    ({"prompt": "a", "response_format": {"type": "yaml"}}, "response_format.type", "unsupported_parameter",
     "wanted text, json_object"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_type", "mixes types"),
    ({"prompt": []}, "prompt", "invalid_value", "empty list"),
    ({"prompt": [1000]}, "prompt", "invalid_value", "token id 1000"),
    ({"prompt": "a", "best_of": 1, "n": 2}, "best_of", "invalid_value", "n or more"),
    ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs", "invalid_type", "is 21"),
    ({"prompt": "a", "prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "invalid_value",
     "stream is true"),
    ({"max_tokens": 3}, "prompt", "missing_required_parameter", "prompt is missing"),
    ({"prompt": "a\ud800"}, "prompt", "invalid_value", "not valid Unicode"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "code", "text"), BAD)
def test_a_wrong_field_is_named(front: Front, body: dict, param: str, code: str, text: str) -> None:
    response = front.post("/v1/completions", content=json.dumps(body))
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (400, param, code), error
    assert text in error["message"] and error["type"] == "invalid_request_error"


def test_unknown_models_and_routes(front: Front) -> None:
    with pytest.raises(openai.NotFoundError) as found:
        front.openai.completions.create(model="gpt-4", prompt="x")
    assert found.value.code == "model_not_found" and "there are toy" in str(found.value)
    assert [model.id for model in front.openai.models.list()] == ["toy"]
    assert front.openai.models.retrieve("toy").created > 0
    assert error_of(front.http.get("/v1/nothing"))["code"] == "unknown_url"
    assert front.http.get("/v1/completions").status_code == 405


def test_fields_without_effect_are_named_in_a_header(front: Front) -> None:
    response = front.post("/v1/completions", {"prompt": "x", "user": "me", "store": False, "max_tokens": 1})
    assert response.headers["x-tridecode-no-effect"] == "user, store"
    other = front.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers={"x-request-id": "mine"})
    assert "x-tridecode-no-effect" not in other.headers and other.headers["x-request-id"] == "mine"
