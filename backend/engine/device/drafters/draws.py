"""Draws drafts from logits as the target's sampler would draw its tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.sampling import on_device
from tridecode.backend.engine.device.step_sampler import StepSampler
from tridecode.kernels.sampling_rules import is_penalised
from tridecode.kernels.sampling_state import SamplingState


class DraftDraws:
    """A sampler of its own on a copy of the slots' state: only tokens that are kept may change the target's.

    A draft is drawn by the rules of its slot and with the noise of its token's number. So it is right where
    the drafter's logits and the target's give the same token, also at a temperature.
    """

    def __init__(self, state: DeviceState):
        target = state.sampling
        own = {name: getattr(target, name).clone() for name in ("slots", "last_tokens", "lengths", "counts")}
        # a history is written behind its end only, where the target's sampler overwrites it
        self.sampling = replace(target, **own)
        self.sampler = StepSampler(state, 0, self.sampling)

    def take(self, state: SamplingState, slots: np.ndarray) -> None:
        """Copy what drawing a token changes, of these slots, from the target's state."""
        own = self.sampling
        own.slots.copy_(state.slots)
        own.last_tokens.copy_(state.last_tokens)
        own.lengths.copy_(state.lengths)
        penalised = slots[is_penalised(state.started[slots])]
        if len(penalised):
            where = on_device(torch.from_numpy(penalised.astype(np.int64)), state.counts.device)
            own.counts.index_copy_(0, where, state.counts.index_select(0, where))

    def draw(self, logits: Tensor, slots: Tensor) -> Tensor:
        """Return the next token of each slot, (R,) int32, valid until the next call; 0 for a row without one.

        logits: (R, V) of this rank's ids, which change. slots: (R,) int32; -1: none.
        """
        return self.sampler.draw(logits, slots).clamp(min=0)
