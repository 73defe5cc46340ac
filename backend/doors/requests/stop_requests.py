"""TensorRT-LLM's stop request: it has `stop` = true and the id of the request to stop."""

from __future__ import annotations

from tridecode.backend.base.errors import RequestError
from tridecode.backend.doors.answers.senders import Senders
from tridecode.backend.doors.answers.stream import Stream
from tridecode.backend.wire.messages import Event


def stop_running(senders: Senders, stream: Stream) -> None:
    """End the door's running requests with the id of `stream`. Raises RequestError if it has no id."""
    if not stream.label:
        raise RequestError("stop is true; it needs the request id of the request to stop")
    for other in senders.open_streams():
        if other.label == stream.label and other is not stream:
            other.stop_wanted = True  # in case the request is still being prepared
            stop_rows(other)


def stop_rows(stream: Stream) -> None:
    """End every row with the tokens that it has. The sender discards these events until the answer exists."""
    stream.cancel_rows()
    for row in range(getattr(stream.answer, "num_rows", len(stream.requests))):
        stream.put_row(row, Event(0, 0, finish="stopped"))
