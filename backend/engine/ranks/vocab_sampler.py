"""`Ops.sample` where the tensor ranks share the vocabulary: the same tokens, and no rank has all the logits.

Every rank runs this with its columns and ends with the same tokens and the same state. What crosses for a
row: (logit, id, log-sum-exp) of each rank's best; for top-k the k largest logits of a rank; for top-p sums
of probability by the ordered bits of the logits, 2048 of them at a time; then (score, id, logit) of each
rank's draw. Plain torch on any device; the slots' parameters are read on the host, as in
kernels/reference.py, which is the meaning of all this.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.ranks.vocab_draw import draw
from tridecode.backend.engine.ranks.vocab_share import TensorRanks
from tridecode.backend.weights.layout import VocabShare
from tridecode.kernels.sampling_state import (
    BROKEN_LOGITS,
    MOST_COUNTED,
    NO_TOKEN,
    SamplingState,
    records,
    words,
)


def sample(
    logits: Tensor,
    slots: Tensor,
    state: SamplingState,
    vocab: VocabShare,
    ranks: TensorRanks,
    *,
    tokens: Tensor,
    log_probs: Tensor,
) -> None:
    """Choose the next token of each row and update the state, as kernels.ops.Ops.sample. Collective in the
    tensor group.

    logits: (R, vocab.size) float32 of this rank's ids, padding minus infinity; rows with a slot are
    overwritten. state: its counts (S, vocab.size) are of this rank's ids. slots, tokens, log_probs: (R,), as
    in Ops.sample.
    """
    log_probs.zero_()
    rows = (slots >= 0).nonzero().squeeze(1)
    if not len(rows):
        return
    held = slots[rows].long()
    sequences = records(state.slots[held])
    x = logits if len(rows) == len(slots) else logits[rows]
    _process(x, held, sequences, state, vocab)
    wants = sequences["return_log_probs"] != 0
    best, ids, total = _best(x, vocab, ranks, bool(wants.any()))
    chosen, logit = ids, best
    drawn = ~_greedy(sequences)
    if drawn.any():
        some = torch.from_numpy(np.flatnonzero(drawn)).to(x.device)
        chosen, logit = chosen.clone(), logit.clone()
        chosen[some], logit[some] = draw(x[some], best[some], sequences[drawn], vocab, ranks)
    nothing = best == -torch.inf
    chosen = torch.where(nothing, NO_TOKEN, chosen)
    chosen = torch.where(best < torch.inf, chosen, BROKEN_LOGITS)  # a NaN counts as the largest
    tokens[rows] = chosen.to(tokens.dtype)
    if total is not None:
        spoken = torch.from_numpy(wants).to(x.device) & (chosen >= 0)
        log_probs[rows] = torch.where(spoken, logit - total, 0.0).float()
    _remember(state, held, sequences, chosen.clamp(min=0), vocab)


def _greedy(sequences: np.ndarray) -> np.ndarray:
    return (sequences["top_k"] == 1) | (sequences["temperature"] == 0)


def _penalised(sequences: np.ndarray) -> np.ndarray:
    return (
        (sequences["repetition_penalty"] != 1)
        | (sequences["presence_penalty"] != 0)
        | (sequences["frequency_penalty"] != 0)
    )


def _best(
    x: Tensor, vocab: VocabShare, ranks: TensorRanks, want_total: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(n,) float64 largest logit over the ranks, (n,) int64 its id, the lowest of equal ones, and (n,)
    float64 log(sum(exp)) of all ids if it is wanted."""
    values, columns = x.max(dim=-1)
    sent = [values.double(), (columns + vocab.first).double()]
    if want_total:
        sent.append(x.logsumexp(-1).double())
    found = ranks.gather(torch.stack(sent))  # (t, 2 or 3, n)
    best, owner = found[:, 0].max(0)  # of equal ones the first rank's
    ids = found[:, 1].gather(0, owner[None])[0].long()
    return best, ids, found[:, 2].logsumexp(0) if want_total else None


def _process(x: Tensor, held: Tensor, sequences: np.ndarray, state: SamplingState, vocab: VocabShare) -> None:
    """Bad words, temperature, penalties and the held-back end, on this rank's columns of x (n, size)."""
    for row in np.flatnonzero(sequences["num_bad_words"]).tolist():
        _ban(x[row], int(held[row]), sequences[row], state, vocab)
    heat = sequences["temperature"]
    warm = np.flatnonzero((heat != 0) & (heat != 1))
    if len(warm):
        rows = torch.from_numpy(warm).to(x.device)
        x[rows] /= _column(heat[warm], x)
    penalised = np.flatnonzero(_penalised(sequences))
    if len(penalised):
        rows, some = torch.from_numpy(penalised).to(x.device), sequences[penalised]
        before, counts = x[rows], state.counts[held[rows]]
        factor = _column(some["repetition_penalty"], x)
        after = torch.where(before < 0, before * factor, before / factor)
        after -= _column(some["presence_penalty"], x) + _column(some["frequency_penalty"], x) * counts.float()
        x[rows] = torch.where(counts > 0, after, before)
    early = sequences["generated"] < sequences["min_tokens"]
    mine = (sequences["end_ids"] >= vocab.first) & (sequences["end_ids"] < vocab.stop)
    for row, place in np.argwhere(early[:, None] & mine).tolist():
        x[row, int(sequences["end_ids"][row, place]) - vocab.first] = -torch.inf


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    """(n, 1) float32 on the device of `like`."""
    return torch.from_numpy(values.astype(np.float32)[:, None]).to(like.device)


def _ban(x: Tensor, slot: int, sequence: np.void, state: SamplingState, vocab: VocabShare) -> None:
    """Make the last id of each bad word impossible whose other ids end the history. x: (size,) of a row."""
    ids = state.bad_ids[slot].tolist()
    length, start = int(sequence["history_length"]), 0
    for end in state.bad_ends[slot, : int(sequence["num_bad_words"])].tolist():
        *before, last = ids[start:end]
        start = end
        tail = state.history[slot, max(length - len(before), 0) : length].tolist()
        if vocab.first <= last < vocab.stop and (not before or tail == before):
            x[last - vocab.first] = -torch.inf


def _remember(
    state: SamplingState, held: Tensor, sequences: np.ndarray, tokens: Tensor, vocab: VocabShare
) -> None:
    """Update the slots `held` (n,) and their records for the tokens (n,) int64."""
    state.last_tokens[held] = tokens.to(state.last_tokens.dtype)
    sequences["generated"] += 1
    found = tokens.cpu().numpy()
    for row in np.flatnonzero(sequences["num_bad_words"]).tolist():
        length = int(sequences["history_length"][row])
        if length < state.history.shape[1]:
            state.history[held[row], length] = int(found[row])
            sequences["history_length"][row] = length + 1
    counted = _penalised(sequences) & (found >= vocab.first) & (found < vocab.stop)
    if counted.any():
        rows = torch.from_numpy(np.flatnonzero(counted)).to(held.device)
        at = held[rows], tokens[rows] - vocab.first
        state.counts[at] = (state.counts[at].int() + 1).clamp_(max=MOST_COUNTED).to(torch.int16)
    decays = sequences["top_p_decay"] < 1
    if decays.any():
        decayed = np.maximum(sequences["top_p_now"] * sequences["top_p_decay"], sequences["top_p_min"])
        reset = found == sequences["top_p_reset_id"]
        now = np.where(reset, sequences["top_p"], decayed)
        sequences["top_p_now"] = np.where(decays, now, sequences["top_p_now"])
    state.slots[held] = words(sequences).to(state.slots.device)
