"""Limits the prompts that begin in a step while sequences queue for few slots. Host only: no torch.

Sequences of equal length that begin together also end together. One step then computes all their prompts, and
the steps in between read all weights for few rows. If prompts begin at different steps, decode rows run in
steps whose prefill takes longer than reading the weights. A step therefore admits about the average number of
prefill tokens of the previous steps, for any prompt lengths. The gain:
tools/bench/studies/step_model.py and docs/lab/loads.md.
"""

from __future__ import annotations

from tridecode.backend.engine.schedule.admission import SchedulerLimits

#: A prefill step has a fixed cost of 2 ms (LAMBADA's prompts on an H200), and decode rows in it cost their
#: multiplications: with more slots, and so fewer steps without prefill, spreading loses.
MOST_SLOTS = 32
#: number of steps that the mean covers, and the factor by which it may grow from step to step
STEPS, GROWTH = 16, 1.25


class Spread:
    """limits.spread_tokens: the smallest budget of a step; 0: no budget."""

    def __init__(self, limits: SchedulerLimits):
        self._fewest, self._unlimited = limits.spread_tokens, limits.max_step_tokens
        if limits.max_sequences > MOST_SLOTS or limits.micro_batches > 1:
            self._fewest = 0
        self._mean = 0.0  # prefill tokens of a step

    def tokens(self, waiting: int, free_slots: int) -> int:
        """Return the prefill budget of a step: once the admitted prompts reach it, no more are admitted.

        waiting: sequences without a slot.
        """
        if self._fewest == 0 or waiting <= free_slots:
            return self._unlimited
        return max(self._fewest, int(GROWTH * self._mean))

    def note(self, prompt_tokens: int) -> None:
        """Record the prefill tokens of a planned step."""
        self._mean += (prompt_tokens - self._mean) / STEPS
