"""Every operation of kernels.ops.Ops in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tridecode.kernels.checks import ShapeError, indices, match, same_dtype
from tridecode.kernels.draft_history import DraftHistory
from tridecode.kernels.formats.kv_rounding import expanded, rounded
from tridecode.kernels.formats.quantized import QuantizedWeight, as_rounded, check_int8_table
from tridecode.kernels.operands import (
    Batch,
    CacheLayer,
    Heads,
    Linear,
    Norm,
    Product,
    RankWords,
)
from tridecode.kernels.reference import attention, sampling, top_rows
from tridecode.kernels.reference.adapters import ReferenceAdapters
from tridecode.kernels.reference.lookup import look_up
from tridecode.kernels.reference.products import (
    GATED,
    activate,
    activated,
    change_qkv,
    rotate,
    written,
)
from tridecode.kernels.reference.products import (
    normed as normed_of,
)
from tridecode.kernels.reference.rows import place_rows, verify_rows
from tridecode.kernels.sampling_state import SamplingState, SlotRows
from tridecode.kernels.top_log_probs import TopRows


class Reference(ReferenceAdapters):
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
        return False  # row counts and lengths are read on the host

    def captured_tokens(self, heads: Heads, cache: CacheLayer, dtype: torch.dtype) -> int:
        return 0

    def pack(self, linear: Linear, dtype: torch.dtype = torch.float32, is_head: bool = False) -> Linear:
        return linear  # a quantised weight is dequantised at each call

    def _temporary(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Return (rows, columns) of scratch, valid until the next operation."""
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

    def place_rows(self, batch: Batch, state: SamplingState, block_tokens: int) -> None:
        place_rows(batch, state, block_tokens)

    def embed(
        self,
        token_ids: Tensor,
        table: Tensor | QuantizedWeight,
        *,
        positions: Tensor | None = None,
        position_table: Tensor | None = None,
        first_id: int | None = None,
        factor: float = 1.0,
        out: Tensor,
    ) -> None:
        if factor != 1.0:
            self.embed(
                token_ids,
                table,
                positions=positions,
                position_table=position_table,
                first_id=first_id,
                out=out,
            )
            out.mul_(factor)
            return
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
        out.copy_(normed_of(x, norm))

    def add_normed(
        self,
        residual: Tensor,
        x: Tensor,
        norm: Norm | None,
        next_norm: Norm | None = None,
        *,
        normed: Tensor | None = None,
    ) -> None:
        match("add_normed", ("TC", "residual", residual), ("TC", "x", x))
        residual.add_(x if norm is None else normed_of(x, norm))
        if next_norm is not None and normed is not None:
            self.norm(residual, next_norm, out=normed)

    def soft_cap(self, x: Tensor, cap: float) -> None:
        x.div_(cap).tanh_().mul_(cap)

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
            x = normed_of(x, norm)
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
        """Compute out = x @ weight.T (+ bias) (+ residual)."""
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

    @property
    def splits_steps(self) -> bool:
        return True

    def linear_sending(self, x: Tensor, linear: Linear, sums: RankWords, *, out: Tensor) -> bool:
        return False

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
            rotate(rotated, heads.rope, batch)
        kv = qkv[:, queries:].unflatten(1, (2, heads.num_kv_heads, heads.head_size))
        rows, blocks, offsets = written(batch, cache.block_tokens)
        if cache.scales is None:
            cache.blocks[blocks, :, :, offsets] = kv if rows is None else kv[rows]
            return
        values, scales = rounded(kv, cache.blocks.dtype)
        # a prompt attends to the dequantised values that later steps will read
        kv.copy_(expanded(values, scales, kv.dtype))
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
        attention.decode_attention(qkv, heads, batch, cache, out)

    def prefill_attention(
        self, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, *, out: Tensor
    ) -> None:
        attention.prefill_attention(qkv, heads, batch, cache, out)

    def gather_rows(self, x: Tensor, rows: Tensor, *, out: Tensor) -> None:
        match("gather_rows", ("TC", "x", x), ("RC", "out", out), ("R", "rows", rows))
        torch.index_select(x, 0, rows.long(), out=out)

    def sample(
        self, logits: Tensor, slots: Tensor, state: SamplingState, *, tokens: Tensor, log_probs: Tensor
    ) -> None:
        sampling.sample(logits, slots, state, tokens, log_probs)

    def verify(
        self,
        logits: Tensor,
        batch: Batch,
        state: SamplingState,
        *,
        tokens: Tensor,
        log_probs: Tensor,
        accepted: Tensor,
    ) -> None:
        verify_rows(self.sample, logits, batch, state, tokens, log_probs, accepted)

    def look_up(
        self,
        history: DraftHistory,
        rows: Tensor,
        sampled: Tensor,
        accepted: Tensor,
        drafts: Tensor,
        *,
        searches: bool,
        found: Tensor,
    ) -> None:
        look_up(history, rows, sampled, accepted, drafts, searches=searches, found=found)

    @property
    def has_top_log_probs(self) -> bool:
        return False  # `sample` overwrites every logit

    def keep_raw_logits(self, logits: Tensor, slots: Tensor, state: SamplingState, rows: TopRows) -> None:
        top_rows.keep_raw_logits(logits, slots, state, rows)

    def top_log_probs(
        self, logits: Tensor, slots: Tensor, state: SamplingState, tokens: Tensor, rows: TopRows
    ) -> None:
        top_rows.top_log_probs(logits, slots, state, tokens, rows)

    def candidates(
        self, logits: Tensor, rows: Tensor, sequences: SlotRows, *, ids: Tensor, log_probs: Tensor
    ) -> None:
        sampling.beam_candidates(logits, rows, sequences, ids, log_probs)
