"""schemathesis over the served OpenAPI document: requests that it allows and that it forbids.

Every answer has a status, a content type and a schema of the document, and no status above 499.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.backend.chat import tool_templates
from tests.backend.front.conftest import TEXT
from tests.backend.front.fronts import Front, repository
from tests.fake_engine import LIMITS, FakeEngine, FakeSupervisor, scripted
from tridecode.backend.front.routes.openapi import openapi

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
OPERATIONS = [(path, method) for path, methods in openapi()["paths"].items() for method in methods]
#: a request has at most one of these fields
CONSTRAINTS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "structural_tag",
)  # fmt: skip
#: the same requests on every machine, and no limits of time
SETTINGS = hypothesis.settings(
    max_examples=12,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def front(ids: Callable[[str], list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A front whose template takes every role and shows tools, before an engine that answers at once."""
    folder = tmp_path_factory.mktemp("document")
    with FakeEngine(next_token=scripted(ids(TEXT))) as engine, FakeSupervisor(engine) as supervisor:
        made = repository(folder / "repo", tool_templates.HERMES)
        with Front(made, folder / "front.log", TRIDECODE_CONTROL_ENDPOINT=supervisor.endpoint) as front:
            yield front


@pytest.fixture(scope="module")
def document(front: Front) -> Any:
    return schemathesis.openapi.from_url(f"{front.url}/openapi.json")


def complete(body: dict[str, Any]) -> None:
    """Put into a generated body what a schema cannot say: the served name, ids that the vocabulary has, one
    prompt, the parts that belong to a message, and few tokens."""
    if body.get("model") is not None:
        body["model"] = "toy"
    for message in body.get("messages") or []:
        message.update(role="user", content=message.get("content") or "When?", tool_calls=None)
        for part in message["content"] if isinstance(message["content"], list) else []:
            part.update(text=part.get("text") or "When?", refusal=part.get("refusal") or "No.")
    for name in ("token_ids", "tokens", "prompt", "input"):
        if isinstance(body.get(name), list):
            body[name] = known_ids(body[name])
    if "messages" in body:
        body.pop("prompt", None)
    elif not {"token_ids", "tokens", "input", "lora_name"} & body.keys():
        body["prompt"] = body.get("prompt") or "When?"
        for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            body.pop(name, None)
    if isinstance(body.get("max_tokens"), int):
        body["max_tokens"] %= 16
    if body.get("dimensions") is not None:
        body["dimensions"] = LIMITS.hidden_size
    body.pop("timeout_s", None)  # else 504
    for place in (body, body.get("sampling_params") or {}):
        for name in [name for name in CONSTRAINTS if place.get(name) is not None][1:]:
            del place[name]


def known_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [known_ids(one) for one in value]
    return int(value) % 300 if isinstance(value, (int, float)) else value


def check(document: Any, path: str, method: str, mode: Any, checks: list[Any]) -> int:
    """Send generated requests. Returns the number of answers with status 200."""
    right = 0

    @SETTINGS
    @hypothesis.given(case=document[path][method.upper()].as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        nonlocal right
        if mode is schemathesis.GenerationMode.POSITIVE and method == "post":
            complete(case.body)
        response = case.call(timeout=60)
        right += response.status_code == 200
        case.validate_response(response, checks=checks)

    send()
    return right


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_answers_to_allowed_requests_match_the_document(document: Any, path: str, method: str) -> None:
    right = check(document, path, method, schemathesis.GenerationMode.POSITIVE, CHECKS)
    assert right >= (1 if method == "get" else 3) or "lora" in path  # adapters are refused with 403


@pytest.mark.parametrize(("path", "method"), [one for one in OPERATIONS if one[1] == "post"])
def test_requests_that_the_document_forbids_are_refused(document: Any, path: str, method: str) -> None:
    checks = [*CHECKS, negative_data_rejection]
    check(document, path, method, schemathesis.GenerationMode.NEGATIVE, checks)
