"""The sampling draw of vocab_sampler: top-k, top-p and Gumbel-max over logits split over ranks by columns."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.ranks.vocab_share import TensorRanks
from tridecode.backend.weights.layout import VocabShare
from tridecode.kernels.sampling_rules import kept_ids

#: maximum logits per rank that are exchanged for top-k; for a larger k, the k-th largest is found by radix
#: search
MOST_CANDIDATES = 1024
#: float32 values processed at a time: the search holds several 8-byte copies of each
_VALUES = 1 << 22
#: bits of an ordered float32 that each pass of the search resolves, most significant first: (shift, number of
#: bins)
_PASSES = ((21, 2048), (10, 2048), (0, 1024))
_WORD = 0xFFFFFFFF


def draw(
    x: Tensor, best: Tensor, sequences: np.ndarray, vocab: VocabShare, ranks: TensorRanks
) -> tuple[Tensor, Tensor]:
    """Return ((n,) int64 token ids, (n,) float64 logits) drawn from rows x (n, size) float32, padding minus
    infinity.

    best: (n,) the largest logit of each row over all ranks. sequences: (n,) SLOT records. Rows without a
    finite best get any id. Collective in the tensor group.
    """
    step = max(1, _VALUES // x.shape[1])
    parts = [
        _draw(x[part], best[part], sequences[part], vocab, ranks)
        for part in (slice(first, first + step) for first in range(0, len(x), step))
    ]
    ids, logits = (torch.cat(column) for column in zip(*parts))
    return ids, logits


def _draw(
    x: Tensor, best: Tensor, sequences: np.ndarray, vocab: VocabShare, ranks: TensorRanks
) -> tuple[Tensor, Tensor]:
    keep = kept_ids(x, best, sequences, SharedRows(vocab, ranks))
    return _largest_score(x, keep, sequences, vocab, ranks)


class SharedRows:
    """The Search of kernels/sampling_rules.py over this rank's columns. Collective."""

    def __init__(self, vocab: VocabShare, ranks: TensorRanks):
        self.vocab_size, self._vocab, self._ranks = vocab.vocab_size, vocab, ranks

    def kth_largest(self, x: Tensor, counts: np.ndarray) -> Tensor:
        most, wanted = int(counts.max()), torch.from_numpy(counts).to(x.device)
        if most > MOST_CANDIDATES:
            ones = torch.ones_like(x, dtype=torch.float64).masked_fill_(x == -torch.inf, 0.0)
            return threshold(x, ones, wanted.double(), self._ranks, is_share=False)
        mine = x.topk(min(most, self._vocab.size), dim=-1).values
        # (n, t * min(most, size)), at least `most` columns
        every = self._ranks.gather(mine).movedim(0, 1).flatten(1)
        return every.topk(min(most, every.shape[1]), dim=-1).values.gather(1, wanted[:, None] - 1)[:, 0]

    def nucleus(self, x: Tensor, weights: Tensor, shares: np.ndarray) -> Tensor:
        return threshold(x, weights, torch.from_numpy(shares.astype(np.float64)).to(x.device), self._ranks)

    def total(self, values: Tensor) -> Tensor:
        self._ranks.all_reduce(values)
        return values


def threshold(
    x: Tensor, weights: Tensor, wanted: Tensor, ranks: TensorRanks, is_share: bool = True
) -> Tensor:
    """Return (n,) float32: per row the largest v such that the weights of all values >= v, on all ranks,
    reach `wanted`.

    Minus infinity if all weights together do not reach it. x: (n, size) float32. weights: (n, size) float64,
    0 for values to ignore. wanted: (n,) float64, a share of the row's sum or, without is_share, a sum. A
    radix search: each pass sums the weights by some bits of the ordered values, among the values that begin
    with the bits found so far.
    """
    keys, above, bits = _ordered(x), torch.zeros_like(wanted), torch.zeros_like(wanted, dtype=torch.int64)
    reached = torch.ones_like(wanted, dtype=torch.bool)
    for number, (shift, bins) in enumerate(_PASSES):
        begins = keys >> shift >> (bins.bit_length() - 1)
        counted = weights.masked_fill(begins != bits[:, None], 0.0) if number else weights
        sums = torch.zeros(len(x), bins, dtype=torch.float64, device=x.device)
        sums.scatter_add_(1, (keys >> shift) & (bins - 1), counted)
        ranks.all_reduce(sums)
        sums = sums.flip(1)  # from the largest values down
        down = above[:, None] + sums.cumsum(1)
        if number == 0:
            wanted = wanted * down[:, -1] if is_share else wanted
            reached = down[:, -1] >= wanted
        enough = (down >= wanted[:, None]) & (sums > 0)
        lowest = bins - 1 - (sums > 0).flip(1).int().argmax(1)  # a later pass may sum to slightly less
        place = torch.where(enough.any(1), enough.int().argmax(1), lowest)
        before = down.gather(1, (place - 1).clamp(min=0)[:, None])[:, 0]
        above = torch.where(place > 0, before, above)
        bits = bits * bins + bins - 1 - place
    return torch.where(reached, _from_ordered(bits), -torch.inf)


def _ordered(x: Tensor) -> Tensor:
    """Return int64 in 0 .. 2^32 - 1 in the order of the float32 values; both zeros map to one value."""
    bits = (x + 0.0).view(torch.int32).long() & _WORD
    return torch.where(bits >> 31 == 1, bits ^ _WORD, bits | 1 << 31)


def _from_ordered(keys: Tensor) -> Tensor:
    bits = torch.where(keys >> 31 == 1, keys ^ (1 << 31), keys ^ _WORD)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)


def _largest_score(
    x: Tensor, keep: Tensor, sequences: np.ndarray, vocab: VocabShare, ranks: TensorRanks
) -> tuple[Tensor, Tensor]:
    """Return the id with the largest logit plus Gumbel noise among the kept ones, and its logit."""
    rows, columns = keep.nonzero(as_tuple=True)
    seeds = torch.from_numpy(sequences["seed"].view(np.int64).copy()).to(x.device)
    generated = torch.from_numpy(sequences["generated"].astype(np.int64)).to(x.device)
    noise = uniforms(seeds[rows], columns + vocab.first, generated[rows])
    scores = torch.full_like(x, -torch.inf)
    lowest = torch.finfo(torch.float32).min  # above any value that is not kept, whatever the noise
    scores[rows, columns] = (x[rows, columns] - (-torch.log1p(-noise)).log()).clamp_(min=lowest)
    values, places = scores.max(dim=-1)
    logits = x.gather(1, places[:, None])[:, 0]
    sent = torch.stack([values.double(), (places + vocab.first).double(), logits.double()])
    found = ranks.gather(sent)  # (t, 3, n)
    owner = found[:, 0].max(0).indices[None]
    return found[:, 1].gather(0, owner)[0].long(), found[:, 2].gather(0, owner)[0]


def uniforms(seeds: Tensor, ids: Tensor, generated: Tensor) -> Tensor:
    """(n,) float32 in (0, 1]: kernels.philox.uniforms in torch, with a key and counter per element.

    seeds, ids, generated: (n,) int64; seeds hold the bits of a uint64.
    """
    c0, c1 = ids >> 2, generated & _WORD
    c2, c3 = torch.zeros_like(ids), torch.zeros_like(ids)
    k0, k1 = seeds & _WORD, (seeds >> 32) & _WORD
    for _ in range(10):  # Philox-4x32-10; products wrap at 2^64, which keeps both halves of 32 bits
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _WORD) ^ c1 ^ k0,
            p1 & _WORD,
            ((p0 >> 32) & _WORD) ^ c3 ^ k1,
            p0 & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    word = torch.stack([c0, c1, c2, c3]).gather(0, (ids & 3)[None])[0]
    return ((word.double() + 0.5) * 2.0**-32).float()
