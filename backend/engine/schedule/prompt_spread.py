"""Limits the prompts that begin in a step. Host only: no torch.

Spread: while sequences queue for few slots. Sequences of equal length that begin together also end together.
One step then computes all their prompts, and the steps in between read all weights for few rows. If prompts
begin at different steps, decode rows run in steps whose prefill takes longer than reading the weights. A step
therefore admits about the average number of prefill tokens of the previous steps, for any prompt lengths. The
gain: tools/bench/studies/step_model.py and docs/lab/loads.md.

Background: prompts of the lowest priority, while other requests are served. Such a prompt (a line of a
batch) delays the first token of everybody whose prompt comes with it or behind it: 64 lines of 128 tokens
in one step take LLaMA-3-8B 90 ms on an H200, and a first token next to none of them takes 15 ms. So while
requests of another priority come, a step has about as many tokens of such prompts as the steps before it
on average, and none where it has a prompt of another priority.
"""

from __future__ import annotations

from tridecode.backend.base.priority import LOWEST_PRIORITY
from tridecode.backend.engine.schedule.admission import SchedulerLimits
from tridecode.backend.engine.schedule.sequence import Sequence

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


#: steps after the last prompt of another priority for which the limit holds: 4 to 8 s
ATTENTIVE_STEPS = 1024
#: smallest limit in tokens: with 64 decoding rows it makes a step of LLaMA-3-8B 3 ms longer on an H200
FEWEST_TOKENS = 256
#: number of steps that the mean of such prompts covers
BACKGROUND_STEPS = 32


def is_background(sequence: Sequence) -> bool:
    """Return whether the sequence waits for everything else."""
    return sequence.group.priority >= LOWEST_PRIORITY


class Background:
    """The number of tokens that prompts of the lowest priority may have in the next step."""

    def __init__(self, max_step_tokens: int):
        self._unlimited = max_step_tokens
        self._steps_since = ATTENTIVE_STEPS  # the last prompt of another priority
        self._mean = 0.0  # tokens of such prompts in a step
        self._taken = 0  # in the step that is planned
        self._has_other = False  # the step that is planned has a prompt of another priority
        self.is_paused = False  # the step takes no such prompts for now

    def begin_step(self) -> None:
        """Open the next step."""
        self._mean += (self._taken - self._mean) / BACKGROUND_STEPS
        self._steps_since += 1
        self._taken, self._has_other, self.is_paused = 0, False, False

    @property
    def tokens_left(self) -> int:
        """Return the number of tokens that the step may still take."""
        if self._has_other or self.is_paused:
            return 0
        if self._steps_since >= ATTENTIVE_STEPS:
            return self._unlimited
        return max(FEWEST_TOKENS, int(GROWTH * self._mean)) - self._taken

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        """Record a chunk of the step."""
        if is_background(sequence):
            self._taken += num_tokens
        else:
            self._steps_since, self._has_other = 0, True
