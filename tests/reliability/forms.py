"""Requests whose answers obey a grammar, and a check of each answer with another library."""

from __future__ import annotations

import json
import random
import re

import jsonschema

#: guided_decoding_guide_type and guided_decoding_guide; ("", ""): none
Form = tuple[str, str]
FREE: Form = "", ""


def form_of(draw: random.Random, new_tokens: int) -> Form:
    """Return a form whose answers need about `new_tokens` tokens of one or two letters, and at most 400."""
    count = min(max(new_tokens, 8), 280)
    if draw.random() < 0.5:
        return "regex", f"[a-z]{{{count}}}(-[0-9]{{2}}){{3,9}}"
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": f"^[a-z]{{{count - 4},{count}}}$"},
            "numbers": {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 4, "maxItems": 12},
        },
        "required": ["name", "numbers"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": ""},
    }
    return "json_schema", json.dumps(schema)


def fault_of(form: Form, answer: str) -> str:
    """Return why an answer does not match its form; "" if it matches."""
    kind, guide = form
    if kind == "regex":
        return "" if re.fullmatch(guide, answer) else f"{answer!r} does not match {guide}"
    if kind == "json_schema":
        try:
            jsonschema.validate(json.loads(answer), json.loads(guide))
        except ValueError as error:
            return f"{answer!r} is not JSON: {error}"
        except jsonschema.ValidationError as error:
            return f"{answer!r}: {error.message}"
    return ""
