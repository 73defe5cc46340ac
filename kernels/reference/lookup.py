"""Ops.look_up: drafts from the longest earlier occurrence of a sequence's newest tokens."""

from __future__ import annotations

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
    longest: int,
    used: int,
    found: Tensor,
) -> None:
    """Compute Ops.look_up, row by row."""
    for row, (slot, first, counted) in enumerate(rows.tolist()):
        count = int(accepted[counted]) if counted >= 0 else 1
        agreed = count > 0 and int(drafts[slot, 0]) == int(sampled[first])
        length, width = int(history.lengths[slot]), history.tokens.shape[1]
        kept = sampled[first : first + max(min(count, width - length), 0)].clamp(min=0)
        history.tokens[slot, length : length + len(kept)] = kept
        length += len(kept)
        history.lengths[slot] = length
        matched, source, following = 0, NOWHERE, torch.zeros(drafts.shape[1], dtype=torch.int32)
        if longest:
            matched, source, following = _longest_match(history, slot, length, used, drafts.shape[1])
        drafts[slot] = following
        found[row] = torch.tensor([matched, source, int(agreed)], dtype=torch.int32)


def _longest_match(
    history: DraftHistory, slot: int, length: int, used: int, most: int
) -> tuple[int, int, Tensor]:
    """Return the matched tokens, their place, and (most,) ids that followed them."""
    own = history.tokens[slot, :length]
    suffix = own[-MOST_MATCH:].flip(0)  # the newest token first
    nothing = torch.zeros(most, dtype=torch.int32)
    if length < LEAST_MATCH:
        return 0, NOWHERE, nothing
    matched, end = _match(own[:-1], suffix, None)
    ring, scopes = history.ring[:used], history.ring_scopes[:used]
    shared, private = history.scopes[slot].tolist()
    allowed = ((scopes == shared) & (shared >= 0)) | ((scopes == private) & (private >= 0))
    in_ring, ring_end = _match(ring[:-1], suffix, allowed[:-1])
    if max(matched, in_ring) < LEAST_MATCH:
        return 0, NOWHERE, nothing
    place = torch.arange(1, most + 1)
    if matched >= in_ring:
        place = place + end
        period = length - 1 - end  # what repeats is continued beyond the newest token
        beyond = (place - length).clamp(min=-1).div(period, rounding_mode="floor") + 1
        return matched, OWN, own[place - beyond * period]
    place = place + ring_end
    is_inside = place < ring.shape[0]
    following = torch.where(is_inside, ring[place.clamp(max=ring.shape[0] - 1)], -1)
    is_inside = (following >= 0).cumprod(0).bool()
    source = CLIENT if int(scopes[ring_end]) == private else ANSWER
    return in_ring, source, torch.where(is_inside, following, 0)


def _match(tokens: Tensor, suffix: Tensor, allowed: Tensor | None) -> tuple[int, int]:
    """Return the length of the longest match of a suffix, newest token first, that ends within `tokens`, and
    the last place where one of this length ends. allowed: places at which it may end; None: all."""
    is_equal = tokens == suffix[0]
    ends = torch.nonzero(is_equal if allowed is None else is_equal & allowed)[:, 0]
    length, last = 0, -1
    while len(ends):
        length, last = length + 1, int(ends[-1])
        if length == len(suffix):
            break
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == suffix[length]]
    return length, last
