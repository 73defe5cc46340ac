"""The operations on an NVIDIA GPU: check, then launch. Contracts are in ops.py, the kernels in csrc/.

Products of few tokens, attention, norms and sampling are kernels of ours; larger products are cuBLAS's,
through torch, save SwiGLU on Hopper. Weights, norms, biases and rope tables are constants: kernels read them
ahead of the kernels before them, so whoever changes one in place synchronises the device before the next
operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tridecode.kernels.checks import DtypeError, ShapeError, indices, match, same_dtype
from tridecode.kernels.cuda_base import (
    ACTIVATIONS,
    DTYPES,
    NUM_COUNTERS,
    SUM_BYTES,
    check_cache,
    contiguous,
    pointer,
)
from tridecode.kernels.cuda_gemm import CudaGemm
from tridecode.kernels.gemm_table import LARGE_WEIGHTS
from tridecode.kernels.library import KernelError, current_stream
from tridecode.kernels.ops import (
    NUM_FLOATS,
    NUM_INTS,
    Batch,
    CacheLayer,
    DecoderLayer,
    Heads,
    Linear,
    SamplingState,
)

#: up to this many decoding rows all layers of a model of small products are one launch, and with SwiGLU,
#: whose products are wider
LAYER_TOKENS, GATED_LAYER_TOKENS = 4, 2
#: of a model whose products are large: gemm_sm90_split_k and gemm_sm90_stream_k are faster from 2 rows on,
#: with SwiGLU from 1 row on
LARGE_LAYER_TOKENS, LARGE_GATED_LAYER_TOKENS = 1, 0
#: the most that this launch takes
MAX_LAYER_TOKENS = 8


class Cuda(CudaGemm):
    """Every operation of kernels.ops.Ops. Used by one thread, for tensors of `device`.

    dependent_launch: let a kernel start before its predecessor ends (programmatic dependent launch, compute
    capability 9.0). None: on, unless TRIDECODE_DEPENDENT_LAUNCH=0.
    """

    def reserve(
        self, max_tokens: int, max_columns: int, max_rows: int, max_context: int, vocab_size: int
    ) -> None:
        self._arena("product", 2 * max_tokens * max_columns)
        self._arena("normed", 2 * max_tokens * max_columns // 2)
        self._sample = self._bytes(self.library.sample_scratch(max_rows, vocab_size))

    def pack(self, linear: Linear) -> Linear:
        """Rows of the weight contiguous, as both cuBLAS and the kernels read them."""
        return Linear(linear.weight.contiguous(), linear.bias)

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
        table: Tensor,
        *,
        positions: Tensor | None = None,
        position_table: Tensor | None = None,
        out: Tensor,
    ) -> None:
        sizes = match("embed", ("VC", "table", table), ("TC", "out", out), ("T", "token_ids", token_ids))
        indices("embed", ("token_ids", token_ids))
        dtype = same_dtype("embed", ("table", table), ("out", out))
        contiguous("embed", ("table", table), ("out", out))
        if position_table is not None and positions is not None:
            match(
                "embed",
                ("TC", "out", out),
                ("PC", "position_table", position_table),
                ("T", "positions", positions),
            )
            indices("embed", ("positions", positions))
            same_dtype("embed", ("table", table), ("position_table", position_table))
            contiguous("embed", ("position_table", position_table))
        else:
            positions = position_table = None
        self.library.embed(
            out.data_ptr(),
            token_ids.data_ptr(),
            table.data_ptr(),
            pointer(positions),
            pointer(position_table),
            sizes["T"],
            sizes["C"],
            DTYPES[dtype],
            current_stream(self.device),
        )

    def decode_attention(
        self, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, *, out: Tensor
    ) -> None:
        rows = batch.num_decodes
        _check_attention("decode_attention", qkv, heads, batch, cache, out, rows)
        if rows == 0:
            return
        self.library.decode_attention(
            out.data_ptr(),
            qkv.data_ptr(),
            cache.blocks.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.context_lens.data_ptr(),
            pointer(heads.slopes),
            heads.scale,
            rows,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_size,
            cache.block_tokens,
            qkv.stride(0),
            out.stride(0),
            batch.block_tables.stride(0),
            self._attention.data_ptr(),
            self._counters.data_ptr(),
            NUM_COUNTERS,
            DTYPES[qkv.dtype],
            current_stream(self.device),
        )

    def prefill_attention(
        self, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, *, out: Tensor
    ) -> None:
        tokens = batch.num_tokens - batch.num_decodes
        _check_attention("prefill_attention", qkv, heads, batch, cache, out, tokens)
        if tokens == 0:
            return
        self.library.prefill_attention(
            out.data_ptr(),
            qkv.data_ptr(),
            cache.blocks.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.context_lens.data_ptr(),
            batch.query_starts.data_ptr(),
            pointer(heads.slopes),
            heads.scale,
            batch.num_decodes,
            batch.num_rows,
            batch.max_query,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_size,
            cache.block_tokens,
            qkv.stride(0),
            out.stride(0),
            batch.block_tables.stride(0),
            tokens,
            DTYPES[qkv.dtype],
            current_stream(self.device),
        )

    def decoder_layers(
        self,
        x: Tensor,
        layers: Sequence[DecoderLayer],
        heads: Heads,
        activation: str,
        batch: Batch,
        caches: Sequence[CacheLayer],
    ) -> bool:
        if not self._runs_layers(x, layers, heads, activation, batch):
            return False
        first = layers[0]
        hidden, inner = x.shape[1], first.down.weight.shape[1]
        columns = heads.num_heads * heads.head_size
        table = self._layer_table(layers, heads, caches)
        rope = heads.rope
        self.library.decoder_layers(
            table.data_ptr(),
            len(layers),
            x.data_ptr(),
            self._temporary("queries", MAX_LAYER_TOKENS, columns, x.dtype).data_ptr(),
            self._temporary("context", MAX_LAYER_TOKENS, columns, x.dtype).data_ptr(),
            self._temporary("inner", MAX_LAYER_TOKENS, inner, x.dtype).data_ptr(),
            batch.positions.data_ptr(),
            batch.kv_slots.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.context_lens.data_ptr(),
            batch.block_tables.stride(0),
            0 if rope is None else rope.cos.data_ptr(),
            0 if rope is None else rope.sin.data_ptr(),
            pointer(heads.slopes),
            heads.scale,
            first.attention_norm.eps,
            x.shape[0],
            hidden,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_size,
            inner,
            0 if rope is None else rope.size,
            ACTIVATIONS[activation],
            caches[0].block_tokens,
            self._sums.data_ptr(),
            SUM_BYTES,
            self._layer_counters.data_ptr(),
            self._layer_counters.numel(),
            self.layers_in_flight,
            DTYPES[x.dtype],
            current_stream(self.device),
        )
        return True

    def _runs_layers(
        self, x: Tensor, layers: Sequence[DecoderLayer], heads: Heads, activation: str, batch: Batch
    ) -> bool:
        """Whether csrc/decoder_layers_sm90a.cu takes the step: few decoding rows, on Hopper, in 16 bit."""
        tokens = x.shape[0]
        if self.capability != 90 or x.dtype == torch.float32 or tokens != batch.num_decodes:
            return False
        if not layers or not 1 <= tokens <= self._most_layer_tokens(layers[0], activation):
            return False
        rope = heads.rope
        if heads.head_size not in (64, 128):
            return False
        if rope is not None and (rope.interleaved or rope.size != heads.head_size):
            return False
        inner = layers[0].down.weight.shape[1]
        return (x.shape[1] | heads.num_heads * heads.head_size | inner) % 64 == 0 and x.is_contiguous()

    def _most_layer_tokens(self, layer: DecoderLayer, activation: str) -> int:
        if self.layer_tokens is not None:
            return self.layer_tokens
        gated = activation == "swiglu"
        if layer.dense.weight.numel() >= LARGE_WEIGHTS:
            return LARGE_GATED_LAYER_TOKENS if gated else LARGE_LAYER_TOKENS
        return GATED_LAYER_TOKENS if gated else LAYER_TOKENS

    def _layer_table(
        self, layers: Sequence[DecoderLayer], heads: Heads, caches: Sequence[CacheLayer]
    ) -> Tensor:
        """Where csrc/decoder_layers_sm90a.cu finds the tensors of these layers, made once for the same
        addresses, outside of graph capture."""
        addresses, first = [], layers[0]
        for layer, cache in zip(layers, caches):
            products = (layer.qkv, layer.dense, layer.up, layer.down)
            for norm in (layer.attention_norm, layer.mlp_norm):
                addresses += [norm.weight.data_ptr(), pointer(norm.bias)]
            addresses += [product.weight.data_ptr() for product in products]
            addresses += [pointer(product.bias) for product in products]
            addresses.append(cache.blocks.data_ptr())
        weight = first.qkv.weight
        inner, up_rows = first.down.weight.shape[1], first.up.weight.shape[0]
        shape = (weight.shape[1], heads.num_heads * heads.head_size, heads.qkv_size, inner, up_rows)
        key = (*addresses, *shape, weight.dtype)
        held = self._layer_tables.get(key)
        if held is None:
            tensors = torch.tensor(addresses, dtype=torch.int64)
            table = torch.zeros(self.library.decoder_table_bytes(len(layers)), dtype=torch.uint8)
            dtype = DTYPES[weight.dtype]
            self.library.decoder_table(table.data_ptr(), tensors.data_ptr(), len(layers), *shape, dtype)
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

    def sample(
        self, logits: Tensor, slots: Tensor, state: SamplingState, *, tokens: Tensor, log_probs: Tensor
    ) -> None:
        sizes = match(
            "sample",
            ("RV", "logits", logits),
            ("R", "slots", slots),
            ("R", "tokens", tokens),
            ("R", "log_probs", log_probs),
        )
        indices("sample", ("slots", slots), ("tokens", tokens))
        if logits.dtype != torch.float32 or log_probs.dtype != torch.float32:
            raise DtypeError(
                f"sample: logits are {logits.dtype}, log_probs {log_probs.dtype}; wanted float32"
            )
        if state.ints.shape[1] != NUM_INTS or state.floats.shape[1] != NUM_FLOATS:
            raise ShapeError(
                f"sample: ints has {state.ints.shape[1]} columns, floats {state.floats.shape[1]}"
            )
        needed = self.library.sample_scratch(sizes["R"], sizes["V"])
        if self._sample is None or self._sample.numel() < needed:
            raise KernelError(
                f"sample: {sizes['R']} rows of {sizes['V']} logits need {needed:,} bytes; call reserve first"
            )
        self.library.sample(
            logits.data_ptr(),
            slots.data_ptr(),
            state.ints.data_ptr(),
            state.floats.data_ptr(),
            state.top_p.data_ptr(),
            state.generated.data_ptr(),
            state.last_tokens.data_ptr(),
            state.history.data_ptr(),
            state.history_lens.data_ptr(),
            state.counts.data_ptr(),
            state.bad_ids.data_ptr(),
            state.bad_ends.data_ptr(),
            tokens.data_ptr(),
            log_probs.data_ptr(),
            sizes["R"],
            sizes["V"],
            state.history.shape[1],
            state.bad_ids.shape[1],
            logits.stride(0),
            self._sample.data_ptr(),
            self._counters.data_ptr(),
            current_stream(self.device),
        )


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
