"""Hostile schemas, grammars and tools for the OpenAI service's fuzz."""

from __future__ import annotations

import json
from typing import Any

Body = dict[str, Any]


def _nested(depth: int) -> Body:
    schema: Body = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return schema


_RECURSIVE = {
    "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},
    "$ref": "#/$defs/n",
}
SCHEMAS: dict[str, Any] = {
    "nothing is allowed": {"enum": []},
    "no answer ends": _RECURSIVE,
    "refers to itself": {"$ref": "#"},
    "refers to nothing": {"$ref": "#/$defs/absent"},
    "refers to a web page": {"$ref": "http://localhost:1/schema.json"},
    "an unknown type": {"type": "ship"},
    "a keyword of another kind": {"type": "object", "properties": 3},
    "a keyword that is not implemented": {"type": "object", "dependentSchemas": {"a": {}}},
    "nested 200 deep": _nested(200),
    "10,000 values": {"enum": [f"value {i}" for i in range(10_000)]},
    "a large minimum": {"type": "array", "items": {}, "minItems": 10**9},
    "an exploding pattern": {"type": "string", "pattern": "(a?){200}a{200}"},
    "an invalid pattern": {"type": "string", "pattern": "(("},
}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}


def _tool(schema: Any) -> Body:
    return {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}


#: by name: fields of a chat; the first one is at fault
CHATS: dict[str, Body] = {
    **{f"tools: {what}": {"tools": [_tool(schema)]} for what, schema in SCHEMAS.items()},
    **{
        f"a forced call: {what}": {"tools": [_tool(schema)], "tool_choice": "required"}
        for what, schema in SCHEMAS.items()
    },
    "128 tools": {
        "tools": [{**_TOOL, "function": {**_TOOL["function"], "name": f"f{i}"}} for i in range(128)],
        "tool_choice": "required",
    },
    "no allowed tools": {"tool_choice": _ALLOWED, "tools": [_TOOL]},
    "a mode of allowed tools": {
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": [_TOOL]}},
        "tools": [_TOOL],
    },
}
#: fields of any request for text
TEXTS: dict[str, Body] = {
    **{
        f"response_format: {what}": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        }
        for what, schema in SCHEMAS.items()
    },
    **{f"guided_json: {what}": {"guided_json": json.dumps(schema)} for what, schema in SCHEMAS.items()},
    "a regex that explodes": {"guided_regex": "(a?){500}a{500}"},
    "a regex without an end": {"guided_regex": "(("},
    "a regex of 200 kB": {"guided_regex": "a" * 200_000},
    "a regex that looks back": {"guided_regex": r"(a)\1"},
    "a grammar without a start": {"guided_grammar": 'other: "a"'},
    "a grammar that never ends": {"guided_grammar": 'start: "a" start'},
    "a grammar of itself": {"guided_grammar": "start: start"},
    "an ambiguous grammar": {"guided_grammar": 'start: start start | "a" | ""'},
    "a grammar with an import": {"guided_grammar": "%import common.WORD\nstart: WORD"},
    "EBNF": {"guided_grammar": 'root ::= "a" | "b" root'},
    "EBNF that is cut": {"guided_grammar": 'root ::= "a" | ('},
    "4,096 choices": {"guided_choice": [f"choice {i}" for i in range(4096)]},
    "4,097 choices": {"guided_choice": ["a"] * 4097},
    "a tag without a trigger": {
        "structural_tag": {"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}
    },
    "a tag that is not JSON": {"structural_tag": "{"},
}
