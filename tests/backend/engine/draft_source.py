"""Forced drafts for engines under test: a random number of the tokens that follow, then wrong ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from tridecode.backend.engine.device.drafters.drafter import DeviceDrafter, SampledStep
from tridecode.backend.engine.schedule.sequence import Sequence
from tridecode.kernels.sampling_state import MOST_DRAFTS


class ForcedDrafts(DeviceDrafter):
    """The scheduler's Drafter and, with needs_token False, the device's too.

    answers: the tokens that each prompt gives one at a time; vocab_size: ids of wrong drafts stay below it.
    On the device the drafts depend on the slot and on the number of its tokens alone, so that all ranks write
    the same.
    """

    def __init__(
        self, answers: Mapping[tuple[int, ...], list[int]], vocab_size: int, needs_token: bool, seed: int = 0
    ):
        self.answers, self.vocab_size, self.needs_token = answers, vocab_size, needs_token
        self.random, self.seed = np.random.default_rng(seed), seed
        self.slots: dict[int, tuple[int, ...]] = {}  # the prompt of the sequence in each slot
        self.generated: dict[int, int] = {}  # its tokens so far
        self.counts: list[int] = []  # drafts of each row that was planned
        self.ahead = 0  # rows that were planned while a token of theirs was in flight

    def drafts(self, sequence: Sequence, most: int) -> np.ndarray:
        count = int(self.random.integers(0, most + 1))
        self.counts.append(count)
        self.ahead += sequence.in_flight > 0
        if not self.needs_token:
            return np.full(count, -1, np.int32)
        assert sequence.in_flight == 0
        answer = self.answers[tuple(sequence.prompt.tolist())]
        return np.array(self._after(answer, len(sequence.output), len(sequence.output))[:count], np.int32)

    def _after(self, answer: list[int], generated: int, salt: int) -> list[int]:
        right = int(np.random.default_rng([self.seed, salt, len(answer)]).integers(0, MOST_DRAFTS + 1))
        drafts = (answer[generated:] + [0] * MOST_DRAFTS)[:MOST_DRAFTS]
        return [token if i < right else (token + 1) % self.vocab_size for i, token in enumerate(drafts)]

    def propose(self, step: SampledStep) -> None:
        """Write the drafts of all slots of the plan. Reads the device, which no real drafter would; only
        what every stage of a pipeline has."""
        plan, state = step.plan, step.state
        for start in plan.starts:
            prompt = start.history[: len(start.history) - start.generated]
            self.slots[start.slot] = tuple(prompt.tolist())
            self.generated[start.slot] = start.generated
        lengths = state.lengths.tolist()
        for row, slot in enumerate(plan.slots.tolist()):
            prompt = self.slots[slot]
            if plan.queries and row < plan.num_decodes:
                self.generated[slot] = lengths[slot] + 1 - len(prompt)
            elif plan.samples[row]:
                self.generated[slot] += 1
            drafts = self._after(self.answers[prompt], self.generated[slot], self.generated[slot])
            state.drafts[slot] = torch.tensor(drafts, dtype=torch.int32).to(state.drafts.device)
