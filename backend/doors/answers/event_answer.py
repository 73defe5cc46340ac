"""Passes the engine's events on as they are, for requests with `sampling_params`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tridecode.backend.doors.contracts.field import EVENTS
from tridecode.backend.doors.door import Outputs
from tridecode.backend.wire.messages import Event, SequenceRequest, encode


class EventAnswer:
    """A response holds all events that wait for it, (1, n) MessagePack texts; `sequence` counts over the
    request's rows.
    """

    def __init__(self, outputs: Outputs, asked: Sequence[SequenceRequest], streamed: bool):
        """asked: the rows. streamed: False: one response holds all events."""
        self.finished = False
        self.num_output_tokens = 0
        self.num_rows = sum(one.params.num_sequences for one in asked)
        self._outputs, self._streamed = outputs, streamed
        self._open = set(range(self.num_rows))
        self._waiting: list[bytes] = []

    def take(self, events: Sequence[tuple[int, Event]]) -> list[list]:
        for row, event in events:
            self.num_output_tokens += len(event.tokens)
            self._waiting.append(encode(msgspec.structs.replace(event, request=0, sequence=row)))
            if event.finish:
                self._open.discard(row)
        self.finished = not self._open
        if not self._waiting or not (self._streamed or self.finished):
            return []
        waiting, self._waiting = self._waiting, []
        return [self._outputs.tensors({EVENTS.name: [waiting]})]
