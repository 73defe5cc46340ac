"""One request of a client: its id, its times, its counts, and its line in the log."""

from __future__ import annotations

import time

from tridecode.backend.service.monitoring.request_log import RequestLine, short_error, short_id
from tridecode.backend.text.completion import Piece

#: status of the answer -> outcome, for the log and the metrics
_OUTCOMES = {
    400: "invalid_arg", 401: "unauthenticated", 404: "not_found", 413: "invalid_arg", 429: "unavailable",
    499: "cancelled", 503: "unavailable", 504: "cancelled",
}  # fmt: skip


class Call:
    """A request and its counts. Times are monotonic seconds. id: of the answer; label: the client's id."""

    def __init__(self, id: str, label: str):
        self.id, self.label = id, label
        self.created = int(time.time())
        self.began = time.monotonic()
        self.first = self.last = 0.0  # 0.0: no token yet
        self.prompt_tokens = self.output_tokens = self.sequences = self.chunks = 0
        self.finishes: set[str] = set()
        self.outcome, self.status, self.error = "ok", 200, ""
        self._ended = 0.0

    def deliver(self, pieces: list[dict[int, Piece]]) -> None:
        """Note pieces that have come."""
        self.last = time.monotonic()
        self.first = self.first or self.last
        for group in pieces:
            for piece in group.values():
                self.output_tokens += piece.num_tokens
                if piece.finish_reason:
                    self.finishes.add(piece.finish_reason)

    def fail(self, status: int, text: str) -> None:
        self.status, self.error = status, text
        self.outcome = _OUTCOMES.get(status, "invalid_arg" if status < 500 else "internal")

    def end(self) -> None:
        self._ended = time.monotonic()

    @property
    def first_token_s(self) -> float | None:
        return self.first - self.began if self.first else None

    @property
    def per_token_s(self) -> float | None:
        """Return the mean seconds between the tokens of a sequence."""
        each = self.output_tokens / max(1, self.sequences)
        return (self.last - self.first) / (each - 1) if each > 1 and self.last > self.first else None

    @property
    def total_s(self) -> float:
        return (self._ended or time.monotonic()) - self.began

    def line(self) -> RequestLine:
        return RequestLine(
            time.time(),
            short_id(self.label),
            self.outcome if self.status in (200, 499, 504) else f"{self.outcome}_{self.status}",
            ",".join(sorted(self.finishes)) if self.outcome == "ok" else "",
            self.prompt_tokens,
            self.output_tokens,
            self.sequences,
            None,
            self.first_token_s,
            self.total_s,
            short_error(self.error),
        )
