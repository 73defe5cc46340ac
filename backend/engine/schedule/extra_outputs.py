"""Outputs of one sequence besides its tokens: logits, the prompt's log probability, metrics. No torch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import cast

from tridecode.backend.wire.messages import EventExtra, Perf
from tridecode.backend.wire.sampling_params import SamplingParams

#: bytes, or a view of an array of logits
Buffer = bytes | memoryview


@dataclass
class ExtraOutputs:
    """The outputs of one sequence besides its tokens.

    planned: positions of the prompt whose logits were planned; they run once, also if the sequence is
    preempted. The others are results that no event has carried yet.

    drafted, accepted: draft counts of an engine that is gone and had begun the request. context: (n, V)
    float32 bytes. generation: (n, V) float32 bytes. log_prob: of the prompt so far.
    """

    planned: int = 0
    arrived_ns: int = field(default_factory=time.time_ns)
    scheduled_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    blocks: int = 0  # most cache blocks held at a time
    reused: int = 0  # of them, found in the cache
    missed: int = 0  # of those of the prompt, not found
    drafted: int = 0
    accepted: int = 0
    context: list[Buffer] = field(default_factory=list)
    generation: list[Buffer] = field(default_factory=list)
    log_prob: float = 0.0

    @property
    def has_news(self) -> bool:
        """Return whether a result must not wait for the next token."""
        return bool(self.context)

    def split(self, prompt_tokens: int) -> ExtraOutputs:
        """Return those of a fork, whose parent returns what belongs to the prompt."""
        return ExtraOutputs(prompt_tokens, self.arrived_ns, self.scheduled_ns)

    def take(
        self, params: SamplingParams, num_tokens: int, finished: bool, drafts: tuple[int, int] = (0, 0)
    ) -> EventExtra | None:
        """Return what the next event carries, or None. num_tokens: of the event. drafts: how many
        this engine has verified for the sequence, and how many were right."""
        perf = None
        if params.return_perf_metrics and (num_tokens or finished):
            perf = self._perf(num_tokens > 0, drafts)
        log_prob, self.log_prob = self.log_prob, 0.0
        context, self.context = self.context, []
        generation, self.generation = self.generation[:num_tokens], self.generation[num_tokens:]
        if not (context or generation or log_prob or perf):
            return None
        return EventExtra(_joined(context), _joined(generation), log_prob, perf)

    def _perf(self, has_token: bool, drafts: tuple[int, int]) -> Perf:
        """Return the metrics so far: a door may end the text before the engine does."""
        if has_token:
            self.last_ns = time.time_ns()
            self.first_ns = self.first_ns or self.last_ns
        new = self.blocks - self.reused
        times = self.arrived_ns, self.scheduled_ns, self.first_ns, self.last_ns
        verified, right = drafts
        counts = self.drafted + verified, self.accepted + right
        return Perf(*times, new, self.reused, *counts, self.missed)


def _joined(parts: list[Buffer]) -> bytes:
    """Return the parts as one; a single part is not copied."""
    return cast(bytes, parts[0]) if len(parts) == 1 else b"".join(parts)
