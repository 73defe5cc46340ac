"""How many prompts begin in a step while sequences queue for few slots. Host only: no torch.

Sequences of equal length that begin together end together. One step then computes all their prompts, and the
steps between have a few rows, for which all weights are read. If prompts begin at different steps, decoding
rows run in steps whose prompts take longer than reading the weights. So a step admits about as many tokens of
prompts as the steps before it had on average, whatever the lengths are. The gain:
tools/bench/studies/step_model.py and docs/lab/loads.md.
"""

from __future__ import annotations

from tridecode.backend.engine.schedule.admission import SchedulerLimits

#: A step with prompts costs 2 ms more than its tokens (LAMBADA's prompts on an H200), and decoding rows in it
#: what they take to multiply: with more slots, and so fewer steps without prompts, spreading is a loss.
MOST_SLOTS = 32
#: the mean is over about so many steps, and may grow by this factor from step to step
STEPS, GROWTH = 16, 1.25


class Spread:
    """limits.spread_tokens: the fewest tokens that a step is limited to; 0: no step is."""

    def __init__(self, limits: SchedulerLimits):
        self._fewest, self._unlimited = limits.spread_tokens, limits.max_step_tokens
        if limits.max_sequences > MOST_SLOTS or limits.micro_batches > 1:
            self._fewest = 0
        self._mean = 0.0  # tokens of prompts in a step

    def tokens(self, waiting: int, free_slots: int) -> int:
        """Once a step has admitted prompts of so many tokens, it admits no more. waiting: sequences without a
        slot."""
        if self._fewest == 0 or waiting <= free_slots:
            return self._unlimited
        return max(self._fewest, int(GROWTH * self._mean))

    def note(self, prompt_tokens: int) -> None:
        """A step with so many tokens of prompts was planned."""
        self._mean += (prompt_tokens - self._mean) / STEPS
