"""Decode attention of many query heads per KV head against float64: rows in one part and in several."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.batches import attend, context_of, make_batch, make_cache, make_heads
from tests.kernels.conftest import Place
from tests.kernels.numeric import assert_close
from tests.kernels.test_attention import decode_and_compare
from tests.kernels.test_unfinished_rows import rotated64
from tridecode.kernels.bench.measure import capture
from tridecode.kernels.operands import Linear, Rope

#: (query heads, kv heads, head size)
HEADS = [(71, 1, 64), (48, 1, 128), (17, 1, 64), (36, 2, 128), (128, 1, 64), (129, 1, 64), (71, 1, 80)]
CONTEXTS = [[1], [64], [65, 1], [0, 700, 40, 63], [129] * 5]
#: more parts, and more rows than blocks at once
LONGER = [[0, 3000, 40, 63], [544] * 5, [290 + i for i in range(64)], [130] * 300]
#: rows and tokens for clusters of eight, four and two blocks, one block, and several clusters of a row
DIVIDED = [(1, 544), (33, 577), (34, 577), (66, 200), (67, 200), (132, 130), (133, 130), (1, 2049), (3, 4000)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("contexts", CONTEXTS, ids=lambda contexts: f"{len(contexts)}x{contexts[0]}")
@pytest.mark.parametrize("heads", HEADS)
def test_many_heads_see_the_keys_of_one(place: Place, heads, contexts: list[int], dtype: torch.dtype):
    decode_and_compare(place, heads, contexts, 16, len(contexts) % 2 == 0, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("contexts", LONGER, ids=lambda contexts: f"{len(contexts)}x{contexts[0]}")
@pytest.mark.parametrize("heads", HEADS)
def test_many_heads_see_long_rows_and_many(cuda_place: Place, heads, contexts, dtype: torch.dtype):
    decode_and_compare(cuda_place, heads, contexts, 16, len(contexts) % 2 == 0, dtype)


@pytest.mark.parametrize("block_tokens", [16, 64, 128])
def test_tiles_and_blocks_differ_in_size(place: Place, block_tokens: int):
    decode_and_compare(place, (71, 1, 64), [1000, 129, 64], block_tokens, True, torch.bfloat16)


def test_rows_are_finished_first(place: Place):
    """The new key is rotated and cached before attention reads it."""
    heads = make_heads(place, 40, 1, 64)
    angles = torch.rand(600, 32, generator=place.generator) * 7
    heads = replace(heads, rope=Rope(angles.cos().to(place.device), angles.sin().to(place.device)))
    batch = make_batch(place, [544, 65, 1], [1, 1, 1], 16)
    cache = make_cache(place, batch, heads, 16, torch.float16)
    if place.device.type == "cpu":
        cache.blocks.nan_to_num_()
    qkv = place.normal(3, heads.qkv_size, dtype=torch.float16)
    bare = qkv.double().cpu().unflatten(1, (-1, 64))
    out = place.poison(3, 40 * 64, dtype=torch.float16)
    place.settle()
    place.ops.decode_attention(qkv, heads, batch, cache, out=out, unfinished=Linear(qkv))
    q = rotated64(bare[:, :40], batch.positions.cpu().long(), heads.rope).half()
    for row in range(3):
        k, v = context_of(cache, batch, row)
        assert_close("attention", out[row : row + 1], attend(q[row : row + 1], k, v, heads))


@pytest.mark.gpu
def test_a_graph_follows_the_lengths(cuda_place: Place):
    """Counters are zero again behind each launch, whatever number of parts a row has."""
    place = cuda_place
    heads = make_heads(place, 71, 1, 64, alibi=True)
    batch = make_batch(place, [1000] * 9, [1] * 9, 32)
    cache = make_cache(place, batch, heads, 32, torch.bfloat16)
    kv = [context_of(cache, batch, row) for row in range(9)]
    qkv = place.normal(9, heads.qkv_size, dtype=torch.bfloat16)
    out = place.poison(9, 71 * 64, dtype=torch.bfloat16)
    graph = capture(lambda: place.ops.decode_attention(qkv, heads, batch, cache, out=out))
    for step in (1000, 1, 0, 64, 129, 700):
        contexts = [(step + 97 * row) % 1001 if row else step for row in range(9)]
        batch.context_lens.copy_(place.ints(contexts))
        qkv.copy_(place.normal(9, heads.qkv_size, dtype=torch.bfloat16))
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        q = qkv[:, : 71 * 64].unflatten(1, (71, 64))
        for row, context in enumerate(contexts):
            if context == 0:
                assert (out[row] == 0).all()
                continue
            k, v = (x[:, :context] for x in kv[row])
            assert_close("attention", out[row : row + 1], attend(q[row : row + 1], k, v, heads))


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["rising", "falling", "one", "no"])
@pytest.mark.parametrize("shape", DIVIDED, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("heads", [(71, 1, 64), (36, 2, 128)])
def test_parts_with_different_maxima_add_up(cuda_place: Place, heads, shape, pattern: str):
    """The first dim adds a number to the scores of each 64 keys: up to 40 either way, or minus infinity in
    all but one of them, or in one alone."""
    place, (rows, context) = cuda_place, shape
    rows = max(1, rows // heads[1])
    held = make_heads(place, *heads)
    batch = make_batch(place, [context] * rows, [1] * rows, 64)
    cache = make_cache(place, batch, held, 64, torch.bfloat16)
    tiles = -(-context // 64)
    lone = tiles // 2
    for tile in range(tiles):
        added = {
            "rising": 40.0 * tile / tiles,
            "falling": -40.0 * tile / tiles,
            "one": 0.0 if tile == lone else -torch.inf,
            "no": -torch.inf if tile == lone else 0.0,
        }[pattern]
        blocks = batch.block_tables[:, tile].long()
        cache.blocks[blocks, 0, :, :, 0] = added / held.scale
    qkv = place.normal(rows, held.qkv_size, dtype=torch.bfloat16)
    q = qkv[:, : heads[0] * heads[2]].unflatten(1, heads[::2])
    q[:, :, 0] = 1.0
    seen = {row: context_of(cache, batch, row) for row in range(0, rows, 8)}
    out = place.poison(rows, heads[0] * heads[2], dtype=torch.bfloat16)
    for _ in range(2):  # the second launch finds the counters that the first one left
        out.fill_(float("nan"))
        place.settle()
        place.ops.decode_attention(qkv, held, batch, cache, out=out)
        for row, (k, v) in seen.items():
            assert_close("attention", out[row : row + 1], attend(q[row : row + 1], k, v, held))
        assert torch.isfinite(out).all()
