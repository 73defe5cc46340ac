"""Embedding and head cut by vocabulary over the tensor ranks: where it is done, and rows across ranks.

Tied or not, both are cut: a rank holds 1 / t of V * C, and so of the head's product, for one more sum of
(T, C) over the ranks in a step. A GPU samples with Cuda.sample_shared, a CPU with vocab_sampler.py.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tridecode.backend.weights.layout import VocabShare, WeightSpec, vocabulary_rows

_CUT = ("model.wte", "model.lm_head.weight", "model.lm_head.bias")


class TensorRanks(Protocol):
    """The ranks of a tensor group, as sampling uses them."""

    tensor_size: int

    def gather(self, x: Tensor) -> Tensor:
        """(tensor_size, *x.shape) in rank order."""
        ...

    def all_reduce(self, x: Tensor) -> None: ...


def share_vocabulary(
    specs: list[WeightSpec], tensor_size: int, device_type: str, has_peers: bool
) -> list[WeightSpec]:
    """The specs with embedding and head cut by vocabulary, where the tensor ranks share it.

    CPUs do. GPUs do if their kernels reach the memory of their peers (has_peers): the sampling kernel
    exchanges there, in CUDA graphs too. Elsewhere each GPU has the whole vocabulary.
    """
    if tensor_size == 1 or not (device_type == "cpu" or has_peers):
        return specs
    return [vocabulary_rows(spec) if spec.name in _CUT else spec for spec in specs]


def mask_padding(logits: Tensor, vocab: VocabShare | None) -> Tensor:
    """logits, (R, size) of this rank's ids, with minus infinity in the columns of no id."""
    if vocab is not None and vocab.count < vocab.size:
        logits[:, vocab.count :] = -torch.inf
    return logits


def whole_rows(logits: Tensor, vocab: VocabShare | None, ranks: TensorRanks) -> Tensor:
    """(n, V): rows of logits (n, size) of all ranks' ids. Collective in the tensor group."""
    if vocab is None:
        return logits
    parts = ranks.gather(logits)  # (t, n, size)
    return parts.movedim(0, 1).reshape(len(logits), -1)[:, : vocab.vocab_size].contiguous()


def log_sum_exp(logits: Tensor, ranks: TensorRanks) -> Tensor:
    """(n,) float64: log(sum(exp)) over the whole vocabulary of logits (n, size), padding minus infinity."""
    return ranks.gather(logits.logsumexp(-1).double()).logsumexp(0)


def values_at(values: Tensor, ids: Tensor, vocab: VocabShare, ranks: TensorRanks) -> Tensor:
    """(n,): values (n, size) of each row at a token id of the whole vocabulary (n,) int64."""
    local = ids - vocab.first
    mine = (local >= 0) & (local < vocab.count)
    picked = values.gather(1, local.clamp(0, vocab.size - 1)[:, None])[:, 0]
    by_rank = ranks.gather(torch.stack([picked.double(), mine.double()]))  # (t, 2, n)
    owner = by_rank[:, 1].argmax(0)
    return by_rank[:, 0].gather(0, owner[None])[0].to(values.dtype)


def largest(values: Tensor, count: int, vocab: VocabShare, ranks: TensorRanks) -> tuple[Tensor, Tensor]:
    """((n, count) values, (n, count) int64 token ids), largest first, of values (n, size); count <= V.

    Each rank sends its `count` largest. Of equal values the order is not defined.
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
