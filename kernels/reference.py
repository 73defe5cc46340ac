"""The meaning of each operation, in plain torch: the CPU path of the engine and the oracle of the CUDA
kernels.

Contracts are in ops.py. Runs on any device; TRIDECODE_OPS=reference chooses it on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tridecode.kernels.checks import ShapeError, indices, match, same_dtype
from tridecode.kernels.formats.kv_rounding import expanded, rounded
from tridecode.kernels.formats.quantized import QuantizedWeight, as_rounded, check_int8_table
from tridecode.kernels.ops import (
    Batch,
    CacheLayer,
    CandidateRows,
    Heads,
    Linear,
    Norm,
    Product,
    Rope,
    SamplingState,
)
from tridecode.kernels.philox import uniforms
from tridecode.kernels.sampling_state import BROKEN_LOGITS, MOST_COUNTED, NO_TOKEN, records, words

#: queries of a prefill row that are scored at a time; bounds the memory of the scores
_QUERY_CHUNK = 256


class Reference:
    """Every operation of kernels.ops.Ops. Its only state is a scratch buffer."""

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, Tensor] = {}

    def reserve(
        self,
        max_tokens: int,
        max_columns: int,
        max_rows: int,
        max_context: int,
        vocab_size: int,
        context_bytes: int = 0,
    ) -> None:
        """Nothing to do: torch allocates what a step needs."""

    def captures(self, heads: Heads) -> bool:
        return False  # numbers of rows and lengths are read on the host

    def pack(self, linear: Linear, dtype: torch.dtype = torch.float32, is_head: bool = False) -> Linear:
        return linear  # a quantised weight is expanded at each call

    def _temporary(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """(rows, columns) of scratch, valid until the next operation."""
        held = self._scratch.get(like.dtype)
        if held is None or held.numel() < rows * columns or held.device != like.device:
            held = self._scratch[like.dtype] = torch.empty(
                rows * columns, dtype=like.dtype, device=like.device
            )
        return held[: rows * columns].view(rows, columns)

    def resolve_tokens(self, token_ids: Tensor, slots: Tensor, last_tokens: Tensor) -> None:
        indices("resolve_tokens", ("token_ids", token_ids), ("slots", slots), ("last_tokens", last_tokens))
        head = token_ids[: slots.shape[0]]
        known = last_tokens[slots.clamp(min=0).long()].masked_fill(slots < 0, 0)
        torch.where(head < 0, known, head, out=head)

    def embed(
        self,
        token_ids: Tensor,
        table: Tensor | QuantizedWeight,
        *,
        positions: Tensor | None = None,
        position_table: Tensor | None = None,
        first_id: int | None = None,
        out: Tensor,
    ) -> None:
        if first_id is not None:
            local = token_ids - first_id
            known = local.clamp(0, table.shape[0] - 1)
            self.embed(known, table, positions=positions, position_table=position_table, out=out)
            out.masked_fill_((local != known)[:, None], 0)
            return
        ids = token_ids.long()
        if isinstance(table, QuantizedWeight):
            table = check_int8_table("embed", table)
            rows = table.values[ids].float() * table.scales[ids]
            if position_table is not None and positions is not None:
                rows += F.embedding(positions, position_table).float()
            out.copy_(rows)
            return
        match("embed", ("VC", "table", table), ("TC", "out", out), ("T", "token_ids", token_ids))
        if position_table is None or positions is None:
            torch.index_select(table, 0, ids, out=out)
            return
        match(
            "embed",
            ("TC", "out", out),
            ("PC", "position_table", position_table),
            ("T", "positions", positions),
        )
        total = F.embedding(token_ids, table).float() + F.embedding(positions, position_table).float()
        out.copy_(total)

    def norm(self, x: Tensor, norm: Norm, *, out: Tensor) -> None:
        match("norm", ("TC", "x", x), ("C", "weight", norm.weight), ("TC", "out", out))
        same_dtype("norm", ("x", x), ("weight", norm.weight), ("out", out))
        out.copy_(_normed(x, norm))

    def linear(
        self,
        x: Tensor,
        linear: Linear,
        *,
        norm: Norm | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor,
    ) -> None:
        gated = activation in GATED
        rows, columns = x.shape[0], linear.weight.shape[0]
        if isinstance(linear.weight, Tensor):
            same_dtype("linear", ("x", x), ("weight", linear.weight))
        match("linear", ("TI", "x", x), ("TO", "out", out))
        wanted = columns // 2 if gated else columns
        if out.shape[1] != wanted:
            raise ShapeError(f"linear: out has {out.shape[1]} columns; {columns} weight rows give {wanted}")
        if norm is not None:
            x = _normed(x, norm)
        rounding = linear.weight if isinstance(linear.weight, QuantizedWeight) else linear
        if rounding.activations:
            x = as_rounded(x, rounding.activations, rounding.activation_group)
        if out.dtype != x.dtype or gated or (activation is not None and residual is not None):
            product = self._temporary(rows, columns, x)
            self._product(x, linear, None, product)
            product = activated(product, activation)
            out.copy_(product if residual is None else product.add_(residual))
            return
        self._product(x, linear, residual, out)
        activate(out, activation)

    def _product(self, x: Tensor, linear: Linear, residual: Tensor | None, out: Tensor) -> None:
        """out = x @ weight.T (+ bias) (+ residual)."""
        if isinstance(linear.weight, QuantizedWeight):
            product = x.float() @ linear.weight.expanded().t()
            if linear.bias is not None:
                product += linear.bias
            out.copy_(product if residual is None else product.add_(residual))
            return
        weight = linear.dense.t()
        if residual is not None:
            torch.addmm(residual, x, weight, out=out)
            if linear.bias is not None:
                out.add_(linear.bias)
        elif linear.bias is not None:
            torch.addmm(linear.bias, x, weight, out=out)
        else:
            torch.mm(x, weight, out=out)

    @property
    def most_linears_rows(self) -> int:
        return 0

    def linears(self, products: Sequence[Product]) -> bool:
        return False

    def project_qkv(
        self,
        x: Tensor,
        linear: Linear,
        norm: Norm | None,
        heads: Heads,
        batch: Batch,
        cache: CacheLayer,
        *,
        out: Tensor,
    ) -> None:
        self.linear(x, linear, norm=norm, out=out)
        self.finish_qkv(out, heads, batch, cache)

    def finish_qkv(self, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer) -> None:
        change_qkv(qkv, heads)
        queries, keys = heads.num_heads * heads.head_size, heads.num_kv_heads * heads.head_size
        if heads.rope is not None:
            rotated = qkv[:, : queries + keys].unflatten(1, (-1, heads.head_size))
            _rotate(rotated, heads.rope, batch)
        kv = qkv[:, queries:].unflatten(1, (2, heads.num_kv_heads, heads.head_size))
        rows, blocks, offsets = _written(batch, cache.block_tokens)
        if cache.scales is None:
            cache.blocks[blocks, :, :, offsets] = kv if rows is None else kv[rows]
            return
        values, scales = rounded(kv, cache.blocks.dtype)
        kv.copy_(expanded(values, scales, kv.dtype))  # a prompt attends to what later steps will read
        for held, new in zip(cache.tensors, (values.view(torch.int8), scales)):
            held[blocks, :, :, offsets] = new if rows is None else new[rows]

    def decode_attention(
        self,
        qkv: Tensor,
        heads: Heads,
        batch: Batch,
        cache: CacheLayer,
        *,
        out: Tensor,
        unfinished: Linear | None = None,
    ) -> None:
        if unfinished is not None:
            self.finish_qkv(qkv, heads, batch, cache)
        rows = batch.num_decodes
        queries = heads.num_heads * heads.head_size
        # the query heads of one kv head are taken as queries of one head: (B, K, H / K, D)
        q = qkv[:, :queries].unflatten(1, (heads.num_kv_heads, -1, heads.head_size))
        key_index, value_index = _decode_indices(batch, cache, heads)
        shape = (rows, heads.num_kv_heads, -1, heads.head_size)
        k = _decode_tokens(cache, key_index, q.dtype).view(shape)
        v = _decode_tokens(cache, value_index, q.dtype).view(shape)
        mask = _decode_mask(batch, heads, cache.block_tokens, k.dtype)
        out.copy_(_attend(q, k, v, mask, heads).reshape(rows, queries))
        if (batch.context_lens[:rows] == 0).any():
            out[batch.context_lens[:rows] == 0] = 0

    def prefill_attention(
        self, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, *, out: Tensor
    ) -> None:
        base = batch.num_decodes
        queries, keys = heads.num_heads * heads.head_size, heads.num_kv_heads * heads.head_size
        starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
        for row in range(base, batch.num_rows):
            first, last = starts[row] - base, starts[row + 1] - base
            if first == last:
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

    def gather_rows(self, x: Tensor, rows: Tensor, *, out: Tensor) -> None:
        match("gather_rows", ("TC", "x", x), ("RC", "out", out), ("R", "rows", rows))
        torch.index_select(x, 0, rows.long(), out=out)

    def sample(
        self, logits: Tensor, slots: Tensor, state: SamplingState, *, tokens: Tensor, log_probs: Tensor
    ) -> None:
        match(
            "sample",
            ("RV", "logits", logits),
            ("R", "slots", slots),
            ("R", "tokens", tokens),
            ("R", "log_probs", log_probs),
        )
        indices("sample", ("slots", slots), ("tokens", tokens))
        log_probs.zero_()
        rows = (slots >= 0).nonzero().squeeze(1)
        if not len(rows):
            return
        held = slots[rows].long()
        sequences = records(state.slots[held])
        greedy = _greedy(sequences)
        plain = (
            greedy
            & ~_penalised(sequences)
            & (sequences["num_bad_words"] == 0)
            & (sequences["generated"] >= sequences["min_tokens"])
            & (sequences["return_log_probs"] == 0)
        ).all()
        chosen = _largest(logits) if plain else []
        for row, slot, sequence in zip(rows.tolist(), held.tolist(), sequences):
            token = chosen[row] if plain else _choose(logits[row], slot, sequence, state, log_probs[row])
            tokens[row] = token
            _remember(state, slot, sequence, max(token, 0))
        state.slots[held] = words(sequences).to(state.slots.device)

    def candidates(self, logits: Tensor, wanted: CandidateRows, *, ids: Tensor, log_probs: Tensor) -> None:
        beam_candidates(logits, wanted, ids, log_probs)


#: float32 values of the copy of the logits that candidates are chosen from at a time
_CANDIDATE_LOGITS = 1 << 24


def beam_candidates(logits: Tensor, wanted: CandidateRows, ids: Tensor, log_probs: Tensor) -> None:
    """Ops.candidates on any device, without waiting for it."""
    match("candidates", ("nW", "ids", ids), ("nW", "log_probs", log_probs), ("n", "rows", wanted.rows))
    step = max(1, _CANDIDATE_LOGITS // logits.shape[1])
    for first in range(0, len(wanted.rows), step):
        part = slice(first, first + step)
        x = processed_rows(logits, wanted, part)
        best = torch.log_softmax(x, dim=-1).topk(ids.shape[1], dim=-1)
        ids[part].copy_(best.indices)
        is_excluded = x.amax(-1, keepdim=True) == -torch.inf  # log_softmax gives NaN
        log_probs[part].copy_(best.values.masked_fill(is_excluded, -torch.inf))


def processed_rows(logits: Tensor, wanted: CandidateRows, part: slice) -> Tensor:
    """(n', V): the logits of a part of the rows after temperature, penalties and bans."""
    x = logits[wanted.rows[part]]
    if wanted.temperature is not None:
        x /= wanted.temperature[part]
    if wanted.seen is not None:
        counts = _scattered(wanted.seen[:2], wanted.seen[2].float(), part, x)
        repeated = x
        if wanted.repetition is not None:
            repeated = torch.where(x < 0, x * wanted.repetition[part], x / wanted.repetition[part])
        if wanted.presence is not None:
            repeated = repeated - wanted.presence[part]
        if wanted.frequency is not None:
            repeated = repeated - wanted.frequency[part] * counts
        x = torch.where(counts > 0, repeated, x)
    if wanted.banned is not None:
        ones = torch.ones_like(wanted.banned[0], dtype=x.dtype)
        x.masked_fill_(_scattered(wanted.banned, ones, part, x) > 0, -torch.inf)
    return x


def _scattered(places: Tensor, values: Tensor, part: slice, like: Tensor) -> Tensor:
    """Values at (row, id) of a part of the rows; zeros elsewhere, of the shape of `like`."""
    rows, last = places[0] - part.start, like.shape[0]
    inside = (rows >= 0) & (rows < last)
    out = torch.zeros(last + 1, like.shape[1], dtype=like.dtype, device=like.device)
    out[torch.where(inside, rows, last), places[1]] = values  # values of other parts go to a row of their own
    return out[:last]


#: gated activations, and the activation of the gate
GATED = {"swiglu": "silu", "geglu_tanh": "gelu_tanh", "geglu": "gelu"}


def gate(product: Tensor, activation: str | None) -> Tensor:
    """(T, F) of (T, 2F): the activation of the first half times the second, changing the first in place."""
    gates, values = product.chunk(2, dim=-1)
    activate(gates, GATED[activation or ""])
    return gates.mul_(values)


def activated(product: Tensor, activation: str | None) -> Tensor:
    """product (T, O) with its activation, changed in place; of a gated one (T, O / 2), a view."""
    if activation in GATED:
        return gate(product, activation)
    activate(product, activation)
    return product


def change_qkv(qkv: Tensor, heads: Heads) -> None:
    """What lies between the product and the rotation, in place. qkv: (T, (H + 2K) * D)."""
    if heads.qkv_limit:
        qkv.clamp_(-heads.qkv_limit, heads.qkv_limit)
    first = 0
    for norm, count in ((heads.query_norm, heads.num_heads), (heads.key_norm, heads.num_kv_heads)):
        part = qkv[:, first : first + count * heads.head_size].unflatten(1, (count, heads.head_size))
        if norm is not None:
            part.copy_(_normed(part, norm))
        first += count * heads.head_size


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: Heads) -> Tensor:
    """Attention with a mask that is added to the scores; None: causal."""
    if not heads.softcap:
        causal = mask is None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=heads.scale)
    assert mask is not None
    scores = (q.float() @ k.float().transpose(-1, -2)).mul_(heads.scale / heads.softcap)
    scores.tanh_().mul_(heads.softcap).add_(mask)
    return scores.softmax(dim=-1).to(v.dtype) @ v


def _normed(x: Tensor, norm: Norm) -> Tensor:
    if norm.bias is not None and norm.weight.ndim == 2:  # weights of each head
        centred = F.layer_norm(x.float(), x.shape[-1:], eps=norm.eps)
        return (centred * norm.weight + norm.bias).to(x.dtype)
    if norm.bias is not None:
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    x32 = x.float()
    return (x32 * (x32.square().mean(-1, keepdim=True) + norm.eps).rsqrt()).to(x.dtype) * norm.weight


def activate(x: Tensor, activation: str | None) -> None:
    if activation == "relu":
        x.relu_()
    elif activation == "silu":
        F.silu(x, inplace=True)
    elif activation is not None:
        in_place = torch._C._nn.gelu_  # type: ignore[attr-defined]  # torch's stubs lack it
        in_place(x, approximate={"gelu": "none", "gelu_tanh": "tanh"}[activation])


def _rotate(x: Tensor, rope: Rope, batch: Batch) -> None:
    """Rotate x (T, heads, D) in place at the batch's positions, in float32."""
    key = ("rope", id(rope))
    if key not in batch.memo:
        rows = batch.positions.long()
        batch.memo[key] = (rope.cos[rows].unsqueeze(1), rope.sin[rows].unsqueeze(1), rope)
    cos, sin, _ = batch.memo[key]  # (T, 1, size / 2)
    half = rope.size // 2
    if rope.interleaved:
        first, second = x[..., 0 : rope.size : 2], x[..., 1 : rope.size : 2]
    else:
        first, second = x[..., :half], x[..., half : rope.size]
    a, b = first.float(), second.float()
    turned = a * cos - b * sin
    second.copy_(b * cos + a * sin)
    first.copy_(turned)


def _written(batch: Batch, block_tokens: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """Rows that are written to the cache (None: all), their blocks and their offsets."""
    if "written" not in batch.memo:
        slots = batch.kv_slots.long()
        rows = None if bool((slots >= 0).all()) else (slots >= 0).nonzero().squeeze(1)
        slots = slots if rows is None else slots[rows]
        batch.memo["written"] = (rows, slots // block_tokens, slots % block_tokens)
    return batch.memo["written"]


def _decode_blocks(batch: Batch, block_tokens: int, window: int) -> tuple[Tensor, int]:
    """(B,): the first block that each decode row sees, and how many blocks from there the longest row has."""
    key = ("decode_blocks", block_tokens, window)
    if key not in batch.memo:
        lens = batch.context_lens[: batch.num_decodes].clamp(min=1)
        first = (lens - window).clamp(min=0) // block_tokens if window else torch.zeros_like(lens)
        count = int(((lens + block_tokens - 1) // block_tokens - first).max())
        batch.memo[key] = (first, count)
    return batch.memo[key]


def _decode_indices(batch: Batch, cache: CacheLayer, heads: Heads) -> tuple[Tensor, Tensor]:
    """Rows of the cache, seen as (N * 2 * K, P, D), that hold the keys and the values which each decode row
    sees: (B * K * blocks,)."""
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
    """(len(index), P, D): rows of the cache, seen as (N * 2 * K, P, D)."""
    held = cache.tensors[0].view(-1, *cache.blocks.shape[3:]).index_select(0, index)
    if cache.scales is None:
        return held
    scales = cache.scales.view(-1, cache.block_tokens).index_select(0, index)
    return expanded(held.view(cache.blocks.dtype), scales, dtype)


def _decode_mask(batch: Batch, heads: Heads, block_tokens: int, dtype: torch.dtype) -> Tensor:
    """(B, K or 1, H / K or 1, tokens of the blocks): -inf outside the context and the window, ALiBi within.
    Layers of the same slopes and window share it."""
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
        batch.memo[key] = (mask, biases)  # they are kept: their id stays theirs
    return batch.memo[key][0]


def key_bias(heads: Heads, positions: Tensor) -> Tensor:
    """(H, len(positions)): heads.key_bias of these positions."""
    assert heads.key_bias is not None
    return heads.key_bias[:, positions.clamp(max=heads.key_bias.shape[1] - 1)]


def cached_keys(cache: CacheLayer, table: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values (K, length, D) of one row, from its blocks. dtype: what an 8-bit cache expands to."""
    blocks = table[: -(-length // cache.block_tokens)].long()
    held = cache.tensors[0][blocks]  # (M, 2, K, P, D)
    if cache.scales is not None:
        held = expanded(held.view(cache.blocks.dtype), cache.scales[blocks], dtype)
    kv = held.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]  # (2, K, length, D)
    return kv[0], kv[1]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
    """q: (H, T, D), the last T of the positions of k, v: (K, L, D) -> (H, T, D)."""
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
        distances = columns[None, :] - rows[:, None]  # (t, L), 0 or less where visible
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


def _greedy(sequence: np.ndarray | np.void) -> np.ndarray:
    """Of one SLOT record or of many."""
    return (sequence["top_k"] == 1) | (sequence["temperature"] == 0)


def _penalised(sequence: np.ndarray | np.void) -> np.ndarray:
    return (
        (sequence["repetition_penalty"] != 1)
        | (sequence["presence_penalty"] != 0)
        | (sequence["frequency_penalty"] != 0)
    )


def _largest(logits: Tensor) -> list[int]:
    """The id of the largest logit of each row, the lowest of equal ones; BROKEN_LOGITS for a row that has NaN
    or infinity, NO_TOKEN for one whose ids are all impossible."""
    values, ids = logits.max(dim=-1)  # a NaN counts as the largest
    ids = torch.where(values < torch.inf, ids, BROKEN_LOGITS)
    return torch.where(values == -torch.inf, NO_TOKEN, ids).tolist()


def _choose(logits: Tensor, slot: int, sequence: np.void, state: SamplingState, log_prob: Tensor) -> int:
    """The next token of one row, or BROKEN_LOGITS or NO_TOKEN. logits (V,) float32 are changed in place;
    log_prob () is written if the sequence wants it."""
    if sequence["num_bad_words"]:
        _ban(logits, slot, sequence, state)
    if sequence["temperature"] not in (0.0, 1.0):
        logits /= float(sequence["temperature"])
    if _penalised(sequence):
        counts, factor = state.counts[slot], float(sequence["repetition_penalty"])
        repeated = torch.where(logits < 0, logits * factor, logits / factor)
        repeated -= (
            float(sequence["presence_penalty"]) + float(sequence["frequency_penalty"]) * counts.float()
        )
        torch.where(counts > 0, repeated, logits, out=logits)
    if sequence["generated"] < sequence["min_tokens"]:
        ends = sequence["end_ids"]
        logits[ends[(ends >= 0) & (ends < logits.shape[0])].astype(np.int64)] = -torch.inf
    largest = int(logits.argmax())  # a NaN counts as the largest
    value = float(logits[largest])
    if not value < torch.inf:
        return BROKEN_LOGITS
    if value == -torch.inf:
        return NO_TOKEN
    token = largest if _greedy(sequence) else _draw(logits, sequence)
    if sequence["return_log_probs"]:
        log_prob.copy_(logits[token] - logits.logsumexp(0))
    return token


def _ban(logits: Tensor, slot: int, sequence: np.void, state: SamplingState) -> None:
    """Make the last id of each bad word impossible whose other ids end the history."""
    ids = state.bad_ids[slot].tolist()
    length = int(sequence["history_length"])
    start = 0
    for end in state.bad_ends[slot, : int(sequence["num_bad_words"])].tolist():
        *before, last = ids[start:end]
        start = end
        tail = state.history[slot, max(length - len(before), 0) : length].tolist()
        if not before or tail == before:
            logits[last] = -torch.inf


def _draw(logits: Tensor, sequence: np.void) -> int:
    """Top-k, top-p, then the largest logit plus Gumbel noise."""
    top_k, top_p, seed = int(sequence["top_k"]), float(sequence["top_p_now"]), int(sequence["seed"])
    keep = ~torch.isneginf(logits)
    if 0 < top_k < logits.shape[0]:
        keep &= logits >= logits.topk(top_k).values[-1]
    if top_p < 1.0:
        values = logits[keep].sort(descending=True).values
        mass = torch.softmax(values.double(), 0).cumsum(0)
        last = min(int((mass < top_p).sum()), len(values) - 1)
        keep &= logits >= values[last]
    ids = keep.nonzero().squeeze(1)
    key = (seed & 0xFFFFFFFF, seed >> 32)
    noise = torch.from_numpy(uniforms(key, ids.cpu().numpy(), int(sequence["generated"]))).to(logits.device)
    with np.errstate(divide="ignore"):
        gumbel = -(-torch.log1p(-noise)).log()
    return int(ids[(logits[ids] + gumbel).argmax()])


def _remember(state: SamplingState, slot: int, sequence: np.void, token: int) -> None:
    """Update the state of a slot and its record."""
    state.last_tokens[slot] = token
    sequence["generated"] += 1
    length = int(sequence["history_length"])
    if sequence["num_bad_words"] and length < state.history.shape[1]:
        state.history[slot, length] = token
        sequence["history_length"] = length + 1
    if _penalised(sequence):
        state.counts[slot, token] = min(int(state.counts[slot, token]) + 1, MOST_COUNTED)
    if sequence["top_p_decay"] < 1:
        decayed = max(sequence["top_p_now"] * sequence["top_p_decay"], sequence["top_p_min"])
        sequence["top_p_now"] = sequence["top_p"] if token == sequence["top_p_reset_id"] else decayed
