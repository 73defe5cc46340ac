"""Fields that constrain an answer over OpenAI's API, sent by OpenAI's own client and by plain HTTP: the fake
engine gets the constraint, and a wrong field is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pydantic
import pytest

from tests.backend.chat import tool_templates
from tests.backend.front.fronts import Front, error_of, repository
from tests.backend.front.transports import Route
from tests.fake_engine import LIMITS, FakeEngine, FakeSupervisor
from tridecode.backend.wire.structured_output import StructuredOutput

MESSAGES: list[Any] = [{"role": "user", "content": "How deep?"}]
DEPTH = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "depth", "parameters": DEPTH}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "depth"}}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "d", "schema": DEPTH, "strict": True}}
SCHEMA = StructuredOutput("json_schema", json.dumps(DEPTH))
TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}
TAG_OUTPUT = StructuredOutput("structural_tag", json.dumps(TAG))


@pytest.fixture(scope="module")
def tool_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("constraints") / "repo", tool_templates.HERMES)


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    limits = msgspec.structs.replace(LIMITS, max_sequence_tokens=4096)
    with FakeEngine(step_s=0.001, limits=limits) as engine:
        yield engine


@pytest.fixture(scope="module")
def front(
    engine_route: Route, tool_repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    log = tmp_path_factory.mktemp("log") / "front.log"
    with Front(tool_repository, log, *engine_route.options, **engine_route.environment) as front:
        yield front


def sent(engine: FakeEngine) -> StructuredOutput | None:
    [sequence] = engine.submits[-1].sequences
    return sequence.structured_output


#: fields -> the engine's constraint, of completions and of chats
FIELDS: list[tuple[dict[str, Any], StructuredOutput | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, StructuredOutput("json")),
    ({"response_format": {"type": "json_object", "schema": DEPTH}}, SCHEMA),
    ({"response_format": JSON_FORMAT}, SCHEMA),
    ({"response_format": {"type": "structural_tag", **TAG}}, TAG_OUTPUT),
    ({"structural_tag": json.dumps(TAG)}, TAG_OUTPUT),
    ({"structured_outputs": {"json": DEPTH, "regex": None}}, SCHEMA),
    ({"structured_outputs": {"json_object": True}}, StructuredOutput("json")),
    ({"structured_outputs": '{"choice": ["a", "b"]}'}, StructuredOutput("choice", '["a", "b"]')),
    ({"structured_outputs": {}}, None),
    ({"guided_json": DEPTH}, SCHEMA),
    ({"guided_json": json.dumps(DEPTH), "guided_decoding_backend": "auto"}, SCHEMA),
    ({"guided_regex": "[0-9]+"}, StructuredOutput("regex", "[0-9]+")),
    ({"guided_choice": ["港", "b"]}, StructuredOutput("choice", '["\\u6e2f", "b"]')),
    ({"guided_grammar": 'root ::= "a"'}, StructuredOutput("grammar", 'root ::= "a"')),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "output"), FIELDS)
def test_the_engine_gets_the_constraint(
    front: Front, engine: FakeEngine, fields: dict[str, Any], output: StructuredOutput | None
) -> None:
    for stream in (False, True):
        more = {"extra_body": fields, "max_tokens": 2, "model": "toy", "stream": stream}
        list(front.openai.chat.completions.create(messages=MESSAGES, **more))
        assert sent(engine) == output
        list(front.openai.completions.create(prompt="a", **more))
        assert sent(engine) == output
    body = {"token_ids": [20], "sampling_params": {**fields, "max_tokens": 2}}
    assert front.post("/inference/v1/generate", body).status_code == 200
    assert sent(engine) == output


class Depth(pydantic.BaseModel):
    at: str
    metres: float | None = None


def test_a_model_of_pydantic_is_sent_as_its_schema(front: Front, engine: FakeEngine) -> None:
    with pytest.raises((openai.LengthFinishReasonError, pydantic.ValidationError)):  # the toy writes no JSON
        front.openai.chat.completions.parse(
            model="toy", messages=MESSAGES, response_format=Depth, max_tokens=4
        )
    output = sent(engine)
    assert output is not None and output.kind == "json_schema"
    schema = json.loads(output.text)
    assert schema["required"] == ["at", "metres"] and schema["additionalProperties"] is False


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_has_a_grammar(front: Front, engine: FakeEngine, choice: Any) -> None:
    body = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": choice, "max_tokens": 2}
    response = front.post("/v1/chat/completions", {**body, "response_format": {"type": "json_object"}})
    assert response.headers["x-tridecode-no-effect"] == "response_format"
    output = sent(engine)
    assert output is not None and output.kind == "grammar"
    assert output.text.startswith("%llguidance") and '"required": ["at"]' in output.text


def test_tools_that_the_model_may_leave_are_constrained_where_they_are_strict(
    front: Front, engine: FakeEngine
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2}
    for fields, expected in (
        ({"tools": [TOOL]}, ""),
        ({"tools": [STRICT]}, "lead: "),
        ({"tools": [STRICT], "tool_choice": "none"}, ""),
        ({"tools": [TOOL], "response_format": JSON_FORMAT}, "response: "),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, 'response: %json {"type": "object"'),
        ({"tools": [TOOL], "guided_regex": "x"}, "x"),
    ):
        response = front.post("/v1/chat/completions", {**body, **fields})
        assert response.status_code == 200, response.text
        assert "x-tridecode-no-effect" not in response.headers
        output = sent(engine)
        assert expected in output.text if output else not expected, fields


#: fields of a chat -> param, part of the message
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {}}, "response_format", "wanted a JSON object, as"),
    ({"response_format": {"type": "xml"}}, "response_format.type", 'is "xml"; wanted text, json_object'),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format",
     'has the unknown key "json_schema"; wanted type, schema'),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "srict": True}}},
     "response_format.json_schema", 'has the unknown key "srict"; wanted name, description, schema, strict'),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "wanted a JSON object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
     "response_format.json_schema.schema", "is missing; wanted a JSON schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
     "response_format.json_schema.strict", "is 1; wanted true or false"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.structures", "wanted a list"),
    ({"structured_outputs": "["}, "structured_outputs", 'is "["; wanted a JSON object'),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs", 'the unknown key "jsn"; wanted one of json'),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.json", "are both sent"),
    ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
     "structured_outputs.disable_any_whitespace", "is true; leave it out"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_json", "guided_regex are both sent; wanted one"),
    ({"guided_json": ""}, "guided_json", "wanted a JSON schema, as an object or a text"),
    ({"guided_choice": []}, "guided_choice", "wanted a list of 1 to 4,096 texts"),
    ({"guided_choice": ["a", ""]}, "guided_choice[1]", "wanted a text"),
    ({"guided_regex": "a\ud800"}, "guided_regex", "not valid UTF-8"),
    ({"guided_grammar": "x" * 300_000}, "guided_grammar", "has a grammar of 300,000 bytes"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not implement"),
    ({"tools": [TOOL], "guided_json": "{", "tool_choice": "auto"}, "guided_json", "wanted a JSON object"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
      "tool_choice": "required"}, "tools[0].function.parameters.type", 'is "array"; wanted "object"'),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "text"), BAD)
def test_a_wrong_constraint_is_named(front: Front, fields: dict[str, Any], param: str, text: str) -> None:
    content = json.dumps({"messages": MESSAGES, "max_tokens": 2, **fields})
    response = front.post("/v1/chat/completions", content=content)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param), error
    assert text in error["message"]


def test_an_engine_without_grammars_refuses_by_the_name_of_the_field(
    tool_repository: Path, tmp_path: Path
) -> None:
    limits = msgspec.structs.replace(LIMITS, max_sequence_tokens=4096, grammar_fault="it has no grammars")
    with FakeEngine(step_s=0.001, limits=limits) as engine, FakeSupervisor(engine) as supervisor:
        environment = {"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint}
        with Front(tool_repository, tmp_path / "log", **environment) as front:
            body = {"messages": MESSAGES, "max_tokens": 2}
            error = error_of(front.post("/v1/chat/completions", {**body, "response_format": JSON_FORMAT}))
            assert error["message"] == "response_format is json_schema, and it has no grammars"
            assert (error["param"], error["code"]) == ("response_format", "unsupported_parameter")
            # the beginning of a call is forced all the same
            tools = {"tools": [STRICT], "tool_choice": "required"}
            response = front.post("/v1/chat/completions", {**body, **tools})
            assert response.headers["x-tridecode-no-effect"] == "tools.function.strict"
            assert sent(engine) is None
