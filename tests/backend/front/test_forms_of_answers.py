"""Answers of a form and forced calls over OpenAI's API, from a real engine with random weights.

What OpenAI's client gets follows the schema, which jsonschema checks.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import pydantic
import pytest

from tests.backend.engine.grammar_models import random_model, tokenizer_folder
from tests.backend.front.fronts import Front, error_of, repository
from tests.backend.front.test_tool_calls import calls_of, whole_and_streamed
from tests.fake_engine import FakeSupervisor
from tests.real_engine import RealEngine

MESSAGES: list[Any] = [{"role": "user", "content": "How deep?"}]
DEPTH = {
    "type": "object",
    "properties": {"at": {"enum": ["the 港", "Bergen"]}, "metres": {"type": "integer", "maximum": 99}},
    "required": ["at", "metres"],
    "additionalProperties": False,
}
TIDE = {"type": "object", "properties": {"high": {"type": "boolean"}}, "required": ["high"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "depth", "parameters": DEPTH}},
    {"type": "function", "function": {"name": "tide", "parameters": {**TIDE, "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"depth": DEPTH, "tide": TIDE, "now": {"type": "object", "maxProperties": 0}}
NAMED = {"type": "function", "function": {"name": "depth"}}
SEEDS = range(4)


class Place(enum.Enum):
    BERGEN = "Bergen"
    HARBOUR = "the 港"


class Answer(pydantic.BaseModel):
    place: Place
    kind: Literal["high", "low"]
    depths: list[Literal[1, 2]]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("forms")
    engine = RealEngine(
        random_model(),
        tokenizer_dir=tokenizer_folder(),
        max_sequences=8,
        max_sequence_tokens=512,
        max_step_tokens=64,
        cache_bytes=8 << 20,
    )
    with engine, FakeSupervisor(engine) as supervisor:  # type: ignore[arg-type]
        environment = {"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint}
        made = repository(
            folder / "repo", "{{ messages[0].content }}{% if tools %}{% endif %}{# <tool_call> #}"
        )
        with Front(made, folder / "front.log", "--served-model-name", "toy", **environment) as front:
            yield front


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_has_valid_arguments(front: Front, choice: Any) -> None:
    for seed in SEEDS:
        found, _ = whole_and_streamed(
            front, tools=TOOLS, tool_choice=choice, seed=seed, max_tokens=300, parallel_tool_calls=False
        )
        assert found.finish_reason == "tool_calls" and found.message.content is None
        [(name, arguments)] = calls_of(found)
        assert name == "depth" or choice == "required"
        jsonschema.validate(arguments, SCHEMAS[name])


def test_allowed_tools_are_the_only_ones(front: Front) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "tide"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    for seed in SEEDS:
        found, _ = whole_and_streamed(
            front, tools=TOOLS, tool_choice=choice, seed=seed, max_tokens=300, parallel_tool_calls=False
        )
        [(name, arguments)] = calls_of(found)
        assert name == "tide"
        jsonschema.validate(arguments, TIDE)


def test_an_answer_is_the_model_of_pydantic_that_was_wanted(front: Front) -> None:
    for seed in SEEDS:
        found = front.openai.chat.completions.parse(
            model="toy", messages=MESSAGES, response_format=Answer, seed=seed, max_tokens=400
        )
        assert (
            isinstance(found.choices[0].message.parsed, Answer) and found.choices[0].finish_reason == "stop"
        )


def test_json_or_a_call(front: Front) -> None:
    """The answer is one or the other where the model may leave the tools."""
    schema = {"name": "d", "schema": {**TIDE, "additionalProperties": False}}
    tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    kinds = set()
    for seed in range(16):
        found, _ = whole_and_streamed(
            front,
            tools=tools,
            response_format={"type": "json_schema", "json_schema": schema},
            parallel_tool_calls=False,
            seed=seed,
            max_tokens=480,
        )
        kinds.add(found.finish_reason)
        for name, arguments in calls_of(found):
            jsonschema.validate(arguments, SCHEMAS[name])
        if not calls_of(found):
            jsonschema.validate(json.loads(found.message.content), TIDE)
    assert kinds == {"stop", "tool_calls"}


def test_regular_expressions_choices_and_grammars(front: Front) -> None:
    for fields, pattern in (
        ({"guided_regex": "(ab|c){2,3}"}, "(ab|c){2,3}"),
        ({"guided_choice": ["high", "low", "the 港"]}, "high|low|the 港"),
        ({"structured_outputs": {"grammar": 'start: ("x" | "yz")~2'}}, "(x|yz){2}"),
    ):
        for stream in (False, True):
            body = {"prompt": "How deep?", "max_tokens": 60, "seed": 3, **fields, "stream": stream}
            if stream:
                client = front.openai.completions.create(
                    model="toy", prompt="How deep?", max_tokens=60, seed=3, stream=True, extra_body=fields
                )
                text = "".join(chunk.choices[0].text for chunk in client)
            else:
                [choice] = front.post("/v1/completions", body).json()["choices"]
                text = choice["text"]
            assert re.fullmatch(pattern, text), text


#: fields -> param, part of the message
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "ship"}}}},
     "response_format", "response_format"),
    ({"guided_regex": "(("}, "guided_regex", "guided_regex (regex)"),
    ({"guided_grammar": "start: absent"}, "guided_grammar", "absent"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "dependentSchemas": {"a": {}}}}}], "tool_choice": "required"},
     "tools", "dependentSchemas"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "text"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_cannot_be_used_is_named(
    front: Front, fields: dict[str, Any], param: str, text: str, stream: bool
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 20, "stream": stream, **fields}
    response = front.post("/v1/chat/completions", body)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param), error
    assert text in error["message"] and "structured_output" not in error["message"]
