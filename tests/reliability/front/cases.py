"""The cases of the OpenAI service's fuzz: a new field of a route is fuzzed at once.

Fields come from the service's own OpenAPI document, which is made from the structs that read the bodies.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.reliability.front.form_cases import CHATS, TEXTS

Body = dict[str, Any]
Place = tuple[Any, ...]  # keys and indices of a value in a body

_USER = {"role": "user", "content": "When?"}
#: route -> a body that is answered
GOOD: dict[str, Body] = {
    "/v1/completions": {"prompt": "When?", "max_tokens": 4, "temperature": 0},
    "/v1/chat/completions": {"messages": [_USER], "max_tokens": 4, "temperature": 0},
    "/inference/v1/generate": {
        "token_ids": [20, 21, 22],
        "sampling_params": {"max_tokens": 4, "temperature": 0},
    },
    "/v1/embeddings": {"input": "When?"},
    "/tokenize": {"prompt": "When?"},
    "/detokenize": {"tokens": [20, 21]},
    "/generate": {"prompt": "When?", "max_new_tokens": 4},
    "/completion": {"prompt": "When?", "max_new_tokens": 4},
    "/chat": {"messages": [_USER], "max_new_tokens": 4},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
#: values of optional fields into which cases go, too
_INNER: Body = {
    "stream_options": {"include_usage": True},
    "tools": [_TOOL],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "chat_template_kwargs": {"name": "x"},
    "documents": [{"title": "x"}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    "logit_bias": {"5": 1.0},
    "structured_outputs": {"choice": ["a", "b"]},
    "structural_tag": {
        "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}],
        "triggers": ["<a"],
    },
}
_MEGABYTE, _MANY = 1 << 20, 100_000

#: by name, for the report
VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "false": False,
    "0": 0,
    "1": 1,
    "-1": -1,
    "2": 2,
    "2^31": 2**31,
    "-2^31": -(2**31),
    "2^63": 2**63,
    "2^64 + 1": 2**64 + 1,
    "10^400": 10**400,
    "0.5": 0.5,
    "-0.5": -0.5,
    "1e308": 1e308,
    "1e-320": 1e-320,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "an empty text": "",
    "a word": "harbour",
    "a number as text": "1",
    "half of a surrogate pair": "\ud83d",
    "NUL": "\0",
    "Japanese": "今日は🙂",
    "1 MB": "a b " * (_MEGABYTE // 4),
    "an empty list": [],
    "a list of null": [None],
    "a list of numbers": [1, 2],
    "a list of a negative and a large number": [-1, 2**40],
    "a list of texts": ["a", "b"],
    "a list of halves of surrogate pairs": ["\ud83d"],
    "a list of lists": [[1, 2], [3]],
    "a list of mixed types": [1, "a", None, {}],
    "a list of objects": [{}, {"role": "user"}],
    "10^5 numbers": [5] * _MANY,
    "10^5 texts": ["x"] * _MANY,
    "an empty object": {},
    "an object": {"type": "x", "name": 1},
    "an object of 10^5 keys": {f"k{i}": i for i in range(_MANY)},
    "60 lists in each other": json.loads("[" * 60 + "]" * 60),
    "an object of halves of surrogate pairs": {"\ud83d": "\ud83d"},
}
LARGE = {name for name, value in VALUES.items() if len(json.dumps(value)) > 100_000}


@dataclass(frozen=True)
class Case:
    """One request body. place: the field that is unusual; (): the body itself, or several."""

    route: str
    place: Place
    what: str
    body: bytes

    @property
    def field(self) -> str:
        return ".".join(map(str, self.place)) or "body"

    def __str__(self) -> str:
        return f"{self.route}: {self.field}: {self.what}"


def places_of(document: Body, route: str) -> list[Place]:
    """All fields of a route's body, those of nested structs included."""
    body = document["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]
    found = list(_places(document, body, ()))
    if route == "/inference/v1/generate":
        fields = [place for place in places_of(document, "/v1/completions") if place[0] != "prompt"]
        found += [("sampling_params", *place) for place in fields]
    if ("tools",) in found:
        found += [("tools", 0, "type"), ("tools", 0, "function"), ("tool_choice", "type")]
        found += [("tools", 0, "function", name) for name in ("name", "parameters", "description", "strict")]
        found += [("tool_choice", "function"), ("tool_choice", "function", "name")]
        found += [("messages", 0, "tool_calls", 0), ("chat_template_kwargs", "name"), ("documents", 0)]
    return list(dict.fromkeys(found))


def _places(document: Body, schema: Body, place: Place) -> Iterator[Place]:
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    for name, inner in schema.get("properties", {}).items():
        yield (*place, name)
        yield from _places(document, inner, (*place, name))
    for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _places(document, inner, place)
    if isinstance(items := schema.get("items"), dict) and ("$ref" in items or "anyOf" in items):
        yield from _places(document, items, (*place, 0))


def put(body: Body, place: Place, value: Any) -> Body:
    """Return a body with this value; what lies above it is made where it is missing."""
    body = copy.deepcopy(body)
    at: Any = body
    for step, following in zip(place, place[1:]):
        if isinstance(step, int) or step in at:
            child = at[step]
        else:
            child = copy.deepcopy(_INNER.get(step, [{}] if isinstance(following, int) else {}))
        if not isinstance(child, (list if isinstance(following, int) else dict)):
            child = [{"type": "text", "text": "x"}] if isinstance(following, int) else {}
        at[step] = child
        at = child
    at[place[-1]] = value
    return body


def cases_of(document: Body, route: str) -> Iterator[Case]:
    """Every value in every field of a route, bodies that are wrong as a whole, and hostile grammars."""
    yield from _whole_bodies(route)
    yield from form_cases(route)
    for place in places_of(document, route):
        for what, value in VALUES.items():
            yield Case(route, place, what, json.dumps(put(GOOD[route], place, value)).encode())
        yield Case(route, place, "twice", _twice(put(GOOD[route], place, "x"), place))


def _twice(body: Body, place: Place) -> bytes:
    """The last key of a place with two values."""
    marked = json.dumps(put(body, place, "\x01"))
    return marked.replace('"\\u0001"', f"1, {json.dumps(place[-1])}: 2").encode()


def _whole_bodies(route: str) -> Iterator[Case]:
    good = json.dumps(GOOD[route]).encode()
    deep = b'{"x": ' * 100_000 + b"1" + b"}" * 100_000
    for what, body in {
        "empty": b"",
        "blank": b" \r\n\t ",
        "cut short": good[:-1],
        "followed by another": good + good,
        "not UTF-8": good[:-1] + b', "x": "\xff"}',
        "UTF-16": good.decode().encode("utf-16"),
        "with a byte order mark": b"\xef\xbb\xbf" + good,
        "a list": b"[" + good + b"]",
        "a text": json.dumps(good.decode()).encode(),
        "a number": b"1e999",
        "null": b"null",
        "NaN": b"NaN",
        "an empty object": b"{}",
        "nested 100,000 deep": deep,
        "nested 100,000 deep without an end": deep[:600_000],
        "100,000 lists": b'{"x": ' + b"[" * 100_000,
        "an unknown field": good[:-1] + b', "harbour": 1}',
        "10,000 unknown fields": good[:-1] + b"".join(b', "x%d": 1' % i for i in range(10_000)) + b"}",
        "a key of 1 MB": good[:-1] + b', "' + b"k" * _MEGABYTE + b'": 1}',
        "a number of 5,000 digits": good[:-1] + b', "x": ' + b"9" * 5000 + b"}",
        "comments": b"/* x */ " + good,
        "single quotes": good.replace(b'"', b"'"),
        "10^6 zeros": b'{"x": [' + b"0," * 1_000_000 + b"0]}",
    }.items():
        yield Case(route, (), what, body)


def form_cases(route: str) -> Iterator[Case]:
    """Hostile schemas, grammars and tools, for the routes that take them."""
    if route not in ("/v1/completions", "/v1/chat/completions"):
        return
    forms = {**TEXTS, **(CHATS if "chat" in route else {})}
    for what, fields in forms.items():
        yield Case(route, (next(iter(fields)),), what, json.dumps({**GOOD[route], **fields}).encode())


def mixed_cases(document: Body, route: str, count: int, seed: int) -> Iterator[Case]:
    """Bodies with two to five unusual fields each, without the large values."""
    places = places_of(document, route)
    values = [(what, value) for what, value in VALUES.items() if what not in LARGE]
    for number in range(count):
        draw = random.Random(f"{route} {seed} {number}")
        body, parts = GOOD[route], []
        for place in draw.sample(places, min(len(places), draw.randint(2, 5))):
            what, value = draw.choice(values)
            try:
                body = put(body, place, value)
            except (KeyError, IndexError, TypeError):  # another value has taken the place of what lies above
                continue
            parts.append(f"{'.'.join(map(str, place))} = {what}")
        yield Case(route, (), "; ".join(parts), json.dumps(body).encode())
