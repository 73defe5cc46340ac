"""The masks of rows with drafts, one behind each of their tokens."""

from __future__ import annotations

import numpy as np
import torch

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.device.parts.part_run import PartRun
from tridecode.backend.engine.device.sampling import on_device
from tridecode.backend.engine.parts.draft_masks import DraftMasks
from tridecode.backend.models.context import Context


class DraftMasksRun(PartRun[DraftMasks]):
    """Writes the masks behind those of the slots, and their place to the slots (SamplingState.masks)."""

    def before(self) -> None:
        state, masks = self.state, self.part.masks
        if not state.is_last_stage:
            return
        first, words = len(state.sampling.slots), state.sampling.masks.shape[1]
        if masks.shape[1] != words:
            raise TridecodeError(f"masks of drafts have {masks.shape[1]} words; wanted {words}")
        values = on_device(torch.from_numpy(np.ascontiguousarray(masks)), state.device)
        state.sampling.masks[first : first + len(masks)].copy_(values)
        self._place()

    def after_forward(self, context: Context, x: torch.Tensor) -> None:
        if self.plan.starts and self.state.is_last_stage:  # a slot start has replaced the place
            self._place()

    def _place(self) -> None:
        state, rows = self.state, self.part.rows
        counts = self.plan.samples[rows]
        places = np.cumsum(counts) - counts + len(state.sampling.slots)
        packed = torch.from_numpy(np.stack([self.plan.slots[rows], places]).astype(np.int64))
        slots, values = on_device(packed, state.device).unbind(0)
        state.sampling.column("masked").index_copy_(0, slots, values.int())
