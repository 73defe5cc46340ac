"""The formats in which models write tool calls, and how a format is chosen."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.chat.json_scanner import WHITESPACE
from tridecode.backend.chat.tool_bodies import Body, ListBody, NamedBody, ObjectBody, PythonBody

_random = random.SystemRandom()
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolFormat:
    """A format of calls. An answer with calls is: head, calls with `between` between them, tail. A call is:
    begin, the function's name, middle, the arguments, end.

    tags: each opens a call. shown_tokens: texts of the format that are one token where the tokenizer has
    them, and have to be shown even if it is special. bare: a call may also
    begin without a tag, with { as the first character. separator: may follow a call. stop: text that ends the
    answer after its first call; "": none. id_length: characters of an id; 0: "call_" and 24."""

    name: str
    tags: tuple[str, ...]
    body: Callable[[Collection[str]], Body]
    begin: str
    middle: str
    end: str
    head: str = ""
    between: str = ""
    tail: str = ""
    bare: bool = False
    separator: str = ""
    stop: str = ""
    id_length: int = 0
    shown_tokens: tuple[str, ...] = ()

    def new_id(self) -> str:
        """A new id of a call."""
        text = "".join(_random.choices(_LETTERS, k=self.id_length or 24))
        return text if self.id_length else f"call_{text}"

    def forced(self, name: str | None) -> str:
        """Text behind the prompt that makes the answer a call of this function; None: of any one."""
        start = self.head + self.begin
        # tokenizers join the space with the first characters of the arguments
        return start if name is None else start + json.dumps(name)[1:-1] + self.middle.rstrip()


class _FirstCharacterBody(Body):
    """A body whose kind its first character decides, behind white space."""

    kinds: tuple[tuple[str, type[Body]], ...]

    def __init__(self, names: Collection[str]):
        super().__init__(names)
        self._inner: Body | None = None

    def _step(self, text: str, place: int) -> int:
        inner = self._inner
        if inner is None:
            if text[place] in WHITESPACE:
                return place + 1
            inner = next(kind for first, kind in self.kinds if first in ("", text[place]))(self.names)
            self._inner = inner
        place = inner.scan(text, place)
        self.name, self.arguments = inner.name, self.arguments + inner.arguments
        self.ended, self.done, self.failed = inner.ended, inner.done, inner.failed
        inner.arguments = ""
        return place

    def next_call(self) -> None:
        super().next_call()
        if self._inner is not None:
            self._inner.next_call()


class _PythonTagBody(_FirstCharacterBody):
    kinds = (("{", ObjectBody), ("", PythonBody))


class _MistralBody(_FirstCharacterBody):
    kinds = (("[", ListBody), ("", NamedBody))


HERMES = ToolFormat(
    "hermes",
    ("<tool_call>",),
    ObjectBody,
    '<tool_call>\n{"name": "',
    '", "arguments": ',
    "}\n</tool_call>",
    between="\n",
    separator="</tool_call>",
    stop="</tool_call>",
    shown_tokens=("<tool_call>", "</tool_call>"),
)
LLAMA3_JSON = ToolFormat(
    "llama3_json",
    ("<|python_tag|>",),
    _PythonTagBody,
    '{"name": "',
    '", "parameters": ',
    "}",
    between="; ",
    bare=True,
    separator=";",
    shown_tokens=("<|python_tag|>",),
)
#: the list of calls of Mistral 7B v0.3 and NeMo; their templates want ids of nine characters
MISTRAL = ToolFormat(
    "mistral",
    ("[TOOL_CALLS]",),
    _MistralBody,
    '{"name": "',
    '", "arguments": ',
    "}",
    head="[TOOL_CALLS] [",
    between=", ",
    tail="]",
    id_length=9,
    shown_tokens=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
)
_MISTRAL_TIGHT = replace(MISTRAL, head="[TOOL_CALLS][")
_MISTRAL_NAMED = replace(MISTRAL, begin="[TOOL_CALLS]", middle="[ARGS]", end="", head="", between="", tail="")
PARSERS = {kind.name: kind for kind in (HERMES, LLAMA3_JSON, MISTRAL)}


def find_format(template: str, parser: str | None = None) -> ToolFormat | None:
    """The format of a chat template's tool calls; None: not known. parser: its name, from an operator.

    Raises ConfigError for a parser that does not exist.
    """
    if parser is not None and parser not in PARSERS:
        raise ConfigError(f"--tool-call-parser is {parser!r}; wanted one of {', '.join(PARSERS)}")
    if "[TOOL_CALLS]" in template:
        found = _mistral(template)
    elif "<tool_call>" in template and "<function=" not in template:  # Qwen3-Coder's calls are XML
        found = HERMES
    elif "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        found = LLAMA3_JSON
    else:
        found = None
    return found if parser is None or (found and found.name == parser) else PARSERS[parser]


def _mistral(template: str) -> ToolFormat:
    if "[ARGS]" in template:
        return _MISTRAL_NAMED
    return _MISTRAL_TIGHT if "[TOOL_CALLS][" in template else MISTRAL
