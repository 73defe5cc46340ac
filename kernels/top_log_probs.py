"""The most likely tokens of a step and their log probabilities, in plain torch on any device.

Only rows whose requests want them are computed here; there is no CUDA kernel for it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def raw_log_probs(logits: Tensor, rows: Tensor) -> Tensor:
    """Return (W, V) float32: log-softmax of logits[rows], before `sample` changes them.

    logits: (R, V) float32, unchanged. rows: (W,) int64, on the device of the logits.
    """
    return logits.index_select(0, rows).float().log_softmax(-1)


def best_tokens(log_probs: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return rank and log probability of each row's chosen token, and the `count` most likely tokens, best
    first.

    log_probs: (W, V) float32. tokens: (W,) integers, the chosen ids; one outside the vocabulary (-1 where
    logits are NaN) counts as the nearest id. count: 0 to V.
    Returns ids (W, 1 + count) int32 and values (W, 1 + count) float32. Column 0 belongs to the chosen token:
    its rank, the number of tokens that are at least as likely (1: none is more likely), and its log
    probability. Source: vLLM's Sampler.gather_logprobs.
    """
    ids = tokens.long().clamp(0, log_probs.shape[1] - 1)
    chosen = log_probs.gather(1, ids.unsqueeze(1))  # (W, 1)
    ranks = (log_probs >= chosen).sum(-1, keepdim=True)
    values, ids = log_probs.topk(count, dim=-1)
    return torch.cat([ranks, ids], 1).int(), torch.cat([chosen, values], 1)
