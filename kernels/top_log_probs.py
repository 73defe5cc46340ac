"""The most likely tokens of a step and their log probabilities: the operations within a step, and plain torch
for steps that cannot use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tridecode.kernels import scratch
from tridecode.kernels.sampling_state import MOST_BIASES, SLOT, SamplingState

#: maximum tokens per row, besides the chosen one
MOST_TOP = 20
#: layout of a row's saved logits: MOST_BIASES biases, then END_IDS end ids, then bad words
END_IDS: int = SLOT["end_ids"].shape[0]  # type: ignore[misc]


@dataclass(frozen=True)
class TopRows:
    """The buffers of the operations, at fixed addresses.

    kept: (R, K) float32, saved logits that `sample` may edit. top: (R, 2, 1 + MOST_TOP) int32, the ids of
    each row and the bits of its float32 values, see TopOps.top_log_probs. scratch: bytes.
    """

    kept: Tensor
    top: Tensor
    scratch: Tensor

    @classmethod
    def allocate(cls, rows: int, bad_words: int, vocab_size: int, device: torch.device) -> TopRows:
        """Allocate for steps of up to `rows` samples. bad_words: columns of SamplingState.bad_ids."""
        size = scratch.top_log_probs_bytes(rows, vocab_size)
        return cls(
            kept=torch.zeros(rows, MOST_BIASES + END_IDS + bad_words, dtype=torch.float32, device=device),
            top=torch.zeros(rows, 2, 1 + MOST_TOP, dtype=torch.int32, device=device),
            scratch=torch.zeros(size, dtype=torch.uint8, device=device),
        )


class TopOps(Protocol):
    """The most likely tokens of rows whose slots have top_log_probs >= 0; other rows are skipped. Part of
    kernels.ops.Ops, which defines the dimension letters. Both operations may be captured in a CUDA graph.
    """

    @property
    def has_top_log_probs(self) -> bool:
        """Return whether steps should use these operations: whether `sample` edits only the logits that
        keep_raw_logits saves and the ids of n-grams.
        """
        ...

    def keep_raw_logits(self, logits: Tensor, slots: Tensor, state: SamplingState, rows: TopRows) -> None:
        """Save in rows.kept the logits of the slots' biases, end_ids (if min_tokens > 0) and bad words.

        logits: (R, V) float32, before `sample`. slots: (R,) int32, -1 for none.
        """
        ...

    def top_log_probs(
        self, logits: Tensor, slots: Tensor, state: SamplingState, tokens: Tensor, rows: TopRows
    ) -> None:
        """Restore the saved logits and write rows.top from the log-softmax of each row.

        tokens: (R,) int32, the chosen ids, clamped to the vocabulary. Column 0 has the chosen token's rank,
        the number of ids that are at least as likely (1: no other id), and its log probability. Columns 1 to
        MOST_TOP have the most likely ids and their log probabilities, in descending order, lower ids first
        among equals; -1 and minus infinity beyond V. Results are undefined for rows with NaN.
        """
        ...


def raw_log_probs(logits: Tensor, rows: Tensor) -> Tensor:
    """Return (W, V) float32: log-softmax of logits[rows], before `sample` changes them.

    logits: (R, V) float32, unchanged. rows: (W,) int64, on the device of the logits.
    """
    chosen = logits.index_select(0, rows)
    if chosen.is_cuda:
        return chosen.float().log_softmax(-1)
    # in float32, torch is off by 1e-4 on a CPU with AVX2, for 128,256 ids
    return chosen.double().log_softmax(-1).float()


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
