"""Server-sent events, as JSON of structs; those in which only a text changes are encoded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

_MARK = "\x00"
encode = msgspec.json.Encoder().encode


def event(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


class TextEvent:
    """The events of one stream that differ in nothing but their text."""

    def __init__(self, body: Callable[[str], Any]):
        """body: returns the struct of an event with this text, behind which it has no text of a client."""
        self._head, _, self._tail = event(body(_MARK)).rpartition(encode(_MARK))

    def of(self, text: str) -> bytes:
        return self._head + encode(text) + self._tail
