"""The inside of a tool call's text, scanned as it arrives: a call's name, then the text of its arguments.

A body fails at the first character that cannot belong to a call of a known function. A name is reported with
the first character of the arguments, so a call that begins is nearly always one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from tridecode.backend.chat.json_scanner import WHITESPACE, JsonScanner, MalformedJson

_ARGUMENTS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type")
_HEAD = re.compile(r"([^\[\s]+)\s*(?:\[CALL_ID\][A-Za-z0-9_-]{0,64})?(?:\[ARGS\])?\s*")
_CALL_ID = re.compile(r"\[CALL_ID\][A-Za-z0-9_-]{0,64}")


class Body:
    """name: of the call that is being read; "": not known, or not yet to be shown. arguments: their new text,
    which the reader clears. ended: the call is complete; the reader calls `next_call` before it continues.
    done: no further call belongs to this body. failed: what comes next cannot belong to it.
    """

    def __init__(self, names: Collection[str]):
        self.names = names
        self.name = self.arguments = ""
        self.ended = self.done = self.failed = False

    def scan(self, text: str, place: int) -> int:
        """Take text[place:], up to the end of a call at most. Returns the place behind the last character
        taken. How the text is cut has no effect on any result.
        """
        while place < len(text) and not (self.ended or self.done or self.failed):
            try:
                place = self._step(text, place)
            except MalformedJson:
                self.failed = True
        return place

    def next_call(self) -> None:
        self.name, self.arguments, self.ended = "", "", False

    def _step(self, text: str, place: int) -> int:
        """Take some of text[place:]. Returns the place behind it. Raises MalformedJson where text[place] does
        not belong to the body.
        """
        raise NotImplementedError

    def _scan_value(self, value: JsonScanner, text: str, place: int) -> int:
        """Scan more of a value; the body fails with it."""
        stop = value.scan(text, place)
        self.failed = value.failed
        return stop

    def _check(self, holds: bool) -> None:
        """Fail behind the text that was taken."""
        self.failed = self.failed or not holds


class ObjectBody(Body):
    """{"name": ..., "arguments": {...}}, the keys in any order, "parameters" as well."""

    def __init__(self, names: Collection[str]):
        super().__init__(names)
        self._wanted = "{"  # outside of values: { k(ey) K(ey or }) : v(alue) ,
        self._value: JsonScanner | None = None
        self._kept: list[str] = []  # the text of the key or value that is read, unless it is passed on
        self._key: str | None = None  # of the value; None: a key is read
        self._seen: set[str] = set()
        self._known = ""  # the name, from when it was read
        self._early: str | None = None  # arguments that came before the name
        self._streams = False

    def _step(self, text: str, place: int) -> int:
        if self._value is not None:
            stop = self._scan_value(self._value, text, place)
            if self._streams:
                self.arguments += text[place:stop]
            else:
                self._kept.append(text[place:stop])
            if self._value.done:
                self._end_value()
            return stop
        character = text[place]
        if character in WHITESPACE:
            return place + 1
        if self._wanted in ("k", "v") or (self._wanted == "K" and character != "}"):
            self._begin_value(character)
            return place
        if character == "}" and self._wanted in ("K", ","):
            self._end_call()
        elif character != self._wanted:
            raise MalformedJson
        else:
            self._wanted = {"{": "K", ":": "v", ",": "k"}[character]
        return place + 1

    def _begin_value(self, first: str) -> None:
        if self._key is None or self._key == "name":
            if first != '"':
                raise MalformedJson
        elif self._key in _ARGUMENTS and first not in '{"n':
            raise MalformedJson
        self._value, self._kept = JsonScanner(), []
        self._streams = self._key in _ARGUMENTS and first == "{" and bool(self._known)
        if self._streams:
            self.name = self._known

    def _end_value(self) -> None:
        text, key, self._value = "".join(self._kept), self._key, None
        if key is None:
            self._end_key(json.loads(text))
            return
        if key == "name":
            self._known = json.loads(text)
            self._check(self._known in self.names)
        elif key in _ARGUMENTS and not self._streams:
            self._early = _arguments_of(text)
            self._check(self._early is not None)
        if self._known and self._early is not None and not self.failed:
            self.name, self.arguments, self._early = self._known, self._early, None
        self._streams, self._key, self._wanted = False, None, ","

    def _end_key(self, key: str) -> None:
        kind = "arguments" if key in _ARGUMENTS else key
        self._check(kind not in self._seen and (kind in ("name", "arguments") or key in _OTHER_KEYS))
        self._seen.add(kind)
        self._key, self._wanted = key, ":"

    def _end_call(self) -> None:
        if not self._known:
            raise MalformedJson
        if not self.name:
            self.name, self.arguments = self._known, "{}"
        self.ended = self.done = True


def _arguments_of(text: str) -> str | None:
    """The arguments of a complete value: an object, an object as JSON in a text, or null; else None."""
    if text == "null":
        return "{}"
    if text.startswith("{"):
        return text
    inner, scanner = json.loads(text).strip(), JsonScanner()
    whole = inner.startswith("{") and scanner.scan(inner) == len(inner) and scanner.done
    return inner if whole and _is_unicode(inner) else None


def _is_unicode(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair, which cannot be sent."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


class ListBody(Body):
    """[{"name": ..., "arguments": {...}}, ...]: several calls."""

    def __init__(self, names: Collection[str]):
        super().__init__(names)
        self._call: ObjectBody | None = None
        self._wanted = "["  # [ c(all) ,

    def _step(self, text: str, place: int) -> int:
        if self._call is not None:
            place = self._call.scan(text, place)
            self.name, self.arguments = self._call.name, self.arguments + self._call.arguments
            self._call.arguments, self.failed = "", self._call.failed
            if self._call.ended:
                self.ended, self._call, self._wanted = True, None, ","
            return place
        character = text[place]
        if character in WHITESPACE:
            return place + 1
        if self._wanted == "c":
            self._call = ObjectBody(self.names)
            return place
        if character == "]" and self._wanted == ",":
            self.done = True
        elif character != self._wanted:
            raise MalformedJson
        else:
            self._wanted = "c"
        return place + 1


class NamedBody(Body):
    """NAME{...}, with [ARGS] or [CALL_ID]ID[ARGS] between them: Mistral's newer format."""

    def __init__(self, names: Collection[str]):
        super().__init__(names)
        self._head = ""
        self._value: JsonScanner | None = None

    def _step(self, text: str, place: int) -> int:
        if self._value is not None:
            stop = self._scan_value(self._value, text, place)
            self.arguments += text[place:stop]
            self.ended = self.done = self._value.done
            return stop
        if text[place] == "{":
            found = _HEAD.fullmatch(self._head)
            if found is None or found.group(1) not in self.names:
                raise MalformedJson
            self.name, self._value = found.group(1), JsonScanner()
            return place
        self._head += text[place]
        self._check_head()
        return place + 1

    def _check_head(self) -> None:
        """Refuse early what cannot become a call."""
        name = re.split(r"[\[\s]", self._head, maxsplit=1)[0]
        rest = self._head[len(name) :].lstrip()
        if len(name) == len(self._head):
            known = any(one.startswith(name) for one in self.names)
        else:
            known = name in self.names
        if rest.startswith("[CALL_ID]"):
            found = _CALL_ID.match(rest)
            assert found is not None
            rest = rest[found.end() :]
        elif "[CALL_ID]".startswith(rest):
            rest = ""
        if not known or not ("[ARGS]".startswith(rest) or rest.rstrip() == "[ARGS]"):
            raise MalformedJson


class PythonBody(Body):
    """NAME.call(key=value, ...), as LLaMA 3 calls its built-in tools. A value is JSON, or True, False, None.
    The arguments are reported at the end.
    """

    _WORDS = {"True": True, "False": False, "None": None}

    def __init__(self, names: Collection[str]):
        super().__init__(names)
        self._openings = {f"{name}.call(": name for name in names}
        self._head = ""
        self._called = ""  # the name, once "(" was read
        self._key = self._text = ""
        self._stage = "K"  # K(ey or parenthesis) k(ey) v(alue) ,
        self._value: JsonScanner | None = None
        self._found: dict[str, Any] = {}

    def _step(self, text: str, place: int) -> int:
        if self._value is not None:
            stop = self._scan_value(self._value, text, place)
            self._text += text[place:stop]
            if self._value.done:
                self._end_value(json.loads(self._text))
            return stop
        character = text[place]
        if not self._called:
            self._begin(character)
        elif self._stage == "v" and not self._text and character in '"{[-0123456789':
            self._value = JsonScanner()
            return place
        elif self._stage in ("v", "k") or (self._stage == "K" and character != ")"):
            self._word(character)
        elif character == ")":
            self._end_call()
        elif character == "," and self._stage == ",":
            self._stage = "k"
        elif character not in WHITESPACE:
            raise MalformedJson
        return place + 1

    def _begin(self, character: str) -> None:
        self._head += character
        if not any(one.startswith(self._head) for one in self._openings):
            raise MalformedJson
        self._called = self._openings.get(self._head, "")

    def _word(self, character: str) -> None:
        """A character of a key, or of True, False and None."""
        if self._stage == "v":
            if not self._text and character in WHITESPACE:
                return
            self._text += character
            if not any(word.startswith(self._text) for word in self._WORDS):
                raise MalformedJson
            if self._text in self._WORDS:
                self._end_value(self._WORDS[self._text])
        elif character == "=":
            self._key = self._key.strip()
            if not self._key.isidentifier() or self._key in self._found:
                raise MalformedJson
            self._stage = "v"
        else:
            self._key += character
            if not self._key.isspace() and not self._key.strip().isidentifier():
                raise MalformedJson

    def _end_value(self, value: Any) -> None:
        self._found[self._key] = value
        self._key = self._text = ""
        self._value, self._stage = None, ","

    def _end_call(self) -> None:
        arguments = json.dumps(self._found, ensure_ascii=False)
        if not _is_unicode(arguments):
            raise MalformedJson
        self.name, self.arguments = self._called, arguments
        self.ended = self.done = True
