"""Benchmarks attention over a paged cache, and torch's attention over the same prompts."""

# ruff: noqa: B023  every closure below is called within its loop iteration

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tridecode.kernels.bench.measure import Result, microseconds, over
from tridecode.kernels.bench.rig import Rig
from tridecode.kernels.formats.kv_rounding import CACHE_DTYPES
from tridecode.kernels.operands import CacheLayer, Heads


def decode_attention(rig: Rig) -> Iterator[Result]:
    block = 32
    for label, heads, kv_heads, alibi in (("BLOOM", 32, 32, True), ("LLaMA", 32, 8, False)):
        shape = Heads(
            heads,
            kv_heads,
            128,
            128**-0.5,
            None,
            torch.rand(heads, device=rig.device) if alibi else None,
        )
        for rows, context in (
            (1, 512),
            (1, 2048),
            (8, 512),
            (16, 512),
            (64, 512),
            (256, 512),
            (16, 2048),
            (64, 2048),
        ):
            columns = context // block + 1
            size = rows * columns * 2 * kv_heads * block * 128 * 2
            layers = max(2, min(30, int(2e9 // size)))
            tables = torch.randperm(rows * columns, device=rig.device).to(torch.int32).view(rows, columns)
            batch = rig.batch([context] * rows, [1] * rows, tables, rows)
            qkv, out = rig.normal(rows, shape.qkv_size), rig.normal(rows, heads * 128)
            for name in ("", *CACHE_DTYPES):
                blocks = (rows * columns, 2, kv_heads, block, 128)
                caches = [rig.cache(blocks, name) for _ in range(layers * (2 if name else 1))]
                mine = microseconds(
                    over(caches, lambda c: rig.ops.decode_attention(qkv, shape, batch, c, out=out)),
                    len(caches),
                )
                caches.clear()
                yield Result(
                    "decode_attention",
                    f"{label} rows {rows} context {context}{name and ' ' + name}",
                    mine,
                    rows * context * kv_heads * 2 * (128 + 4 if name else 256),
                )


def prefill_attention(rig: Rig) -> Iterator[Result]:
    for label, heads, kv_heads, size, alibi in (
        ("BLOOM-7B1", 32, 32, 128, True),
        ("LLaMA-3-8B", 32, 8, 128, False),
        ("BLOOM-560M", 16, 16, 64, True),
        ("LLaMA-3.2-1B", 32, 8, 64, False),
    ):
        slopes = torch.rand(heads, device=rig.device) if alibi else None
        shape = Heads(heads, kv_heads, size, size**-0.5, None, slopes)
        cache = CacheLayer(rig.normal(2, 2, kv_heads, 32, size))
        for rows, length in ((1, 512), (16, 512), (64, 512), (1, 2048), (8, 4096)):
            batch = rig.batch([length] * rows, [length] * rows, rig.ints([[0]] * rows), 0)
            qkv, out = (
                rig.normal(rows * length, shape.qkv_size),
                rig.normal(rows * length, heads * size),
            )
            mine = microseconds(lambda: rig.ops.prefill_attention(qkv, shape, batch, cache, out=out), 1)
            flops = 4.0 * size * heads * rows * length * (length + 1) / 2
            yield Result(
                "prefill_attention",
                f"{label} {rows} prompts of {length}",
                mine,
                flops=flops,
                peer=_flash(rig, qkv, shape, rows, length),
            )
        if size == 128:
            yield from _continued(rig, label, shape)


def _continued(rig: Rig, label: str, shape: Heads) -> Iterator[Result]:
    """Time chunks of 512 tokens of prompts with 1536 cached tokens, in a 16-bit and an 8-bit cache."""
    rows, length, before, block = 4, 512, 1536, 32
    columns = (length + before) // block
    tables = torch.randperm(rows * columns, device=rig.device).to(torch.int32).view(rows, columns)
    batch = rig.batch([length + before] * rows, [length] * rows, tables, 0)
    batch.fresh_prompts = False
    heads = shape.num_heads
    qkv, out = rig.normal(rows * length, shape.qkv_size), rig.normal(rows * length, heads * 128)
    for name in ("", *CACHE_DTYPES):
        cache = rig.cache((rows * columns, 2, shape.num_kv_heads, block, 128), name)
        mine = microseconds(lambda: rig.ops.prefill_attention(qkv, shape, batch, cache, out=out), 1)
        yield Result(
            "prefill_attention",
            f"{label} {rows} chunks of {length} after {before}{name and ' ' + name}",
            mine,
            flops=4.0 * 128 * heads * rows * length * (before + (length + 1) / 2),
        )


def prefix_attention(rig: Rig) -> Iterator[Result]:
    """Time few queries after a long cached prefix, over caches that together exceed the L2 cache."""
    block = 32
    for label, heads, kv_heads, rows, queries, before in (
        ("LLaMA-3-8B", 32, 8, 1, 30, 8160),
        ("LLaMA-3-8B", 32, 8, 1, 30, 2016),
        ("LLaMA-3-8B", 32, 8, 1, 256, 7936),
        ("LLaMA-3-8B", 32, 8, 4, 60, 2048),
        ("LLaMA-3-8B", 32, 8, 1, 30, 0),
        ("BLOOM-7B1", 32, 32, 1, 30, 2016),
    ):
        slopes = torch.rand(heads, device=rig.device) if kv_heads == heads else None
        shape = Heads(heads, kv_heads, 128, 128**-0.5, None, slopes)
        columns = (queries + before) // block + 1
        layers = max(2, min(16, int(2e9 // (rows * columns * 2 * kv_heads * block * 128 * 2))))
        tables = torch.randperm(rows * columns, device=rig.device).to(torch.int32).view(rows, columns)
        batch = rig.batch([queries + before] * rows, [queries] * rows, tables, 0)
        batch.fresh_prompts = False
        qkv, out = rig.normal(rows * queries, shape.qkv_size), rig.normal(rows * queries, heads * 128)
        for name in ("", *CACHE_DTYPES):
            blocks = (rows * columns, 2, kv_heads, block, 128)
            caches = [rig.cache(blocks, name) for _ in range(layers)]
            mine = microseconds(
                over(caches, lambda c: rig.ops.prefill_attention(qkv, shape, batch, c, out=out)), layers
            )
            caches.clear()
            yield Result(
                "prefix_attention",
                f"{label} {rows} rows of {queries} after {before}{name and ' ' + name}",
                mine,
                rows * (queries + before) * kv_heads * 2 * (128 + 4 if name else 256),
            )


def _flash(rig: Rig, qkv: Tensor, shape: Heads, rows: int, length: int) -> float | None:
    """Return torch's attention over the same ragged prompts, without ALiBi, which it does not support."""
    from torch.nn.attention.varlen import varlen_attn  # torch 2.10 and newer

    size = shape.head_size
    sizes = [shape.num_heads * size, shape.num_kv_heads * size, shape.num_kv_heads * size]
    q, k, v = (part.unflatten(1, (-1, size)) for part in qkv.split(sizes, dim=1))
    starts = rig.ints([row * length for row in range(rows + 1)])
    return microseconds(lambda: varlen_attn(q, k, v, starts, starts, length, length, window_size=(-1, 0)), 1)
