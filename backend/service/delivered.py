"""Records the events that a door has received, from which another engine can continue a request."""

from __future__ import annotations

from array import array

import numpy as np

from tridecode.backend.wire.messages import BeamStep, Event, Perf, Sent

_LOGIT_BYTES = 4  # float32


class DeliveredSequence:
    """The events of one sequence so far, without values that only the client needed."""

    __slots__ = ("_context_bytes", "_perf", "_steps", "_tokens", "ended")

    def __init__(self) -> None:
        self.ended = False
        self._tokens = array("i")
        self._context_bytes = 0
        self._perf: Perf | None = None
        self._steps: list[BeamStep] = []

    def take(self, event: Event) -> None:
        self._tokens.extend(event.tokens)
        if event.beams is not None:
            self._steps.append(event.beams)
        if event.extra is not None:
            self._context_bytes += len(event.extra.context_logits)
            self._perf = event.extra.perf or self._perf
        self.ended = self.ended or bool(event.finish)

    @property
    def num_tokens(self) -> int:
        return len(self._tokens) + len(self._steps)

    def sent(self, vocab_size: int) -> Sent:
        if self.ended:
            return Sent(ended=True)
        return Sent(
            np.asarray(self._tokens, "<i4").tobytes(),
            False,
            self._context_bytes // (_LOGIT_BYTES * vocab_size),
            self._perf,
            self._steps,
        )


class Delivered:
    """The sequences of one request, in order of their first events."""

    def __init__(self, num_sequences: int):
        self.sequences = [DeliveredSequence() for _ in range(num_sequences)]

    def take(self, event: Event) -> None:
        self.sequences[event.sequence].take(event)

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    def sent(self, vocab_size: int) -> list[Sent]:
        return [sequence.sent(vocab_size) for sequence in self.sequences]
