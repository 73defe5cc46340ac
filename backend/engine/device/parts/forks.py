"""Copies of cache blocks and of sampling state on the device."""

from __future__ import annotations

import torch

from tridecode.backend.engine.device.parts.part_run import PartRun
from tridecode.backend.engine.device.sampling import copy_slots
from tridecode.backend.engine.parts.forks import Forks


class ForksRun(PartRun[Forks]):
    def before(self) -> None:
        state = self.state
        if self.part.blocks:
            sources, destinations = torch.tensor(self.part.blocks, device=state.device).unbind(1)
            for cache in state.caches:
                for tensor in cache.tensors:
                    tensor[destinations] = tensor[sources]
        if self.part.slots:
            copy_slots(state.sampling, *zip(*self.part.slots))
