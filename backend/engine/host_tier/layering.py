"""Decides which prompts are computed while their blocks come in from the host tier. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from tridecode.backend.engine.schedule.sequence import Sequence


@dataclass
class Layering:
    """The rule. A step with such copies runs without a CUDA graph, and its prompt continues only once their
    checksums are known, so short copies and short prompts gain nothing.

    least_tokens: fewest tokens of the prompt that are not in a block of the tier. least_copy_s: shortest
    predicted copy.
    """

    is_used: bool = True
    least_tokens: int = 1025
    least_copy_s: float = 0.006

    def suits(self, sequence: Sequence, own_tokens: int, blocks: int, copy_s: float | None) -> bool:
        """Return whether a sequence with own_tokens tokens to compute begins while its blocks come in.

        copy_s: predicted seconds per block; None: unknown.
        """
        if not self.is_used or copy_s is None or own_tokens < self.least_tokens:
            return False
        return blocks * copy_s >= self.least_copy_s and _is_simple(sequence)


def _is_simple(sequence: Sequence) -> bool:
    """Return whether the first token is all that the step of its prompt yields, so that a step over wrong
    blocks can be repeated.
    """
    group = sequence.group
    shares = group.has_samples or group.search is not None or group.row is not None
    yields = sequence.embedding is not None or sequence.extra_outputs is not None
    return not (shares or yields or sequence.constraint is not None or sequence.params.top_log_probs >= 0)
