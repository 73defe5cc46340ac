"""Attention over the paged cache in plain torch."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tridecode.kernels.formats.kv_rounding import expanded
from tridecode.kernels.operands import Batch, CacheLayer, Heads

#: prefill queries scored at a time, which bounds the memory of the scores
_QUERY_CHUNK = 256


def decode_attention(qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, out: Tensor) -> None:
    """Compute Ops.decode_attention for rows that are rotated and cached."""
    if batch.decode_queries > 1:
        batch = _row_of_each_token(batch)
    rows = batch.num_decodes
    queries = heads.num_heads * heads.head_size
    # the query heads of a KV head count as queries of one head: (B, K, H / K, D)
    q = qkv[:, :queries].unflatten(1, (heads.num_kv_heads, -1, heads.head_size))
    key_index, value_index = _decode_indices(batch, cache, heads)
    shape = (rows, heads.num_kv_heads, -1, heads.head_size)
    k = _decode_tokens(cache, key_index, q.dtype).view(shape)
    v = _decode_tokens(cache, value_index, q.dtype).view(shape)
    mask = _decode_mask(batch, heads, cache.block_tokens, k.dtype)
    out.copy_(_attend(q, k, v, mask, heads).reshape(rows, queries))
    if (batch.context_lens[:rows] == 0).any():
        out[batch.context_lens[:rows] == 0] = 0


def _row_of_each_token(batch: Batch) -> Batch:
    """Return a batch of decode rows of one token each: the bits of a token do not depend on its row."""
    if "token_rows" not in batch.memo:
        rows, tokens = batch.num_decodes, batch.decode_tokens
        starts = batch.query_starts[: rows + 1]
        token = torch.arange(tokens, device=starts.device)
        row = (torch.searchsorted(starts.long(), token, right=True) - 1).clamp(max=rows - 1)
        behind = starts[row + 1] - 1 - token  # tokens of the row behind this one; below 0: padding
        lens = torch.where(behind >= 0, (batch.context_lens[row] - behind).clamp(min=0), 0)
        batch.memo["token_rows"] = replace(
            batch,
            block_tables=batch.block_tables[row],
            context_lens=lens.int(),
            query_starts=torch.arange(tokens + 1, dtype=torch.int32, device=starts.device),
            num_decodes=tokens,
            decode_queries=1,
            decode_tokens=tokens,
            memo={},
        )
    return batch.memo["token_rows"]


def prefill_attention(qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, out: Tensor) -> None:
    """Ops.prefill_attention."""
    _attend_rows(qkv, heads, batch, cache, range(batch.num_decodes, batch.num_rows), out)


def _attend_rows(
    qkv: Tensor,
    heads: Heads,
    batch: Batch,
    cache: CacheLayer,
    rows: range,
    out: Tensor,
) -> None:
    """Compute causal attention row by row.

    qkv, out: begin at the first token of `rows`. Rows without cached tokens read keys and values from qkv.
    """
    queries, keys = heads.num_heads * heads.head_size, heads.num_kv_heads * heads.head_size
    starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    base = starts[rows.start]
    for row in rows:
        first, last = starts[row] - base, starts[row + 1] - base
        if first == last:
            continue
        if lens[row] == 0:  # the row has no context
            out[first:last] = 0
            continue
        mine = qkv[first:last]
        q = mine[:, :queries].unflatten(1, (-1, heads.head_size)).transpose(0, 1)  # (H, T, D)
        if lens[row] == last - first:
            k = mine[:, queries : queries + keys].unflatten(1, (-1, heads.head_size)).transpose(0, 1)
            v = mine[:, queries + keys :].unflatten(1, (-1, heads.head_size)).transpose(0, 1)
        else:
            k, v = cached_keys(cache, batch.block_tables[row], lens[row], q.dtype)
        attended = causal_attention(q, k, v, heads)
        out[first:last].copy_(attended.transpose(0, 1).reshape(last - first, queries))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
    """Return (H, T, D): attention of q (H, T, D), the last T positions, over k, v (K, L, D)."""
    tokens, length = q.shape[1], k.shape[1]
    group = heads.num_heads // heads.num_kv_heads
    if group > 1:
        k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    windowed = 0 < heads.window < length
    biased = heads.slopes is not None or heads.key_bias is not None
    if not biased and tokens == length and not (windowed or heads.softcap):
        return _attend(q[None], k[None], v[None], None, heads)[0]
    columns = torch.arange(length, device=q.device)
    parts = []
    for first in range(0, tokens, _QUERY_CHUNK):
        chunk = q[:, first : first + _QUERY_CHUNK]
        rows = torch.arange(
            length - tokens + first, length - tokens + first + chunk.shape[1], device=q.device
        )
        distances = columns[None, :] - rows[:, None]  # (t, L), 0 or less if visible
        bias = torch.zeros(1, *distances.shape, device=q.device)
        if heads.slopes is not None:
            bias = heads.slopes[:, None, None] * distances.float()
        elif heads.key_bias is not None:
            bias = key_bias(heads, columns)[:, None, :].expand(-1, *distances.shape)
        hidden = distances > 0
        if windowed:
            hidden = hidden | (distances <= -heads.window)
        mask = bias.masked_fill(hidden, -torch.inf).to(q.dtype)
        parts.append(_attend(chunk[None], k[None], v[None], mask[None], heads)[0])
    return torch.cat(parts, dim=1)


def cached_keys(cache: CacheLayer, table: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values (K, length, D) of one row, from its blocks.

    dtype: that of dequantised values.
    """
    blocks = table[: -(-length // cache.block_tokens)].long()
    held = cache.tensors[0][blocks]  # (M, 2, K, P, D)
    if cache.scales is not None:
        held = expanded(held.view(cache.blocks.dtype), cache.scales[blocks], dtype)
    kv = held.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]  # (2, K, length, D)
    return kv[0], kv[1]


def key_bias(heads: Heads, positions: Tensor) -> Tensor:
    """Return (H, len(positions)), heads.key_bias at these positions."""
    assert heads.key_bias is not None
    return heads.key_bias[:, positions.clamp(max=heads.key_bias.shape[1] - 1)]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: Heads) -> Tensor:
    """Compute attention with an additive mask; None: causal."""
    if not heads.softcap:
        causal = mask is None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=heads.scale)
    assert mask is not None
    scores = (q.float() @ k.float().transpose(-1, -2)).mul_(heads.scale / heads.softcap)
    scores.tanh_().mul_(heads.softcap).add_(mask)
    return scores.softmax(dim=-1).to(v.dtype) @ v


def _decode_blocks(batch: Batch, block_tokens: int, window: int) -> tuple[Tensor, int]:
    """Return (B,), the first visible block of each decode row, and the largest number of visible blocks of a
    row.
    """
    key = ("decode_blocks", block_tokens, window)
    if key not in batch.memo:
        lens = batch.context_lens[: batch.num_decodes].clamp(min=1)
        first = (lens - window).clamp(min=0) // block_tokens if window else torch.zeros_like(lens)
        count = int(((lens + block_tokens - 1) // block_tokens - first).max())
        batch.memo[key] = (first, count)
    return batch.memo[key]


def _decode_indices(batch: Batch, cache: CacheLayer, heads: Heads) -> tuple[Tensor, Tensor]:
    """Return the rows of the cache, viewed as (N * 2 * K, P, D), with each decode row's visible keys and
    values: (B * K * blocks,).
    """
    kv_heads = heads.num_kv_heads
    key = ("decode_indices", kv_heads, cache.block_tokens, heads.window)
    if key not in batch.memo:
        first, count = _decode_blocks(batch, cache.block_tokens, heads.window)
        tables = batch.block_tables[: batch.num_decodes]
        columns = first[:, None] + torch.arange(count, device=tables.device)  # (B, blocks)
        blocks = tables.gather(1, columns.clamp(max=tables.shape[1] - 1).long()).clamp(min=0).long()
        each = torch.arange(kv_heads, device=tables.device)[None, :, None]
        keys = (blocks[:, None, :] * (2 * kv_heads) + each).flatten()
        batch.memo[key] = (keys, keys + kv_heads)
    return batch.memo[key]


def _decode_tokens(cache: CacheLayer, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (len(index), P, D), rows of the cache viewed as (N * 2 * K, P, D)."""
    held = cache.tensors[0].view(-1, *cache.blocks.shape[3:]).index_select(0, index)
    if cache.scales is None:
        return held
    scales = cache.scales.view(-1, cache.block_tokens).index_select(0, index)
    return expanded(held.view(cache.blocks.dtype), scales, dtype)


def _decode_mask(batch: Batch, heads: Heads, block_tokens: int, dtype: torch.dtype) -> Tensor:
    """Return (B, K or 1, H / K or 1, tokens of the blocks): -inf outside the context and the window, ALiBi
    within.

    Layers with the same slopes and window share it.
    """
    biases = (heads.slopes, heads.key_bias)
    key = ("decode_mask", *map(id, biases), heads.num_kv_heads, heads.window, block_tokens, dtype)
    if key not in batch.memo:
        lens = batch.context_lens[: batch.num_decodes].clamp(min=1)[:, None]
        first, count = _decode_blocks(batch, block_tokens, heads.window)
        inside = torch.arange(count * block_tokens, device=lens.device)
        positions = first[:, None] * block_tokens + inside  # (B, tokens)
        outside = positions >= lens
        if heads.window:
            outside = outside | (positions < lens - heads.window)
        if heads.key_bias is not None:
            mask = key_bias(heads, positions).transpose(0, 1).unflatten(1, (heads.num_kv_heads, -1))
        elif heads.slopes is None:
            mask = torch.zeros(outside.shape, device=lens.device)[:, None, None, :]
        else:
            distances = (positions - (lens - 1)).float()
            slopes = heads.slopes.view(1, heads.num_kv_heads, -1, 1)
            mask = slopes * distances[:, None, None, :]
        mask = mask.masked_fill(outside[:, None, None, :], -torch.inf).to(dtype)
        batch.memo[key] = (mask, biases)  # keeps them alive, so that no other object gets their id
    return batch.memo[key][0]
