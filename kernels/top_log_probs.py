"""The most likely tokens of a step and their log probabilities: the operations within a step, and plain torch
for the steps that cannot use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tridecode.kernels import scratch
from tridecode.kernels.sampling_state import MOST_BIASES, SLOT, SamplingState

#: tokens of a row besides the chosen one, at most
MOST_TOP = 20
#: places of a row's kept values: MOST_BIASES of its biases, END_IDS of the ids that end it, its bad words
END_IDS: int = SLOT["end_ids"].shape[0]  # type: ignore[misc]


@dataclass(frozen=True)
class TopRows:
    """The buffers of the operations, at fixed addresses.

    kept: (R, K) float32, logits that `sample` may edit, by place. top: (R, 2, 1 + MOST_TOP) int32, the ids of
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
    """The most likely tokens of rows whose slots have top_log_probs >= 0; other rows are skipped. A part of
    kernels.ops.Ops, which has the letters; both operations may be captured in a CUDA graph.
    """

    @property
    def has_top_log_probs(self) -> bool:
        """Return whether steps should use these operations: whether `sample` leaves logits as they are except
        for those that keep_raw_logits keeps and the ids of n-grams.
        """
        ...

    def keep_raw_logits(self, logits: Tensor, slots: Tensor, state: SamplingState, rows: TopRows) -> None:
        """rows.kept = the logits of the slots' biases, end_ids (where min_tokens > 0) and bad words.

        logits: (R, V) float32, before `sample`. slots: (R,) int32, -1 for none.
        """
        ...

    def top_log_probs(
        self, logits: Tensor, slots: Tensor, state: SamplingState, tokens: Tensor, rows: TopRows
    ) -> None:
        """Put the kept logits back, and write rows.top from the log-softmax of each row.

        tokens: (R,) int32, the chosen ids; one outside the vocabulary counts as the nearest id. Column 0
        belongs to the chosen token: its rank, the number of ids that are at least as likely (1: none is more
        likely), and its log probability. Columns 1 to MOST_TOP are the most likely ids, best first and the
        lower of equal ones first, and their log probabilities; -1 and minus infinity beyond V. Rows with NaN
        have undefined results.
        """
        ...


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
