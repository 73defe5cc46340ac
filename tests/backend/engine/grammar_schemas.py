"""Random schemas and grammars: ones that random models can satisfy in a few tokens, and hostile ones."""

from __future__ import annotations

import json
import random
from typing import Any

from tridecode.backend.wire.structured_output import KINDS, StructuredOutput

_NAMES = ["a", "b1", "name", "é", 'q"', "x y", "\\", "type"]


def schema_of(r: random.Random, depth: int = 0) -> Any:
    """Return a schema whose values are short."""
    kinds = [
        _integer,
        _string,
        _enum,
        _constant,
        _pattern,
        _format,
        lambda r, d: {"type": r.choice(["null", "boolean"])},
    ]
    if depth < 3:
        kinds += [_object, _object, _array, _any_of, _all_of]
    return r.choice(kinds)(r, depth)


def _integer(r: random.Random, depth: int) -> Any:
    low = r.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + r.randint(0, 1000)}


def _string(r: random.Random, depth: int) -> Any:
    least = r.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + r.randint(0, 4)}


def _enum(r: random.Random, depth: int) -> Any:
    values = ["red", "", "é\n", 7, -1.5, None, True, ["x", 1], {"k": []}]
    return {"enum": r.sample(values, r.randint(1, 4))}


def _constant(r: random.Random, depth: int) -> Any:
    return {"const": r.choice(["c", 0, None, {"a": [1, "b"]}])}


def _pattern(r: random.Random, depth: int) -> Any:
    return {
        "type": "string",
        "pattern": r.choice(["^[a-f]{2,4}$", "^(ab|c)+d$", "^[0-9]{1,3}%$"]),
        "maxLength": 9,
    }


def _format(r: random.Random, depth: int) -> Any:
    return {"type": "string", "format": r.choice(["date", "time", "ipv4", "uuid"])}


def _object(r: random.Random, depth: int) -> Any:
    names = r.sample(_NAMES, r.randint(0, 3))
    properties = {name: schema_of(r, depth + 1) for name in names}
    required = [name for name in names if r.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(r: random.Random, depth: int) -> Any:
    least = r.randint(0, 2)
    items = schema_of(r, depth + 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + r.randint(0, 2)}


def _any_of(r: random.Random, depth: int) -> Any:
    return {"anyOf": [schema_of(r, depth + 1) for _ in range(r.randint(1, 3))]}


def _all_of(r: random.Random, depth: int) -> Any:
    low = r.randint(0, 20)
    return {"allOf": [{"type": "integer"}, {"minimum": low}, {"maximum": low + r.randint(0, 99)}]}


_KEYWORDS = [
    *("uniqueItems", "not", "if", "then", "contains", "dependentRequired", "propertyNames", "$dynamicRef"),
    *(
        "unevaluatedProperties",
        "oneOf",
        "$ref",
        "$defs",
        "multipleOf",
        "pattern",
        "format",
        "x-guidance",
        "type",
    ),
    *("minLength", "maxItems", "minProperties", "required", "enum", "anyOf", "allOf", "$id", "nonsense"),
]
_VALUES = [
    *(
        None,
        True,
        -1,
        0,
        1,
        10**9,
        10**30,
        1e308,
        "",
        "#",
        "#/$defs/a",
        "http://a/b",
        "(",
        "a{1,99999}",
        "(?=a)",
    ),
    *(
        [],
        [1],
        ["a", "a"],
        {},
        {"a": 1},
        {"type": "string"},
        "\ud7ff\U0001f600",
        "(((a{0,99}){0,99}){0,99})*",
    ),
]
_TEXTS = [
    *("", "{", "[" * 2000, '{"items":' * 500 + "{}" + "}" * 500, "start: start", "start: a", "root ::= root"),
    *(
        "start: " + "(" * 3000,
        "(a|b|c|d){1,2000}x",
        "(a*)*" * 50,
        ".*" * 200 + "x",
        "a{4000000000}",
        "[^\\x00-\\U0010FFFF]",
    ),
    *(
        'start: s\ns: s s | "a" | ""',
        "start: %json {}",
        '["' + "x" * 50_000 + '"]',
        "\x00",
        "%llguidance {}",
        "start: <[99]>",
    ),
    *(
        '{"structures": [], "triggers": []}',
        '{"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": [""]}',
    ),
]


def hostile_output(r: random.Random) -> StructuredOutput:
    """Return a structured output that may not parse, may explode, and may allow nothing."""
    if r.random() < 0.4:
        return StructuredOutput(r.choice([kind for kind in KINDS if kind != "json"]), r.choice(_TEXTS) or " ")
    return StructuredOutput("json_schema", json.dumps(_hostile(r, 0)))


def _hostile(r: random.Random, depth: int) -> Any:
    found: dict[str, Any] = dict(schema_of(r, 2)) if r.random() < 0.5 else {}
    for _ in range(r.randint(1, 4)):
        value = _hostile(r, depth + 1) if depth < 4 and r.random() < 0.4 else r.choice(_VALUES)
        if r.random() < 0.2:
            value = [value] * r.choice([1, 2, 30])
        found[r.choice(_KEYWORDS)] = value
    return found
