"""Generated text to content and tool calls, piece by piece: what has been reported is never taken back."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from tridecode.backend.chat.tool_bodies import Body
from tridecode.backend.chat.tool_formats import ToolFormat


class Content(NamedTuple):
    """Text that belongs to no call."""

    text: str


class CallStart(NamedTuple):
    """A call begins. call: its number in the answer, from 0."""

    call: int
    id: str
    name: str


class Arguments(NamedTuple):
    """More text of the arguments of a call, as the model wrote it."""

    call: int
    text: str


class CallBroken(NamedTuple):
    """A call that had begun turns out not to be one. text: all of it, which is content."""

    call: int
    text: str


Delta = Content | CallStart | Arguments | CallBroken


class ToolCallParser:
    """The text of one answer, to deltas whose concatenation does not depend on how the text was cut.

    White space between text and a call, between calls and after the last one is left out. Text that cannot
    become a call is content from its opening tag on. calls: complete ones. finished: single is set and a call
    is complete; what comes after it is ignored.
    """

    def __init__(
        self,
        kind: ToolFormat,
        names: Collection[str],
        new_id: Callable[[], str],
        *,
        forced: str = "",
        single: bool = False,
    ):
        """names: of the functions that may be called. forced: text at the end of the prompt that the answer
        continues. single: one call at most."""
        self.calls = 0
        self.finished = False
        self._kind, self._names, self._new_id, self._single = kind, names, new_id, single
        self._tags = re.compile("|".join(map(re.escape, kind.tags)))
        self._index = -1
        self._held = ""  # text that could be content or the beginning of a tag
        self._only_blanks = True  # since the beginning or the last call
        self._separable = False  # a separator may follow
        self._body: Body | None = None
        self._raw = ""  # text of the call that is being read, its tag first
        self._gap, self._tag = "", ""  # the white space before it, and what opened it
        self._started = False
        self._deltas: list[Delta] = []
        self._forced = 0  # characters of the prompt that _raw begins with
        if forced:
            self.feed(forced)
            self._forced = len(self._raw)

    def feed(self, text: str) -> list[Delta]:
        """The deltas that more text makes certain."""
        while text and not self.finished:
            text = self._outside(text) if self._body is None else self._inside(text)
        return self._take()

    def end(self, cut: bool = False) -> list[Delta]:
        """The last deltas. cut: the text ends at the token limit, so its last call may be incomplete."""
        if self.finished:
            return []
        if self._body is None:
            if not (self.calls and self._only_blanks and self._held.isspace()):
                self._content(self._held)
        elif not self._started:
            if self._raw.strip():
                self._content(self._gap + self._raw[self._forced :])
        elif not cut:
            self._deltas.append(CallBroken(self._index, self._raw[self._forced :]))
        return self._take()

    def finish_reason(self, reason: str) -> str:
        """OpenAI's finish_reason. reason: why the text ended."""
        return "tool_calls" if self.calls and (reason == "stop" or self.finished) else reason

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _content(self, text: str) -> None:
        if text:
            self._deltas.append(Content(text))
            self._only_blanks = self._separable = False

    # ------------------------------------------------------------ content

    def _outside(self, text: str) -> str:
        """Take text up to the beginning of a call; returns the rest."""
        text, self._held = self._held + text, ""
        if self._separable:
            rest = text.lstrip()
            if rest.startswith(self._kind.separator):
                self._separable = False
                return rest[len(self._kind.separator) :]
            if self._kind.separator.startswith(rest):
                self._held = text
                return ""
        if self._kind.bare and self._only_blanks:
            rest = text.lstrip()
            if not rest:
                self._held = text
                return ""
            if rest.startswith("{"):
                return self._open(text[: len(text) - len(rest)], "", rest)
        found = self._tags.search(text)
        if found is None:
            kept = self._undecided(text)
            self._content(text[:kept])
            self._held = text[kept:]
            return ""
        before = text[: found.start()]
        self._content(before.rstrip())
        return self._open(before[len(before.rstrip()) :], found.group(), text[found.end() :])

    def _undecided(self, text: str) -> int:
        """Return where the white space, and the beginning of a tag, at the end of a text begin."""
        tags, place = self._kind.tags, len(text)
        for start in range(max(0, len(text) - max(map(len, tags)) + 1), len(text)):
            if any(tag.startswith(text[start:]) for tag in tags):
                place = start
                break
        return len(text[:place].rstrip())

    def _open(self, gap: str, tag: str, text: str) -> str:
        self._gap, self._tag, self._raw = gap, tag, tag
        self._body, self._started = self._kind.body(self._names), False
        return text

    # ------------------------------------------------------------ a call

    def _inside(self, text: str) -> str:
        """Take text up to the end of a call; returns the rest."""
        body = self._body
        assert body is not None
        place = body.scan(text, 0)
        self._raw += text[:place]
        text = text[place:]
        if body.name and not self._started:
            self._started = True
            self._index += 1
            self._deltas.append(CallStart(self._index, self._new_id(), body.name))
        if body.arguments and self._started:
            self._deltas.append(Arguments(self._index, body.arguments))
            body.arguments = ""
        if body.failed:
            return self._malformed(text)
        if body.ended:
            self.calls += 1
            self.finished = self._single
            self._raw = self._gap = self._tag = ""
            self._forced, self._started = 0, False
            body.next_call()
        if body.done:
            self._body = None
            self._only_blanks, self._separable = True, bool(self._kind.separator)
        return text

    def _malformed(self, text: str) -> str:
        """The call is none: what follows its tag is read again as content, or is content if it had begun."""
        raw, tag, forced = self._raw, self._tag, self._forced
        self._body, self._forced = None, 0
        if self._started:
            self._started = False
            self._deltas.append(CallBroken(self._index, raw[forced:]))
            again = text
        elif forced:
            again = raw[forced:] + text
        else:
            again = raw + text
            shown = len(tag) or 1
            self._content(self._gap + again[:shown])
            again = again[shown:]
        self._only_blanks = self._separable = False
        return again
