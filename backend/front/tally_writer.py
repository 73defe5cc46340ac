"""Writes answers whose rows are tallied: the part that completions, chats and token ids have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import msgspec

from tridecode.backend.front.answering import DONE, Writer
from tridecode.backend.front.calls import Call
from tridecode.backend.front.fields.sampling import StreamOptions
from tridecode.backend.front.model import ServedModel
from tridecode.backend.front.reading import Pieces
from tridecode.backend.front.tally import Tally
from tridecode.backend.front.text_event import TextEvent, event
from tridecode.backend.text.completion import Piece


class TallyWriter(Writer):
    """Counts the rows of an answer; a subclass writes the events of one piece, and the bodies."""

    heavy = False

    def __init__(
        self, model: ServedModel, call: Call, tally: Tally, stream: bool | None, options: StreamOptions | None
    ):
        self._model, self._call, self._tally, self._streaming = model, call, tally, bool(stream)
        self._usage = bool(options and options.include_usage)
        self._each_usage = bool(options and options.continuous_usage_stats)
        self._text_events: dict[int, TextEvent] = {}

    @abstractmethod
    def _events(self, index: int, piece: Piece) -> bytes:
        """Return the events of a stream for one piece of the row `index`."""

    @abstractmethod
    def _body(self, choices: Any, usage: Any) -> Any:
        """Return the struct of an event with these choices."""

    def take(self, pieces: Pieces) -> bytes:
        self._tally.add(pieces, keep=not self._streaming)
        self._call.prompt_tokens = self._tally.prompt_tokens
        if not self._streaming:
            return b""
        return b"".join(
            [self._events(index, piece) for group in pieces for index, piece in sorted(group.items())]
        )

    def _text_event(self, index: int, choice: Callable[[str], Any], text: str) -> bytes:
        """Return the event of a row that gets text and nothing else. choice: returns its choice of a text."""
        if self._each_usage:
            return event(self._body([choice(text)], self._event_usage))
        found = self._text_events.get(index)
        if found is None:
            found = TextEvent(lambda text: self._body([choice(text)], self._event_usage))
            self._text_events[index] = found
        return found.of(text)

    def end(self) -> bytes:
        return (event(self._body([], self._tally.usage)) if self._usage else b"") + DONE

    @property
    def _event_usage(self) -> Any:
        """The usage of an event that is not the last."""
        return self._tally.usage if self._each_usage else None if self._usage else msgspec.UNSET
