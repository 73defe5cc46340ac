"""Attention with windows, soft caps and biases of keys against float64: caches of 16 and 8 bits, rows of one
and of several queries, prompts; window edges at and near the edges of tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.batches import attend, make_batch, make_heads
from tests.kernels.conftest import Place
from tests.kernels.numeric import assert_close
from tests.kernels.test_decode_queries import check_rows, filled
from tridecode.kernels.bench.measure import capture
from tridecode.kernels.operands import Batch, CacheLayer, Heads

FORMATS = pytest.mark.parametrize("format", ["auto", "int8", "fp8"])
#: (query heads, kv heads, head size)
HEADS = [(4, 4, 64), (8, 2, 64), (6, 3, 80), (8, 8, 96), (8, 2, 128), (12, 1, 128), (4, 2, 256), (10, 5, 40)]
LIMITS = [
    {"window": 1},
    {"window": 15, "softcap": 30.0},
    {"window": 16},
    {"window": 17},
    {"window": 32, "softcap": 50.0},
    {"window": 100},
    {"window": 4096, "softcap": 2.0},
    {"softcap": 50.0},
]


def edges(window: int) -> list[int]:
    """Lengths about the window and about the tiles in which it begins."""
    near = [window + step for step in (-1, 0, 1, 14, 15, 16, 17, 31, 33)]
    return [length if 0 < length < 900 else 1 + length % 600 for length in near] + [1, 0, 700]


def poison_hidden(cache: CacheLayer, batch: Batch, window: int, rows: list[tuple[int, int]]) -> None:
    """Fill the blocks that no query of a decode row sees with NaN. rows: (context, queries)."""
    if not window:
        return
    for row, (context, queries) in enumerate(rows):
        outside = max(context - max(queries, 1) + 1 - window, 0) // cache.block_tokens
        blocks = batch.block_tables[row, :outside].long()
        if cache.scales is None:
            cache.blocks[blocks] = torch.nan
        else:
            cache.scales[blocks] = torch.nan


def decode_and_compare(
    place: Place,
    heads_shape,
    rows: list[tuple[int, int]],
    limits: dict,
    dtype: torch.dtype = torch.bfloat16,
    format: str = "auto",
    block_tokens: int = 16,
    alibi: bool = False,
) -> None:
    """rows: (context, queries); no row of more than one query: the kernels of one query."""
    heads = replace(make_heads(place, *heads_shape, alibi=alibi), **limits)
    contexts, queries = [context for context, _ in rows], [count for _, count in rows]
    batch = make_batch(place, contexts, queries, block_tokens, decodes=len(rows))
    cache, kv = filled(place, batch, heads, block_tokens, dtype, format)
    if place.device.type == "cuda":
        poison_hidden(cache, batch, heads.window, rows)
    qkv = place.normal(
        sum(queries), heads.qkv_size, dtype=dtype, scale=1.0 if dtype == torch.float32 else 2.0
    )
    out = place.poison(sum(queries), heads.num_heads * heads.head_size, dtype=dtype)
    place.settle()
    place.ops.decode_attention(qkv, heads, batch, cache, out=out)
    first = 0
    for row, (context, count) in enumerate(rows):
        mine = out[first : first + count]
        if context == 0:
            assert (mine == 0).all()
        else:
            q = qkv[first : first + count, : heads.num_heads * heads.head_size]
            wanted = attend(q.unflatten(1, (-1, heads.head_size)), *kv[row], heads)
            assert_close("attention", mine, wanted)
        first += count


@FORMATS
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_a_decoding_row_sees_its_window(place: Place, heads, limits: dict, format: str):
    window = limits.get("window", 0)
    rows = [(length, 1) for length in edges(window or 100)]
    dtype = torch.float16 if window % 2 else torch.bfloat16
    decode_and_compare(place, heads, rows, limits, dtype, format, 32 if window in (16, 32) else 16)


@FORMATS
@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize("rows", [[1], [544], [33, 700], [4000], [2100, 5000], [0]], ids=str)
@pytest.mark.parametrize("window", [1, 33, 1024])
def test_few_rows_see_their_windows(place: Place, rows, window: int, size: int, format: str):
    """One and two rows: clusters of blocks, also of several for a long window."""
    limits = {"window": window, "softcap": 30.0 if size == 256 else 0.0}
    decode_and_compare(
        place, (8, 4, size), [(length, 1) for length in rows], limits, format=format, block_tokens=32
    )


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("heads", [(8, 2, 128), (4, 2, 256), (16, 16, 64)])
def test_many_rows_see_their_windows(cuda_place: Place, heads, format: str):
    """Teams of one warp; rows of one tile among longer ones."""
    rows = [(1 + 37 * i % 190 + (1500 if i % 50 == 7 else 0), 1) for i in range(256)]
    limits = {"window": 60, "softcap": 50.0}
    decode_and_compare(cuda_place, heads, rows, limits, format=format, block_tokens=32)


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("rows", [3, 20, 70, 140])
def test_any_number_of_rows_has_heads_of_256(cuda_place: Place, rows: int, format: str):
    """Gemma's heads with one block per multiprocessor, with two, and with teams of a warp."""
    lengths = [(1 + 53 * i % 310 + (900 if i % 30 == 7 else 0), 1) for i in range(rows)]
    limits = {"window": 512, "softcap": 50.0}
    decode_and_compare(cuda_place, (16, 8, 256), lengths, limits, format=format, block_tokens=32)


@FORMATS
@pytest.mark.parametrize("window", [1, 5, 16, 40, 300])
@pytest.mark.parametrize("heads", [(8, 2, 128), (4, 1, 256), (6, 6, 64), (4, 2, 80)])
def test_every_query_of_a_row_has_its_own_window(place: Place, heads, window: int, format: str):
    rows = [(16, 16), (window + 7, min(7, window + 7)), (700, 13), (77, 1), (0, 0), (200, 4), (3, 3), (64, 5)]
    decode_and_compare(place, heads, rows, {"window": window, "softcap": 30.0}, format=format, alibi=True)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("size", [40, 128, 256])
def test_float32_rows_see_their_windows(place: Place, size: int, limits: dict):
    rows = [(length, 1) for length in edges(limits.get("window", 100))]
    decode_and_compare(place, (4, 2, size), rows, limits, torch.float32, alibi=size == 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("limits", [*LIMITS, {"window": 129}, {"window": 64}], ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 64), (6, 3, 80), (4, 4, 96), (8, 2, 128), (4, 2, 256), (3, 1, 40)])
def test_prompts_see_their_windows(place: Place, heads, limits: dict, dtype: torch.dtype):
    """Fresh prompts, chunks behind cached tokens, prompts of one token; longer than several tiles."""
    heads = replace(make_heads(place, *heads, alibi=limits.get("window") == 17), **limits)
    rows = [(1, 1), (19, 19), (300, 300), (317, 17), (450, 200), (129, 128), (700, 1)]
    contexts, queries = [context for context, _ in rows], [count for _, count in rows]
    batch = make_batch(place, contexts, queries, 16, decodes=0)
    cache, kv = filled(place, batch, heads, 16, dtype, "auto")
    cache.blocks.nan_to_num_()
    qkv = place.normal(
        sum(queries), heads.qkv_size, dtype=dtype, scale=1.0 if dtype == torch.float32 else 2.0
    )
    queried, keys, first = heads.num_heads * heads.head_size, heads.num_kv_heads * heads.head_size, 0
    for row, (context, count) in enumerate(rows):  # a fresh prompt's keys and values are in qkv, too
        if context == count:
            k, v = (x.transpose(0, 1).flatten(1).to(dtype).to(place.device) for x in kv[row])
            mine = slice(first, first + count)
            qkv[mine, queried : queried + keys], qkv[mine, queried + keys :] = k, v
        first += count
    out = place.poison(sum(queries), queried, dtype=dtype)
    place.settle()
    place.ops.prefill_attention(qkv, heads, batch, cache, out=out)
    check_rows(out, qkv, rows, kv, heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_have_biases_of_their_own(place: Place, dtype: torch.dtype):
    """The last column also applies beyond it."""
    rows = [(1, 1), (40, 1), (133, 1), (90, 90), (133, 20)]
    heads = make_heads(place, 6, 2, 64)
    heads = replace(heads, key_bias=place.normal(6, 100, dtype=torch.float32))
    contexts, queries = [context for context, _ in rows], [count for _, count in rows]
    batch = make_batch(place, contexts, queries, 16)
    cache, kv = filled(place, batch, heads, 16, dtype, "auto")
    qkv = place.normal(sum(queries), heads.qkv_size, dtype=dtype)
    mine = slice(3, 93)
    k, v = (x.transpose(0, 1).flatten(1).to(dtype).to(place.device) for x in kv[3])
    qkv[mine, 6 * 64 : 8 * 64], qkv[mine, 8 * 64 :] = k, v
    out = place.poison(sum(queries), 6 * 64, dtype=dtype)
    place.settle()
    place.ops.decode_attention(qkv[:3], heads, batch, cache, out=out[:3])
    place.ops.prefill_attention(qkv[3:], heads, batch, cache, out=out[3:])
    check_rows(out, qkv, rows, kv, heads)


@FORMATS
def test_a_prompt_behind_a_cache_of_8_bits_sees_its_window(place: Place, format: str):
    heads = Heads(8, 2, 128, 128**-0.5, window=40, softcap=30.0)
    rows = [(300, 100), (90, 3), (41, 1)]
    contexts, queries = [context for context, _ in rows], [count for _, count in rows]
    batch = make_batch(place, contexts, queries, 16, decodes=0)
    cache, kv = filled(place, batch, heads, 16, torch.bfloat16, format)
    qkv = place.normal(sum(queries), heads.qkv_size, dtype=torch.bfloat16)
    out = place.poison(sum(queries), 8 * 128, dtype=torch.bfloat16)
    place.settle()
    place.ops.prefill_attention(qkv, heads, batch, cache, out=out)
    check_rows(out, qkv, rows, kv, heads)


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("rows", [1, 5, 200])
@pytest.mark.parametrize("heads_shape", [(8, 2, 128), (4, 2, 256)])
def test_a_graph_follows_windows_that_move(cuda_place: Place, heads_shape, rows: int, format: str):
    """One graph over contexts that grow past the window, shrink to padding, and use other blocks."""
    place = cuda_place
    heads = replace(make_heads(place, *heads_shape), window=48, softcap=50.0)
    batch = make_batch(place, [300] * rows, [1] * rows, 32)
    cache, kv = filled(place, batch, heads, 32, torch.bfloat16, format)
    qkv = place.normal(rows, heads.qkv_size, dtype=torch.bfloat16)
    out = place.poison(rows, heads.num_heads * heads.head_size, dtype=torch.bfloat16)
    graph = capture(lambda: place.ops.decode_attention(qkv, heads, batch, cache, out=out))
    for step in (300, 1, 48, 0, 64, 97, 299):
        contexts = [(step + 61 * row) % 301 if row else step for row in range(rows)]
        batch.context_lens.copy_(place.ints(contexts))
        qkv.copy_(place.normal(rows, heads.qkv_size, dtype=torch.bfloat16))
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        for _ in range(2):  # counters are zero again behind each launch
            graph.replay()
        torch.cuda.synchronize()
        compare_rows(out, qkv, contexts, kv, heads)


def compare_rows(
    out: Tensor, qkv: Tensor, contexts: list[int], kv: list[tuple[Tensor, Tensor]], heads: Heads
) -> None:
    q = qkv[:, : heads.num_heads * heads.head_size].unflatten(1, (-1, heads.head_size))
    for row, context in enumerate(contexts):
        if context == 0:
            assert (out[row] == 0).all()
            continue
        k, v = (x[:, :context] for x in kv[row])
        assert_close("attention", out[row : row + 1], attend(q[row : row + 1], k, v, heads))
