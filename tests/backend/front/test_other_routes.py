"""Token ids, Colossal-Inference's routes, adapters, metrics and the document, before a fake engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.backend.front.conftest import TEXT
from tests.backend.front.fronts import Front, error_of, repository
from tests.backend.front.transports import Route
from tests.fake_engine import FakeEngine, FakeSupervisor, toy_log_prob

Ids = Callable[[str], list[int]]


def test_texts_and_token_ids(front: Front, ids: Ids) -> None:
    found = front.post("/tokenize", {"prompt": TEXT, "return_token_strs": True}).json()
    assert found["tokens"] == ids(TEXT) and found["count"] == len(ids(TEXT))
    assert "".join(found["token_strs"]) == TEXT and found["max_model_len"] == 512
    assert front.post("/detokenize", {"tokens": ids(TEXT)}).json() == {"prompt": TEXT}
    assert error_of(front.post("/detokenize", {"tokens": [5, 999_999]}))["param"] == "tokens"
    assert error_of(front.post("/tokenize", {"prompt": "x" * 100_000}))["param"] == "prompt"


def test_token_ids_in_and_out(front: Front, engine: FakeEngine, ids: Ids) -> None:
    wanted = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4, "temperature": 0.5, "logprobs": 1}}
    found = front.post("/inference/v1/generate", {**wanted, "request_id": "mine"}).json()
    tokens = ids(TEXT)[:4]
    assert found["request_id"] == "mine"
    assert (found["choices"][0]["token_ids"], found["choices"][0]["finish_reason"]) == (tokens, "length")
    content = found["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in content] == [toy_log_prob(token) for token in tokens]
    assert engine.submits[-1].sequences[0].params.temperature == 0.5
    streamed = front.post("/inference/v1/generate", {**wanted, "stream": True}).text.split("\n\n")
    assert streamed[-2] == "data: [DONE]"
    events = [json.loads(event[6:]) for event in streamed[:-2]]
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == tokens
    wrong = front.post("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"topk": 1}})
    assert error_of(wrong)["param"] == "sampling_params.topk"


def test_token_ids_come_with_text_and_alternatives_by_id_on_request(front: Front, ids: Ids) -> None:
    tokens, stop = ids(TEXT), TEXT.split()[2]
    params = {"max_tokens": 64, "logprobs": 2, "stop": stop, "return_tokens_as_token_ids": True}
    wanted = {"token_ids": [5, 6], "sampling_params": params, "return_text": True}
    response = front.post("/inference/v1/generate", wanted)
    assert "x-tridecode-no-effect" not in response.headers
    (choice,) = response.json()["choices"]
    assert choice["text"] == TEXT[: TEXT.index(stop)] and choice["stop_reason"] == stop
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["token_ids"] == tokens[: len(choice["token_ids"])]
    for step in content:
        assert len(step["top_logprobs"]) == 2
        assert all(re.fullmatch(r"token_id:\d+", one["token"]) for one in step["top_logprobs"])
    events = front.post("/inference/v1/generate", {**wanted, "stream": True}).text.split("\n\n")[:-2]
    choices = [json.loads(event[6:])["choices"][0] for event in events]
    assert "".join(one["text"] for one in choices) == choice["text"]
    assert [one["stop_reason"] for one in choices][-1] == stop
    assert [token for one in choices for token in one["token_ids"]] == choice["token_ids"]


@pytest.mark.parametrize("name", ["model", "stream", "stream_options", "prompt", "echo", "request_id"])
def test_sampling_params_have_no_other_fields(front: Front, name: str) -> None:
    response = front.post("/inference/v1/generate", {"token_ids": [5], "sampling_params": {name: None}})
    assert (response.status_code, error_of(response)["param"]) == (400, f"sampling_params.{name}")


def test_a_priority_may_be_among_the_sampling_params(front: Front, engine: FakeEngine) -> None:
    front.post("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"priority": -3}})
    assert engine.submits[-1].priority == -3


def test_a_float_without_a_fraction_is_a_whole_number(front: Front, engine: FakeEngine) -> None:
    """JSON Schema has no other integers, and clients in other languages send 16.0."""
    body = {"prompt": "x", "max_tokens": 2.0, "stop_token_ids": [9.0], "logprobs": 1.0}
    assert front.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 2
    assert engine.submits[-1].sequences[0].params.end_ids == [2, 9]
    params = {"max_tokens": 2.0, "logprobs": 1.0}
    answer = front.post("/inference/v1/generate", {"token_ids": [5.0], "sampling_params": params}).json()
    assert len(answer["choices"][0]["logprobs"]["content"]) == 2
    refused = error_of(front.post("/v1/completions", {"prompt": "x", "max_tokens": 2.5}))
    assert (refused["param"], refused["message"]) == (
        "max_tokens", "max_tokens is 2.5; wanted a whole number or null",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["tools", "add_generation_prompt", "chat_template_kwargs"])
def test_fields_of_chats_need_messages(front: Front, name: str) -> None:
    value = {"tools": [], "add_generation_prompt": False, "chat_template_kwargs": {}}[name]
    response = front.post("/tokenize", {"prompt": "x", name: value})
    assert (response.status_code, error_of(response)["param"]) == (400, name)


@pytest.mark.parametrize("field", [{"no_repeat_ngram_size": 65}, {"forced_eos_token_id": 2}, {"top_k": -5}])
def test_colossal_inferences_fields_are_checked(front: Front, field: dict[str, int]) -> None:
    response = front.post("/generate", {"prompt": "x", "max_new_tokens": 1, **field})
    assert (response.status_code, error_of(response)["param"]) == (400, next(iter(field)))


def test_colossal_inferences_routes(front: Front, engine: FakeEngine, ids: Ids) -> None:
    count = len(ids(TEXT))
    body = {"prompt": "x", "max_new_tokens": count, "stream": "False"}
    assert front.post("/generate", body).json() == {"text": TEXT}
    assert engine.submits[-1].sequences[0].params.top_k == 1
    front.post("/generate", {**body, "no_repeat_ngram_size": 3})
    assert engine.submits[-1].sequences[0].params.no_repeat_ngram_size == 3
    found = front.post("/completion", body).json()
    assert found["text"] == TEXT and found["request_id"]
    messages = [{"role": "user", "content": "When?"}]
    chat = front.post("/chat", {"messages": messages, "max_new_tokens": count}).json()
    assert chat == {"role": "assistant", "text": TEXT}
    pieces = front.post("/generate", {**body, "stream": "true"}).text.split("\0")
    assert pieces[-1] == "" and json.loads(pieces[-2]) == {"text": TEXT}
    assert all(TEXT.startswith(json.loads(piece)["text"]) for piece in pieces[:-1])


def test_adapters_come_and_go(supervisor: FakeSupervisor, engine: FakeEngine, tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", lora_path="adapters")
    source = tmp_path / "french"
    source.mkdir()
    (source / "adapter_config.json").write_text("{}")
    (source / "adapter_model.safetensors").write_bytes(b"x")
    environment = {"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint}
    load = {"lora_name": "french", "lora_path": str(source)}
    with Front(repo, tmp_path / "log", "--manage-adapters", **environment) as front:
        assert front.post("/v1/load_lora_adapter", load).status_code == 200
        assert [(card.id, card.parent) for card in front.openai.models.list()] == [
            ("toy", None), ("french", "toy"),
        ]  # fmt: skip
        answer = front.openai.completions.create(model="french", prompt="x", max_tokens=1)
        assert answer.model == "french" and engine.submits[-1].sequences[0].lora_name == "french"
        assert error_of(front.post("/v1/load_lora_adapter", load))["code"] == "exists"
        for name in ("../x", ".x", "a/b", ""):
            assert (
                error_of(front.post("/v1/load_lora_adapter", {**load, "lora_name": name}))["param"]
                == "lora_name"
            )
        missing = {"lora_name": "other", "lora_path": str(tmp_path)}
        assert error_of(front.post("/v1/load_lora_adapter", missing))["param"] == "lora_path"
        for path in ("x" * 5000, "a\0b"):
            wrong = {**missing, "lora_path": path}
            assert error_of(front.post("/v1/load_lora_adapter", wrong))["param"] == "lora_path"
        assert front.post("/v1/unload_lora_adapter", {"lora_name": "french"}).status_code == 200
        assert len(front.openai.models.list().data) == 1 and source.is_dir()
        assert front.post("/v1/unload_lora_adapter", {"lora_name": "french"}).status_code == 404


def test_an_adapter_is_named_as_a_model(engine_route: Route, engine: FakeEngine, tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", lora_path="adapters")
    (repo / "fastertransformer" / "adapters" / "french").mkdir(parents=True)
    with Front(repo, tmp_path / "log", *engine_route.options, **engine_route.environment) as front:
        assert [card.id for card in front.openai.models.list()] == ["toy", "french"]
        for name, lora in (("french", "french"), ("toy", "")):
            front.openai.completions.create(model=name, prompt="x", max_tokens=1)
            assert engine.submits[-1].sequences[0].lora_name == lora


def test_adapters_of_requests_need_an_option(front: Front) -> None:
    response = front.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/tmp"})
    assert (response.status_code, error_of(response)["code"]) == (403, "not_allowed")


def test_the_page_of_metrics_is_prometheus(front: Front, engine_route: Route) -> None:
    def value(name: str, **labels: str) -> float:
        families = text_string_to_metric_families(front.http.get("/metrics").text)
        samples = [s for family in families for s in family.samples if s.name == name]
        return next(s.value for s in samples if labels.items() <= s.labels.items())

    before = value("tridecode_requests_total", outcome="ok")
    tokens = value("tridecode_output_tokens_total")
    front.post("/v1/completions", {"prompt": "x", "max_tokens": 5})
    assert value("tridecode_requests_total", outcome="ok") == before + 1
    assert value("tridecode_output_tokens_total") == tokens + 5
    assert (
        value("tridecode_engine_ready", engine=engine_route.options[1] if engine_route.options else "0") == 1
    )
    assert value("tridecode_request_seconds_count") >= 1


def test_the_document_describes_bodies_and_answers(front: Front) -> None:
    document = front.http.get("/openapi.json").json()
    posts = {path for path, methods in document["paths"].items() if "post" in methods}
    assert {"/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/generate"} <= posts
    schema = {"$ref": "#/components/schemas/CompletionRequest", "components": document["components"]}
    jsonschema.validate({"prompt": "x", "max_tokens": 3, "stop": ["a"]}, schema)
    for wrong in ({"prompt": "x", "max_tokens": -1}, {"prompt": "x", "max_tokns": 3}, {"max_tokens": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    for wrong in ({"prompt": [1, "a"]}, {"prompt": []}, {"prompt": "x", "logit_bias": {"5": "1"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    answer = front.post("/v1/completions", {"prompt": "x", "max_tokens": 3, "logprobs": 1}).json()
    found = {"$ref": "#/components/schemas/Completion", "components": document["components"]}
    jsonschema.validate(answer, found)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/inference/v1/generate",
            {"token_ids": [5], "sampling_params": {"best_of": 2}},
            "sampling_params.best_of",
        ),
        ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
        (
            "/inference/v1/generate",
            {"token_ids": [5], "sampling_params": {"top_k": "x"}},
            "sampling_params.top_k",
        ),
        ("/inference/v1/generate", {"token_ids": [5], "request_id": "\ud83d"}, "request_id"),
        ("/generate", {"prompt": "x", "max_new_tokens": 2**31}, "max_new_tokens"),
        ("/completion", {"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ],
)
def test_an_error_names_the_field_that_was_sent(
    front: Front, path: str, body: dict[str, object], param: str
) -> None:
    response = front.post(path, content=json.dumps(body).encode())
    assert response.status_code == 400 and error_of(response)["param"] == param, response.text


def test_compressed_bodies_are_refused(front: Front) -> None:
    response = front.post("/tokenize", content=b"x", headers={"content-encoding": "gzip"})
    assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_encoding")
