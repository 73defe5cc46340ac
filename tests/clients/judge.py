"""Judges a program's run: it works, works with a reservation, or does not work for a reason."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

from tests.clients.program import Program

PROMPT_FIRST = "the answer begins with the prompt"
LOSES_LAST = "loses the last token of an answer by itself"
_REASON_CHARS = 160
_TELLING = r"(?i)error|fail|refus|unexpected|expects|not support"


@dataclass(frozen=True)
class Expected:
    """The server's greedy answer to `prompt`, the best of two beams, and the answer to a chat of `prompt`,
    requested from Triton without any client."""

    prompt: str
    answer: str
    beams: str = ""
    chat: str = ""


@dataclass(frozen=True)
class Verdict:
    """works: it did what it is for. note: a reservation, or the reason."""

    works: bool
    note: str = ""

    def __str__(self) -> str:
        word = "works" if self.works else "does not"
        return f"{word}: {self.note}" if self.note else word


def judge(program: Program, status: int | None, output: str, expected: Expected) -> Verdict:
    """status: exit code; None: it was ended at its time limit."""
    if status is None:
        return Verdict(False, f"no end after {program.limit_s:g} s")
    forbidden = program.never and re.search(program.never, output)
    if status != 0 or forbidden:
        return Verdict(False, reason(output) or f"exit code {status}")
    if program.shows and not re.search(_pattern(program.shows, expected), output):
        return Verdict(False, f"ends without an error and without {program.shows!r} in its output")
    if not program.answers:
        return Verdict(True)
    return _answer(output, replace(expected, answer=expected.chat) if program.is_chat else expected)


def _pattern(shows: str, expected: Expected) -> str:
    for name in ("answer", "beams"):
        words = r"\s+".join(re.escape(word) for word in getattr(expected, name).split())
        shows = shows.replace(f"{{{name}}}", words)
    return shows.replace("{prompt}", re.escape(expected.prompt))


def _answer(output: str, expected: Expected) -> Verdict:
    lines = [line for line in output.splitlines() if line.startswith("ANSWER ")]
    if not lines:
        return Verdict(False, reason(output) or "no answer")
    given, wanted = json.loads(lines[-1].removeprefix("ANSWER ")), expected.answer
    if given.strip() == wanted.strip():
        return Verdict(True)
    if given.strip() == (expected.prompt + wanted).strip():
        return Verdict(True, PROMPT_FIRST)
    lost = len(wanted.split()) - len(given.split())
    if given.strip() and wanted.strip().startswith(given.strip()) and lost <= 1:
        return Verdict(True, LOSES_LAST)
    return Verdict(False, f"it gives {given!r}; the server's answer is {wanted!r}")


def reason(output: str) -> str:
    """The line of an output that says what went wrong, without paths: the last one with an error in it."""
    lines = [line.strip(" |│") for line in output.splitlines()]
    lines = [line for line in lines if re.search(r"\w{3}", line)]
    telling = [line for line in lines if re.search(_TELLING, line)]
    found = (telling or lines or [""])[-1]
    return shorten(re.sub(r"(/[\w.@+-]+){3,}/", "", found))


def shorten(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _REASON_CHARS else flat[: _REASON_CHARS - 1] + "…"
