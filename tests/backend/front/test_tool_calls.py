"""Tools of /v1/chat/completions by OpenAI's own client, before a fake engine that says what a test wants."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion
from transformers import AutoTokenizer

from tests.backend.chat import tool_templates
from tests.backend.front.fronts import Front, error_of, repository
from tests.backend.front.transports import Route
from tests.fake_engine import LIMITS, FakeEngine, FakeSupervisor
from tridecode.backend.wire.messages import SamplingParams

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"properties": {"at": {"type": "string"}}}},
    }
    for name in ("depth", "tide")
]  # fmt: skip
NAMED = {"type": "function", "function": {"name": "depth"}}
MESSAGES: list[Any] = [{"role": "user", "content": "How deep?"}]
ONE = '<tool_call>\n{"name": "depth", "arguments": {"at": "the 港"}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "tide", "arguments": {}}\n</tool_call>'


class Script:
    """The output of the engine: ids, then the end token."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def __call__(self, history: list, generated: int, params: SamplingParams, vocab_size: int) -> int:
        return self.ids[generated] if generated < len(self.ids) else LIMITS.end_id


@pytest.fixture(scope="module")
def tool_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("tools") / "repo", tool_templates.HERMES)


@pytest.fixture(scope="module")
def tokenizer(tool_repository: Path) -> Any:
    return AutoTokenizer.from_pretrained(tool_repository / "text" / "1" / "tokenizer")


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def engine(script: Script) -> Iterator[FakeEngine]:
    limits = msgspec.structs.replace(LIMITS, max_sequence_tokens=4096)
    with FakeEngine(next_token=script, step_s=0.001, limits=limits) as engine:
        yield engine


@pytest.fixture(scope="module")
def front(
    engine_route: Route, tool_repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    log = tmp_path_factory.mktemp("log") / "front.log"
    with Front(tool_repository, log, *engine_route.options, **engine_route.environment) as front:
        yield front


@pytest.fixture
def say(script: Script, tokenizer: Any) -> Callable[[str], None]:
    def tell(text: str) -> None:
        script.ids = tokenizer.encode(text, add_special_tokens=False)

    return tell


def whole_and_streamed(front: Front, **wanted: Any) -> tuple[Any, list[Any]]:
    """The choice of a whole answer, equal to the one that OpenAI's client makes of a stream; its chunks."""
    body = {"model": "toy", "messages": MESSAGES, **wanted}
    whole = front.openai.chat.completions.create(**body)
    ChatCompletion.model_validate(whole.model_dump())
    chunks = list(front.openai.chat.completions.create(**body, stream=True))
    state: ChatCompletionStreamState = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(chunk)
    streamed = state.get_final_completion().choices[0]
    choice = whole.choices[0]
    assert streamed.finish_reason == choice.finish_reason
    assert (streamed.message.content or None) == (choice.message.content or None)
    calls = [
        [(call.function.name, call.function.arguments, call.type) for call in one.message.tool_calls or ()]
        for one in (streamed, choice)
    ]
    assert calls[0] == calls[1]
    return choice, chunks


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    return [
        (call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()
    ]


def sent_text(engine: FakeEngine, tokenizer: Any) -> str:
    ids = np.frombuffer(engine.submits[-1].sequences[0].prompt, "<i4").tolist()
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_calls_of_an_answer(
    front: Front, engine: FakeEngine, say: Callable, tokenizer: Any, transport: str
) -> None:
    say(f"Let me see.\n{ONE}\n{TWO}")
    choice, chunks = whole_and_streamed(front, tools=TOOLS)
    assert choice.message.content == "Let me see." and choice.finish_reason == "tool_calls"
    assert calls_of(choice) == [("depth", {"at": "the 港"}), ("tide", {})]
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2 and all(one.startswith("call_") for one in ids)
    wanted = tokenizer.apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert sent_text(engine, tokenizer) == wanted
    # the arguments come in parts, behind an id and a name that come once
    parts = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [part.id is not None for part in parts if part.index == 0] == [True] + [False] * (
        sum(part.index == 0 for part in parts) - 1
    )
    # behind Triton, tokens share responses while its model falls behind
    assert sum(part.index == 0 for part in parts) > (3 if transport == "socket" else 0)


def test_an_answer_without_a_call_and_one_that_is_none(front: Front, say: Callable) -> None:
    say("Twelve < thirteen metres.\n")
    choice, _ = whole_and_streamed(front, tools=TOOLS)
    assert choice.message.content == "Twelve < thirteen metres.\n" and choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    bad = '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>'
    say(bad)
    choice, _ = whole_and_streamed(front, tools=TOOLS)
    assert (choice.message.content, choice.finish_reason) == (bad, "stop")


def test_no_tools_no_calls(front: Front, engine: FakeEngine, say: Callable, tokenizer: Any) -> None:
    say(ONE)
    for wanted in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        choice, _ = whole_and_streamed(front, **wanted)
        assert (choice.message.content, choice.finish_reason) == (ONE, "stop")
        assert "# Tools" not in sent_text(engine, tokenizer)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_choice_forces_the_beginning_of_a_call(
    front: Front, engine: FakeEngine, say: Callable, tokenizer: Any, choice: Any
) -> None:
    start = '<tool_call>\n{"name": "' + ("" if choice == "required" else 'depth", "arguments":')
    say(ONE[len(start) :] + "\n" + TWO)
    found, _ = whole_and_streamed(front, tools=TOOLS, tool_choice=choice)
    count = 2 if choice == "required" else 1
    assert calls_of(found) == [("depth", {"at": "the 港"}), ("tide", {})][:count]
    assert found.finish_reason == "tool_calls" and found.message.content is None
    assert sent_text(engine, tokenizer).endswith(f"<|im_start|>assistant\n{start}")


def test_one_call_where_parallel_calls_are_forbidden(front: Front, say: Callable) -> None:
    say(f"{ONE}\n{TWO} and so on")
    choice, _ = whole_and_streamed(front, tools=TOOLS, parallel_tool_calls=False)
    assert len(calls_of(choice)) == 1 and choice.finish_reason == "tool_calls"
    assert choice.message.content is None


def test_a_call_that_the_limit_cuts(front: Front, say: Callable, tokenizer: Any) -> None:
    say(ONE)
    cut = len(tokenizer.encode(ONE[: ONE.index("港")], add_special_tokens=False))
    body: dict[str, Any] = {"model": "toy", "messages": MESSAGES, "tools": TOOLS, "max_tokens": cut}
    choice = front.openai.chat.completions.create(**body).choices[0]
    assert choice.finish_reason == "length" and choice.message.content is None
    arguments = choice.message.tool_calls[0].function.arguments
    assert arguments.startswith('{"at": "the') and not arguments.endswith("}")
    chunks = [chunk.choices[0] for chunk in front.openai.chat.completions.create(**body, stream=True)]
    parts = [call.function.arguments for one in chunks for call in one.delta.tool_calls or ()]
    assert "".join(parts) == arguments and chunks[-1].finish_reason == "length"


def test_samples_have_calls_of_their_own(front: Front, say: Callable) -> None:
    say(ONE)
    found = front.openai.chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS, n=2)
    assert [calls_of(choice) for choice in found.choices] == [[("depth", {"at": "the 港"})]] * 2
    assert len({choice.message.tool_calls[0].id for choice in found.choices}) == 2


def test_log_probabilities_come_with_calls(front: Front, say: Callable, script: Script) -> None:
    say(ONE)
    choice, chunks = whole_and_streamed(front, tools=TOOLS, logprobs=True)
    assert len(choice.logprobs.content) == len(script.ids) + 1  # and the end token
    streamed = [one for chunk in chunks for one in getattr(chunk.choices[0].logprobs, "content", None) or ()]
    assert [one.token for one in streamed] == [one.token for one in choice.logprobs.content]


def test_a_conversation_with_results(front: Front, engine: FakeEngine, say: Callable, tokenizer: Any) -> None:
    """The answer's message goes back as the client has it, with the result of its call."""
    say(ONE)
    asked = front.openai.chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS)
    message = asked.choices[0].message
    call = message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"m": 12}'}
    say("Twelve metres.")
    for shown in (message.model_dump(), message.model_dump(exclude_none=True), message):
        found = front.openai.chat.completions.create(
            model="toy", messages=[*MESSAGES, shown, result], tools=TOOLS
        )
        assert found.choices[0].message.content == "Twelve metres."
    arguments = {"name": "depth", "arguments": json.loads(call.function.arguments)}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [{"function": arguments}]},
        result,
    ]
    wanted = tokenizer.apply_chat_template(history, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert sent_text(engine, tokenizer) == wanted


def test_the_tokens_of_a_chat_are_those_of_its_prompt(
    front: Front, engine: FakeEngine, say: Callable
) -> None:
    say("Hm.")
    front.openai.chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS)
    sent = np.frombuffer(engine.submits[-1].sequences[0].prompt, "<i4").tolist()
    found = front.post("/tokenize", {"messages": MESSAGES, "tools": TOOLS}).json()
    assert (found["tokens"], found["count"]) == (sent, len(sent))
    for body in ({}, {"prompt": "a", "messages": MESSAGES}):
        response = front.post("/tokenize", body)
        assert response.status_code == 400 and "wanted one of them" in error_of(response)["message"]
    error = error_of(front.post("/tokenize", {"messages": [{"role": "tool", "content": "x"}]}))
    assert error["param"] == "messages[0].tool_call_id"


def test_a_message_is_continued(front: Front, engine: FakeEngine, say: Callable, tokenizer: Any) -> None:
    say(" metres.")
    history = [*MESSAGES, {"role": "assistant", "content": "Twelve"}]
    found = front.post("/v1/chat/completions", {"messages": history, "continue_final_message": True}).json()
    assert found["choices"][0]["message"]["content"] == " metres."
    wanted = tokenizer.apply_chat_template(history, tokenize=False, continue_final_message=True)
    assert sent_text(engine, tokenizer) == wanted


def test_fields_without_effect_and_neutral_ones(front: Front, say: Callable) -> None:
    say("Hm.")
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    body = {"messages": MESSAGES, "tools": strict, "response_format": {"type": "text"}, "user": "u"}
    response = front.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    assert response.headers["x-tridecode-no-effect"] == "user"


#: further fields -> param, code, part of the message
BAD: list[tuple[dict[str, Any], str, str, str]] = [
    ({"tools": "x"}, "tools", "invalid_type", 'tools is "x"'),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name",
     "invalid_value", "letters"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "invalid_value", "wanted none, auto, required"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
     "tool_choice.function.name", "invalid_value", "wanted one of tools: depth, tide"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value", "there are no tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter", "wanted function"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter", "not implement"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema",
     "invalid_value", "wanted a JSON schema"),
    ({"messages": [{"role": "tool", "tool_call_id": "x", "content": "y"}]}, "messages[0].tool_call_id",
     "invalid_value", "wanted the id of a call"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0]", "unsupported_parameter", "reads text"),
    ({"messages": []}, "messages", "invalid_value", "empty list"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value", "not a variable"),
    ({"chat_template": "x"}, "chat_template", "unsupported_parameter", "not implement"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message",
     "invalid_value", "both true"),
    ({"messages": [{"role": "user", "content": "a\ud800"}]}, "messages", "invalid_messages", "surrogates"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "code", "text"), BAD)
def test_a_wrong_field_is_named(
    front: Front, fields: dict[str, Any], param: str, code: str, text: str
) -> None:
    content = json.dumps({"messages": MESSAGES, **fields})
    response = front.post("/v1/chat/completions", content=content)
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (400, param, code), error
    assert text in error["message"]


def test_a_template_without_tools_and_a_parser_that_an_operator_names(
    engine: FakeEngine, script: Script, say: Callable, tmp_path: Path
) -> None:
    plain = repository(tmp_path / "plain")
    unknown = repository(
        tmp_path / "unknown", "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with FakeSupervisor(engine) as supervisor:
        environment = {"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint}
        for folder, options, text in (
            (plain, (), "does not show tools"),
            (unknown, (), "see --tool-call-parser"),
            (unknown, ("--tool-call-parser", "hermes"), ""),
        ):
            with Front(folder, tmp_path / "log", *options, **environment) as front:
                if text:
                    with pytest.raises(openai.BadRequestError, match=text):
                        front.openai.chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS)
                    continue
                say(ONE)
                choice, _ = whole_and_streamed(front, tools=TOOLS)
                assert calls_of(choice) == [("depth", {"at": "the 港"})]


#: bodies that langchain-openai 1.7, litellm 1.110, instructor 1.17, pydantic-ai 2.38 and openai 3.3 have sent
REQUESTS = json.loads((Path(__file__).with_name("client_requests.json")).read_text())


@pytest.mark.parametrize("sent", REQUESTS, ids=lambda sent: sent["client"].replace(" ", "-"))
def test_requests_of_other_clients_are_answered(front: Front, say: Callable, sent: dict[str, Any]) -> None:
    say("Hello there.")
    response = front.post(sent["path"], sent["body"])
    assert response.status_code == 200, response.text
    if sent["body"].get("stream"):
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        kind = ChatCompletion if sent["path"].endswith("chat/completions") else Completion
        kind.model_validate(response.json())
