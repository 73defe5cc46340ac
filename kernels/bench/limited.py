"""Benchmarks of what only some families have: windows and soft caps in decode attention, norms of heads,
sandwich norms and gated GELUs."""

# ruff: noqa: B023  every closure below is called within its loop iteration

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from tridecode.kernels.bench.measure import Result, microseconds, over
from tridecode.kernels.bench.rig import Rig
from tridecode.kernels.formats.kv_rounding import CACHE_DTYPES
from tridecode.kernels.operands import Heads, Linear, Norm, Rope

_BLOCK = 32


def limited_attention(rig: Rig) -> Iterator[Result]:
    """Decode attention with a window or a soft cap; the last column is the same without either, over as many
    tokens as are visible."""
    shapes = {
        "Gemma 2": Heads(16, 8, 256, 256**-0.5, softcap=50.0),
        "Mistral": Heads(32, 8, 128, 128**-0.5, window=4096),
    }
    for label, heads in shapes.items():
        for rows, context in ((1, 544), (8, 544), (64, 544), (8, 4096), (8, 32768)):
            for name in ("", *CACHE_DTYPES):
                seen = min(context, heads.window or context)
                mine = _decode(rig, heads, rows, context, name)
                plain = _decode(rig, replace(heads, window=0, softcap=0.0), rows, seen, name)
                size = heads.num_kv_heads * 2 * heads.head_size
                case = f"{label} rows {rows} context {context}{name and ' ' + name}"
                traffic = rows * seen * size * (1 if name else 2)
                yield Result("limited_attention", case, mine, traffic, peer=plain)


def _decode(rig: Rig, heads: Heads, rows: int, context: int, cache: str) -> float:
    """Return microseconds of one layer."""
    columns = context // _BLOCK + 1
    blocks = (rows * columns, 2, heads.num_kv_heads, _BLOCK, heads.head_size)
    bytes_of_layer = rows * columns * 2 * heads.num_kv_heads * _BLOCK * heads.head_size * 2
    layers = max(2, min(30, int(2e9 // bytes_of_layer)))
    tables = torch.randperm(rows * columns, device=rig.device).to(torch.int32).view(rows, columns)
    batch = rig.batch([context] * rows, [1] * rows, tables, rows)
    qkv, out = rig.normal(rows, heads.qkv_size), rig.normal(rows, heads.num_heads * heads.head_size)
    caches = [rig.cache(blocks, cache) for _ in range(layers)]
    return microseconds(
        over(caches, lambda layer: rig.ops.decode_attention(qkv, heads, batch, layer, out=out)), layers
    )


def finish_heads(rig: Rig) -> Iterator[Result]:
    """Norms of heads, rotation and cache; the last column is the rotation and the cache alone."""
    angles = torch.rand(1024, 64, device=rig.device)
    plain = Heads(32, 8, 128, 128**-0.5, Rope(angles.cos(), angles.sin()))
    norm = Norm(rig.normal(128), None, 1e-6)
    normed = replace(plain, query_norm=norm, key_norm=norm)
    for rows in (1, 8, 64, 1024):
        columns = rows // _BLOCK + 2
        tables = torch.arange(columns, device=rig.device, dtype=torch.int32).view(1, columns)
        batch = rig.batch([rows], [rows], tables, 0)
        cache = rig.cache((columns, 2, 8, _BLOCK, 128), "")
        layers = [rig.normal(rows, plain.qkv_size) for _ in range(8)]
        times = [
            microseconds(over(layers, lambda qkv: rig.ops.finish_qkv(qkv, heads, batch, cache)), len(layers))
            for heads in (normed, plain)
        ]
        traffic = rows * (plain.qkv_size * 2 + 2 * 8 * 128) * 2
        yield Result("finish_heads", f"Qwen3 tokens {rows}", times[0], traffic, peer=times[1])


def add_normed(rig: Rig) -> Iterator[Result]:
    """The norms of a sandwich layer around its sum; the last column is two norms in launches of their own."""
    for tokens, columns in ((1, 3584), (64, 3584), (4096, 3584)):
        norm = Norm(rig.normal(columns), None, 1e-6)
        residual, other = rig.normal(tokens, columns), rig.normal(tokens, columns)
        xs = [rig.normal(tokens, columns) for _ in range(16)]
        mine = microseconds(
            over(xs, lambda x: rig.ops.add_normed(residual, x, norm, norm, normed=x)), len(xs)
        )
        norms = microseconds(over([*xs, *xs], lambda x: rig.ops.norm(x, norm, out=other)), len(xs))
        yield Result("add_normed", f"{tokens}x{columns}", mine, 10 * tokens * columns, peer=norms)


def activate_rows(rig: Rig) -> Iterator[Result]:
    """A product with a gated GELU; the last column is the same product with SwiGLU in its epilogue."""
    outputs, inputs = 14336, 3584
    weights = [Linear(rig.normal(2 * outputs, inputs, scale=inputs**-0.5)) for _ in range(8)]
    for tokens in (1, 8, 64):
        x, out = rig.normal(tokens, inputs), rig.normal(tokens, outputs)
        times = [
            microseconds(
                over(weights, lambda weight: rig.ops.linear(x, weight, activation=kind, out=out)),
                len(weights),
            )
            for kind in ("geglu", "swiglu")
        ]
        yield Result(
            "activate_rows", f"Gemma 2 tokens {tokens}", times[0], 4 * outputs * inputs, peer=times[1]
        )
