"""The operations on an NVIDIA GPU: check, then launch. Contracts are in ops.py, the kernels in csrc/.

Weights, norms, biases and rope tables are constants: kernels prefetch them before their predecessor has
finished. Code that changes one in place must synchronise the device before the next operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tridecode.kernels.checks import ShapeError, indices, match, same_dtype
from tridecode.kernels.cuda_base import (
    ACTIVATIONS,
    DTYPES,
    cache_fields,
    check_cache,
    contiguous,
    pointer,
)
from tridecode.kernels.cuda_chain import CudaChain
from tridecode.kernels.cuda_gemm import fields_of_heads
from tridecode.kernels.cuda_sampling import CudaSampling
from tridecode.kernels.library import current_stream
from tridecode.kernels.ops import (
    Batch,
    CacheLayer,
    CandidateRows,
    DecoderLayer,
    Heads,
    Linear,
)
from tridecode.kernels.packed_weight import PackedWeight
from tridecode.kernels.quantized import QuantizedWeight, check_int8_table
from tridecode.kernels.reference import Reference, beam_candidates
from tridecode.kernels.scratch import NUM_COUNTERS, SUM_BYTES, arena_bytes, expanded_bytes

#: Up to how many decoding rows one launch of all layers is used, by (at most) hidden size: where a whole step
#: gains 10 % or more over operation by operation. Gain on an H200, 512-token prompts, 1 / 2 / 3 / 4 rows:
#:   GPT-2, 768 x 12 layers: +13 / +20 / +4 / +1 %        BLOOM-560M, 1024 x 24: +18 / +19 / +17 / +15 %
#:   BLOOM-1B7, 2048 x 24: +12 / +11 / +2 / +2 %          BLOOM-7B1, 4096 x 30: +1 % at 1 row, slower above
#: SmolLM2-135M, a LLaMA, was slower: the kernel has neither RMSNorm, rotation, SwiGLU nor groups.
LAYER_ROWS = ((768, 2), (1024, 4), (2048, 2))
#: the most rows that the launch takes, and the most bytes of their inputs of one product
MAX_LAYER_ROWS, MAX_LAYER_INPUT_BYTES = 4, 64 << 10


class Cuda(CudaChain, CudaSampling):
    """Every operation of kernels.ops.Ops. Used by one thread, for tensors of `device`.

    dependent_launch: let a kernel start before its predecessor ends (programmatic dependent launch, compute
    capability 9.0). None: on, unless TRIDECODE_DEPENDENT_LAUNCH=0.
    """

    def reserve(
        self,
        max_tokens: int,
        max_columns: int,
        max_rows: int,
        max_context: int,
        vocab_size: int,
        context_bytes: int = 0,
    ) -> None:
        for name, size in arena_bytes(max_tokens, max_columns, self._sorts_inputs).items():
            self._arena(name, size)
        if context_bytes:
            self._arena("expanded", expanded_bytes(context_bytes))
        self._sample = self._bytes(self.library.sample_scratch(max_rows, vocab_size))

    def captures(self, heads: Heads) -> bool:
        return _has_kernel(heads)

    def resolve_tokens(self, token_ids: Tensor, slots: Tensor, last_tokens: Tensor) -> None:
        indices("resolve_tokens", ("token_ids", token_ids), ("slots", slots), ("last_tokens", last_tokens))
        if slots.shape[0] > token_ids.shape[0]:
            raise ShapeError(f"resolve_tokens: {slots.shape[0]} slots, but {token_ids.shape[0]} tokens")
        self.library.resolve_tokens(
            token_ids.data_ptr(),
            slots.data_ptr(),
            last_tokens.data_ptr(),
            slots.shape[0],
            current_stream(self.device),
        )

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
        scales = None
        if isinstance(table, QuantizedWeight):
            scales = check_int8_table("embed", table).scales
            table = table.values
        sizes = match("embed", ("VC", "table", table), ("TC", "out", out), ("T", "token_ids", token_ids))
        indices("embed", ("token_ids", token_ids))
        dtype = same_dtype("embed", ("out", out), *([("table", table)] if scales is None else []))
        contiguous("embed", ("table", table), ("out", out))
        if position_table is not None and positions is not None:
            match(
                "embed",
                ("TC", "out", out),
                ("PC", "position_table", position_table),
                ("T", "positions", positions),
            )
            indices("embed", ("positions", positions))
            same_dtype("embed", ("out", out), ("position_table", position_table))
            contiguous("embed", ("position_table", position_table))
        else:
            positions = position_table = None
        if scales is not None:
            contiguous("embed", ("table.scales", scales))
        self.library.embed(
            out.data_ptr(),
            token_ids.data_ptr(),
            table.data_ptr(),
            pointer(scales),
            pointer(positions),
            pointer(position_table),
            sizes["T"],
            sizes["C"],
            first_id or 0,
            sizes["V"],
            DTYPES[dtype],
            current_stream(self.device),
        )

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
        rows = batch.num_decodes
        _check_attention("decode_attention", qkv, heads, batch, cache, out, rows)
        if rows == 0:
            return
        if unfinished is not None and _finishes_apart(heads, unfinished):
            self.finish_qkv(qkv, heads, batch, cache)
            unfinished = None
        if not _has_kernel(heads):
            Reference().decode_attention(qkv, heads, batch, cache, out=out)
            return
        fields = _attention_fields(qkv, heads, batch, cache, out)
        if unfinished is not None:
            indices("decode_attention", ("kv_slots", batch.kv_slots), ("positions", batch.positions))
            fields |= fields_of_heads(heads, batch, cache)
        self.library.decode_attention(
            current_stream(self.device),
            num_rows=rows,
            scratch=self._attention.data_ptr(),
            counters=self._counters.data_ptr(),
            num_counters=NUM_COUNTERS,
            unfinished=unfinished is not None,
            **fields,
        )

    def prefill_attention(
        self, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, *, out: Tensor
    ) -> None:
        tokens = batch.num_tokens - batch.num_decodes
        _check_attention("prefill_attention", qkv, heads, batch, cache, out, tokens)
        if tokens == 0:
            return
        if not _has_kernel(heads):
            Reference().prefill_attention(qkv, heads, batch, cache, out=out)
            return
        fields = _attention_fields(qkv, heads, batch, cache, out)
        fields["query_starts"] = batch.query_starts.data_ptr()
        fields |= {"origin_row": batch.num_decodes, "max_query": batch.max_query, "tokens": tokens}
        fields["shared_bytes"] = self.prompt_shared_bytes
        if cache.scales is None or batch.fresh_prompts:  # fresh prompts read rounded keys from qkv
            self.library.prefill_attention(
                current_stream(self.device),
                first_row=batch.num_decodes,
                num_rows=batch.num_rows,
                **fields,
            )
        else:
            self._prefill_expanded(qkv.dtype, heads, batch, cache, fields)

    def _prefill_expanded(
        self, dtype: torch.dtype, heads: Heads, batch: Batch, cache: CacheLayer, fields: dict[str, float]
    ) -> None:
        """Attention of prompts with tokens in an 8-bit cache: their blocks are expanded to scratch memory,
        whose blocks take the place of the cache's. As many rows at a time as the memory holds."""
        stream, index = current_stream(self.device), batch.block_tables.element_size()
        columns = -(-batch.max_context // cache.block_tokens)
        row_bytes = columns * cache.blocks.stride(0) * dtype.itemsize
        expanded = self._arena("expanded", row_bytes)
        rows = expanded.numel() // row_bytes
        blocks = self._block_numbers(rows * columns)
        shared = {name: fields[name] for name in ("context_lens", "query_starts")}
        for first in range(batch.num_decodes, batch.num_rows, rows):
            last = min(first + rows, batch.num_rows)
            self.library.expand_cache(
                stream,
                out=expanded.data_ptr(),
                block_tables=batch.block_tables[first].data_ptr(),
                table_stride=batch.block_tables.stride(0),
                num_rows=last - first,
                columns=columns,
                kv_heads=heads.num_kv_heads,
                head_size=heads.head_size,
                dtype=DTYPES[dtype],
                **cache_fields(cache),
                **{name: address + first * index for name, address in shared.items()},
            )
            given = fields | {
                "cache": expanded.data_ptr(),
                "cache_format": 0,
                "cache_scales": 0,
                # row `first` has the blocks from 0 on
                "block_tables": blocks.data_ptr() - first * columns * index,
                "table_stride": columns,
            }
            self.library.prefill_attention(stream, first_row=first, num_rows=last, **given)

    def _block_numbers(self, count: int) -> Tensor:
        """0, 1, 2, ... as block tables."""
        if self._numbers.numel() < count:
            self._numbers = torch.arange(count, dtype=torch.int32, device=self.device)
        return self._numbers

    def decoder_layers(
        self,
        x: Tensor,
        layers: Sequence[DecoderLayer],
        heads: Heads,
        activation: str,
        batch: Batch,
        caches: Sequence[CacheLayer],
    ) -> bool:
        if any(cache.scales is not None for cache in caches):
            return False
        if not self._runs_layers(x, layers, heads, activation, batch):
            return False
        rows, hidden = x.shape
        inner, queries = layers[0].down.weight.shape[1], heads.num_heads * heads.head_size
        self.library.decoder_layers(
            current_stream(self.device),
            layers=self._layer_table(layers, queries, caches).data_ptr(),
            x=x.data_ptr(),
            queries=self._temporary("queries", MAX_LAYER_ROWS, queries, x.dtype).data_ptr(),
            context=self._temporary("context", MAX_LAYER_ROWS, queries, x.dtype).data_ptr(),
            mlp=self._temporary("inner", MAX_LAYER_ROWS, inner, x.dtype).data_ptr(),
            kv_slots=batch.kv_slots.data_ptr(),
            block_tables=batch.block_tables.data_ptr(),
            context_lens=batch.context_lens.data_ptr(),
            slopes=pointer(heads.slopes),
            table_stride=batch.block_tables.stride(0),
            scale=heads.scale,
            norm_eps=layers[0].attention_norm.eps,
            num_layers=len(layers),
            tokens=rows,
            hidden=hidden,
            heads=heads.num_heads,
            head_size=heads.head_size,
            inner=inner,
            activation=ACTIVATIONS[activation],
            block_tokens=caches[0].block_tokens,
            dtype=DTYPES[x.dtype],
            partials=self._sums.data_ptr(),
            partial_bytes=SUM_BYTES,
            counters=self._layer_counters.data_ptr(),
            num_counters=self._layer_counters.numel(),
        )
        return True

    def _runs_layers(
        self, x: Tensor, layers: Sequence[DecoderLayer], heads: Heads, activation: str, batch: Batch
    ) -> bool:
        """Whether decoder_layers_sm90a.cu runs the step: few decoding rows, a small LayerNorm model, 16
        bit, Hopper."""
        rows, hidden = x.shape
        if self.capability != 90 or x.dtype == torch.float32 or rows != batch.num_decodes or not layers:
            return False
        if self.gemm_device.shared:  # the launch's blocks wait for each other
            return False
        most = self.layer_tokens
        if most is None:
            most = next((count for size, count in LAYER_ROWS if hidden <= size), 0)
        if not 1 <= rows <= most:
            return False
        first = layers[0]
        products = (first.qkv, first.dense, first.up, first.down)
        if not all(isinstance(product.weight, Tensor) for product in products):
            return False
        if first.attention_norm.bias is None or heads.rope is not None or heads.changes_qkv:
            return False
        if activation not in ("gelu_tanh", "gelu", "relu") or not _has_kernel(heads):
            return False
        if heads.num_kv_heads != heads.num_heads or heads.head_size not in (64, 128):
            return False
        queries, inner = heads.num_heads * heads.head_size, first.down.weight.shape[1]
        fits = max(hidden, queries, inner) * rows * x.element_size() <= MAX_LAYER_INPUT_BYTES
        return fits and (hidden | queries | inner) % 64 == 0 and x.is_contiguous()

    def _layer_table(
        self, layers: Sequence[DecoderLayer], queries: int, caches: Sequence[CacheLayer]
    ) -> Tensor:
        """The table of these layers' tensors for decoder_layers_sm90a.cu, made once per set of addresses and
        outside of graph capture."""
        addresses: list[int] = []
        for layer, cache in zip(layers, caches):
            products = (layer.qkv, layer.dense, layer.up, layer.down)
            for norm in (layer.attention_norm, layer.mlp_norm):
                addresses += [norm.weight.data_ptr(), pointer(norm.bias)]
            addresses += [product.dense.data_ptr() for product in products]
            addresses += [pointer(product.bias) for product in products]
            addresses.append(cache.blocks.data_ptr())
        inner, hidden = layers[0].up.weight.shape
        key = (*addresses, hidden, queries, inner, DTYPES[layers[0].up.dense.dtype])
        held = self._layer_tables.get(key)
        if held is None:
            tensors = torch.tensor(addresses, dtype=torch.int64)
            table = torch.zeros(self.library.decoder_table_bytes(len(layers)), dtype=torch.uint8)
            shape = key[len(addresses) :]
            self.library.decoder_table(table.data_ptr(), tensors.data_ptr(), len(layers), *shape)
            held = self._layer_tables[key] = table.to(self.device)
        return held

    def gather_rows(self, x: Tensor, rows: Tensor, *, out: Tensor) -> None:
        match("gather_rows", ("TC", "x", x), ("RC", "out", out), ("R", "rows", rows))
        indices("gather_rows", ("rows", rows))
        same_dtype("gather_rows", ("x", x), ("out", out))
        size = x.element_size()
        self.library.gather_rows(
            out.data_ptr(),
            x.data_ptr(),
            rows.data_ptr(),
            out.shape[0],
            out.shape[1] * size,
            x.stride(0) * size,
            out.stride(0) * size,
            current_stream(self.device),
        )

    def candidates(self, logits: Tensor, wanted: CandidateRows, *, ids: Tensor, log_probs: Tensor) -> None:
        beam_candidates(logits, wanted, ids, log_probs)  # torch: no kernel yet


def _has_kernel(heads: Heads) -> bool:
    """Whether csrc/ has attention for these heads; torch computes the others."""
    return not heads.window and not heads.softcap and heads.key_bias is None


def _finishes_apart(heads: Heads, product: Linear) -> bool:
    """Whether a launch of its own finishes rows in front of decode attention.

    An H100's step of one sequence in two runs, inside attention and apart, ms: LLaMA-3-8B bf16 5.17 and 5.22,
    int8 2.82 and 2.85, int4 1.96 and 1.95; BLOOM-7B1, which rotates nothing, fp16 4.91 and 5.00, int8 2.71
    and 2.79, int4 1.92 and 1.98. Attention begins beside that launch, and rotates little faster.
    """
    rotates_packed = heads.rope is not None and isinstance(product.weight, PackedWeight)
    return heads.changes_qkv or not _has_kernel(heads) or rotates_packed


def _attention_fields(
    qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, out: Tensor
) -> dict[str, float]:
    """The fields of tridecode_attention_task that both attentions read."""
    return {
        "out": out.data_ptr(),
        "qkv": qkv.data_ptr(),
        **cache_fields(cache),
        "block_tables": batch.block_tables.data_ptr(),
        "context_lens": batch.context_lens.data_ptr(),
        "slopes": pointer(heads.slopes),
        "qkv_stride": qkv.stride(0),
        "out_stride": out.stride(0),
        "table_stride": batch.block_tables.stride(0),
        "scale": heads.scale,
        "heads": heads.num_heads,
        "kv_heads": heads.num_kv_heads,
        "head_size": heads.head_size,
        "dtype": DTYPES[qkv.dtype],
    }


def _check_attention(
    operation: str, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, out: Tensor, tokens: int
) -> None:
    if qkv.shape != (tokens, heads.qkv_size):
        raise ShapeError(f"{operation}: qkv is {tuple(qkv.shape)}; wanted ({tokens}, {heads.qkv_size})")
    if out.shape != (tokens, heads.num_heads * heads.head_size):
        raise ShapeError(
            f"{operation}: out is {tuple(out.shape)}; wanted ({tokens}, {heads.num_heads * heads.head_size})"
        )
    match(operation, ("TQ", "qkv", qkv), ("TO", "out", out), ("BM", "block_tables", batch.block_tables))
    same_dtype(operation, ("qkv", qkv), ("out", out))
    indices(
        operation,
        ("block_tables", batch.block_tables),
        ("context_lens", batch.context_lens),
        ("query_starts", batch.query_starts),
    )
    check_cache(operation, heads, cache, qkv)
