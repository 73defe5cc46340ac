"""One server with the real engine on the CPU, one front at its socket, one at its gRPC: the same answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.backend.front.fronts import TEMPLATE, Front
from tests.reliability.service import RUNTIME, Service, build_repository

pytestmark = [pytest.mark.server, pytest.mark.slow]
PROMPT = "the ferry leaves at seven"
#: a template that shows tools, whose calls Hermes' parser reads
TOOLS_TEMPLATE = TEMPLATE + "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
TOOL = {"type": "function", "function": {"name": "depth", "parameters": {"type": "object"}}}
MESSAGES = [{"role": "user", "content": "When does it leave?"}]


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Front, Front]]:
    folder = tmp_path_factory.mktemp("agree")
    repo = build_repository(folder)
    template = folder / "template.jinja"
    template.write_text(TOOLS_TEMPLATE)
    options = ["--chat-template", str(template), "--tool-call-parser", "hermes"]
    service = Service(repo)
    try:
        environment = {RUNTIME: str(service.run_dir)}
        with Front(repo, folder / "socket.log", *options, **environment) as socket:
            triton = ["--triton", service.grpc, *options]
            with Front(repo, folder / "triton.log", *triton) as grpc:
                yield socket, grpc
        complaint = service.stop()
    finally:
        service.close()
    assert not complaint, complaint


#: route, body
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": PROMPT, "temperature": 0, "max_tokens": 24}),
    ("/v1/completions", {"prompt": PROMPT, "temperature": 0.7, "top_p": 0.93, "seed": 2**63 - 1, "n": 3,
                         "logprobs": 5}),
    ("/v1/completions", {"prompt": [PROMPT, "and returns"], "seed": 5, "min_p": 0.01, "top_k": 40,
                         "echo": True, "logprobs": 2, "max_tokens": 6}),
    ("/v1/completions", {"prompt": PROMPT, "seed": 4, "best_of": 4, "n": 2, "max_tokens": 8}),
    ("/v1/completions", {"prompt": PROMPT, "seed": 3, "presence_penalty": 0.3, "frequency_penalty": 0.2,
                         "max_tokens": 20, "stop": ["e"]}),
    ("/v1/completions", {"prompt": [[5, 6, 7], [8]], "seed": 2, "repetition_penalty": 1.1,
                         "bad_words": [" a", "e"], "min_tokens": 3, "stop_token_ids": [9, 300, 301],
                         "include_stop_str_in_output": True, "max_tokens": 30}),
    ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {"seed": 1, "n": 2, "logprobs": 3},
                                "request_id": "mine"}),
    ("/v1/chat/completions", {"messages": MESSAGES, "seed": 6, "n": 2, "logprobs": True, "top_logprobs": 3,
                              "max_tokens": 12}),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL], "seed": 7, "max_tokens": 12}),
    ("/generate", {"prompt": PROMPT, "max_new_tokens": 9}),
]  # fmt: skip


def timeless(body: Any) -> Any:
    """A body without what differs between two equal requests."""
    found = {name: value for name, value in body.items() if name not in ("id", "created")}
    if isinstance(found.get("usage"), dict):  # the second request finds the prompt of the first in the cache
        found["usage"] = {name: n for name, n in found["usage"].items() if name != "prompt_tokens_details"}
    return found


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_whole_answers_are_equal(fronts: tuple[Front, Front], path: str, body: dict[str, Any]) -> None:
    answers = [front.post(path, body) for front in fronts]
    assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
    first, second = (timeless(answer.json()) for answer in answers)
    assert first == second


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (path, body)
        for path, body in REQUESTS
        if path.startswith("/v1") and not {"best_of", "echo"} & set(body)
    ],
)
def test_streams_have_equal_texts_and_tokens(
    fronts: tuple[Front, Front], path: str, body: dict[str, Any]
) -> None:
    found = []
    for front in fronts:
        wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
        events = [line[6:] for line in front.post(path, wanted).text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        bodies = [json.loads(event) for event in events[:-1]]
        texts: dict[int, str] = {}
        log_probs: dict[int, list[Any]] = {}
        finishes = {}
        for choice in (choice for one in bodies for choice in one["choices"]):
            index = choice["index"]
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[index] = texts.get(index, "") + text
            logprobs = choice.get("logprobs") or {}
            log_probs.setdefault(index, []).extend(
                logprobs.get("token_logprobs") or logprobs.get("content") or []
            )
            finishes[index] = choice["finish_reason"] or finishes.get(index)
        found.append((texts, log_probs, finishes, bodies[-1]["usage"]))
    assert found[0] == found[1]


def test_models_are_equal(fronts: tuple[Front, Front]) -> None:
    first, second = (front.http.get("/v1/models").json() for front in fronts)
    assert first == second and first["data"][0]["max_model_len"] > 0
