"""The line of a door's request in the request log."""

from __future__ import annotations

import time
from typing import Any

from tridecode.backend.doors.monitoring.request_times import RequestTimes
from tridecode.backend.service.monitoring.request_log import RequestLine, short_error, short_id


def line_of(
    times: RequestTimes, label: str, outcome: str, answer: Any, sequences: int, error: str
) -> RequestLine:
    """Return the line of a request that ends now.

    answer: its Answer, None if it was refused before it had one.
    """
    known = () if answer is None else getattr(answer, "finish_reasons", ())
    return RequestLine(
        time.time(),
        short_id(label),
        outcome,
        times.finish_reasons(known) if outcome == "ok" else "",
        times.prompt_tokens,
        0 if answer is None else answer.num_output_tokens,
        sequences,
        times.queued_s,
        times.first_token_s,
        times.total_s,
        short_error(error),
    )
