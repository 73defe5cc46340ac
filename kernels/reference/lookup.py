"""Ops.look_up: drafts from the longest earlier occurrence of a sequence's newest tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tridecode.kernels.draft_history import (
    ANSWER,
    CLIENT,
    LEAST_MATCH,
    MOST_MATCH,
    NOWHERE,
    OWN,
    DraftHistory,
)


def look_up(
    history: DraftHistory,
    rows: Tensor,
    sampled: Tensor,
    accepted: Tensor,
    drafts: Tensor,
    *,
    searches: bool,
    found: Tensor,
) -> None:
    """Compute Ops.look_up, row by row, in numpy: a row takes a few small operations."""
    counts, drawn = accepted.cpu().numpy(), sampled.cpu().numpy()
    used = int(history.used)
    ring, scopes = history.ring[:used].cpu().numpy(), history.ring_scopes[:used].cpu().numpy()
    width = history.tokens.shape[1]
    for row, (slot, first, counted) in enumerate(rows.tolist()):
        if slot < 0:
            found[row] = 0
            continue
        count = int(counts[counted]) if counted >= 0 else 1
        agreed = count > 0 and drafts[slot, 0].item() == drawn[first]
        length = int(history.lengths[slot])
        kept = drawn[first : first + max(min(count, width - length), 0)].clip(min=0)
        history.tokens[slot, length : length + len(kept)] = torch.from_numpy(kept)
        length += len(kept)
        history.lengths[slot] = length
        matched, source, following = 0, NOWHERE, np.zeros(0, np.int32)
        if searches and length >= LEAST_MATCH:
            own, mine = history.tokens[slot, :length].cpu().numpy(), history.scopes[slot].tolist()
            matched, source, following = _longest_match(own, ring, scopes, mine, drafts.shape[1])
        drafts[slot, : len(following)] = torch.from_numpy(following)
        drafts[slot, len(following) :] = 0
        found[row] = torch.tensor([matched, source, int(agreed)], dtype=torch.int32)


def _longest_match(
    own: np.ndarray, ring: np.ndarray, scopes: np.ndarray, mine: list[int], most: int
) -> tuple[int, int, np.ndarray]:
    """Return the matched tokens, their place, and up to `most` ids that followed them."""
    suffix = own[-MOST_MATCH:][::-1]  # the newest token first
    matched, end = _match(own[:-1], suffix, None)
    in_ring, place = 0, -1
    if max(mine) >= 0 and len(ring):
        allowed = (scopes >= 0) & ((scopes == mine[0]) | (scopes == mine[1]))
        in_ring, place = _match(ring[:-1], suffix, allowed[:-1])
    if max(matched, in_ring) < LEAST_MATCH:
        return 0, NOWHERE, np.zeros(0, np.int32)
    if matched >= in_ring:  # continue the repetition beyond the newest token
        return matched, OWN, np.resize(own[end + 1 :], most)
    following = ring[place + 1 : place + 1 + most]
    ends = np.flatnonzero(following < 0)
    source = CLIENT if scopes[place] == mine[1] else ANSWER
    return in_ring, source, (following[: ends[0]] if len(ends) else following).copy()


def _match(tokens: np.ndarray, suffix: np.ndarray, allowed: np.ndarray | None) -> tuple[int, int]:
    """Return the length of the longest match of a suffix, newest token first, that ends within `tokens`, and
    the last place where one of this length ends. allowed: places at which it may end; None: all."""
    is_equal = tokens == suffix[0]
    ends = np.flatnonzero(is_equal if allowed is None else is_equal & allowed)
    length, last = 0, -1
    while len(ends):
        length, last = length + 1, int(ends[-1])
        if length == len(suffix):
            break
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == suffix[length]]
    return length, last
