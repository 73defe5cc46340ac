"""Samples drafts from logits like the target's sampler."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.sampling import on_device
from tridecode.backend.engine.device.step_sampler import StepSampler
from tridecode.kernels.sampling_rules import is_penalised


class DraftDraws:
    """A sampler on a copy of the slots' state, because only accepted tokens may change the target's state.

    A draft is sampled by the rules of its slot and with the noise of its token's number. It is therefore
    right if the drafter's logits and the target's give the same token, also at a temperature above 0.
    """

    def __init__(self, state: DeviceState):
        target = self._target = state.sampling
        own = {name: getattr(target, name).clone() for name in ("slots", "last_tokens", "lengths", "counts")}
        # a history is only written beyond its end, where the target's sampler overwrites it
        self.sampling = replace(target, **own)
        self.sampler = StepSampler(state, 0, self.sampling)

    def take_counts(self, slots: np.ndarray) -> None:
        """Copy the counts of tokens from the target's state, for those of these slots that have penalties."""
        own, target = self.sampling, self._target
        penalised = slots[is_penalised(target.started[slots])]
        if len(penalised):
            where = on_device(torch.from_numpy(penalised.astype(np.int64)), own.counts.device)
            own.counts.index_copy_(0, where, target.counts.index_select(0, where))

    def take(self, keeps: Tensor) -> None:
        """Copy the other state that sampling a token changes from the target's; may be captured.

        keeps: (S,) int32, 0 for a slot whose sequence obeys a grammar: its mask is that of another token, so
        drafts have none; else 1.
        """
        self.sampling.slots.copy_(self._target.slots)
        self.sampling.column("masked").mul_(keeps)

    def draw(self, logits: Tensor, slots: Tensor) -> Tensor:
        """Return the next token of each slot, (R,) int32, valid until the next call; 0 for a row without one.

        logits: (R, V) of this rank's ids, which change. slots: (R,) int32; -1: none.
        """
        return self.sampler.draw(logits, slots).clamp(min=0)
