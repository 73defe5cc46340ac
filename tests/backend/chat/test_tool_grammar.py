"""Grammars of tool calls: llguidance accepts what transformers' rendering of a template writes if jsonschema
finds the arguments valid, and every text that a grammar allows is read as calls with valid arguments."""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from tests.backend.chat import tool_templates
from tests.checkpoints import tiny_tokenizer
from tridecode.backend.chat.tool_formats import ToolFormat, find_format
from tridecode.backend.chat.tool_grammar import CallGrammar
from tridecode.backend.chat.tool_parser import Arguments, CallStart, ToolCallParser

SCHEMAS: dict[str, dict[str, Any]] = {
    "depth": {
        "type": "object",
        "properties": {"at": {"enum": ["the 港", 'a "berth" ::= }']}, "n": {"type": "integer"}},
        "required": ["at"],
        "additionalProperties": False,
    },
    "depth_chart": {
        "type": "object",
        "properties": {
            "points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2},
            "scale": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
        },
        "required": ["points"],
        "additionalProperties": False,
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "integer"}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
}
#: name -> (template, text before the answer, text behind it)
TEMPLATES = {
    "hermes": (tool_templates.HERMES, "<|im_start|>assistant\n", "<|im_end|>\n"),
    "llama3_json": (tool_templates.LLAMA3, "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "mistral-named": (tool_templates.MISTRAL_NAMED, "[/INST]", "</s>"),
}
KINDS: dict[str, ToolFormat] = {
    name: found for name in TEMPLATES if (found := find_format(TEMPLATES[name][0]))
}
KINDS["mistral"] = find_format(tool_templates.MISTRAL) or KINDS["hermes"]
RESPONSE = {"type": "object", "properties": {"z": {"type": "boolean"}}, "additionalProperties": False}


@cache
def tokenizer(special: bool) -> tuple[Tokenizer, llguidance.LLTokenizer, int]:
    """special: the formats' tokens are tokens of the tokenizer, else they are text."""
    found = Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    if special:
        names = {text for kind in KINDS.values() for text in kind.shown_tokens}
        found.add_special_tokens([AddedToken(name, special=True) for name in sorted(names)])
    end = found.token_to_id("</s>")
    return found, llguidance.LLTokenizer(found.to_str(), eos_token=end), end


def grammar(name: str, special: bool, single: bool = False) -> CallGrammar:
    kind = KINDS[name]
    words = tokenizer(special)[0]
    ids = {text: words.token_to_id(text) for text in kind.shown_tokens} if special else {}
    return CallGrammar(kind, SCHEMAS, ids, single)


def matcher(text: str, special: bool) -> llguidance.LLMatcher:
    found = llguidance.LLMatcher(tokenizer(special)[1], text, log_level=0)
    assert not found.is_error(), found.get_error()
    assert not found.get_grammar_warnings()
    return found


def accepts(grammar: str, special: bool, text: str) -> bool:
    found = matcher(grammar, special)
    ids = tokenizer(special)[0].encode(text, add_special_tokens=False).ids
    return found.try_consume_tokens(ids) == len(ids) and found.is_accepting()


def rendered(name: str, calls: list[tuple[str, Any]]) -> str:
    """The text of an assistant's message with these calls, by transformers' rendering."""
    source, before, after = TEMPLATES[name]
    written = [
        {"id": f"abcdefgh{index}", "type": "function", "function": {"name": one, "arguments": arguments}}
        for index, (one, arguments) in enumerate(calls)
    ]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": written}]
    [text], _ = render_jinja_template(
        conversations=[messages], chat_template=source, bos_token="<s>", eos_token="</s>"
    )
    return text[text.index(before) + len(before) : -len(after)]


POINT = st.fixed_dictionaries({"x": st.integers(-99, 99) | st.just("1")})
ARGUMENTS = {
    "depth": st.fixed_dictionaries(
        {"at": st.sampled_from(["the 港", 'a "berth" ::= }', "the"])}, optional={"n": st.integers(0, 9)}
    ),
    "depth_chart": st.fixed_dictionaries(
        {"points": st.lists(POINT, max_size=3)}, optional={"scale": st.sampled_from([None, True, 3])}
    ),
}
#: keys in the order of the schema, which llguidance wants
CALLS = st.sampled_from(sorted(ARGUMENTS)).flatmap(
    lambda name: st.tuples(st.just(name), ARGUMENTS[name].map(lambda found: dict(sorted(found.items()))))
)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(sorted(TEMPLATES)), st.booleans(), st.booleans(), st.lists(CALLS, min_size=1, max_size=2)
)
def test_calls_are_accepted_where_jsonschema_finds_their_arguments_valid(
    name, special, single, calls
) -> None:
    if name == "llama3_json":
        calls = calls[:1]
    text = rendered(name, calls)
    validators = {one: jsonschema.Draft202012Validator(schema) for one, schema in SCHEMAS.items()}
    valid = all(validators[one].is_valid(arguments) for one, arguments in calls)
    fits = valid and (len(calls) == 1 or not single)
    kind, grammars = KINDS[name], grammar(name, special, single)
    forced = kind.forced(None)
    assert text.startswith(forced)
    assert accepts(grammars.forced(None), special, text[len(forced) :]) == fits
    if special or not single:  # a second call is text behind the first one, where its tag is text
        assert accepts(grammars.free(), special, text) == fits
    if not kind.bare:
        assert accepts(grammars.or_response(RESPONSE), special, text) == fits
    named = kind.forced(calls[0][0])
    if len(calls) == 1:
        assert accepts(grammars.forced(calls[0][0]), special, text[len(named) :]) == valid


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_text_and_responses_in_place_of_calls(name, special) -> None:
    grammars = grammar(name, special)
    for text in ("", "Twelve metres.", "\n a < b [c] \n", "x {"):
        assert accepts(grammars.free(), special, text), text
        assert not accepts(grammars.or_response(RESPONSE), special, text)
    assert accepts(grammars.or_response(RESPONSE), special, '{"z": true}')
    assert not accepts(grammars.or_response(RESPONSE), special, '{"z": 1}')


def walk(text: str, special: bool, seed: int) -> str | None:
    """A random text that a grammar allows, None if it gets too long."""
    words, _, end = tokenizer(special)
    found, draw = matcher(text, special), random.Random(seed)
    closing = [words.token_to_id(one) for one in '"}],']
    ids: list[int] = []
    while len(ids) < 300:
        allowed = np.frombuffer(found.compute_logit_bias(), np.uint8)
        if found.is_stopped() or (allowed[end] and draw.random() < 0.5):
            return words.decode(ids, skip_special_tokens=False)
        likely = [token for token in closing if token is not None and allowed[token]]
        choices = likely if likely and draw.random() < 0.5 else np.flatnonzero(allowed).tolist()
        token = draw.choice(choices)
        if token == end:
            return words.decode(ids, skip_special_tokens=False)
        ids.append(token)
        assert found.consume_token(token), found.get_error()
    return None


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(KINDS)), st.booleans(), st.sampled_from([None, *SCHEMAS]), st.integers(0, 10**6)
)
def test_a_text_that_a_forced_grammar_allows_is_read_as_valid_calls(name, special, function, seed) -> None:
    kind = KINDS[name]
    text = walk(grammar(name, special).forced(function), special, seed)
    if text is None:
        return
    names = SCHEMAS if function is None else (function,)
    parser = ToolCallParser(kind, names, lambda: "id", forced=kind.forced(function))
    deltas = parser.feed(text) + parser.end()
    assert {type(delta) for delta in deltas} == {CallStart, Arguments}, text
    arguments = dict.fromkeys(range(parser.calls), "")
    for delta in deltas:
        if isinstance(delta, Arguments):
            arguments[delta.call] += delta.text
    for delta in deltas:
        if isinstance(delta, CallStart):
            jsonschema.validate(json.loads(arguments[delta.call]), SCHEMAS[delta.name])


def test_schemas_are_left_as_they_came() -> None:
    before = copy.deepcopy(SCHEMAS)
    for name in KINDS:
        grammar(name, False).free()
    assert before == SCHEMAS
