"""Drafts with a draft model, which samples the next tokens of each row with the target's random numbers."""

from __future__ import annotations

from dataclasses import replace

import torch

from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.drafters.sequential_drafter import SequentialDrafter
from tridecode.backend.engine.device.step_sampler import StepSampler
from tridecode.backend.models.context import Context
from tridecode.kernels.operands import Batch


class ModelDrafter(SequentialDrafter):
    """Runs DeviceState.draft on the tokens of steps with prompts, and after each step whose rows get drafts.

    sampler, step_ids, turns: as for SequentialDrafter.
    """

    def __init__(self, state: DeviceState, sampler: StepSampler, step_ids: torch.Tensor | None, turns: int):
        assert state.draft is not None
        self._draft = state.draft
        super().__init__(state, sampler, step_ids, self._draft.work.hidden, turns)
        self._first = len(state.model.layers) + len(state.draft_layers)
        self._num_layers = self._draft.config.num_layers
        state.draft_layers += self._draft.block_shapes(state.config.block_tokens, state.ranks.tensor_size)

    def _read(self, batch: Batch) -> None:
        self._forward(batch)

    def _logits(self, batch: Batch) -> torch.Tensor:
        tokens = batch.decode_queries
        if tokens > 1:
            rows = {name: getattr(batch, name)[tokens - 1 :: tokens].contiguous() for name in _SAMPLED}
            batch = replace(batch, memo={}, **rows)
        return self._draft.model.logits(*self._forward(batch))

    def _forward(self, batch: Batch) -> tuple[Context, torch.Tensor]:
        state, draft = self._state, self._draft
        context = Context(state.ops, state.ranks, draft.work, batch)
        x = draft.work.hidden[: batch.num_tokens]
        draft.model.embed(context, x)
        draft.model.forward(context, x, state.caches[self._first : self._first + self._num_layers])
        return context, x


_SAMPLED = ("sample_tokens", "sample_slots")
