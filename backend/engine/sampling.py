"""The sampler's state on the device, and what a sequence that takes a slot puts there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from tridecode.backend.engine.plan import SlotStart
from tridecode.backend.sampling_params import SamplingParams, is_greedy
from tridecode.kernels import ops as o
from tridecode.kernels.ops import SamplingState


def allocate_state(
    slots: int, max_tokens: int, vocab_size: int, max_bad_word_tokens: int, device: torch.device
) -> SamplingState:
    """Zeros for `slots` sequences of up to max_tokens tokens."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    return SamplingState(
        ints=zeros(slots, o.NUM_INTS),
        floats=zeros(slots, o.NUM_FLOATS, dtype=torch.float32),
        top_p=zeros(slots, dtype=torch.float32),
        generated=zeros(slots),
        last_tokens=zeros(slots),
        history=zeros(slots, max_tokens),
        history_lens=zeros(slots),
        counts=zeros(slots, vocab_size, dtype=torch.int16),
        bad_ids=zeros(slots, max_bad_word_tokens),
        bad_ends=zeros(slots, max_bad_word_tokens),
    )


def flags_of(params: SamplingParams) -> int:
    """FLAGS of kernels.ops: what a step has to do for this sequence beyond the usual."""
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (
        1.0,
        0.0,
        0.0,
    )
    return (
        (o.GREEDY if is_greedy(params) else 0)
        | (o.PENALTIES if penalties else 0)
        | (o.BAD_WORDS if params.bad_words else 0)
        | (o.MIN_LENGTH if params.min_tokens > 0 else 0)
        | (o.LOG_PROBS if params.return_log_probs else 0)
        | (o.DECAY if params.top_p_decay < 1.0 else 0)
    )


def start_slots(state: SamplingState, starts: list[SlotStart]) -> None:
    """Put the sequences that start in this step into their slots."""
    device = state.ints.device
    ints = np.zeros((len(starts), o.NUM_INTS + 2), np.int32)  # and: generated, history length
    floats = np.zeros((len(starts), o.NUM_FLOATS + 1), np.float32)  # and: top_p
    for i, start in enumerate(starts):
        _fill(ints[i], floats[i], start)
    slots = _on_device(np.array([start.slot for start in starts], np.int64), device)
    on_device_ints, on_device_floats = _on_device(ints, device), _on_device(floats, device)
    state.ints[slots] = on_device_ints[:, : o.NUM_INTS]
    state.generated[slots] = on_device_ints[:, o.NUM_INTS]
    state.history_lens[slots] = on_device_ints[:, o.NUM_INTS + 1]
    state.floats[slots] = on_device_floats[:, : o.NUM_FLOATS]
    state.top_p[slots] = on_device_floats[:, o.NUM_FLOATS]
    for start, flags in zip(starts, ints[:, o.FLAGS].tolist()):
        if flags & o.PENALTIES:
            ids = _on_device(start.history.astype(np.int64), device)
            state.counts[start.slot] = torch.bincount(ids, minlength=state.counts.shape[1]).to(torch.int16)
        if flags & o.BAD_WORDS:
            _start_bad_words(state, start)


def copy_slots(state: SamplingState, sources: Sequence[int], destinations: Sequence[int]) -> None:
    """Copy all state of slot sources[i] to slot destinations[i], for every i at once, on the device."""
    device = state.ints.device
    both = _on_device(np.array([sources, destinations], np.int64), device)
    for field in dataclasses.fields(state):
        tensor = getattr(state, field.name)
        tensor[both[1]] = tensor[both[0]]


def _fill(ints: np.ndarray, floats: np.ndarray, start: SlotStart) -> None:
    params = start.params
    ints[o.FLAGS] = flags_of(params)
    ints[o.TOP_K] = min(params.top_k, 2**31 - 1)
    ints[o.TOP_P_RESET_ID] = params.top_p_reset_id
    ints[o.END_ID] = params.end_id
    ints[o.MIN_TOKENS] = params.min_tokens
    ints[[o.SEED_LOW, o.SEED_HIGH]] = np.array([params.seed], np.uint64).view(np.int32)
    ints[o.NUM_BAD_WORDS] = len(params.bad_words)
    ints[o.NUM_INTS] = start.generated
    ints[o.NUM_INTS + 1] = len(start.history)
    floats[o.TEMPERATURE] = params.temperature
    floats[o.TOP_P_INITIAL] = params.top_p
    floats[o.TOP_P_DECAY] = params.top_p_decay
    floats[o.TOP_P_MIN] = params.top_p_min
    floats[o.REPETITION] = params.repetition_penalty
    floats[o.PRESENCE] = params.presence_penalty
    floats[o.FREQUENCY] = params.frequency_penalty
    floats[o.NUM_FLOATS] = start.top_p


def _start_bad_words(state: SamplingState, start: SlotStart) -> None:
    words, device = start.params.bad_words, state.ints.device
    ids = np.array([token for word in words for token in word], np.int32)
    ends = np.cumsum([len(word) for word in words]).astype(np.int32)
    state.bad_ids[start.slot, : len(ids)] = _on_device(ids, device)
    state.bad_ends[start.slot, : len(ends)] = _on_device(ends, device)
    history = np.array(start.history)  # a copy: what arrived is read-only
    state.history[start.slot, : len(history)] = _on_device(history, device)


def _on_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy that the host does not wait for, whatever the device is still doing."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
