"""Drafts with a chosen number of accepted tokens, at the full cost of a drafter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tridecode.backend.engine.device.drafters.drafter import DeviceDrafter, SampledStep
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.pending import Found
from tridecode.backend.engine.step.plan import StepPlan
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
        self._drafter, self.is_planned = drafter, drafter.is_planned
        self.source, self.most_drafts = drafter.source, drafter.most_drafts
        self.keeps_cache = drafter.keeps_cache
        self._rows = {tuple(prompt): row for row, (prompt, _) in enumerate(answers)}
        longest = max(len(answer) for _, answer in answers) + 1
        tokens = [[*answer, *[0] * (longest + MOST_DRAFTS - len(answer))] for _, answer in answers]
        following = torch.tensor(tokens, dtype=torch.int32).unfold(1, MOST_DRAFTS, 1)[:, :longest]
        is_right = torch.arange(MOST_DRAFTS) < right
        drafts = torch.where(is_right, following, (following + 1) % engine.model_config.vocab_size)
        #: drafts behind each number of generated tokens, of one answer after the other
        self._drafts = drafts.reshape(-1, MOST_DRAFTS).to(engine.device)
        self._longest = longest
        #: place of each slot's answer in _drafts
        self._firsts = torch.zeros(engine.config.slots, dtype=torch.int64, device=engine.device)

    def begin(self, plan: StepPlan) -> None:
        self._drafter.begin(plan)

    def follow(self, batch: Batch, hidden: torch.Tensor) -> None:
        self._drafter.follow(batch, hidden)

    def sampled(self, batch: Batch) -> None:
        self._drafter.sampled(batch)

    @torch.inference_mode()
    def propose(self, step: SampledStep) -> Found | None:
        """DeviceDrafter.propose; the match is reported as a long one, so that every row has drafts."""
        state = step.state
        for start in step.plan.starts:
            self._firsts[start.slot] = self._rows[tuple(start.history.tolist())] * self._longest
        found = self._drafter.propose(step)
        # few and small kernels: they stand between two steps
        places = (self._firsts + state.column("generated")).clamp_(max=len(self._drafts) - 1)
        torch.index_select(self._drafts, 0, places, out=state.drafts)
        if found is None:
            return None
        rows = found[0]
        return rows, torch.from_numpy(np.tile(np.array([32, OWN, 0], np.int32), (len(rows), 1)))
