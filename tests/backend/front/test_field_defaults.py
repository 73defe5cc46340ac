"""The defaults that docs/reference/openai_fields.md states: sending one changes nothing."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.backend.front.fronts import Front
from tests.fake_engine import FakeEngine
from tridecode.backend.front.fields.chat import ChatRequest
from tridecode.backend.front.fields.completions import CompletionRequest
from tridecode.backend.front.fields.embeddings import EmbeddingRequest
from tridecode.backend.front.fields.meanings import meaning_of
from tridecode.backend.front.routes.colossal import GenerateFields
from tridecode.backend.front.routes.generate import GenerateRequest

#: route -> (struct, smallest body)
ROUTES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "When?", "seed": 5}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "When?"}], "seed": 5}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "When?"}),
    "/generate": (GenerateFields, {"prompt": "When?"}),
    "/inference/v1/generate": (GenerateRequest, {"token_ids": [5], "sampling_params": {"seed": 5}}),
}


def stated(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Field -> default, for the defaults that are JSON."""
    found = {}
    for name in struct.__struct_fields__:
        meaning = meaning_of(struct, name)
        try:
            found[name] = json.loads(meaning.default) if meaning else None
        except ValueError:
            continue
    return {name: value for name, value in found.items() if value is not None}


CASES = [
    (route, name, value)
    for route, (struct, body) in ROUTES.items()
    for name, value in stated(struct).items()
    if name not in body
]


@pytest.fixture(scope="module")
def transport() -> str:
    """The front itself fills defaults in, so one transport is enough."""
    return "socket"


def sent(front: Front, engine: FakeEngine, route: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """Return the engine's Submit of a request, and the body of the answer without its id and times."""
    answer = front.post(route, body)
    assert answer.status_code == 200, answer.text
    submit = engine.submits[-1]
    (sequence,) = submit.sequences
    params = msgspec.structs.replace(sequence.params, seed=0)  # Colossal-Inference's has none
    found = answer.json()
    return (bytes(sequence.prompt), params, submit.priority), {
        name: value for name, value in found.items() if name not in ("id", "created", "request_id")
    }


def test_most_defaults_can_be_tested() -> None:
    assert len(CASES) > 50 and {route for route, _, _ in CASES} == set(ROUTES)


@pytest.mark.parametrize(("route", "name", "value"), CASES)
def test_a_stated_default_changes_nothing(
    front: Front, engine: FakeEngine, route: str, name: str, value: Any
) -> None:
    body = ROUTES[route][1]
    if route not in ("/inference/v1/generate", "/v1/embeddings") and not name.startswith("max_"):
        body = {**body, "max_tokens": 2}
    if route == "/v1/chat/completions" and name == "top_logprobs":
        body = {**body, "logprobs": True}
    assert sent(front, engine, route, {**body, name: value}) == sent(front, engine, route, body)
