"""States of sampling with every setting mixed, of a whole vocabulary and of one rank's ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.weights.layout import VocabShare
from tridecode.kernels.sampling_state import SLOT, SamplingState

SLOTS, HISTORY = 64, 24


def cut(x: Tensor, share: VocabShare, padding: float = 7.0) -> Tensor:
    """The columns of a rank, as a head with padded rows gives them: padding has any value."""
    out = torch.full((x.shape[0], share.size), padding, dtype=x.dtype, device=x.device)
    out[:, : share.count] = x[:, share.first : share.stop]
    return out


def _end_ids(random: np.random.Generator, vocab: int) -> Tensor:
    """(16,) int32: up to 16 ids, -1 behind them."""
    ids = np.full(SLOT["end_ids"].shape, -1, np.int32)
    count = int(random.choice([0, 1, 3, len(ids)]))
    ids[:count] = random.integers(0, vocab, count)
    return torch.from_numpy(ids)


def packed(possible: np.ndarray, state: SamplingState) -> Tensor:
    """(W,) int32, a slot's mask, of (V,) bool. The bits beyond the vocabulary are set: nothing reads them."""
    bits = np.ones(32 * state.masks.shape[1], bool)
    bits[: len(possible)] = possible
    return torch.from_numpy(np.packbits(bits, bitorder="little").view("<i4"))


def random_state(
    device: torch.device,
    vocab: int,
    rows: int,
    random: np.random.Generator,
    top_ks: Sequence[int] = (0, 0, 1, 2, 5, 40),
    **always: Any,
) -> SamplingState:
    """Slots with every setting mixed, a history, counts of it, bad words and biases. top_ks: besides the
    largest ones. always: columns of all slots."""
    state = SamplingState.allocate(SLOTS, HISTORY, vocab, 8, device)
    for slot in range(rows):
        ks = [*top_ks, vocab - 1, vocab, vocab + 9]
        some = {
            "top_k": int(random.choice(ks)),
            "top_p": float(random.choice([1.0, 0.0, 0.1, 0.5, 0.9, 0.999])),
            "min_p": float(random.choice([0.0, 0.0, 0.02, 0.4, 1.0])),
            "typical_p": float(random.choice([1.0, 1.0, 0.2, 0.95])),
            "no_repeat_ngram_size": int(random.choice([0, 0, 1, 2, 3])),
            "temperature": float(random.choice([0.0, 0.3, 1.0, 1.7])),
            "repetition_penalty": float(random.choice([1.0, 1.3, 0.8])),
            "presence_penalty": float(random.choice([0.0, 0.4])),
            "frequency_penalty": float(random.choice([0.0, -0.3])),
            "min_tokens": int(random.choice([0, 5])),
            "end_ids": _end_ids(random, vocab),
            "generated": int(random.integers(0, 9)),
            "seed": int(random.integers(0, 2**63)),
            "return_log_probs": int(random.integers(0, 2)),
            "top_p_decay": float(random.choice([1.0, 0.9])),
            "top_p_min": 0.2,
            "top_p_reset_id": int(random.integers(-1, vocab)),
            "masked": int(random.integers(0, 2)),
            **always,
        }
        some["top_p_now"] = some["top_p"]
        for name, value in some.items():
            state.column(name)[slot] = value
        state.masks[slot] = packed(random.random(vocab) < random.choice([0.02, 0.5, 1.0]), state)
        history = random.integers(0, vocab, HISTORY)
        length = int(random.integers(3, HISTORY + 1))
        state.history[slot] = torch.from_numpy(history.astype(np.int32))
        state.column("history_length")[slot] = length
        ids = torch.from_numpy(history[:length])
        state.counts[slot] = torch.bincount(ids, minlength=vocab).to(torch.int16)
        if random.integers(0, 2):  # one word of an id, one that the history ends with, one that it does not
            words = [[int(random.integers(0, vocab))], [*history[length - 2 : length].tolist(), 0]]
            words.append([(int(history[length - 1]) + 1) % vocab, 1])
            ends = np.cumsum([len(word) for word in words])
            state.column("num_bad_words")[slot] = len(words)
            flat = [token for word in words for token in word]
            state.bad_ids[slot, : len(flat)] = torch.tensor(flat, dtype=torch.int32)
            state.bad_ends[slot, : len(ends)] = torch.from_numpy(ends.astype(np.int32))
        if random.integers(0, 2):
            add_biases(state, slot, random.permutation(vocab)[:40], random)
    return state


def add_biases(state: SamplingState, slot: int, ids: np.ndarray, random: np.random.Generator) -> None:
    """Give the ids of a slot random biases."""
    values = random.normal(0, 3, len(ids)).astype(np.float32)
    pairs = np.stack([ids.astype(np.int32), values.view(np.int32)], 1)
    state.biases[slot, : len(ids)] = torch.from_numpy(pairs).to(state.biases.device)
    state.column("num_biases")[slot] = len(ids)


def cloned(state: SamplingState, share: VocabShare | None = None) -> SamplingState:
    parts = {
        name: value.clone()
        for name in state.__dataclass_fields__
        if isinstance(value := getattr(state, name), Tensor)
    }
    if share is not None:
        parts["counts"] = cut(parts["counts"], share, 0)
    return SamplingState(**parts)
