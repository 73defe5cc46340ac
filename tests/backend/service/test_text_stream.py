"""TextStream: what happens to a reader that does not read."""

from __future__ import annotations

from typing import Any

import pytest

from tridecode.backend.base.errors import CapacityError
from tridecode.backend.service.text_stream import TextStream
from tridecode.backend.wire.messages import Event, TopLogProbs


class Link:
    """Notes what is cancelled."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    def cancel(self, request: int) -> None:
        self.cancelled.append(request)


def stream_of(link: Any, most: int) -> TextStream:
    stream = TextStream(link, lambda _: None, max_unread_bytes=most)
    stream.requests = [7]
    return stream


@pytest.mark.parametrize("tops", [0, 20])
def test_a_reader_that_does_not_read_loses_its_request(tops: int) -> None:
    link = Link()
    stream = stream_of(link, 100_000)
    top = [TopLogProbs(-1.0, 1, list(range(tops)), [-1.0] * tops)]
    count = 0
    while not stream.ended:
        stream.put_row(0, Event(7, 0, [5], top_log_probs=top if tops else []))
        count += 1
        assert count < 1000
    assert count > (20 if tops else 200) and link.cancelled == [7]
    stream.put_row(0, Event(7, 0, [5]))  # one that was in flight
    with pytest.raises(CapacityError, match="does not read"):
        stream.take()


def test_a_reader_that_reads_never_does() -> None:
    link = Link()
    stream = stream_of(link, 100_000)
    for _ in range(50):
        for _ in range(100):
            stream.put_row(0, Event(7, 0, [5]))
        stream.take()
    assert not stream.ended and not link.cancelled
