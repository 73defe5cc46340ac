"""One JSON value, scanned as it arrives: where it ends, and the first character that cannot belong to it."""

from __future__ import annotations

import re
import string

#: nested lists and objects of a value
MAX_DEPTH = 64
WHITESPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = frozenset("-+.0123456789" + string.ascii_letters)  # characters of numbers and words
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?\Z")
_MAX_SCALAR = 512  # characters of a number
_WORDS = ("true", "false", "null")
#: expected next element
_VALUE, _FIRST_ITEM, _FIRST_KEY, _KEY, _COLON, _COMMA = range(6)


class MalformedJson(Exception):
    """The text is not JSON (RFC 8259), or too deep."""


class JsonScanner:
    """Takes the pieces of a text that begins with a JSON value, without white space ahead of it.

    done: the value is complete. failed: the character behind the last one taken cannot belong to it. A number
    or a word at the top level is complete with the character behind it. Each character is looked at once, and
    neither result depends on how the text is cut.
    """

    def __init__(self) -> None:
        self.done = self.failed = False
        self._stack: list[str] = []  # closing brackets
        self._wanted = _VALUE
        self._in_string = self._is_key = False
        self._escape = 0  # characters of an escape that are missing; -1: the one behind the backslash
        self._scalar = ""

    def scan(self, text: str, start: int = 0) -> int:
        """Take text[start:] up to the end of the value. Returns the place behind the last character taken."""
        place, end = start, len(text)
        try:
            while place < end and not self.done:
                if self._in_string and not self._escape:
                    found = _PLAIN.match(text, place)
                    assert found is not None
                    place = found.end()
                    if place == end:
                        break
                if self._one(text[place]):
                    place += 1
        except MalformedJson:
            self.failed = True
        return place

    def _one(self, character: str) -> bool:
        """Take a character; False: it is the one behind a number or a word, and comes again."""
        if self._in_string:
            self._string(character)
        elif self._scalar:
            return self._more_of_scalar(character)
        elif not (character in WHITESPACE and self._stack):
            self._structure(character)
        return True

    def _structure(self, character: str) -> None:
        """A character outside of strings, numbers and words."""
        wanted = self._wanted
        if wanted in (_VALUE, _FIRST_ITEM):
            if wanted == _FIRST_ITEM and character == "]":
                self._close(character)
            else:
                self._begin_value(character)
        elif wanted in (_FIRST_KEY, _KEY):
            if character == '"':
                self._in_string = self._is_key = True
            elif wanted == _FIRST_KEY and character == "}":
                self._close(character)
            else:
                raise MalformedJson
        elif wanted == _COLON:
            if character != ":":
                raise MalformedJson
            self._wanted = _VALUE
        elif character == ",":
            self._wanted = _KEY if self._stack[-1] == "}" else _VALUE
        else:
            self._close(character)

    def _begin_value(self, character: str) -> None:
        if character == '"':
            self._in_string, self._is_key = True, False
        elif character in "{[":
            if len(self._stack) >= MAX_DEPTH:
                raise MalformedJson
            self._stack.append("}" if character == "{" else "]")
            self._wanted = _FIRST_KEY if character == "{" else _FIRST_ITEM
        elif character in "-0123456789tfn":
            self._scalar = character
        else:
            raise MalformedJson

    def _close(self, character: str) -> None:
        if character != self._stack[-1]:
            raise MalformedJson
        self._stack.pop()
        self._end_value()

    def _end_value(self) -> None:
        self._wanted, self.done = _COMMA, not self._stack

    def _string(self, character: str) -> None:
        if self._escape > 0:
            if character not in string.hexdigits:
                raise MalformedJson
            self._escape -= 1
        elif self._escape:
            if character not in '"\\/bfnrtu':
                raise MalformedJson
            self._escape = 4 if character == "u" else 0
        elif character == "\\":
            self._escape = -1
        elif character != '"':
            raise MalformedJson  # a control character
        else:
            self._in_string = False
            if self._is_key:
                self._is_key, self._wanted = False, _COLON
            else:
                self._end_value()

    def _more_of_scalar(self, character: str) -> bool:
        if character not in _SCALAR:
            if self._scalar not in _WORDS and not _NUMBER.match(self._scalar):
                raise MalformedJson
            self._scalar = ""
            self._end_value()
            return False
        found = self._scalar + character
        if len(found) > _MAX_SCALAR or (found[0] in "tfn" and not any(w.startswith(found) for w in _WORDS)):
            raise MalformedJson
        self._scalar = found
        return True
