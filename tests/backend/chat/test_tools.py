"""Tools and messages of a chat request: what is refused, and prompts equal to transformers'."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.backend.chat import tool_templates
from tests.checkpoints import tiny_tokenizer
from tridecode.backend.base.errors import RequestError, UnsupportedError
from tridecode.backend.chat.async_templates import AsyncTemplateRenderer
from tridecode.backend.chat.chat_template import ChatTemplate, template_variables
from tridecode.backend.chat.messages import reads_parts, template_messages
from tridecode.backend.chat.templates import TemplateFault
from tridecode.backend.chat.tool_parser import Arguments, CallStart
from tridecode.backend.chat.tools import plan_tools, read_tools

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Depth of a <harbour> & “berth”.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
    for name in ("depth", "tide-table")
]  # fmt: skip
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "How deep is the 港?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "a1b2c3d4e",
                "type": "function",
                "function": {"name": "depth", "arguments": '{"place": "the 港", "at": [1, {"x": null}]}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": '{"m": 12}'},
    {"role": "assistant", "content": "Twelve metres."},
    {"role": "user", "content": "And at low tide?"},
]
SOURCES = {
    "hermes": tool_templates.HERMES,
    "llama3": tool_templates.LLAMA3,
    "mistral": tool_templates.MISTRAL,
    "mistral-named": tool_templates.MISTRAL_NAMED,
}


def tokenizer_with(source: str | dict[str, str], folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = source
    tokenizer.save_pretrained(folder)
    return tokenizer


def as_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as transformers' guide wants them: arguments are objects."""
    found = copy.deepcopy(messages)
    for message in found:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        message["content"] = message["content"] or ""
    return found


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", SOURCES)
def test_prompts_with_tools_are_those_of_transformers(name, tools, tmp_path) -> None:
    tokenizer = tokenizer_with(SOURCES[name], tmp_path)
    template = ChatTemplate.find(tmp_path)
    assert template is not None
    request = read_tools(tools, None, None)
    schemas = None if request is None else request.schemas
    for messages in (CHAT, CHAT[:1], CHAT[:3]):
        wanted = tokenizer.apply_chat_template(
            as_objects(messages), tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert template.render(template_messages(messages), tools=schemas) == wanted


def test_variables_documents_and_named_templates_are_those_of_transformers(tmp_path) -> None:
    source = "{{ documents | tojson }}{{ tools is none }}{{ enable_thinking }}{{ eos_token }}"
    source += "{{ add_generation_prompt }}"
    tokenizer = tokenizer_with({"default": source, "tool_use": "with {{ tools | length }}"}, tmp_path)
    template = ChatTemplate.find(tmp_path)
    assert template is not None
    documents = [{"title": "Port", "text": "deep"}]
    for arguments in (
        {"documents": documents, "enable_thinking": False, "add_generation_prompt": True},
        {"documents": None, "enable_thinking": [1], "add_generation_prompt": False},
        {"tools": TOOLS, "add_generation_prompt": True},
    ):
        wanted = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, **arguments)
        assert template.render(CHAT[:1], **arguments) == wanted
    for key in ("messages", "tools", "chat_template", "a b"):
        with pytest.raises(RequestError, match=f'chat_template_kwargs has (the key )?"{key}"'):
            template_variables({"x": 1, key: 2})
    assert template_variables({"enable_thinking": False}) == {"enable_thinking": False}


PLAIN = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content | trim if trims else m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}> {% for p in m.content %}{{ p.text }}{% endfor %}</s>{% endfor %}"
)


@pytest.mark.parametrize("text", ["The depth is ", "The depth is", "x", " x \n ", "<assistant> </s>"])
@pytest.mark.parametrize("trims", [False, True])
def test_a_continued_message_is_that_of_transformers(text, trims, tmp_path) -> None:
    messages = [{"role": "user", "content": "How deep?"}, {"role": "assistant", "content": text}]
    arguments = {"add_generation_prompt": False, "continue_final_message": True}
    for source in (PLAIN, tool_templates.HERMES):
        tokenizer = tokenizer_with(source, tmp_path)
        template = ChatTemplate.find(tmp_path)
        assert template is not None
        wanted = tokenizer.apply_chat_template(messages, tokenize=False, trims=trims, **arguments)
        assert template.render(messages, trims=trims, **arguments) == wanted
    parts = [messages[0] | {"content": []}, messages[1] | {"content": [{"type": "text", "text": text}]}]
    tokenizer = tokenizer_with(PARTS, tmp_path)
    template = ChatTemplate.find(tmp_path)
    assert template is not None
    assert template.render(parts, **arguments) == tokenizer.apply_chat_template(
        parts, tokenize=False, **arguments
    )


def test_a_message_that_cannot_be_continued_is_refused(tmp_path) -> None:
    tokenizer_with("{% for m in messages %}{{ m.content[:3] }}{% endfor %}", tmp_path)
    template = ChatTemplate.find(tmp_path)
    assert template is not None
    message = {"role": "assistant", "content": "a long text"}
    with pytest.raises(RequestError, match="does not show the whole text of the last message"):
        template.render([message], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RequestError, match="the last message has no text"):
        template.job([{"role": "assistant"}], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RequestError, match="add_generation_prompt are both true"):
        template.job([message], continue_final_message=True)


def test_parts_reach_templates_that_read_them_and_are_one_text_for_the_others(tmp_path) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]

    async def find(source: str) -> tuple[bool, str]:
        tokenizer_with(source, tmp_path)
        template = ChatTemplate.find(tmp_path)
        assert template is not None
        renderer = AsyncTemplateRenderer()
        try:
            parts = await reads_parts(template, renderer)
            return parts, await template.render_with(renderer, template_messages(messages, parts))
        finally:
            await renderer.close()

    assert asyncio.run(find(PARTS)) == (True, "<user> ab</s>")
    assert asyncio.run(find("{{ messages[0].content }}")) == (False, "a\nb")
    assert asyncio.run(find("{{ messages[0].content | trim }}")) == (False, "a\nb")
    assert asyncio.run(find("{{ messages[0]['content'] + '!' }}")) == (False, "a\nb!")
    assert asyncio.run(find("{{ messages[0]['content'] | tojson }}")) == (False, '"a\\nb"')


CALL = CHAT[1]["tool_calls"][0]
BAD_MESSAGES: dict[str, list[Any]] = {
    "messages is an empty list": [],
    r"messages\[0\] is 3": [3],
    r"messages\[0\].role is null": [{"content": "x"}],
    r"messages\[0\].role is function": [{"role": "function", "name": "f", "content": "x"}],
    r"messages\[0\].content is missing": [{"role": "user"}],
    r"messages\[0\].content is 7": [{"role": "user", "content": 7}],
    r"messages\[0\].content\[1\] has the type \"image_url\"; this model reads text": [
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}
    ],
    r"messages\[0\].content\[0\].text is null": [{"role": "user", "content": [{"type": "text"}]}],
    r"messages\[0\].tool_calls is sent by the role user": [
        {"role": "user", "content": "", "tool_calls": [CALL]}
    ],
    r"messages\[0\].function_call is not implemented": [{"role": "assistant", "function_call": {}}],
    r"tool_calls\[0\] is \"x\"": [{"role": "assistant", "tool_calls": ["x"]}],
    r"tool_calls\[0\].id is null": [{"role": "assistant", "tool_calls": [{**CALL, "id": None}]}],
    r"tool_calls\[1\].id is \"a1b2c3d4e\" twice": [{"role": "assistant", "tool_calls": [CALL, CALL]}],
    r"tool_calls\[0\].type is \"custom\"": [
        {"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}
    ],
    r"function.name is \"\"": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": ""}}]}],
    r"messages\[0\].tool_call_id is \"a1b2c3d4e\"; wanted the id of a call": [CHAT[2]],
    r"messages\[1\].tool_call_id is missing": [CHAT[1], {"role": "tool", "content": "x"}],
    r"messages\[0\].name is \[\]": [{"role": "user", "content": "x", "name": []}],
}
for bad in ("[1]", "{", '{"a": NaN}', '{"a": 1} {}', "[" * 10_000, '{"a":' * 10_000, "null", 7, '{"a": 1,}'):
    BAD_MESSAGES[f"arguments is .*; wanted a JSON object #{str(bad)[:20]}"] = [
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": bad}}]}
    ]


@pytest.mark.parametrize("text", BAD_MESSAGES)
def test_a_message_that_is_wrong_is_refused_by_its_place(text) -> None:
    with pytest.raises((RequestError, UnsupportedError), match=text.partition(" #")[0]) as found:
        template_messages(BAD_MESSAGES[text])
    assert found.value.param.startswith("messages")


def test_messages_of_clients_that_send_whole_answers_back_are_read() -> None:
    nothing = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": None}
    found = template_messages(
        [
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": "x", "name": "Ann"},
            {"role": "assistant", "content": "y", **nothing},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "tool_calls": []},
            CHAT[1] | {"content": None},
        ]
    )
    assert [(one["role"], one["content"]) for one in found] == [
        ("system", "Be kind."), ("user", "x"), ("assistant", "y"), ("assistant", "no"), ("assistant", ""),
    ]  # fmt: skip
    assert found[1]["name"] == "Ann" and found[2].keys() == {"role", "content"}
    assert found[4]["tool_calls"][0]["function"]["arguments"] == {"place": "the 港", "at": [1, {"x": None}]}


def test_a_result_has_the_name_of_its_function_as_some_templates_want() -> None:
    assert template_messages(CHAT)[2]["name"] == "depth"
    assert template_messages([*CHAT[:2], CHAT[2] | {"name": "mine"}])[2]["name"] == "mine"


FUNCTION = TOOLS[0]["function"]
BAD_TOOLS: dict[str, tuple[Any, Any, Any]] = {
    'tools is "x"; wanted a list': ("x", None, None),
    "tools is a list of 129 items; wanted a list of at most 128 tools": ([TOOLS[0]] * 129, None, None),
    r"tools\[0\] is 1": ([1], None, None),
    r'tools\[0\].type is "custom"; wanted function': ([{"type": "custom"}], None, None),
    r"tools\[0\].function is null": ([{"type": "function"}], None, None),
    r"tools\[0\].function.name is missing": ([{"type": "function", "function": {}}], None, None),
    r'tools\[0\].function.name is "a b"': ([{"type": "function", "function": {"name": "a b"}}], None, None),
    r'tools\[0\].function has the unknown field "args"': (
        [{"type": "function", "function": FUNCTION | {"args": 1}}], None, None),
    r"tools\[0\].function.parameters is \[\]; wanted a JSON object": (
        [{"type": "function", "function": FUNCTION | {"parameters": []}}], None, None),
    r'tools\[0\].function.strict is "yes"': (
        [{"type": "function", "function": FUNCTION | {"strict": "yes"}}], None, None),
    r'tools\[1\].function.name is "depth" twice': ([TOOLS[0], TOOLS[0]], None, None),
    'tool_choice is "any"; wanted none, auto, required or a function': (TOOLS, "any", None),
    'tool_choice.function.name is "x"; wanted one of tools: depth, tide-table': (
        TOOLS, {"type": "function", "function": {"name": "x"}}, None),
    'tool_choice.type is "custom"; wanted function or allowed_tools': (TOOLS, {"type": "custom"}, None),
    'tool_choice.allowed_tools is null; wanted a JSON object with mode and tools': (
        TOOLS, {"type": "allowed_tools"}, None),
    'tool_choice.allowed_tools.mode is "none"; wanted auto or required': (
        TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "none"}}, None),
    r"tool_choice.allowed_tools.tools is \[\]; wanted a list": (
        TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, None),
    r'tool_choice.allowed_tools.tools\[0\].function.name is "x"; wanted one of tools: depth, tide-table': (
        TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "x"}}]}}, None),
    'tool_choice is "required" and there are no tools': (None, "required", None),
    "parallel_tool_calls is 3; wanted true or false": (TOOLS, None, 3),
}  # fmt: skip


@pytest.mark.parametrize("text", BAD_TOOLS)
def test_tools_that_are_wrong_are_refused_by_their_place(text) -> None:
    with pytest.raises((RequestError, UnsupportedError), match=text) as found:
        read_tools(*BAD_TOOLS[text])
    assert found.value.param in text.replace("\\", "")


def test_choices() -> None:
    for tools, choice in ((None, None), ([], "auto"), (None, "none"), (TOOLS, "none")):
        assert read_tools(tools, choice, None) is None
    auto = read_tools(TOOLS, None, None)
    assert auto is not None
    assert (auto.choice, auto.parallel, auto.names) == ("auto", True, {"depth", "tide-table"})
    required = read_tools(TOOLS, "required", False)
    assert required is not None and (required.choice, required.parallel) == ("required", False)
    named = read_tools(TOOLS, {"type": "function", "function": {"name": "depth"}}, True)
    assert named is not None and (named.choice, named.names, named.parallel) == ("named", {"depth"}, False)
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "tide-table"}}]}
    some = read_tools(TOOLS, {"type": "allowed_tools", "allowed_tools": allowed}, None)
    assert some is not None
    assert (some.choice, some.names, len(some.schemas)) == ("required", {"tide-table"}, len(TOOLS))
    strict = [{"type": "function", "function": FUNCTION | {"strict": True}}]
    found = read_tools(strict, None, None)
    assert found is not None and found.strict == {"depth"} and found.schemas == [TOOLS[0]]


@pytest.mark.parametrize("name", SOURCES)
def test_a_forced_call_continues_the_prompt_as_the_template_would_write_it(name, tmp_path) -> None:
    """The prompt with the forced prefix begins the text that the template makes of the same call."""
    tokenizer_with(SOURCES[name], tmp_path)
    template = ChatTemplate.find(tmp_path)
    assert template is not None
    request = read_tools(TOOLS, {"type": "function", "function": {"name": "depth"}}, None)
    any_request = read_tools(TOOLS, "required", None)
    assert request is not None and any_request is not None
    plan = plan_tools(request, template)
    prompt = template.render(template_messages(CHAT[:1]), tools=plan.schemas)
    whole = template.render(template_messages(CHAT[:2]), tools=plan.schemas)
    assert whole.startswith(prompt + plan.suffix)
    assert whole.startswith(prompt + plan_tools(any_request, template).suffix)
    arguments = json.dumps(json.loads(CALL["function"]["arguments"]), ensure_ascii=False)
    rest = whole[len(prompt + plan.suffix) :]
    assert rest.lstrip().startswith(arguments)
    parser = plan.parser()
    found = parser.feed(rest) + parser.end()
    assert isinstance(found[0], CallStart) and found[0].name == "depth"
    assert found[1] == Arguments(0, arguments) and parser.finished


def test_templates_without_tools_or_a_known_format_are_refused(tmp_path) -> None:
    request = read_tools(TOOLS, None, None)
    assert request is not None
    with pytest.raises(UnsupportedError, match="does not show tools"):
        plan_tools(request, ChatTemplate(tmp_path, PLAIN))
    unknown = ChatTemplate(tmp_path, "{{ tools }}{{ messages }}")
    with pytest.raises(UnsupportedError, match="has no known format of calls; see --tool-call-parser"):
        plan_tools(request, unknown)
    assert plan_tools(request, unknown, "hermes").kind.name == "hermes"


def test_a_template_that_refuses_messages_says_why(tmp_path) -> None:
    template = ChatTemplate(tmp_path, tool_templates.LLAMA3)
    two = CHAT[1] | {"tool_calls": [CALL, CALL | {"id": "other"}]}
    with pytest.raises(TemplateFault, match="one call at most"):
        template.render(template_messages([CHAT[0], two]))
