"""Chooses the drafter of an engine."""

from __future__ import annotations

from torch import Tensor

from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.drafters.combined import CombinedDrafter
from tridecode.backend.engine.device.drafters.drafter import DeviceDrafter
from tridecode.backend.engine.device.drafters.glide import GlideDrafter
from tridecode.backend.engine.device.drafters.heads import HeadsDrafter, HeadWeights
from tridecode.backend.engine.device.drafters.lookup import LookupDrafter
from tridecode.backend.engine.device.drafters.model_drafter import ModelDrafter
from tridecode.backend.engine.device.step_sampler import StepSampler
from tridecode.backend.engine.speculation.sources import RING_TOKENS
from tridecode.backend.weights.draft_files import GLIDE


def device_drafter(
    state: DeviceState, sampler: StepSampler, step_ids: Tensor | None, turns: int
) -> DeviceDrafter | None:
    """Return the drafter of the setting `speculation`; None if drafts come from the host, or there are none.

    step_ids: as for SequentialDrafter. turns: host buffers, more than steps in flight.
    """
    planned = _planned_drafter(state, sampler, step_ids, turns)
    if not state.config.looks_up or state.ranks.is_pipelined:
        return planned
    lookup = LookupDrafter(state, sampler, RING_TOKENS, turns)
    return lookup if planned is None else CombinedDrafter(state, lookup, planned)


def _planned_drafter(
    state: DeviceState, sampler: StepSampler, step_ids: Tensor | None, turns: int
) -> DeviceDrafter | None:
    if state.trained is not None and state.trained.info.kind == GLIDE:
        return GlideDrafter(state, sampler, step_ids, turns)
    if state.trained is not None:
        depth = min(state.trained.info.depth, state.config.max_draft_tokens)
        tensors = state.trained.tensors
        weights = HeadWeights.pack(tensors, depth, state.ops, state.dtype, state.device)
        return HeadsDrafter(state, weights, sampler, turns)
    if state.draft is not None:
        return ModelDrafter(state, sampler, step_ids, turns)
    return None
