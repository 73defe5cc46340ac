"""Attention over the paged KV cache on an NVIDIA GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from tridecode.kernels.checks import ShapeError, indices, match, same_dtype
from tridecode.kernels.gemm.call import check_qkv, fields_of_heads
from tridecode.kernels.gemm.kind import finish_heads
from tridecode.kernels.gpu import DTYPES, Gpu, aligned, cache_fields, check_cache, pointer
from tridecode.kernels.operands import (
    FEW_EXACT_TOKENS,
    FEW_TOKENS,
    MOST_QUERIES,
    Batch,
    CacheLayer,
    Heads,
    Linear,
)
from tridecode.kernels.scratch import NUM_COUNTERS


class CudaAttention:
    """decode_attention and prefill_attention of kernels.ops.Ops."""

    def __init__(self, gpu: Gpu):
        self._gpu = gpu
        self._numbers = torch.empty(0, dtype=torch.int32, device=gpu.device)

    def decode(
        self,
        qkv: Tensor,
        heads: Heads,
        batch: Batch,
        cache: CacheLayer,
        out: Tensor,
        unfinished: Linear | None = None,
    ) -> None:
        gpu, rows, several = self._gpu, batch.num_decodes, batch.decode_queries > 1
        _check_attention("decode_attention", qkv, heads, batch, cache, out, batch.decode_tokens)
        if rows == 0:
            return
        if batch.decode_queries > MOST_QUERIES:
            raise ShapeError(
                f"decode_attention: rows of {batch.decode_queries} queries; at most {MOST_QUERIES}"
            )
        if unfinished is not None and (several or _finishes_apart(heads, unfinished)):
            check_qkv("finish_qkv", qkv, heads, batch, cache)
            finish_heads(gpu, qkv, heads, fields_of_heads(heads, batch, cache))
            unfinished = None
        fields = _attention_fields(qkv, heads, batch, cache, out)
        if unfinished is not None:
            indices("decode_attention", ("kv_slots", batch.kv_slots), ("positions", batch.positions))
            fields |= fields_of_heads(heads, batch, cache)
        if several:
            fields |= {"query_starts": batch.query_starts.data_ptr(), "max_query": batch.decode_queries}
        gpu.library.decode_attention(
            gpu.stream,
            num_rows=rows,
            scratch=gpu.attention.data_ptr(),
            counters=gpu.counters.data_ptr(),
            num_counters=NUM_COUNTERS,
            unfinished=unfinished is not None,
            **fields,
        )

    def prefill(self, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, out: Tensor) -> None:
        tokens = batch.num_tokens - batch.decode_tokens
        _check_attention("prefill_attention", qkv, heads, batch, cache, out, tokens)
        if tokens == 0:
            return
        fields = _attention_fields(qkv, heads, batch, cache, out)
        fields["query_starts"] = batch.query_starts.data_ptr()
        fields |= {"origin_row": batch.num_decodes, "max_query": batch.max_query, "tokens": tokens}
        fields["shared_bytes"] = self._gpu.prompt_shared_bytes
        few = tokens <= FEW_EXACT_TOKENS if cache.scales is None else batch.max_query <= FEW_TOKENS
        if (
            few
            and not batch.fresh_prompts
            and self.splits(heads, cache, qkv.dtype)
            and aligned(qkv)
            and aligned(out)
        ):
            self._gpu.library.prefill_attention(
                self._gpu.stream,
                first_row=batch.num_decodes,
                num_rows=batch.num_rows,
                split=1,
                scratch=self._gpu.attention.data_ptr(),
                **fields,
            )
        elif (
            cache.scales is None or batch.fresh_prompts
        ):  # prompts without cached tokens read quantised keys from qkv
            self._gpu.library.prefill_attention(
                self._gpu.stream,
                first_row=batch.num_decodes,
                num_rows=batch.num_rows,
                **fields,
            )
        else:
            self._prefill_dequantised(qkv.dtype, heads, batch, cache, fields)

    def splits(self, heads: Heads, cache: CacheLayer, dtype: torch.dtype) -> bool:
        """Return whether a split-KV kernel supports these prompts with cached tokens and few new tokens of
        `dtype`, over a cache of 16 or 8 bits."""
        if heads.key_bias is not None or self._gpu.prompt_shared_bytes:
            return False
        key = heads.head_size, DTYPES[dtype], cache.block_tokens, int(is_limited(heads))
        return bool(self._gpu.library.prefill_attention_splits(*key))

    def _prefill_dequantised(
        self, dtype: torch.dtype, heads: Heads, batch: Batch, cache: CacheLayer, fields: dict[str, float]
    ) -> None:
        """Compute prefill attention over an 8-bit cache, after dequantising its blocks to scratch memory.

        Processes as many rows at a time as fit in the scratch memory.
        """
        stream, index = self._gpu.stream, batch.block_tables.element_size()
        columns = -(-batch.max_context // cache.block_tokens)
        row_bytes = columns * cache.blocks.stride(0) * dtype.itemsize
        expanded = self._gpu.arena("expanded", row_bytes)
        rows = expanded.numel() // row_bytes
        blocks = self._block_numbers(rows * columns)
        shared = {name: fields[name] for name in ("context_lens", "query_starts")}
        for first in range(batch.num_decodes, batch.num_rows, rows):
            last = min(first + rows, batch.num_rows)
            self._gpu.library.expand_cache(
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
                # row `first` uses the blocks from 0 on
                "block_tables": blocks.data_ptr() - first * columns * index,
                "table_stride": columns,
            }
            self._gpu.library.prefill_attention(stream, first_row=first, num_rows=last, **given)

    def _block_numbers(self, count: int) -> Tensor:
        """Return the block tables of the scratch memory: 0, 1, 2, ..."""
        if self._numbers.numel() < count:
            self._numbers = torch.arange(count, dtype=torch.int32, device=self._gpu.device)
        return self._numbers


def is_limited(heads: Heads) -> bool:
    """Return whether decode_limited.cu and prefill_limited.cu compute these heads."""
    return heads.window > 0 or heads.softcap > 0 or heads.key_bias is not None


def _finishes_apart(heads: Heads, product: Linear) -> bool:
    """Return whether a separate launch finishes the rows (rotation, cache write) before decode attention.

    ms per step of one sequence on an H100, in two runs, inside attention and in a separate launch: LLaMA-3-8B
    bf16 5.17 and 5.22, int8 2.82 and 2.85, int4 1.96 and 1.95; BLOOM-7B1, which has no rotation, fp16 4.91
    and 5.00, int8 2.71 and 2.79, int4 1.92 and 1.98. Attention becomes resident during the separate launch,
    so fusing the rotation saves little.
    """
    rotates_packed = heads.rope is not None and product.kind in ("packed", "int4")
    return heads.changes_qkv or is_limited(heads) or rotates_packed


def _attention_fields(
    qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, out: Tensor
) -> dict[str, float]:
    """Return the fields of tridecode_attention_task that both attentions read."""
    bias = heads.key_bias
    limits: dict[str, float] = {}
    if is_limited(heads):
        limits = {
            "window": heads.window,
            "softcap": heads.softcap,
            "key_bias": pointer(bias),
            "bias_columns": 0 if bias is None else bias.shape[1],
        }
    return {
        **limits,
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
