"""Embedding and head split by vocabulary over the tensor ranks: when that is done, and rows across ranks.

Both are split, tied or not: a rank holds 1 / t of V * C and computes as much of the head's GEMM, at the cost
of one more sum of (T, C) over the ranks per step. A GPU samples with Cuda.sample_shared, a CPU with
vocab_sampler.py.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tridecode.backend.weights.layout import VocabShare, WeightSpec, vocabulary_rows

_CUT = ("model.wte", "model.lm_head.weight", "model.lm_head.bias")


class TensorRanks(Protocol):
    """The interface to the ranks of a tensor group that sampling needs."""

    tensor_size: int

    def gather(self, x: Tensor) -> Tensor:
        """Return (tensor_size, *x.shape) in rank order."""
        ...

    def all_reduce(self, x: Tensor) -> None: ...


def share_vocabulary(
    specs: list[WeightSpec], tensor_size: int, device_type: str, has_peers: bool
) -> list[WeightSpec]:
    """Return the specs, with embedding and head split by vocabulary if the tensor ranks share it.

    CPUs always share it. GPUs do if their kernels can access peer memory (has_peers), through which the
    sampling kernel exchanges, in CUDA graphs too. Otherwise each GPU holds the whole vocabulary.
    """
    if tensor_size == 1 or not (device_type == "cpu" or has_peers):
        return specs
    return [vocabulary_rows(spec) if spec.name in _CUT else spec for spec in specs]


def mask_padding(logits: Tensor, vocab: VocabShare | None) -> Tensor:
    """Set the columns without an id to minus infinity in logits, (R, size) of this rank's ids."""
    if vocab is not None and vocab.count < vocab.size:
        logits[:, vocab.count :] = -torch.inf
    return logits


def whole_rows(logits: Tensor, vocab: VocabShare | None, ranks: TensorRanks) -> Tensor:
    """Return (n, V): rows of logits (n, size), joined over all ranks. Collective in the tensor group."""
    if vocab is None:
        return logits
    parts = ranks.gather(logits)  # (t, n, size)
    return parts.movedim(0, 1).reshape(len(logits), -1)[:, : vocab.vocab_size].contiguous()


def log_sum_exp(logits: Tensor, ranks: TensorRanks) -> Tensor:
    """Return (n,) float64: log(sum(exp)) over the whole vocabulary of logits (n, size), padding minus
    infinity.
    """
    return ranks.gather(logits.logsumexp(-1).double()).logsumexp(0)


def values_at(values: Tensor, ids: Tensor, vocab: VocabShare, ranks: TensorRanks) -> Tensor:
    """Return (n,): each row's value, of values (n, size), at a token id of the whole vocabulary, (n,)
    int64.
    """
    local = ids - vocab.first
    mine = (local >= 0) & (local < vocab.count)
    picked = values.gather(1, local.clamp(0, vocab.size - 1)[:, None])[:, 0]
    by_rank = ranks.gather(torch.stack([picked.double(), mine.double()]))  # (t, 2, n)
    owner = by_rank[:, 1].argmax(0)
    return by_rank[:, 0].gather(0, owner[None])[0].to(values.dtype)


def largest(values: Tensor, count: int, vocab: VocabShare, ranks: TensorRanks) -> tuple[Tensor, Tensor]:
    """Return ((n, count) values, (n, count) int64 token ids), largest first, of values (n, size); count <= V.

    Each rank sends its `count` largest. The order of equal values is undefined.
    """
    most, rows = min(count, vocab.size), values.shape[0]
    sent = values.new_zeros(rows, most, 2, dtype=torch.float64)
    mine = min(most, vocab.count)
    best = values[:, : vocab.count].topk(mine, dim=-1)
    sent[:, :mine, 0] = best.values
    sent[:, :mine, 1] = best.indices + vocab.first
    parts = ranks.gather(sent)
    parts = torch.cat([part[:, : min(most, held)] for part, held in zip(parts, vocab.counts)], 1)
    found, places = parts[..., 0].topk(count, dim=-1)
    return found.to(values.dtype), parts[..., 1].gather(1, places).long()
