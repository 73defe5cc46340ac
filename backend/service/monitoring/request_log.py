"""The request log: one line per request when it ends, also if refused. No line has text of a prompt.

Lines go to stderr, like tritonserver's own. A separate thread writes them, and a front end only appends to a
list: neither a flood of refused requests nor a stalled reader of the log can delay a request. Lines beyond
LINES_PER_S are dropped and counted.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tridecode.backend.base import log_format

#: lines of one front end per second; the requests beyond are summarised in one line per second
LINES_PER_S = 500
_EVERY_S = 0.2
_MAX_ERROR = 400  # characters
_MAX_ID = 200


@dataclass(frozen=True)
class RequestLine:
    """One request that has ended. Durations are seconds; None: it ended before that.

    outcome: "ok", or the code of the error in lower case. finish: finish reasons, joined by commas.
    """

    time: float  # end, seconds since the Unix epoch
    id: str  # the client's request id; "" if it sent none
    outcome: str
    finish: str
    prompt_tokens: int
    output_tokens: int
    sequences: int
    queue_s: float | None
    first_token_s: float | None
    total_s: float
    error: str = ""


def short_id(text: str) -> str:
    """Cut a client's request id to the length that a line has room for."""
    return _short(text, _MAX_ID)


def short_error(text: str) -> str:
    return _short(text, _MAX_ERROR)


def _short(text: str, most: int) -> str:
    """Cut to `most` characters, and further if JSON escapes many of them: a line must fit PIPE_BUF."""
    text = text[:most]
    return text if len(json.dumps(text)) <= 2 * most else text[: most // 6]


class RequestLog:
    """Writes the lines of one model. $TRIDECODE_REQUEST_LOG=off switches it off."""

    def __init__(self, model: str, fd: int = 2, lines_per_s: int = LINES_PER_S):
        """fd: file descriptor that the lines are written to."""
        self._model, self._fd = model, fd
        self._format = as_json if log_format.chosen() == "json" else as_text
        self._most = max(1, round(lines_per_s * _EVERY_S))
        self._lock = threading.Lock()
        self._lines: list[RequestLine] = []
        self._left_out: Counter[str] = Counter()  # by outcome
        self._said = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)

    def start(self) -> RequestLog:
        if os.environ.get(log_format.REQUESTS_VARIABLE, "").strip().lower() != "off":
            self._thread.start()
        return self

    def put(self, line: RequestLine) -> None:
        """Queue a line; never blocks. If the queue is full, the line is counted as dropped."""
        if not self._thread.is_alive():
            return
        with self._lock:
            if len(self._lines) < self._most:
                self._lines.append(line)
            else:
                self._left_out[line.outcome] += 1

    def close(self) -> None:
        """Write the queued lines, without waiting for a stalled reader."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(_EVERY_S)
            if not all(map(self._write, self._take(closing))):
                return

    def _take(self, closing: bool) -> list[bytes]:
        """Return the pieces to write now; each is small enough to be atomic in a pipe."""
        now = time.monotonic()
        with self._lock:
            lines, self._lines = self._lines, []
            left_out = None
            if self._left_out and (closing or now - self._said >= 1.0):
                left_out, self._left_out, self._said = self._left_out, Counter(), now
        texts = [self._format(self._model, line) for line in lines]
        if left_out:
            summary = as_json_summary if self._format is as_json else as_text_summary
            texts.append(summary(self._model, left_out))
        pieces = [b""]
        for text in texts:
            line = text.encode("utf-8", "replace") + b"\n"
            if len(pieces[-1]) + len(line) > select.PIPE_BUF:
                pieces.append(b"")
            pieces[-1] += line
        return [piece for piece in pieces if piece]

    def _write(self, data: bytes) -> bool:
        """Write the data; return False if nobody can read the log any more."""
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # the pipe's creator has made it non-blocking
                time.sleep(_EVERY_S)
            except OSError:
                return False
        return True


def as_json(model: str, line: RequestLine) -> str:
    """Format as one JSON object, with the fields of docs/reference/metrics.md."""
    fields: dict[str, Any] = {"time": log_format.timestamp(line.time), "event": "request", "model": model}
    fields["id"] = line.id
    fields["outcome"] = line.outcome
    fields["finish"] = line.finish
    for name in ("prompt_tokens", "output_tokens", "sequences"):
        fields[name] = getattr(line, name)
    for name in ("queue_s", "first_token_s", "total_s"):
        value = getattr(line, name)
        fields[name] = None if value is None else round(value, 6)
    if line.error:
        fields["error"] = line.error
    return json.dumps(fields)


def as_text(model: str, line: RequestLine) -> str:
    """Format the same fields as `name=value`.

    Texts of the client become JSON strings, so that each stays on one line.
    """
    words = [f"{log_format.timestamp(line.time)} request model={model} outcome={line.outcome}"]
    words += [f"id={json.dumps(line.id)}"] if line.id else []
    words += [f"finish={line.finish}"] if line.finish else []
    words.append(f"prompt_tokens={line.prompt_tokens} output_tokens={line.output_tokens}")
    words += [f"sequences={line.sequences}"] if line.sequences > 1 else []
    for name in ("queue_s", "first_token_s", "total_s"):
        value = getattr(line, name)
        words += [] if value is None else [f"{name}={value:.4f}"]
    words += [f"error={json.dumps(line.error)}"] if line.error else []
    return " ".join(words)


def as_json_summary(model: str, left_out: Counter[str]) -> str:
    fields = {"time": log_format.timestamp(time.time()), "event": "requests_left_out", "model": model}
    return json.dumps({**fields, "lines": sum(left_out.values()), "outcomes": dict(left_out)})


def as_text_summary(model: str, left_out: Counter[str]) -> str:
    outcomes = " ".join(f"{outcome}={count}" for outcome, count in sorted(left_out.items()))
    when = log_format.timestamp(time.time())
    return f"{when} requests_left_out model={model} lines={sum(left_out.values())} {outcomes}"
