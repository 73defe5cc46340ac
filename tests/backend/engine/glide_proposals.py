"""Notes the drafts of a GLIDE layer in an engine, and compares them with the paper's module."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tests.backend.engine.glide_layers import PaperGlide
from tridecode.backend.engine.device.drafters.drafter import SampledStep
from tridecode.backend.engine.device.drafters.glide import GlideDrafter
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.parts.drafting import Drafting
from tridecode.backend.engine.schedule.sequence import Sequence
from tridecode.kernels.operands import Batch


@dataclass
class Proposal:
    """The drafts of one row. place: of its newest token. logits: (drafts, V), before they were drawn from."""

    sequence: Sequence
    place: int
    drafts: list[int]
    logits: np.ndarray

    @property
    def text(self) -> list[int]:
        return [*self.sequence.prompt.tolist(), *self.sequence.output]


def recorded(offline: OfflineEngine) -> list[Proposal]:
    """Return a list that gets every proposal of an engine that decodes greedily."""
    drafter, proposals, seen = offline.engine.drafter, [], []
    assert isinstance(drafter, GlideDrafter)
    propose, logits_of = drafter.propose, drafter._logits

    def propose_and_note(step: SampledStep) -> None:
        seen.clear()
        propose(step)
        part = step.plan.part(Drafting)
        if part is None:
            return
        for row, number in enumerate(part.rows.tolist()):
            slot = int(step.plan.slots[number])
            place = int(drafter._newest.lengths[slot]) - part.count
            drafts = step.state.drafts[slot, : part.count].tolist()
            logits = torch.stack([one[row] for one in seen]).cpu().numpy()
            proposals.append(Proposal(step.plan.sequences[number], place, drafts, logits))

    def logits_and_note(batch: Batch) -> torch.Tensor:
        found = logits_of(batch)
        seen.append(found.clone())
        return found

    drafter.propose, drafter._logits = propose_and_note, logits_and_note  # type: ignore[method-assign]
    return proposals


def check_proposals(proposals: list[Proposal], paper: PaperGlide) -> int:
    """Compare all proposals with the module; return their number."""
    checked = 0
    for one in proposals:
        if one.place >= len(one.text):  # behind the end of the answer
            continue
        wanted, logits = paper.drafts(one.text[: one.place + 1], one.place, len(one.drafts))
        bound = 1e-4 * float(logits.abs().max())
        np.testing.assert_allclose(one.logits, logits.numpy(), rtol=0, atol=bound)
        assert one.drafts == wanted
        checked += 1
    return checked
