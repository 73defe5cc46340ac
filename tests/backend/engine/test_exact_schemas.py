"""Texts that a compiled schema accepts satisfy the schema; jsonschema is the reference."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest

from tests.backend.engine.byte_grammars import accepts, begins, compiled, fault_of
from tridecode.backend.chat.tool_formats import PARSERS
from tridecode.backend.chat.tool_grammar import CallGrammar

INTEGER, NULL = {"type": "integer"}, {"type": "null"}


def check(schema: Any, texts: list[str], all_valid: bool = True) -> None:
    """Compare a schema with jsonschema; all_valid: each valid text has to be accepted."""
    matcher = compiled("json_schema", json.dumps(schema))
    for text in texts:
        is_valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        found = accepts(matcher, text)
        assert found <= is_valid, (schema, text)
        if all_valid and text != "-0":
            assert found or not is_valid, (schema, text)


LEAST = ["0", "1", "-1", "-0.5", "0.1", "0.35"]
MOST = ["0", "1", "0.1", "0.5", "0.9", "-0.1", "1.5", "-0.5"]
NUMBERS = [
    "0",
    "-0",
    "1",
    "-1",
    "2",
    "0.05",
    "0.1",
    "0.2",
    "0.5",
    "0.9",
    "1.2",
    "-0.2",
    "-0.5",
    "-0.9",
    "1.5",
]


@pytest.mark.parametrize("lower", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("upper", ["maximum", "exclusiveMaximum"])
def test_bounds_of_numbers_are_exact(lower: str, upper: str) -> None:
    for least, most in itertools.product(LEAST, MOST):
        if float(least) < float(most):
            bounds = {lower: json.loads(least), upper: json.loads(most)}
            check({"type": "number", **bounds}, NUMBERS)
            merged = {"type": "number", "allOf": [{lower: bounds[lower]}, {upper: bounds[upper]}]}
            check(merged, NUMBERS)


def test_a_flag_of_draft_4_excludes_a_bound() -> None:
    matcher = compiled(
        "json_schema", '{"type": "number", "minimum": 0, "exclusiveMinimum": true, "maximum": 0.9}'
    )
    assert [accepts(matcher, text) for text in ("0", "0.1", "0.9")] == [False, True, True]


BIG = [2**53, 2**53 + 1, 2**53 + 2, 2**53 + 3, 2**63 - 1, 2**63, 2**64]


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("value", [2**53 + 1, 2**53 + 2, 2**53 + 3, 2**63 - 1, 2**63, 2**64, 10**300])
def test_no_text_is_beyond_a_large_bound(kind: str, value: int) -> None:
    texts = [str(sign * one) for one in BIG for sign in (1, -1)] + ["0"]
    for schema in (
        {"minimum": -value, "maximum": value},
        {"exclusiveMinimum": -value, "exclusiveMaximum": value},
        {"exclusiveMinimum": 0, "exclusiveMaximum": value},
        {"exclusiveMaximum": 0, "minimum": -value},
    ):
        check({"type": kind, **schema}, texts, all_valid=False)
    least = {"type": kind, "minimum": value, "maximum": value + 2}
    if value <= 2**53 + 3:
        check(least, texts, all_valid=False)
    else:
        assert f"minimum is {str(value)[:30]}" in fault_of("json_schema", json.dumps(least))


def test_usual_ranges_of_64_bits_are_supported() -> None:
    for low, high in ((-(2**63), 2**63 - 1), (0, 2**64 - 1), (-3.4028235e38, 3.4028235e38)):
        for kind in ("integer", "number"):
            matcher = compiled("json_schema", json.dumps({"type": kind, "minimum": low, "maximum": high}))
            assert [accepts(matcher, text) for text in ("7", "9007199254740992", "99999999999999999999")] == [
                True, True, False,
            ]  # fmt: skip


@pytest.mark.parametrize("value", [0, 1.5, -7, 0.1, 1e-7, 2**53, 123456.789, 1e15])
def test_constants_are_exact(value: float) -> None:
    text = format(value, "f").rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    check({"const": value}, [text, "3"])
    check({"enum": ["x", value]}, [text, '"x"', "3"])


@pytest.mark.parametrize(
    "value", [175928847299117063, 2**53 + 1, -(2**63), 123456789.123456789, 1e23, 10**400]
)
def test_constants_that_would_be_rounded_are_refused(value: float) -> None:
    for schema in ({"const": value}, {"enum": ["x", value]}, {"const": {"id": [value]}}):
        assert "has too many digits; wanted" in fault_of("json_schema", json.dumps(schema))
        assert str(value)[:40] in fault_of("json_schema", json.dumps(schema))


KEYS = ["a", "\\u0061", "b", "x-1", "x\\u002d1", "\\u00e9", "é", "x-\\ud83d\\ude00", "x-😀", "\\n"]


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": NULL, "é": NULL}, "additionalProperties": INTEGER},
        {"patternProperties": {"^x-": NULL}, "additionalProperties": INTEGER},
        {"patternProperties": {"^x-": NULL, "^é": NULL}},
        {"properties": {"b": NULL}, "patternProperties": {"a": {"const": 1}}, "additionalProperties": NULL},
    ],
    ids=str,
)
def test_a_key_in_another_spelling_is_the_same_key(schema: dict[str, Any]) -> None:
    """Keys with escapes of characters that need none may be excluded, but their values are never wrong."""
    texts = [f'{{"{key}":{value}}}' for key in KEYS for value in ("1", "null")]
    check({"type": "object", **schema}, texts, all_valid=False)
    plain = [text for text in texts if "\\u" not in text]
    check({"type": "object", **schema}, plain)


def test_control_characters_of_a_schema_can_be_written() -> None:
    check({"enum": ["\x00", "\x1b["]}, ['"\\u0000"', '"\\u001b["', '"a"'])


REPEATED = {"type": "object", "additionalProperties": NULL, "minProperties": 2}


def test_repeated_keys_do_not_make_a_least_number_of_properties() -> None:
    fault = fault_of("json_schema", json.dumps(REPEATED))
    assert fault == (
        "structured_output (json_schema) is refused: minProperties is 2, and 0 keys are required; "
        "wanted 1 at most, because the grammar cannot keep an answer from repeating other keys"
    )
    texts = ['{"a":null,"b":null}', '{"a":null,"b":null,"b":null}', '{"a":null}', "{}"]
    check({**REPEATED, "minProperties": 1}, [*texts[:1], *texts[2:]])
    check({**REPEATED, "required": ["a"]}, texts[:3])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("uniqueItems", False),
        ("unevaluatedItems", True),
        ("unevaluatedProperties", {}),
        ("propertyNames", True),
        ("dependentRequired", {}),
        ("dependentSchemas", {}),
        ("dependencies", {}),
    ],
)
def test_a_keyword_without_effect_is_no_fault(key: str, value: Any) -> None:
    check({"type": ["array", "object"], key: value}, ["[]", "{}", "[1]", '{"a":1}', "2"])
    assert key in fault_of("json_schema", json.dumps({"type": "array", key: {"x": ["y"]}}))


def test_multiples_whose_product_overflows_are_refused() -> None:
    parts = [{"type": "integer", "multipleOf": 65537}, {"multipleOf": 65539}]
    assert "multipleOf is 65539.0" in fault_of("json_schema", json.dumps({"allOf": parts}))
    check({"allOf": [{"type": "integer", "multipleOf": 4}, {"multipleOf": 6}]}, ["4", "6", "12", "36"])
    check({"type": "array", "prefixItems": parts, "items": False}, ["[65537,65539]", "[1]"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("item_separator", ";"),
        ("key_separator", "="),
        ("whitespace_pattern", "x*"),
        ("whitespace_pattern", "\\s"),
    ],
)
def test_an_answer_is_json_whatever_x_guidance_says(name: str, value: str) -> None:
    fault = fault_of("json_schema", json.dumps({"type": "array", "x-guidance": {name: value}}))
    assert f"x-guidance.{name} is {json.dumps(value)}; wanted a regular expression of " in fault


def test_x_guidance_chooses_the_white_space() -> None:
    options = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": r":[\x20\n]{0,2}"}
    matcher = compiled("json_schema", json.dumps({"type": "object", "x-guidance": options}))
    texts = ('{"a": 1, "b":2}', '{"a":\n 1,"b":2}', '{ "a":1}')
    assert [accepts(matcher, text) for text in texts] == [True, True, False]
    matcher = compiled("json_schema", json.dumps({"type": "array", "x-guidance": {"whitespace_pattern": ""}}))
    assert [accepts(matcher, text) for text in ("[1,2]", "[1, 2]")] == [True, False]


def test_schemas_of_an_openapi_document_are_found_by_reference() -> None:
    pet = {"oneOf": [{"const": "cat"}, {"type": "integer", "exclusiveMinimum": 0, "maximum": 3}]}
    document = {
        "type": "array",
        "items": {"$ref": "#/components/schemas/Pet"},
        "components": {"schemas": {"Pet": pet, "Rate": {"exclusiveMinimum": 0, "maximum": 0.5}}},
    }
    check(document, ['["cat",1]', "[]", "[0]", '["dog"]'])
    check({**document, "items": {"$ref": "#/components/schemas/Rate"}}, ["[0]", "[0.5]", "[1]"])


UNION = {"oneOf": [{"const": "1"}, {"type": "number", "exclusiveMinimum": 5, "maximum": 5.5}]}
ENDLESS = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}


def test_schemas_within_tags_and_grammars_are_prepared() -> None:
    tag = {"structures": [{"begin": "<n>", "schema": UNION, "end": "</n>"}], "triggers": ["<n>"]}
    grammar = (
        f'start: "%json {{" | /%json [{{]/ | "n" value  // %json {{\nvalue: %json {json.dumps(UNION)} " "?\n'
    )
    for kind, text, mould in (
        ("structural_tag", json.dumps(tag), "a<n>%s</n>"),
        ("grammar", grammar, "n%s "),
    ):
        matcher = compiled(kind, text)
        found = [value for value in ('"1"', "5", "5.2", "6") if accepts(matcher, mould % value)]
        assert found == ['"1"', "5.2"]
    assert accepts(matcher, "%json {")
    tag["structures"][0]["schema"] = ENDLESS  # type: ignore[index]
    for kind, text in (
        ("structural_tag", json.dumps(tag)),
        ("grammar", f"start: %json {json.dumps(ENDLESS)}"),
    ):
        assert "no finite value satisfies it" in fault_of(kind, text)


def test_arguments_of_tools_may_be_a_union() -> None:
    """pydantic writes such parameters for a tagged union."""
    tagged = [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"],
               "additionalProperties": False} for kind in ("cat", "dog")]  # fmt: skip
    parameters = {
        "type": "object",
        "properties": {"pet": {"oneOf": tagged}},
        "required": ["pet"],
        "additionalProperties": False,
    }
    for kind in PARSERS.values():
        compiled("grammar", CallGrammar(kind, {"feed": parameters}, {}, False).forced("feed"))


def test_an_answer_begins_nothing_that_cannot_end() -> None:
    """Only references to themselves satisfy `q`; values may leave it out."""
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/q"}, "b": {"anyOf": [{"$ref": "#/$defs/q"}, NULL]}},
        "patternProperties": {"^x": {"$ref": "#/$defs/q"}},
        "additionalProperties": {"type": "array", "items": {"$ref": "#/$defs/q"}},
        "$defs": {"q": {"$ref": "#/$defs/q"}},
    }
    matcher = compiled("json_schema", json.dumps(schema))
    assert all(begins(matcher, text) for text in ("{}", '{"b":null}', '{"b":null,"c":[]}', '{"ab'))
    assert not any(begins(matcher, text) for text in ('{"a"', '{"x', '{"b":{', '{"c":[1', '{"c":["'))
