"""Batches and caches for attention tests: rows of given lengths, blocks in random order, NaN in all unused
places."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.conftest import Place
from tridecode.kernels.operands import Batch, CacheLayer, Heads


def make_heads(place: Place, num_heads: int, num_kv_heads: int, head_size: int, alibi: bool = False) -> Heads:
    slopes = torch.rand(num_heads, generator=place.generator).to(place.device) if alibi else None
    return Heads(num_heads, num_kv_heads, head_size, head_size**-0.5, None, slopes)


def make_batch(
    place: Place, contexts: list[int], queries: list[int], block_tokens: int, decodes: int | None = None
) -> Batch:
    """Rows with contexts[b] tokens in the cache after the step, queries[b] of them new. The first `decodes`
    decode; None: all rows of one query, which come first."""
    num_decodes = decodes
    if num_decodes is None:
        num_decodes = next((b for b, count in enumerate(queries) if count != 1), len(queries))
    columns = max(-(-max(contexts) // block_tokens), 1) + 1
    rows = len(contexts)
    order = torch.randperm(rows * columns, generator=place.generator)
    tables = order.view(rows, columns)
    starts = [0]
    positions, slots = [], []
    for row, (context, count) in enumerate(zip(contexts, queries)):
        starts.append(starts[-1] + count)
        for position in range(context - count, context):
            positions.append(max(position, 0))
            block = int(tables[row, max(position, 0) // block_tokens])
            slots.append(block * block_tokens + position % block_tokens if position >= 0 else -1)
    ints = place.ints
    return Batch(
        token_ids=ints([0] * starts[-1]),
        positions=ints(positions),
        kv_slots=ints(slots),
        block_tables=ints(tables),
        context_lens=ints(contexts),
        query_starts=ints(starts),
        sample_tokens=ints([start - 1 for start in starts[1:]]),
        sample_slots=ints(range(rows)),
        decode_queries=max(queries[:num_decodes], default=1),
        decode_tokens=starts[num_decodes],
        num_decodes=num_decodes,
        max_query=max(queries[num_decodes:], default=0),
        max_context=max(contexts),
        fresh_prompts=all(c == q for c, q in zip(contexts[num_decodes:], queries[num_decodes:])),
    )


def make_cache(place: Place, batch: Batch, heads: Heads, block_tokens: int, dtype: torch.dtype) -> CacheLayer:
    """Random keys and values for every token of the batch's contexts, NaN elsewhere."""
    num_blocks = batch.block_tables.numel()
    blocks = place.poison(num_blocks, 2, heads.num_kv_heads, block_tokens, heads.head_size, dtype=dtype)
    for row, context in enumerate(batch.context_lens.tolist()):
        for column in range(-(-context // block_tokens)):
            held = min(block_tokens, context - column * block_tokens)
            block = int(batch.block_tables[row, column])
            blocks[block, :, :, :held] = place.normal(
                2, heads.num_kv_heads, held, heads.head_size, dtype=dtype
            )
    return CacheLayer(blocks)


def context_of(cache: CacheLayer, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
    """(K, L, D) float64 keys and values of a row, read token by token."""
    size, length = cache.block_tokens, int(batch.context_lens[row])
    held = [
        cache.blocks[int(batch.block_tables[row, j // size]), :, :, j % size].double().cpu()
        for j in range(length)
    ]
    both = torch.stack(held, dim=2)  # (2, K, L, D)
    return both[0], both[1]


def attend(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
    """Vaswani et al. 2017 with Press et al. 2022, windows and soft caps, in float64: q (T, H, D), the last T
    positions of k, v (K, L, D)."""
    group = heads.num_heads // heads.num_kv_heads
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = torch.einsum("thd,hld->htl", q.double().cpu(), k) * heads.scale
    distance = (
        torch.arange(k.shape[1])[None, :] - (torch.arange(q.shape[0]) + k.shape[1] - q.shape[0])[:, None]
    )
    if heads.softcap:
        scores = heads.softcap * torch.tanh(scores / heads.softcap)
    if heads.slopes is not None:
        scores = scores + heads.slopes.double().cpu()[:, None, None] * distance
    if heads.key_bias is not None:
        columns = torch.arange(k.shape[1]).clamp(max=heads.key_bias.shape[1] - 1)
        scores = scores + heads.key_bias.double().cpu()[:, None, columns]
    hidden = distance > 0
    if heads.window:
        hidden = hidden | (distance <= -heads.window)
        v = v.nan_to_num()  # blocks outside of all windows may hold anything
        scores = scores.nan_to_num()
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("htl,hld->thd", weights, v).flatten(1)
