"""Outputs of a step, besides its samples, computed from vocabulary-parallel logits.

Candidates of beams, the most likely tokens, log probabilities of given ids: only the requested values are
exchanged between ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tridecode.backend.engine.ranks.vocab_share import TensorRanks, largest, log_sum_exp, values_at
from tridecode.backend.weights.layout import VocabShare
from tridecode.kernels.sampling_rules import process
from tridecode.kernels.sampling_state import SlotRows


def beam_candidates(
    logits: Tensor,
    rows: Tensor,
    sequences: SlotRows,
    vocab: VocabShare,
    ranks: TensorRanks,
    *,
    ids: Tensor,
    log_probs: Tensor,
) -> None:
    """Ops.candidates over logits (R, size) of this rank's ids, padding minus infinity. Collective."""
    x = logits[rows]
    process(x, sequences)
    total = log_sum_exp(x, ranks)
    values, found = largest(x, ids.shape[1], vocab, ranks)
    ids.copy_(found)
    total = torch.where(total == -torch.inf, 0.0, total)  # rows whose ids are all banned
    log_probs.copy_(values.double() - total[:, None])


def raw_log_probs(logits: Tensor, rows: Tensor, ranks: TensorRanks) -> Tensor:
    """(W, size) float32: log-softmax over the whole vocabulary of logits[rows], at this rank's ids."""
    x = logits.index_select(0, rows)
    return (x.double() - log_sum_exp(x, ranks)[:, None]).float()


def best_tokens(
    log_probs: Tensor, tokens: Tensor, count: int, vocab: VocabShare, ranks: TensorRanks
) -> tuple[Tensor, Tensor]:
    """kernels.top_log_probs.best_tokens over log_probs (W, size) of this rank's ids."""
    chosen = values_at(log_probs, tokens.long().clamp(0, vocab.vocab_size - 1), vocab, ranks)[:, None]
    order = ranks.gather((log_probs[:, : vocab.count] >= chosen).sum(-1, keepdim=True)).sum(0)
    values, ids = largest(log_probs, count, vocab, ranks)
    return torch.cat([order, ids], 1).int(), torch.cat([chosen, values], 1)


def log_probs_at(logits: Tensor, targets: Tensor, vocab: VocabShare, ranks: TensorRanks) -> Tensor:
    """(n,) float64: the log-softmax of each row (n, size) at its target, an id of the whole vocabulary."""
    return values_at(logits, targets, vocab, ranks).double() - log_sum_exp(logits, ranks)
