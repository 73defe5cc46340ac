"""`Ops.sample` for tensor ranks that share the vocabulary: the same tokens, although no rank has all logits.

Every rank runs this with its columns and ends with the same tokens and the same state. The ranks exchange,
per row: (logit, id, log-sum-exp) of each rank's best; for top-k the k largest logits of a rank; for top-p
sums of probability in 2048 bins by the ordered bits of the logits; then (score, id, logit) of each rank's
draw. Plain torch on any device; the slots' parameters are read on the host. The rules are those of
kernels/sampling_rules.py; kernels/reference/sampling.py defines the result.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.ranks.vocab_draw import draw
from tridecode.backend.engine.ranks.vocab_share import TensorRanks
from tridecode.backend.weights.layout import VocabShare
from tridecode.kernels.sampling_rules import greedy, process, remember
from tridecode.kernels.sampling_state import BROKEN_LOGITS, NO_TOKEN, SamplingState, SlotRows, records


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

    logits: (R, vocab.size) float32 for this rank's ids, padding minus infinity; rows with a slot are
    overwritten. state: its counts (S, vocab.size) cover this rank's ids. slots, tokens, log_probs: (R,), as
    in Ops.sample.
    """
    rows = (slots >= 0).nonzero().squeeze(1)
    if not len(rows):
        return
    log_probs[rows] = 0.0
    held = slots[rows].long()
    sequences = records(state.slots[held])
    slot_rows = SlotRows(state, held, sequences, vocab.first)
    x = logits if len(rows) == len(slots) else logits[rows]
    process(x, slot_rows)
    wants = sequences["return_log_probs"] != 0
    best, ids, total = _best(x, vocab, ranks, bool(wants.any()))
    chosen, logit = ids, best
    drawn = ~greedy(sequences)
    if drawn.any():
        some = torch.from_numpy(np.flatnonzero(drawn)).to(x.device)
        chosen, logit = chosen.clone(), logit.clone()
        chosen[some], logit[some] = draw(x[some], best[some], sequences[drawn], vocab, ranks)
    nothing = best == -torch.inf
    chosen = torch.where(nothing, NO_TOKEN, chosen)
    chosen = torch.where(best < torch.inf, chosen, BROKEN_LOGITS)  # NaN counts as the largest
    tokens[rows] = chosen.to(tokens.dtype)
    if total is not None:
        spoken = torch.from_numpy(wants).to(x.device) & (chosen >= 0)
        log_probs[rows] = torch.where(spoken, logit - total, 0.0).float()
    remember(slot_rows, chosen.clamp(min=0))


def _best(
    x: Tensor, vocab: VocabShare, ranks: TensorRanks, want_total: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(n,) float64 largest logit over the ranks, (n,) int64 its id, the lowest of equal ones, and (n,)
    float64 log(sum(exp)) of all ids, if requested.
    """
    values, columns = x.max(dim=-1)
    sent = [values.double(), (columns + vocab.first).double()]
    if want_total:
        sent.append(x.logsumexp(-1).double())
    found = ranks.gather(torch.stack(sent))  # (t, 2 or 3, n)
    best, owner = found[:, 0].max(0)  # the first rank's among equal ones
    ids = found[:, 1].gather(0, owner[None])[0].long()
    return best, ids, found[:, 2].logsumexp(0) if want_total else None
