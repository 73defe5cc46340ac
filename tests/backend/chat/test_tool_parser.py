"""Generated text to tool calls: the calls that transformers' rendering of a template has written, malformed
ones, and the same result however the text is cut."""

from __future__ import annotations

import itertools
import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from tests.backend.chat import tool_templates
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.chat.json_scanner import JsonScanner
from tridecode.backend.chat.tool_formats import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    PARSERS,
    ToolFormat,
    find_format,
)
from tridecode.backend.chat.tool_parser import Arguments, CallBroken, CallStart, Content, ToolCallParser
from tridecode.backend.configuration.engine_config import EngineConfig

NAMES = ("depth", "depth_chart", "tide-table", "brave_search")
KINDS = {"hermes": HERMES, "llama3_json": LLAMA3_JSON, "mistral": MISTRAL}


def joined(deltas: list) -> list:
    """Deltas with neighbours of one kind as one."""
    found: list = []
    for delta in deltas:
        last = found[-1] if found else None
        if isinstance(delta, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + delta.text)
        elif isinstance(delta, Arguments) and isinstance(last, Arguments) and last.call == delta.call:
            found[-1] = Arguments(last.call, last.text + delta.text)
        else:
            found.append(delta)
    return found


def run(kind: ToolFormat, pieces: list[str], cut: bool = False, **options: Any) -> list:
    numbers = itertools.count()
    parser = ToolCallParser(kind, NAMES, lambda: f"id{next(numbers)}", **options)
    deltas: list = []
    for piece in pieces:
        deltas += parser.feed(piece)
    return joined(deltas + parser.end(cut))


def call(index: int, name: str, arguments: str) -> list:
    return [CallStart(index, f"id{index}", name), Arguments(index, arguments)]


A = '{"name": "depth", "arguments": {"x": 1, "of": "the \\"港\\" {[<"}}'
X = '{"x": 1, "of": "the \\"港\\" {[<"}'
P = '{"name": "depth", "parameters": {"x": 1}}'
#: (format, text) -> deltas
SAMPLES: dict[tuple[str, str], list] = {
    # ---- Hermes
    ("hermes", "Twelve metres."): [Content("Twelve metres.")],
    ("hermes", f"<tool_call>\n{A}\n</tool_call>"): call(0, "depth", X),
    ("hermes", f"Let me see.\n<tool_call>\n{A}\n</tool_call>\n"): [
        Content("Let me see."), *call(0, "depth", X)],
    ("hermes", f"<tool_call>{A}</tool_call>\n<tool_call>{A}</tool_call>\n\n Done. "): [
        *call(0, "depth", X), *call(1, "depth", X), Content("\n\n Done. ")],
    ("hermes", f"<tool_call>{A}<tool_call>{A}"): [*call(0, "depth", X), *call(1, "depth", X)],
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "depth"}</tool_call>'): call(
        0, "depth", '{"x": 1}'),
    ("hermes", '<tool_call>{"name": "depth", "arguments": "{\\"x\\": 1}"}</tool_call>'): call(
        0, "depth", '{"x": 1}'),
    ("hermes", '<tool_call>{"type":"function","id":"7","name":"depth"}</tool_call>'): call(0, "depth", "{}"),
    ("hermes", '<tool_call>{"name":"depth_chart","arguments":null}</tool_call>'): call(
        0, "depth_chart", "{}"),
    ("hermes", "a <tool_call"): [Content("a <tool_call")],
    ("hermes", "a < b \n\n"): [Content("a < b \n\n")],
    ("hermes", "<tool_call>none</tool_call>"): [Content("<tool_call>none</tool_call>")],
    ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'): [
        Content('<tool_call>{"name": "rm", "arguments": {}}</tool_call>')],
    ("hermes", '<tool_call>{"name": "depth", "arguments": [1]}'): [
        Content('<tool_call>{"name": "depth", "arguments": [1]}')],
    ("hermes", '<tool_call>{"name": "depth", "nam": 1}'): [Content('<tool_call>{"name": "depth", "nam": 1}')],
    ("hermes", f"<tool_call>oh <tool_call>{A}</tool_call>"): [
        Content("<tool_call>oh"), *call(0, "depth", X)],
    ("hermes", '<tool_call>{"name": "depth", "arguments": {"x": 1,}} </tool_call> x'): [
        *call(0, "depth", '{"x": 1,'),
        CallBroken(0, '<tool_call>{"name": "depth", "arguments": {"x": 1,'),
        Content("}} </tool_call> x")],
    ("hermes", '<tool_call>{"name": "depth", "arguments": {"x": 1'): [
        *call(0, "depth", '{"x": 1'), CallBroken(0, '<tool_call>{"name": "depth", "arguments": {"x": 1')],
    ("hermes", '<tool_call>{"name": "depth", "arguments": "{\\"x\\": \\"\\\\ud800\\"}"}'): call(
        0, "depth", '{"x": "\\ud800"}'),
    ("hermes", '<tool_call>{"name": "depth", "arguments": "{\\"x\\": \\"\\ud800\\"}"}'): [
        Content('<tool_call>{"name": "depth", "arguments": "{\\"x\\": \\"\\ud800\\"}"}')],
    # ---- LLaMA 3
    ("llama3_json", P): call(0, "depth", '{"x": 1}'),
    ("llama3_json", f"\n {P} "): call(0, "depth", '{"x": 1}'),
    ("llama3_json", f"{P}; {P}"): [*call(0, "depth", '{"x": 1}'), *call(1, "depth", '{"x": 1}')],
    ("llama3_json", f"<|python_tag|>{P};{P}"): [*call(0, "depth", '{"x": 1}'), *call(1, "depth", '{"x": 1}')],
    ("llama3_json", '<|python_tag|>brave_search.call(query="港 \\"(\\"", n=3, all=True,x=[null])'): call(
        0, "brave_search", '{"query": "港 \\"(\\"", "n": 3, "all": true, "x": [null]}'),
    ("llama3_json", "<|python_tag|>brave_search.call()"): call(0, "brave_search", "{}"),
    ("llama3_json", '<|python_tag|>print("hi")'): [Content('<|python_tag|>print("hi")')],
    ("llama3_json", "<|python_tag|>brave_search.call(query='x')"): [
        Content("<|python_tag|>brave_search.call(query='x')")],
    ("llama3_json", '{"city": "Bergen", "depth": 12}'): [Content('{"city": "Bergen", "depth": 12}')],
    ("llama3_json", f"It is {P}"): [Content(f"It is {P}")],
    ("llama3_json", " twelve"): [Content(" twelve")],
    ("llama3_json", "{"): [Content("{")],
    # ---- Mistral
    ("mistral", f"[TOOL_CALLS] [{A}]"): call(0, "depth", X),
    ("mistral", f"[TOOL_CALLS][{A}, {A}]"): [*call(0, "depth", X), *call(1, "depth", X)],
    ("mistral", f"Hm [TOOL_CALLS][{A}] so"): [Content("Hm"), *call(0, "depth", X), Content(" so")],
    ("mistral", f"[TOOL_CALLS][{A}, oh]"): [*call(0, "depth", X), Content(", oh]")],
    ("mistral", f"[TOOL_CALLS][{A}"): call(0, "depth", X),
    ("mistral", '[TOOL_CALLS]depth{"x": 1}[TOOL_CALLS]depth_chart[ARGS]{"y": 2}'): [
        *call(0, "depth", '{"x": 1}'), *call(1, "depth_chart", '{"y": 2}')],
    ("mistral", '[TOOL_CALLS]tide-table[CALL_ID]a1B2c3D4e[ARGS] {"y": 2}'): call(0, "tide-table", '{"y": 2}'),
    ("mistral", "[TOOL_CALLS]deep{}"): [Content("[TOOL_CALLS]deep{}")],
    ("mistral", "[TOOL_CALLS]depth[ARG]{}"): [Content("[TOOL_CALLS]depth[ARG]{}")],
    ("mistral", "[TOOL_CALLS]"): [Content("[TOOL_CALLS]")],
}  # fmt: skip


@pytest.mark.parametrize("kind, text", SAMPLES)
def test_a_text_gives_its_deltas_however_it_is_cut(kind, text) -> None:
    wanted = SAMPLES[kind, text]
    assert run(KINDS[kind], [text]) == wanted
    assert run(KINDS[kind], list(text)) == wanted
    for i in range(len(text)):
        assert run(KINDS[kind], [text[:i], text[i:]]) == wanted, text[:i]
    for i in range(0, len(text), 3):
        for j in range(i, len(text), 4):
            assert run(KINDS[kind], [text[:i], text[i:j], text[j:]]) == wanted, (text[:i], text[i:j])


def test_arguments_are_reported_as_they_arrive() -> None:
    parser = ToolCallParser(HERMES, NAMES, lambda: "id")
    assert parser.feed('<tool_call>{"name": "depth", "arguments": ') == []
    assert parser.feed('{"x"') == [CallStart(0, "id", "depth"), Arguments(0, '{"x"')]
    assert parser.feed(": [1, 2") == [Arguments(0, ": [1, 2")]
    assert parser.feed("]}} </tool") == [Arguments(0, "]}")]
    assert parser.feed("_call>\n") == [] and parser.end() == []
    assert parser.calls == 1
    assert parser.finish_reason("stop") == "tool_calls" and parser.finish_reason("length") == "length"


def test_a_call_that_the_token_limit_cuts_keeps_what_it_has() -> None:
    text = '<tool_call>{"name": "depth", "arguments": {"x": 1'
    assert run(HERMES, [text], cut=True) == call(0, "depth", '{"x": 1')
    assert run(HERMES, [text[:20]], cut=True) == [Content(text[:20])]


FORCED = {
    ("hermes", "depth"): (' {"x": 1}}\n</tool_call>', 1),
    ("hermes", None): ('depth", "arguments": {"x": 1}}\n</tool_call>', 1),
    ("llama3_json", "depth"): (' {"x": 1}}', 1),
    ("llama3_json", None): ('depth", "parameters": {"x": 1}}', 1),
    ("mistral", "depth"): (' {"x": 1}}]', 1),
    ("mistral", None): ('depth", "arguments": {"x": 1}}, {"name": "depth", "arguments": {"x": 1}}]', 2),
}


@pytest.mark.parametrize("kind, name", FORCED)
def test_a_forced_prefix_of_the_prompt_makes_the_answer_a_call(kind, name) -> None:
    text, count = FORCED[kind, name]
    wanted = [delta for index in range(count) for delta in call(index, "depth", '{"x": 1}')]
    for pieces in ([text], list(text)):
        assert run(KINDS[kind], pieces, forced=KINDS[kind].forced(name)) == wanted
    # if the answer does not continue the call, it is shown without the part from the prompt
    for refusal in ("I cannot.", "[1]", '"no"'):
        for pieces in ([refusal], list(refusal)):
            assert run(KINDS[kind], pieces, forced=KINDS[kind].forced("depth")) == [Content(refusal)]
    assert run(KINDS[kind], [], forced=KINDS[kind].forced(name), cut=True) == []


def test_a_single_call_ends_the_answer() -> None:
    text = f"<tool_call>{A}</tool_call><tool_call>{A}</tool_call> and more"
    assert run(HERMES, [text], single=True) == call(0, "depth", X)
    assert run(HERMES, list(text), single=True) == call(0, "depth", X)


# ---------------------------------------------------------------- properties

ALPHABET = list('{}[]",:;\\ \n<>/|0a港') + [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "[CALL_ID]", '"name"',
    '"depth"', '"arguments"', '"parameters"', "depth", "brave_search.call(", "x=", "null", "true", "1e5",
    '{"name": "depth", ',
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.lists(st.lists(st.sampled_from(ALPHABET)).map("".join)))
def test_no_text_is_lost_or_depends_on_its_cuts(kind, pieces) -> None:
    text = "".join(pieces)
    found = run(KINDS[kind], pieces)
    assert found == run(KINDS[kind], [text]) == run(KINDS[kind], list(text))
    if all(isinstance(delta, Content) for delta in found):
        assert "".join(delta.text for delta in found) == text


@settings(max_examples=1000, deadline=None)
@given(st.text(st.sampled_from('{}[]",:\\ \n0123-.eEtrufalsn/b\x01')), st.integers(0, 100))
def test_the_scanner_accepts_what_the_standard_parser_accepts(text, place) -> None:
    text = f"[{text}]"
    scanner = JsonScanner()
    place = min(place, len(text))
    used = scanner.scan(text[:place])
    if used == place and not (scanner.failed or scanner.done):
        used += scanner.scan(text[place:])
    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        assert not (scanner.done and used == len(text))
    else:
        assert scanner.done and used == len(text)


def refuse(constant: str) -> None:
    raise ValueError(constant)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
TEMPLATES = {
    "hermes": (tool_templates.HERMES, "<|im_start|>assistant\n", "<|im_end|>\n"),
    "llama3_json": (tool_templates.LLAMA3, "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "mistral": (tool_templates.MISTRAL, "[/INST]", "</s>"),
    "mistral-named": (tool_templates.MISTRAL_NAMED, "[/INST]", "</s>"),
}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(TEMPLATES)),
    st.lists(
        st.tuples(st.sampled_from(NAMES[:3]), st.dictionaries(st.text(), VALUES, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    st.lists(st.integers(0, 200), max_size=6),
)  # fmt: skip
def test_calls_that_a_template_writes_are_read_again(kind, calls, cuts) -> None:
    """transformers renders an assistant's message with the calls; the parser reads them from the text."""
    source, before, after = TEMPLATES[kind]
    if kind == "llama3_json":
        calls = calls[:1]
    written = [
        {"id": f"abcdefgh{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": written}]
    [text], _ = render_jinja_template(
        conversations=[messages], chat_template=source, bos_token="<s>", eos_token="</s>"
    )
    text = text[text.index(before) + len(before) : -len(after)]
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    found_format = find_format(source)
    assert found_format is not None and found_format.name == kind.split("-")[0]
    found = run(found_format, [text[i:j] for i, j in zip(places, places[1:])])
    assert [(one.call, one.name) for one in found[0::2]] == list(enumerate(name for name, _ in calls))
    assert [json.loads(one.text) for one in found[1::2]] == [arguments for _, arguments in calls]


def test_the_format_follows_from_the_template_or_the_operator() -> None:
    found = {name: find_format(source) for name, (source, _, _) in TEMPLATES.items()}
    assert {name: kind and kind.name for name, kind in found.items()} == {
        "hermes": "hermes", "llama3_json": "llama3_json", "mistral": "mistral", "mistral-named": "mistral",
    }  # fmt: skip
    assert find_format("{{ messages }}") is None
    assert find_format("<tool_call><function=x>") is None
    assert find_format("{{ messages }}", "hermes") is HERMES
    assert find_format(tool_templates.MISTRAL_NAMED, "mistral") is found["mistral-named"]
    assert find_format(tool_templates.HERMES, "mistral") is MISTRAL
    with pytest.raises(ConfigError, match="'hermit'; wanted one of hermes, llama3_json, mistral"):
        find_format("", "hermit")


def test_config_pbtxt_accepts_the_names_of_the_parsers() -> None:
    [field] = [one for one in fields(EngineConfig) if one.name == "openai_tool_call_parser"]
    accepted = field.metadata["accepted"].test
    assert all(map(accepted, ("none", *PARSERS))) and not accepted("hermit")


def test_long_malformed_text_is_read_once() -> None:
    """Each opening tag starts a call that fails; the time stays linear."""
    text = '<tool_call>{"name": ' * 20_000
    assert run(HERMES, [text[i : i + 7] for i in range(0, len(text), 7)]) == [Content(text)]
