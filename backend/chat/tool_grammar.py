"""Grammars of answers with tool calls, in Lark's notation with llguidance's extensions.

A token of a format, as <tool_call>, may be a special token, which grammars name by its id, or plain text; a
grammar accepts both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tridecode.backend.chat.tool_formats import ToolFormat

#: schema of arguments without one of their own
ANY_OBJECT: dict[str, Any] = {"type": "object"}
#: keywords with which a schema could weaken what it says are overridden
_OPTIONS = {"lenient": False, "coerce_one_of": False}
#: white space of arguments, as in the histories that templates render
_ARGUMENTS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", **_OPTIONS}
#: of a response; without a limit a model may write spaces until max_tokens
_RESPONSE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}", **_OPTIONS}
_TEXT = "TEXT: /(.|\\n)*/"
#: text that cannot be the beginning of a call without a tag
_PROSE = "PROSE: /[ \\t\\r\\n]*([^{ \\t\\r\\n](.|\\n)*)?/"


def object_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a function's arguments. None: the function takes none, as with OpenAI."""
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **parameters}


def _inline(schema: Any, options: Mapping[str, Any]) -> str:
    """Return a JSON schema as a grammar holds it."""
    return "%json " + json.dumps({**schema, "x-guidance": options} if isinstance(schema, Mapping) else schema)


class CallGrammar:
    """The grammars of one request."""

    def __init__(
        self,
        kind: ToolFormat,
        schemas: Mapping[str, Mapping[str, Any]],
        ids: Mapping[str, int],
        single: bool,
    ):
        """schemas: of the arguments, by the function's name. ids: of the format's tokens, those that the
        tokenizer has. single: one call at most."""
        self._kind, self._names, self._single, self._ids = kind, list(schemas), single, ids
        self._schemas = list(schemas.values())
        self._tokens = re.compile("(" + "|".join(map(re.escape, ids)) + ")") if ids else None

    def forced(self, name: str | None) -> str:
        """Return the grammar of an answer behind `kind.forced(name)`."""
        if name is None:
            return self._grammar(f"start: call {self._more} {self._literal(self._kind.tail)}")
        rest = '" "? ' if self._kind.middle.endswith(" ") else ""
        end = self._literal(self._kind.end + self._kind.tail)
        return self._grammar(f"start: {rest}a{self._names.index(name)} {end}")

    def free(self) -> str:
        """Return the grammar of text or calls, in the order that the model chooses."""
        kind = self._kind
        if kind.bare:
            return self._grammar(f"start: PROSE | {self._bare} | {self._tagged}", _PROSE)
        tag, rest = self._opening()
        lead = f"lead: tag{self._id(tag, 'TEXT ')}\ntag[lazy]: TEXT {json.dumps(tag)}"
        calls = f"lead {rest} call {self._inner} {self._literal(kind.tail)}"
        start = f"start: ({calls}){'?' if self._single else '*'} TEXT"
        return self._grammar(start, lead, _TEXT)

    def or_response(self, schema: Any) -> str:
        """Return the grammar of calls or of a JSON value that follows a schema."""
        return self._grammar(f"start: {self._tagged} | response\nresponse: {_inline(schema, _RESPONSE)}")

    # ------------------------------------------------------------ parts

    def _grammar(self, *rules: str) -> str:
        calls = [
            f"f{i}: {self._literal(name + self._kind.middle)} a{i} {self._literal(self._kind.end)}"
            for i, name in enumerate(self._names)
        ]
        arguments = [f"a{i}: {_inline(schema, _ARGUMENTS)}" for i, schema in enumerate(self._schemas)]
        call = "call: " + " | ".join(f"f{i}" for i in range(len(self._names)))
        return "\n".join(["%llguidance {}", *rules, call, *calls, *arguments, ""])

    @property
    def _more(self) -> str:
        """Further calls behind a complete one."""
        return "" if self._single else f"({self._literal(self._kind.between + self._kind.begin)} call)*"

    @property
    def _inner(self) -> str:
        """Further calls behind the same tag."""
        return self._more if self._kind.head else ""

    @property
    def _bare(self) -> str:
        """Calls from the beginning of the answer on, without a tag."""
        return f"{self._literal(self._kind.begin)} call {self._more}"

    @property
    def _tagged(self) -> str:
        """Calls behind a tag at the beginning of the answer."""
        tag, rest = self._opening()
        return f"{self._literal(tag)} {rest} call {self._more} {self._literal(self._kind.tail)}"

    def _opening(self) -> tuple[str, str]:
        """Return the tag, and the literals between it and the function's name."""
        tag = self._kind.tags[0]
        return tag, self._literal((self._kind.head + self._kind.begin).removeprefix(tag))

    def _literal(self, text: str) -> str:
        """Return the rule of a text, in which tokens of the format may be special."""
        parts = [text] if self._tokens is None else self._tokens.split(text)
        return " ".join(
            f"({json.dumps(part)}{self._id(part)})" if part in self._ids else json.dumps(part)
            for part in parts
            if part
        )

    def _id(self, text: str, before: str = "") -> str:
        """Return the alternative that a text is one token, "" if it is none."""
        return f" | {before}<[{self._ids[text]}]>" if text in self._ids else ""
