"""Times of one request, measured at its door, and the gaps between its tokens.

The sender thread of a stream reports each delivery of tokens here, at well under a microsecond per token;
door_metrics.py and request_log.py read the results when the request has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from tridecode.backend.base.histogram import Histogram
from tridecode.backend.service.monitoring.metric_table import GAP_BOUNDS
from tridecode.backend.text.completion import FINISH_REASONS
from tridecode.backend.wire.messages import Event


class GapCounts(Histogram):
    """Histogram of the gaps between deliveries, in seconds."""

    def __init__(self) -> None:
        super().__init__(GAP_BOUNDS)


class RequestTimes:
    """Times of one request, in monotonic seconds; once open, used by the request's sender thread only.

    prompt_tokens: of all prompts, 0 before they are known. queued_s: from the arrival in the engine until the
    first sequence got a slot; None if none has. finishes: how each sequence ended, by row.
    """

    def __init__(self, gaps: GapCounts):
        self.began = time.monotonic()
        self.ended = 0.0
        self.first_token = self.last_token = 0.0  # 0.0: there was none
        self.prompt_tokens = 0
        self.queued_s: float | None = None
        self.finishes: dict[int, str] = {}
        self._gaps = gaps
        self._last: dict[int, float] = {}
        self._tokens: dict[int, int] = {}

    def deliver(self, events: Iterable[tuple[int, Event]]) -> None:
        """Take the (row, event) pairs that go into the next responses."""
        now = time.monotonic()
        for row, event in events:
            if event.queued_s and self.queued_s is None:
                self.queued_s = event.queued_s
            if event.tokens or event.beams is not None:
                last = self._last.get(row)
                if last is None:
                    self.first_token = self.first_token or now
                    self._tokens[row] = 0
                elif now > last:  # tokens of several steps that share a response count as one gap
                    self._gaps.add(now - last)
                self._last[row] = self.last_token = now
                self._tokens[row] += len(event.tokens) or 1
            if event.finish:
                self.finishes[row] = event.finish

    @property
    def first_token_s(self) -> float | None:
        """Return the seconds from the arrival at the door to the first token; None if there was none."""
        return self.first_token - self.began if self.first_token else None

    @property
    def per_token_s(self) -> float | None:
        """Return the longest sequence's mean seconds per token; None with fewer than two deliveries."""
        most = max(self._tokens.values(), default=0)
        if most < 2 or self.last_token <= self.first_token:
            return None
        return (self.last_token - self.first_token) / (most - 1)

    @property
    def total_s(self) -> float:
        """Return the seconds from the arrival at the door to the end."""
        return (self.ended or time.monotonic()) - self.began

    def finish_reasons(self, known: Sequence[str] = ()) -> str:
        """Return the distinct finish reasons of the sequences, joined by commas.

        known: those that the answer reported.
        """
        reasons = known or [FINISH_REASONS.get(finish, finish) for finish in self.finishes.values()]
        return ",".join(sorted({reason for reason in reasons if reason}))
