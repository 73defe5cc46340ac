"""Counts of a batch, its speed, and an estimate of its end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

#: the speed is that of the last WINDOW_S seconds, so that an estimate follows a service that slows down
WINDOW_S = 300.0
#: no estimate before this many lines and seconds: the first answers come all at once
_LEAST_LINES = 10
_LEAST_S = 5.0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage | None = None


_usage_of = msgspec.json.Decoder(_Body).decode


@dataclass
class Totals:
    """Lines and tokens. before: lines of earlier runs, which `answers` and `errors` count, too."""

    answers: int = 0
    errors: int = 0
    before: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def done(self) -> int:
        return self.answers + self.errors


class Meter:
    """Measures a run. counted: lines of the whole input, None until they are counted. empty: empty ones that
    were read. clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.totals = Totals()
        self.counted: int | None = None
        self.empty = 0
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Begin to measure now: the service is ready."""
        self._began = self._clock()
        self._samples: deque[tuple[float, int]] = deque([(self._began, self._sent)])

    def skip(self, is_answer: bool) -> None:
        """Count a line of an earlier run."""
        self.totals.before += 1
        self._count(is_answer)

    def add_answer(self, body: msgspec.Raw) -> None:
        self._count(True)
        try:
            usage = _usage_of(body).usage or _Usage()
        except msgspec.MsgspecError:  # not of the known shape
            return
        self.totals.prompt_tokens += usage.prompt_tokens
        self.totals.output_tokens += usage.completion_tokens

    def add_error(self) -> None:
        self._count(False)

    def _count(self, is_answer: bool) -> None:
        if is_answer:
            self.totals.answers += 1
        else:
            self.totals.errors += 1

    @property
    def lines(self) -> int | None:
        """Lines with a request, as far as they are known."""
        return None if self.counted is None else self.counted - self.empty

    # ------------------------------------------------------------ speed

    @property
    def _sent(self) -> int:
        """Lines done in this run."""
        return self.totals.done - self.totals.before

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began

    @property
    def tokens(self) -> tuple[int, str]:
        """Tokens of this run: those of answers, or of prompts if all lines are embeddings; and their name."""
        if self.totals.output_tokens or not self.totals.prompt_tokens:
            return self.totals.output_tokens, "tokens"
        return self.totals.prompt_tokens, "prompt tokens"

    def sample(self) -> None:
        """Note the state; to be called about once a second."""
        now = self._clock()
        self._samples.append((now, self._sent))
        while len(self._samples) > 2 and now - self._samples[1][0] > WINDOW_S:
            self._samples.popleft()

    def seconds_left(self) -> float | None:
        """Return the time that the rest takes at the speed of the last minutes; None: not known.

        Assumes that the remaining lines are like those of the window.
        """
        (began, before), (_, now_done) = self._samples[0], self._samples[-1]
        # up to now and not to the last sample: the estimate grows while no answer comes
        seconds, lines = self._clock() - began, now_done - before
        if self.lines is None or lines < _LEAST_LINES or seconds < _LEAST_S:
            return None
        return max(0, self.lines - self.totals.done) * seconds / lines
