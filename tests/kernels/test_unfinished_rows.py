"""decode_attention of rows that are bare products: rotation, cache and attention against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.batches import attend, make_batch, make_cache, make_heads
from tests.kernels.conftest import Place
from tests.kernels.numeric import assert_close
from tests.kernels.test_attention_8bit import filled_cache
from tridecode.kernels.operands import Batch, CacheLayer, Linear, Rope

BLOCK = 32
#: (query heads, kv heads, head size), rotated dims, interleaved
HEADS = [
    ((4, 4, 128), 0, False),
    ((8, 2, 128), 128, False),
    ((8, 2, 64), 64, False),
    ((9, 3, 64), 0, False),
    ((4, 4, 128), 32, False),
    ((4, 4, 128), 128, True),
    ((4, 4, 80), 80, False),
    ((16, 1, 128), 128, False),
]
#: one row; two; a long one; padding; more rows than clusters take
CONTEXTS = [[1], [16], [545], [513, 33], [3000], [0, 40], [77 + 5 * i for i in range(40)]]
CACHES = [
    (torch.float32, None),
    (torch.float16, None),
    (torch.bfloat16, None),
    (torch.float16, "int8"),
    (torch.bfloat16, "int8"),
    (torch.bfloat16, "fp8"),
]


def rotated64(x: Tensor, positions: Tensor, rope: Rope | None) -> Tensor:
    """x (T, H, D) float64."""
    if rope is None:
        return x
    cos, sin = rope.cos.double().cpu()[positions][:, None], rope.sin.double().cpu()[positions][:, None]
    turned = x[..., : rope.size]
    a, b = (turned[..., ::2], turned[..., 1::2]) if rope.interleaved else turned.chunk(2, dim=-1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    together = torch.stack(pair, -1).flatten(-2) if rope.interleaved else torch.cat(pair, -1)
    return torch.cat([together, x[..., rope.size :]], -1)


def contents(cache: CacheLayer) -> Tensor:
    """(blocks, 2, K, block tokens, D) float64."""
    numbers = cache.blocks.double().cpu()
    return numbers if cache.scales is None else numbers * cache.scales.double().cpu()[..., None]


def context_of(held: Tensor, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
    """(K, L, D) keys and values."""
    length, tables = int(batch.context_lens[row]), batch.block_tables.cpu().long()
    places = torch.arange(length)
    both = held[tables[row, places // BLOCK], :, :, places % BLOCK].permute(1, 2, 0, 3)
    return both[0], both[1]


@pytest.mark.parametrize(("dtype", "format"), CACHES)
@pytest.mark.parametrize("contexts", CONTEXTS, ids=lambda contexts: f"{len(contexts)}x{contexts[0]}")
@pytest.mark.parametrize(("shape", "turned", "interleaved"), HEADS)
def test_rows_are_finished_first(place: Place, shape, turned, interleaved, contexts, dtype, format):
    heads = make_heads(place, *shape, alibi=not turned)
    if turned:
        angles = torch.rand(max(contexts), turned // 2, generator=place.generator) * 7
        rope = Rope(angles.cos().to(place.device), angles.sin().to(place.device), interleaved)
        heads = replace(heads, rope=rope)
    batch = make_batch(place, contexts, [1] * len(contexts), BLOCK)
    if format is None:
        cache = make_cache(place, batch, heads, BLOCK, dtype)
        if place.device.type == "cpu":  # torch's attention spreads NaN through a mask
            cache.blocks.nan_to_num_()
    else:
        cache, _ = filled_cache(place, batch, heads, BLOCK, format, spread=2)
    qkv = place.normal(len(contexts), heads.qkv_size, dtype=dtype)
    bare = qkv.double().cpu().unflatten(1, (-1, heads.head_size))
    before = contents(cache)
    out = place.poison(len(contexts), heads.num_heads * heads.head_size, dtype=dtype)
    place.settle()
    place.ops.decode_attention(qkv, heads, batch, cache, out=out, unfinished=Linear(qkv))

    positions = batch.positions.cpu().long()
    q, k, v = bare.split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
    q, k = (rotated64(x, positions, heads.rope).to(dtype).double() for x in (q, k))
    after, slots = contents(cache), batch.kv_slots.cpu().long()
    assert_written(after, slots, torch.stack([k, v], 1), torch.finfo(dtype).eps, format)
    written = slots[slots >= 0]
    for held in (before, after):
        held[written // BLOCK, :, :, written % BLOCK] = 0
    assert torch.equal(before.nan_to_num(7), after.nan_to_num(7))
    after = contents(cache)
    for row, context in enumerate(contexts):
        if context == 0:
            assert (out[row] == 0).all()
            continue
        keys, values = context_of(after, batch, row)
        assert_close("attention", out[row : row + 1], attend(q[row : row + 1], keys, values, heads))


def assert_written(after: Tensor, slots: Tensor, wanted: Tensor, eps: float, format: str | None) -> None:
    """wanted: (T, 2, K, D): the cache has each at its slot, to a rounding of the dtype or of the format."""
    has = slots >= 0
    wanted = wanted[has]
    found = after[slots[has] // BLOCK, :, :, slots[has] % BLOCK]
    most = wanted.abs().amax(-1, keepdim=True)
    allowed = 2 * eps * wanted.abs() + 1e-6 * most
    if format == "int8":
        allowed = allowed + most / 127 * (0.5 + 2 * eps * 127)
    if format == "fp8":
        allowed = (
            allowed + torch.maximum(wanted.abs() / 16, most / 448 / 1024) * (1 + 4 * eps) + 2 * eps * most
        )
    assert ((found - wanted).abs() <= allowed).all()
