"""Rebuilds the beams of a request from the steps in its events, which carry parents and tokens instead of
texts.
"""

from __future__ import annotations

from dataclasses import dataclass

from tridecode.backend.wire.messages import BeamStep


@dataclass(frozen=True)
class BeamText:
    """tokens: generated so far. log_probs: natural logarithms, one for each. Immutable."""

    tokens: list[int]
    log_probs: list[float]
    cum_log_prob: float = 0.0


class BeamTree:
    """The current beams of one beam search, best first: one empty text before the first step."""

    def __init__(self) -> None:
        self.beams = [BeamText([], [])]

    def take(self, step: BeamStep) -> list[BeamText]:
        """Return the beams after a step; see BeamStep."""
        before = self.beams
        self.beams = [
            before[parent] if token < 0 else _longer(before[parent], token, log_prob)
            for parent, token, log_prob in zip(step.parents, step.tokens, step.log_probs)
        ]
        return self.beams


def _longer(beam: BeamText, token: int, log_prob: float) -> BeamText:
    return BeamText([*beam.tokens, token], [*beam.log_probs, log_prob], beam.cum_log_prob + log_prob)
