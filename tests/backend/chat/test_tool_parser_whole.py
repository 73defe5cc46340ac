"""Incremental parsing of tool calls against an independent parse of the whole text: a search finds the marked
regions, and Python's json reads them."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.chat import tool_templates
from tridecode.backend.chat.tool_formats import HERMES, LLAMA3_JSON, MISTRAL, ToolFormat, find_format
from tridecode.backend.chat.tool_parser import Arguments, CallBroken, CallStart, Content, ToolCallParser

NAMES = ("depth", "tide-table")
NAMED = find_format(tool_templates.MISTRAL_NAMED) or MISTRAL
Call = tuple[str, Any]

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
CALL = st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=4), VALUES, max_size=3))
#: text without a marker or a character that begins one
PROSE = st.text(st.characters(exclude_characters="<[{;", exclude_categories=("Cs",)), max_size=12)
SPACE = st.sampled_from(["", " ", "\n"])
STYLE = st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}])


def dumped(key: str, call: Call, style: dict[str, Any]) -> str:
    return json.dumps({"name": call[0], key: call[1]}, **style)


# ---------------------------------------------------------------- independent parses of whole texts


def hermes(text: str) -> tuple[str, list[Call]]:
    pattern = re.compile(r"\s*<tool_call>(.*?)</tool_call>", re.DOTALL)
    found = [json.loads(region) for region in pattern.findall(text)]
    return pattern.sub("", text), [(one["name"], one["arguments"]) for one in found]


def llama(text: str) -> tuple[str, list[Call]]:
    decoder, calls = json.JSONDecoder(), []
    rest = text.removeprefix("<|python_tag|>").lstrip()
    while rest.startswith("{"):
        one, place = decoder.raw_decode(rest)
        calls.append((one["name"], one["parameters"]))
        rest = rest[place:].lstrip().removeprefix(";").lstrip()
    return rest, calls


def mistral(text: str) -> tuple[str, list[Call]]:
    before, mark, rest = text.partition("[TOOL_CALLS]")
    if not mark:
        return before, []
    rest = rest.lstrip()
    found, place = json.JSONDecoder().raw_decode(rest)
    return before.rstrip() + rest[place:], [(one["name"], one["arguments"]) for one in found]


def named(text: str) -> tuple[str, list[Call]]:
    before, *regions = text.split("[TOOL_CALLS]")
    found = [region.partition("[ARGS]") for region in regions]
    return before.rstrip(), [(name, json.loads(arguments)) for name, _, arguments in found]


@st.composite
def texts(draw: st.DrawFn) -> tuple[ToolFormat, str, str, list[Call]]:
    """A format, a text, and its content and calls by the independent parse."""
    number = draw(st.integers(0, 3))
    calls, style = draw(st.lists(CALL, max_size=3)), draw(STYLE)
    before, after = draw(PROSE), draw(PROSE)
    if number == 0:
        # a marker within an argument would end the independent parse early
        calls = [one for one in calls if "</tool_call>" not in json.dumps(one)]
        parts = [
            f"{draw(SPACE)}<tool_call>{draw(SPACE)}{dumped('arguments', one, style)}\n</tool_call>"
            for one in calls
        ]
        text = before + "".join(parts) + (draw(SPACE) + after if after.strip() else "")
        return HERMES, text, *hermes(text)
    if number == 1:
        tag = draw(st.sampled_from(["", "<|python_tag|>"]))
        text = tag + f"{draw(SPACE)};{draw(SPACE)}".join(dumped("parameters", one, style) for one in calls)
        text = text if calls else before
        return LLAMA3_JSON, text, *(llama(text) if calls else (text, []))
    if number == 2:
        items = f",{draw(SPACE)}".join(dumped("arguments", one, style) for one in calls)
        text = before + (f"[TOOL_CALLS]{draw(SPACE)}[{items}]" if calls else "")
        return MISTRAL, text, *mistral(text)
    calls = [one for one in calls if "[TOOL_CALLS]" not in json.dumps(one[1], ensure_ascii=False)]
    parts = [f"[TOOL_CALLS]{one[0]}[ARGS]{json.dumps(one[1], **style)}" for one in calls]
    text = before + "".join(parts)
    return NAMED, text, *(named(text) if calls else (text, []))


@settings(max_examples=300, deadline=None)
@given(texts(), st.lists(st.integers(0, 300), max_size=12), st.booleans())
def test_every_split_gives_the_calls_and_the_content_of_the_whole_text(case, cuts, singly) -> None:
    kind, text, content, calls = case
    places = range(len(text) + 1) if singly else [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    numbers = itertools.count()
    parser = ToolCallParser(kind, NAMES, lambda: f"id{next(numbers)}")
    deltas: list = []
    for start, stop in zip(places, places[1:]):
        deltas += parser.feed(text[start:stop])
    deltas += parser.end()
    found, names, arguments = "", [], [""] * len(calls)
    for delta in deltas:
        assert not isinstance(delta, CallBroken), text
        if isinstance(delta, Content):
            found += delta.text
        elif isinstance(delta, CallStart):
            assert (delta.call, delta.id) == (len(names), f"id{len(names)}")
            names.append(delta.name)
        else:
            assert isinstance(delta, Arguments) and delta.text and delta.call == len(names) - 1
            arguments[delta.call] += delta.text
    assert list(zip(names, map(json.loads, arguments))) == calls
    if calls:  # white space around calls is left out
        assert re.sub(r"\s+", "", found) == re.sub(r"\s+", "", content)
    else:
        assert found == text
