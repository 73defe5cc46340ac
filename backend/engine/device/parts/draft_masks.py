"""The masks of rows with drafts: they are applied to the logits, before any sampler reads them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.device.parts.part_run import PartRun
from tridecode.backend.engine.device.sampling import on_device
from tridecode.backend.engine.parts.draft_masks import DraftMasks

#: rows of logits that are masked together, which bounds the memory: about 9 bytes of each logit
_ROWS = 8


class DraftMasksRun(PartRun[DraftMasks]):
    """A slot's mask holds for one token, so the slots of these rows allow all ids in this step."""

    def before(self) -> None:
        state = self.state
        if state.is_last_stage:
            slots = torch.from_numpy(self.plan.slots[self.part.rows].astype(np.int64))
            state.sampling.masks[on_device(slots, state.device)] = -1

    def after_logits(self, logits: Tensor | None, like: Tensor) -> None:
        if logits is None:
            return
        plan, rows, device = self.plan, self.part.rows, logits.device
        words = self.state.sampling.masks.shape[1]
        if self.part.masks.shape[1] != words:
            raise TridecodeError(f"masks of drafts have {self.part.masks.shape[1]} words; wanted {words}")
        ends = np.cumsum(plan.samples)
        places = np.concatenate([np.arange(ends[row] - plan.samples[row], ends[row]) for row in rows])
        where = on_device(torch.from_numpy(places.astype(np.int64)), device)
        bits = np.array(self.part.masks, "<i4").view(np.uint8)  # byte i has the ids from 8 i on
        masks = on_device(torch.from_numpy(bits), device)
        ids = torch.arange(logits.shape[1], device=device) + self.state.first_id
        column, bit = (ids // 8).clamp(max=masks.shape[1] - 1), (1 << ids % 8).to(torch.uint8)
        for first in range(0, len(places), _ROWS):
            mine = where[first : first + _ROWS]
            is_excluded = (masks[first : first + _ROWS].index_select(1, column) & bit) == 0
            logits[mine] = logits[mine].masked_fill_(is_excluded, -torch.inf)
