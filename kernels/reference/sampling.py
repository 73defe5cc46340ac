"""Sampling in plain torch, one slot and one row at a time where rows differ."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tridecode.kernels.checks import indices, match
from tridecode.kernels.philox import uniforms
from tridecode.kernels.sampling_rules import WholeRows, greedy, kept_ids, process, remember, unchanged
from tridecode.kernels.sampling_state import BROKEN_LOGITS, NO_TOKEN, SamplingState, SlotRows, records

#: float32 values of the logits' copy from which candidates are chosen at a time
_CANDIDATE_LOGITS = 1 << 24


def sample(logits: Tensor, slots: Tensor, state: SamplingState, tokens: Tensor, log_probs: Tensor) -> None:
    """Ops.sample."""
    match(
        "sample",
        ("RV", "logits", logits),
        ("R", "slots", slots),
        ("R", "tokens", tokens),
        ("R", "log_probs", log_probs),
    )
    indices("sample", ("slots", slots), ("tokens", tokens))
    rows = (slots >= 0).nonzero().squeeze(1)
    if not len(rows):
        return
    log_probs[rows] = 0.0
    held = slots[rows].long()
    sequences = SlotRows(state, held, records(state.slots[held]))
    x = logits if len(rows) == len(slots) else logits[rows]
    chosen = _choose(x, sequences, log_probs, rows)
    tokens[rows] = chosen.to(tokens.dtype)
    remember(sequences, chosen.clamp(min=0))


def beam_candidates(
    logits: Tensor, rows: Tensor, sequences: SlotRows, ids: Tensor, log_probs: Tensor
) -> None:
    """Ops.candidates on any device, without waiting for it."""
    match("candidates", ("nW", "ids", ids), ("nW", "log_probs", log_probs), ("n", "rows", rows))
    step = max(1, _CANDIDATE_LOGITS // logits.shape[1])
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        x = logits[rows[part]]
        process(x, sequences.part(part))
        best = torch.log_softmax(x, dim=-1).topk(ids.shape[1], dim=-1)
        ids[part].copy_(best.indices)
        is_excluded = x.amax(-1, keepdim=True) == -torch.inf  # log_softmax gives NaN
        log_probs[part].copy_(best.values.masked_fill(is_excluded, -torch.inf))


def _choose(x: Tensor, sequences: SlotRows, log_probs: Tensor, rows: Tensor) -> Tensor:
    """Return (n,) int64, the next token of each row of x (n, V).

    BROKEN_LOGITS for a row with NaN or infinity, NO_TOKEN for one whose ids are all impossible. x is changed
    in place; log_probs[rows] are written for the sequences that want them.
    """
    found = sequences.records
    if not unchanged(found):
        process(x, sequences)
    largest, tokens = x.max(dim=-1)  # the lowest id among equal ones; NaN counts as the largest
    tokens = torch.where(largest < torch.inf, tokens, BROKEN_LOGITS)
    tokens = torch.where(largest == -torch.inf, NO_TOKEN, tokens)
    is_drawn = ~greedy(found)
    if is_drawn.any():
        some = np.flatnonzero(is_drawn & (tokens >= 0).cpu().numpy())
        index = torch.from_numpy(some).to(x.device)
        tokens[index] = _draw(x[index], largest[index], found[some])
    wants = (found["return_log_probs"] != 0) & (tokens >= 0).cpu().numpy()
    if wants.any():
        index = torch.from_numpy(np.flatnonzero(wants)).to(x.device)
        some_x = x[index]
        log_probs[rows[index]] = some_x.gather(1, tokens[index, None])[:, 0] - some_x.logsumexp(-1)
    return tokens


def _draw(x: Tensor, largest: Tensor, found: np.ndarray) -> Tensor:
    """Return (n,) int64: for each row of x (n, V) the kept id with the largest logit plus Gumbel noise."""
    tokens = []
    for logits, kept, record in zip(x, kept_ids(x, largest, found, WholeRows(x.shape[1])), found):
        ids, seed = kept.nonzero().squeeze(1), int(record["seed"])
        key = (seed & 0xFFFFFFFF, seed >> 32)
        noise = torch.from_numpy(uniforms(key, ids.cpu().numpy(), int(record["generated"]))).to(x.device)
        gumbel = -(-torch.log1p(-noise)).log()
        tokens.append(ids[(logits[ids] + gumbel).argmax()])
    return torch.stack(tokens) if tokens else torch.zeros(0, dtype=torch.int64, device=x.device)
