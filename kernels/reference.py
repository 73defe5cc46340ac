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
from tridecode.kernels.operands import Batch, CacheLayer, Heads, Linear, Norm, Product, Rope
from tridecode.kernels.philox import uniforms
from tridecode.kernels.sampling_rules import WholeRows, greedy, kept_ids, process, remember, unchanged
from tridecode.kernels.sampling_state import BROKEN_LOGITS, NO_TOKEN, SamplingState, SlotRows, records

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
        sequences = SlotRows(state, held, records(state.slots[held]))
        x = logits if len(rows) == len(slots) else logits[rows]
        chosen = _choose(x, sequences, log_probs, rows)
        tokens[rows] = chosen.to(tokens.dtype)
        remember(sequences, chosen.clamp(min=0))

    def candidates(
        self, logits: Tensor, rows: Tensor, sequences: SlotRows, *, ids: Tensor, log_probs: Tensor
    ) -> None:
        beam_candidates(logits, rows, sequences, ids, log_probs)


#: float32 values of the copy of the logits that candidates are chosen from at a time
_CANDIDATE_LOGITS = 1 << 24


def beam_candidates(
    logits: Tensor, rows: Tensor, sequences: SlotRows, ids: Tensor, log_probs: Tensor
) -> None:
    """Ops.candidates on any device, without waiting for it."""
    match("candidates", ("nW", "ids", ids), ("nW", "log_probs", log_probs), ("n", "rows", rows))
    step = max(1, _CANDIDATE_LOGITS // logits.shape[1])
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        x = logits[rows[part]]
        process(x, sequences.part(part))
        best = torch.log_softmax(x, dim=-1).topk(ids.shape[1], dim=-1)
        ids[part].copy_(best.indices)
        is_excluded = x.amax(-1, keepdim=True) == -torch.inf  # log_softmax gives NaN
        log_probs[part].copy_(best.values.masked_fill(is_excluded, -torch.inf))


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


def _choose(x: Tensor, sequences: SlotRows, log_probs: Tensor, rows: Tensor) -> Tensor:
    """(n,) int64: the next token of each row of x (n, V), BROKEN_LOGITS for a row that has NaN or infinity,
    NO_TOKEN for one whose ids are all impossible. x is changed in place; log_probs[rows] are written for the
    sequences that want them."""
    found = sequences.records
    if not unchanged(found):
        process(x, sequences)
    largest, tokens = x.max(dim=-1)  # the lowest id of equal ones; a NaN counts as the largest
    tokens = torch.where(largest < torch.inf, tokens, BROKEN_LOGITS)
    tokens = torch.where(largest == -torch.inf, NO_TOKEN, tokens)
    is_drawn = ~greedy(found)
    if is_drawn.any():
        some = np.flatnonzero(is_drawn & (tokens >= 0).cpu().numpy())
        index = torch.from_numpy(some).to(x.device)
        tokens[index] = _draw(x[index], largest[index], found[some])
    wants = (found["return_log_probs"] != 0) & (tokens >= 0).cpu().numpy()
    if wants.any():
        index = torch.from_numpy(np.flatnonzero(wants)).to(x.device)
        some_x = x[index]
        log_probs[rows[index]] = some_x.gather(1, tokens[index, None])[:, 0] - some_x.logsumexp(-1)
    return tokens


def _draw(x: Tensor, largest: Tensor, found: np.ndarray) -> Tensor:
    """(n,) int64: of each row x (n, V) the kept id with the largest logit plus Gumbel noise."""
    tokens = []
    for logits, kept, record in zip(x, kept_ids(x, largest, found, WholeRows(x.shape[1])), found):
        ids, seed = kept.nonzero().squeeze(1), int(record["seed"])
        key = (seed & 0xFFFFFFFF, seed >> 32)
        noise = torch.from_numpy(uniforms(key, ids.cpu().numpy(), int(record["generated"]))).to(x.device)
        gumbel = -(-torch.log1p(-noise)).log()
        tokens.append(ids[(logits[ids] + gumbel).argmax()])
    return torch.stack(tokens) if tokens else torch.zeros(0, dtype=torch.int64, device=x.device)
