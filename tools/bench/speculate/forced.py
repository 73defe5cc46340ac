"""Drafts with a chosen number of accepted tokens, at the full cost of a drafter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tridecode.backend.engine.device.drafters.drafter import DeviceDrafter, SampledStep
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.pending import Found
from tridecode.kernels.draft_history import OWN
from tridecode.kernels.operands import Batch
from tridecode.kernels.sampling_state import MOST_DRAFTS


class ForcedDrafts(DeviceDrafter):
    """Runs the engine's drafter at its full cost, then overwrites its drafts with the next `right` tokens of
    the answer, followed by wrong ones.

    answers: for each prompt, the tokens of its answer.
    """

    def __init__(
        self,
        engine: Engine,
        drafter: DeviceDrafter,
        right: int,
        answers: Sequence[tuple[Sequence[int], Sequence[int]]],
    ):
        self._drafter, self._right, self.is_planned = drafter, right, drafter.is_planned
        self.source, self.most_drafts = drafter.source, drafter.most_drafts
        self.keeps_cache = drafter.keeps_cache
        self._vocab_size, self._device = engine.model_config.vocab_size, engine.device
        self._rows = {tuple(prompt): row for row, (prompt, _) in enumerate(answers)}
        longest = max(len(answer) for _, answer in answers) + MOST_DRAFTS
        tokens = [[*answer, *[0] * (longest - len(answer))] for _, answer in answers]
        self._answers = torch.tensor(tokens, dtype=torch.int32, device=self._device)
        self._of_slot = torch.zeros(engine.config.slots, dtype=torch.int64, device=self._device)
        self._places = torch.arange(MOST_DRAFTS, device=self._device)

    def follow(self, batch: Batch, hidden: torch.Tensor) -> None:
        self._drafter.follow(batch, hidden)

    @torch.inference_mode()
    def propose(self, step: SampledStep) -> Found | None:
        """DeviceDrafter.propose; the match is reported as a long one, so that every row has drafts."""
        state = step.state
        for start in step.plan.starts:
            self._of_slot[start.slot] = self._rows[tuple(start.history.tolist())]
        found = self._drafter.propose(step)
        generated = state.column("generated").long()[:, None] + self._places
        drafts = self._answers[self._of_slot[:, None], generated.clamp(max=self._answers.shape[1] - 1)]
        wrong = (drafts + 1) % self._vocab_size
        state.drafts.copy_(torch.where(self._places < self._right, drafts, wrong))
        if found is None:
            return None
        rows = found[0]
        return rows, torch.from_numpy(np.tile(np.array([32, OWN, 0], np.int32), (len(rows), 1)))
