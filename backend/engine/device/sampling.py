"""Initialises and copies slots of the sampling state on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tridecode.backend.engine.grammars.token_masks import mask_of
from tridecode.backend.engine.parts.beams import BeamRows
from tridecode.backend.engine.step.plan import SlotStart
from tridecode.backend.wire.sampling_params import SamplingParams
from tridecode.kernels.sampling_rules import remember
from tridecode.kernels.sampling_state import MOST_COUNTED, SLOT, SamplingState, SlotRows, words

#: a parameter with the name of a column is copied unchanged
_PARAMETERS = [name for name in SLOT.names or () if name in SamplingParams.__struct_fields__]

#: up to this many slots are written one by one
_FEW_SLOTS = 2


def start_slots(state: SamplingState, starts: list[SlotStart], first_id: int = 0) -> None:
    """Initialise the slots of the sequences that start in this step.

    first_id: id of state.counts' first column.
    """
    device = state.slots.device
    rows = np.zeros(len(starts), SLOT)
    for name in _PARAMETERS:
        rows[name] = [getattr(start.params, name) for start in starts]
    rows["temperature"] = [start.params.divisor for start in starts]
    rows["end_ids"] = -1
    for row, start in zip(rows, starts):
        row["end_ids"][: len(start.params.end_ids)] = start.params.end_ids
    rows["num_bad_words"] = [len(start.params.bad_words) for start in starts]
    rows["num_biases"] = [len(start.params.logit_bias) for start in starts]
    rows["top_p_now"] = [start.top_p for start in starts]
    rows["masked"] = [start.masked or bool(start.params.allowed_token_ids) for start in starts]
    rows["generated"] = [start.generated for start in starts]
    rows["history_length"] = [len(start.history) for start in starts]
    slots = [start.slot for start in starts]
    _store_slots(state, slots, rows)
    state.started[slots] = rows
    for start in starts:
        params, slot = start.params, start.slot
        if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0):
            first = 0 if params.count_prompt else len(start.history) - start.generated
            columns = state.counts.shape[1]
            known = start.history[first:].astype(np.int64) - first_id
            ids = on_device(torch.from_numpy(known[(known >= 0) & (known < columns)]), device)
            counts = torch.bincount(ids, minlength=columns)
            state.counts[slot] = counts.clamp(max=MOST_COUNTED).to(torch.int16)
        if params.bad_words:
            ends = np.cumsum([len(word) for word in params.bad_words])
            _put(state.bad_ids[slot], [token for word in params.bad_words for token in word])
            _put(state.bad_ends[slot], ends)
        if params.bad_words or params.no_repeat_ngram_size:
            _put(state.history[slot], start.history)
        if params.allowed_token_ids and not start.masked:  # else the step may have brought the first mask
            _put(state.masks[slot], mask_of(params.allowed_token_ids, state.masks.shape[1]))
        if params.logit_bias:
            pairs = np.array(list(params.logit_bias.items()), dtype="<i4,<f4")
            _put(state.biases[slot], pairs.view("<i4").reshape(-1, 2))


def _store_slots(state: SamplingState, slots: list[int], rows: np.ndarray) -> None:
    """Write SLOT records to these slots on the device.

    A few records are copied one by one, because index tensors on the device take the host longer, and the
    first step of a request waits for this.
    """
    held, device = words(rows), state.slots.device
    if len(slots) > _FEW_SLOTS:
        state.slots[on_device(torch.tensor(slots), device)] = on_device(held, device)
        return
    pinned = held if device.type == "cpu" else held.pin_memory()
    for slot, row in zip(slots, pinned):
        state.slots[slot].copy_(row, non_blocking=True)


def copy_slots(state: SamplingState, sources: Sequence[int], destinations: Sequence[int]) -> None:
    """Copy all state of slot sources[i] to slot destinations[i], for every i at once, on the device.

    A copied sequence draws the same tokens as the original: a fork that should differ needs its own seed. No
    destination occurs twice.
    """
    both = on_device(torch.tensor([sources, destinations], dtype=torch.int64), state.slots.device)
    for tensor in state.tensors():
        tensor[both[1]] = tensor[both[0]]
    state.started[list(destinations)] = state.started[list(sources)]


def beam_slots(state: SamplingState, beams: BeamRows, first_id: int = 0) -> tuple[torch.Tensor, SlotRows]:
    """Return (n,) int64 logits rows of a plan's beams, and their slots after adding the tokens that the plan
    carries.

    first_id: id of state.counts' first column.
    """
    device = state.slots.device

    def whole(values: np.ndarray) -> torch.Tensor:
        return on_device(torch.from_numpy(values.astype(np.int64)), device)

    def rows(slots: np.ndarray) -> SlotRows:
        return SlotRows(state, whole(slots), state.started[slots], first_id)

    is_new = beams.tokens >= 0
    if is_new.any():
        remember(rows(beams.slots[is_new]), whole(beams.tokens[is_new]))
    return whole(beams.rows), rows(beams.slots)


def _put(to: torch.Tensor, values: np.ndarray | list[int]) -> None:
    """Copy int32 values to the beginning of a tensor."""
    to[: len(values)] = on_device(torch.tensor(np.asarray(values), dtype=torch.int32), to.device)


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on the device, made without waiting for the device."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
