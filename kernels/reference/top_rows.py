"""The operations of kernels.top_log_probs.TopOps in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tridecode.kernels.sampling_state import MOST_BIASES, SamplingState
from tridecode.kernels.top_log_probs import END_IDS, MOST_TOP, TopRows, best_tokens, raw_log_probs


def keep_raw_logits(logits: Tensor, slots: Tensor, state: SamplingState, rows: TopRows) -> None:
    """Implement TopOps.keep_raw_logits."""
    for row, slot in _wanting(slots, state):
        for token, place in _edited(state, slot, logits.shape[1]):
            rows.kept[row, place] = logits[row, token]


def top_log_probs(logits: Tensor, slots: Tensor, state: SamplingState, tokens: Tensor, rows: TopRows) -> None:
    """Implement TopOps.top_log_probs."""
    count = min(MOST_TOP, logits.shape[1])
    for row, slot in _wanting(slots, state):
        for token, place in _edited(state, slot, logits.shape[1]):
            logits[row, token] = rows.kept[row, place]
        raw = raw_log_probs(logits, torch.tensor([row], device=logits.device))
        (rank,), (chosen,) = (found[0] for found in best_tokens(raw, tokens[row : row + 1], 0))
        order = raw[0].argsort(descending=True, stable=True)[:count]
        ids, values = rows.top[row, 0], rows.top[row, 1].view(torch.float32)
        ids.fill_(-1)
        values.fill_(-torch.inf)
        ids[0], values[0] = rank, chosen
        ids[1 : 1 + count], values[1 : 1 + count] = order.int(), raw[0, order]


def _wanting(slots: Tensor, state: SamplingState) -> Iterator[tuple[int, int]]:
    """Yield (row, slot) of the rows that request their most likely tokens."""
    wanted = state.column("top_log_probs").tolist()
    return ((row, slot) for row, slot in enumerate(slots.tolist()) if slot >= 0 and wanted[slot] >= 0)


def _edited(state: SamplingState, slot: int, vocab_size: int) -> list[tuple[int, int]]:
    """Return (id, place) of a slot's saved logits."""
    count = int(state.column("num_biases")[slot])
    found = list(zip(state.biases[slot, :count, 0].tolist(), range(count)))
    if state.column("min_tokens")[slot] > 0:
        found += zip(state.column("end_ids")[slot].tolist(), range(MOST_BIASES, MOST_BIASES + END_IDS))
    count = int(state.column("num_bad_words")[slot])
    lasts = [int(state.bad_ids[slot, end - 1]) for end in state.bad_ends[slot, :count].tolist() if end > 0]
    found += zip(lasts, range(MOST_BIASES + END_IDS, MOST_BIASES + END_IDS + count))
    return [(token, place) for token, place in found if 0 <= token < vocab_size]
