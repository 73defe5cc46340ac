"""Decode rows of several tokens: their cache positions, and the tokens that each row keeps."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tridecode.kernels.operands import Batch
from tridecode.kernels.sampling_state import SamplingState


def place_rows(batch: Batch, state: SamplingState, block_tokens: int) -> None:
    """Ops.place_rows."""
    rows = batch.num_decodes
    starts = batch.query_starts[: rows + 1].long()
    counts = starts.diff()
    row = torch.repeat_interleave(torch.arange(rows, device=starts.device), counts)  # row of each token
    count = row.shape[0]
    offset = torch.arange(count, device=starts.device) - starts[row]  # index within the row
    slots = batch.sample_slots[:count]
    held = slots.clamp(min=0).long()

    ids = batch.token_ids[:count]
    drafts = state.drafts[held, (offset - 1).clamp(min=0)]
    known = torch.where(offset == 0, state.last_tokens[held], drafts).masked_fill(slots < 0, 0)
    ids.copy_(torch.where(ids < 0, known, ids))

    lens = batch.context_lens[:rows]
    is_unknown = lens < 0
    place = state.lengths[held].long() + offset
    column, columns = place // block_tokens, batch.block_tables.shape[1]
    blocks = batch.block_tables[row, column.clamp(max=columns - 1)].long()
    address = (blocks * block_tokens + place % block_tokens).masked_fill(column >= columns, -1).int()
    derives = is_unknown[row]
    for values, derived in (
        (batch.positions[:count], batch.positions[:count] + place.int()),
        (batch.kv_slots[:count], address),
    ):
        values.copy_(torch.where(derives, derived, values))
    first = starts[:-1].clamp(max=max(count - 1, 0))
    before = state.lengths[held[first]] if count else lens
    lens.copy_(torch.where(is_unknown, before + counts.int(), lens))


class Sample(Protocol):
    """Ops.sample, or another sampler with its contract."""

    def __call__(
        self, logits: Tensor, slots: Tensor, state: SamplingState, *, tokens: Tensor, log_probs: Tensor
    ) -> None: ...


def verify_rows(
    sample: Sample,
    logits: Tensor,
    batch: Batch,
    state: SamplingState,
    tokens: Tensor,
    log_probs: Tensor,
    accepted: Tensor,
) -> None:
    """Compute Ops.verify: `sample` draws the tokens position by position, and a row continues while the drawn
    token equals its next draft token.

    Waits for the device only if `sample` does, and can be captured in a CUDA graph if `sample` can.
    """
    rows, count = batch.num_decodes, batch.decode_tokens
    starts, ends = batch.query_starts[:rows].long(), batch.query_starts[1 : rows + 1].long()
    device = starts.device
    slots = batch.sample_slots[starts.clamp(max=count - 1)].masked_fill(ends == starts, -1)
    # one extra position for rows that have ended, so that no two rows write to the same token's position
    found = torch.zeros(count + 1, dtype=tokens.dtype, device=device)
    likely = torch.zeros(count + 1, dtype=log_probs.dtype, device=device)
    goes_on = slots >= 0
    accepted.zero_()
    token = torch.zeros(rows, dtype=tokens.dtype, device=device)
    log_prob = torch.zeros(rows, dtype=log_probs.dtype, device=device)
    masked = state.column("masked")  # above 1: row of state.masks, one for each token of a decode row
    for i in range(batch.decode_queries):
        at = torch.where(goes_on, starts + i, 0)
        own = slots.masked_fill(~goes_on, -1)
        sample(logits[at], own, state, tokens=token, log_probs=log_prob)
        masked += masked > 1
        to = torch.where(goes_on, starts + i, count)
        found[to], likely[to] = token, log_prob
        accepted += goes_on
        following = batch.token_ids[(starts + i + 1).clamp(max=count - 1)]
        goes_on = goes_on & (starts + i + 1 < ends) & (token == following)
    tokens.copy_(found[:count])
    log_probs.copy_(likely[:count])
    masked.clamp_(max=1)
    keep_lengths(state, batch, slots, accepted)


def keep_lengths(state: SamplingState, batch: Batch, slots: Tensor, accepted: Tensor) -> None:
    """Update state.lengths for the slots of the decode rows (B,), -1 for none, when `accepted` (B,) tokens of
    each are kept.
    """
    rows, size = batch.num_decodes, state.lengths.shape[0]
    counts = batch.query_starts[: rows + 1].diff()
    lengths = torch.cat([state.lengths, state.lengths[:1]])  # one extra position for rows without a slot
    lengths[torch.where(slots >= 0, slots, size).long()] = batch.context_lens[:rows] - counts + accepted
    state.lengths.copy_(lengths[:-1])
