"""The masks of a step's tokens on the device."""

from __future__ import annotations

import numpy as np
import torch

from tridecode.backend.engine.device.parts.part_run import PartRun
from tridecode.backend.engine.device.sampling import on_device
from tridecode.backend.engine.parts.masks import Masks


class MasksRun(PartRun[Masks]):
    def before(self) -> None:
        state = self.state
        if not state.is_last_stage:
            return
        slots = on_device(torch.from_numpy(self.part.slots.astype("int64")), state.device)
        masks = np.require(self.part.masks, requirements="W")  # arrays of a decoded frame are read-only
        state.sampling.masks[slots] = on_device(torch.from_numpy(masks), state.device)
