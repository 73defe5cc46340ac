"""decode_attention of rows with several queries against float64, over poisoned caches of 16 and 8 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.batches import attend, context_of, make_batch, make_cache, make_heads
from tests.kernels.conftest import Place
from tests.kernels.numeric import assert_close
from tests.kernels.test_attention_8bit import filled_cache
from tests.kernels.test_unfinished_rows import contents
from tests.kernels.test_unfinished_rows import context_of as row_of
from tridecode.kernels.bench.measure import capture
from tridecode.kernels.operands import Batch, CacheLayer, Heads, Linear

#: a query, a kv head and its query heads make one column; 8 columns are a pass of the kernels
HEADS = [(1, 1), (8, 2), (7, 1), (16, 2), (12, 4)]
#: (tokens in the cache after the step, of them new) of each row
ROWS = {
    "one row": [(5, 5)],
    "a long row": [(2049, 4)],
    "two rows": [(2049, 7), (19, 5)],
    "two rows of other lengths": [(1, 1), (530, 16)],
    "a row beside padding": [(0, 0), (900, 8)],
    "new tokens in two tiles": [(19, 5), (34, 3), (33, 2), (64, 16), (49, 16)],
    "rows of one query among others": [(700, 1), (33, 2), (1, 1), (300, 8), (16, 16)],
    "padding": [(0, 0), (40, 3), (0, 0), (0, 0)],
    "many rows": [
        (1 + q + 37 * i % 90 + (900 if i % 50 == 7 else 0), q) for i in range(120) for q in [1 + i % 5]
    ],
}


def filled(
    place: Place, batch: Batch, heads: Heads, block_tokens: int, dtype: torch.dtype, format: str
) -> tuple[CacheLayer, list[tuple[Tensor, Tensor]]]:
    """A cache, and keys and values of each row in float64. format: "auto": of dtype."""
    if format != "auto":
        return filled_cache(place, batch, heads, block_tokens, format, spread=1e3)
    cache = make_cache(place, batch, heads, block_tokens, dtype)
    if place.device.type == "cpu":
        cache.blocks.nan_to_num_()  # the reference masks, and torch's attention spreads NaN through a mask
    empty = torch.zeros(heads.num_kv_heads, 0, heads.head_size, dtype=torch.float64)
    lens = batch.context_lens.tolist()
    return cache, [context_of(cache, batch, row) if lens[row] else (empty, empty) for row in range(len(lens))]


def check_rows(out: Tensor, qkv: Tensor, rows, kv, heads: Heads) -> None:
    """Compare each decode row with float64. rows: (context, queries)."""
    q, first = qkv[:, : heads.num_heads * heads.head_size].unflatten(1, (-1, heads.head_size)), 0
    for row, (_, count) in enumerate(rows):
        if count:
            mine = slice(first, first + count)
            assert_close("attention", out[mine], attend(q[mine], *kv[row], heads))
        first += count


def decode_and_compare(
    place: Place,
    heads_shape,
    rows,
    dtype=torch.bfloat16,
    format="auto",
    alibi=False,
    block_tokens=16,
    spare=0,
) -> None:
    """spare: how much larger than the longest row's the number of queries is that the kernels are given."""
    heads = make_heads(place, *heads_shape, alibi=alibi)
    contexts, queries = [context for context, _ in rows], [count for _, count in rows]
    batch = make_batch(place, contexts, queries, block_tokens, decodes=len(rows))
    batch.decode_queries = min(max(2, batch.decode_queries + spare), 16)
    cache, kv = filled(place, batch, heads, block_tokens, dtype, format)
    qkv = place.normal(sum(queries), heads.qkv_size, dtype=dtype)
    out = place.poison(sum(queries), heads.num_heads * heads.head_size, dtype=dtype)
    place.settle()
    place.ops.decode_attention(qkv, heads, batch, cache, out=out)
    check_rows(out, qkv, rows, kv, heads)


@pytest.mark.parametrize("queries", range(1, 17))
@pytest.mark.parametrize("groups", HEADS)
@pytest.mark.parametrize("size", [64, 128])
def test_every_number_of_queries_sees_its_own_past(place: Place, queries: int, groups, size: int):
    """Contexts of a tile and of several; the last row has fewer queries than the others."""
    rows = [(queries + 3, queries), (queries, queries), (150, queries), (77, max(queries - 1, 1))]
    decode_and_compare(place, (*groups, size), rows, alibi=queries % 2 == 0)


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("queries", [1, 2, 3, 5, 8, 13, 16])
@pytest.mark.parametrize("heads", [(1, 1, 64), (8, 2, 128), (7, 1, 64), (8, 1, 128)])
def test_queries_read_a_cache_of_8_bits(place: Place, heads, queries: int, format: str):
    rows = [(queries + 3, queries), (queries, queries), (333, queries), (77, max(queries - 1, 1))]
    dtype = torch.float16 if queries % 2 else torch.bfloat16
    decode_and_compare(place, heads, rows, dtype, format, alibi=queries == 5, block_tokens=32)


@pytest.mark.parametrize("format", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_rows_of_any_length_share_a_step(place: Place, rows, block_tokens: int, format: str):
    decode_and_compare(place, (8, 2, 128), rows, torch.bfloat16, format, True, block_tokens)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_rows_may_have_fewer_queries_than_the_step_has_room_for(place: Place, rows):
    decode_and_compare(place, (8, 2, 64), rows, torch.float16, spare=7)


@pytest.mark.parametrize("size", [40, 64, 80, 96, 112, 128, 160, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("format", ["auto", "int8"])
def test_heads_of_any_size_have_several_queries(place: Place, size: int, dtype, format: str):
    rows = [(21, 4), (700, 3), (3, 3), (0, 0), (18, 1)]
    decode_and_compare(place, (6, 2, size), rows, dtype, format, alibi=size == 80)


@pytest.mark.parametrize("format", ["auto", "fp8"])
def test_rows_without_a_context_get_zeros(place: Place, format: str):
    """Graphs are captured from such a plan."""
    heads = make_heads(place, 8, 2, 64)
    batch = make_batch(place, [0, 9, 0], [4, 4, 4], 16, decodes=3)
    cache, kv = filled(place, batch, heads, 16, torch.float16, format)
    qkv = place.normal(12, heads.qkv_size, dtype=torch.float16)
    out = place.poison(12, 8 * 64, dtype=torch.float16)
    place.settle()
    place.ops.decode_attention(qkv, heads, batch, cache, out=out)
    assert (out[:4] == 0).all() and (out[8:] == 0).all()
    q = qkv[4:8, : 8 * 64].unflatten(1, (-1, 64))
    assert_close("attention", out[4:8], attend(q, *kv[1], heads))


def test_windows_and_soft_caps_hold_for_each_query(place: Place):
    """torch computes these cases on every device."""
    heads = Heads(4, 2, 64, 0.125, window=5)
    batch = make_batch(place, [40, 7], [4, 3], 16, decodes=2)
    cache, kv = filled(place, batch, heads, 16, torch.float32, "auto")
    cache.blocks.nan_to_num_()
    qkv = place.normal(7, heads.qkv_size, dtype=torch.float32)
    out = place.poison(7, 4 * 64, dtype=torch.float32)
    place.ops.decode_attention(qkv, heads, batch, cache, out=out)
    q, first = qkv[:, : 4 * 64].unflatten(1, (-1, 64)), 0
    for row, (context, count) in enumerate([(40, 4), (7, 3)]):
        for i in range(count):
            end = context - count + i + 1
            seen = slice(max(end - 5, 0), end)
            wanted = attend(q[first + i : first + i + 1], kv[row][0][:, seen], kv[row][1][:, seen], heads)
            assert_close("attention", out[first + i : first + i + 1], wanted)
        first += count


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("heads_shape", [(8, 2, 128), (4, 4, 64)])
def test_a_graph_follows_lengths_tables_and_queries(cuda_place: Place, heads_shape, format: str):
    """One graph of 5 rows of up to 4 queries; rows without queries are padding."""
    place, dtype = cuda_place, torch.bfloat16
    heads = make_heads(place, *heads_shape, alibi=True)
    batch = make_batch(place, [400] * 5, [4] * 5, 32, decodes=5)
    cache, kv = filled(place, batch, heads, 32, dtype, format)
    tables = batch.block_tables.clone()
    qkv, out = (
        place.normal(20, heads.qkv_size, dtype=dtype),
        place.poison(20, heads.num_heads * heads.head_size, dtype=dtype),
    )
    graph = capture(lambda: place.ops.decode_attention(qkv, heads, batch, cache, out=out))
    steps = [
        [(5, 4), (0, 0), (33, 1), (399, 3), (4, 4)],
        [(400, 4)] * 5,
        [(0, 0), (0, 0), (0, 0), (0, 0), (7, 2)],
        [(64, 1), (65, 2), (63, 3), (17, 4), (128, 4)],
    ]
    for number, rows in enumerate(steps):
        starts = torch.tensor([0] + [count for _, count in rows]).cumsum(0)
        batch.query_starts.copy_(place.ints(starts))
        batch.context_lens.copy_(place.ints([context for context, _ in rows]))
        order = torch.arange(5).roll(number)
        batch.block_tables.copy_(tables[order.to(place.device)])
        qkv.copy_(place.normal(20, heads.qkv_size, dtype=dtype))
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        for _ in range(2):  # counters are zero again behind each launch
            graph.replay()
        torch.cuda.synchronize()
        held = [
            (kv[i][0][:, :context], kv[i][1][:, :context]) for i, (context, _) in zip(order.tolist(), rows)
        ]
        check_rows(out, qkv, rows, held, heads)
        assert out[int(starts[-1]) :].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["auto", "fp8"])
def test_a_row_of_one_query_is_the_same_beside_others(cuda_place: Place, format: str):
    """The kernel of several queries and that of one agree to rounding on the same rows."""
    heads = make_heads(cuda_place, 32, 8, 128)
    contexts = [544, 33, 1, 2049, 700]
    batch = make_batch(cuda_place, contexts, [1] * 5, 32)
    cache, kv = filled(cuda_place, batch, heads, 32, torch.bfloat16, format)
    qkv = cuda_place.normal(5, heads.qkv_size, dtype=torch.bfloat16)
    outs = [cuda_place.poison(5, 32 * 128, dtype=torch.bfloat16) for _ in range(2)]
    cuda_place.settle()
    for queries, out in zip((1, 2), outs):
        batch.decode_queries = queries
        cuda_place.ops.decode_attention(qkv, heads, batch, cache, out=out)
        check_rows(out, qkv, [(context, 1) for context in contexts], kv, heads)
    assert (outs[0].float() - outs[1].float()).abs().max() < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["auto", "fp8"])
@pytest.mark.parametrize("queries", [2, 5, 16])
def test_tokens_that_the_kernel_before_writes_are_seen(cuda_place: Place, queries: int, format: str):
    """Attention loads older tiles while the GEMM before it still writes the new tokens, which are NaN before
    each replay. Contexts end at and around the borders of tiles."""
    heads = make_heads(cuda_place, 32, 8, 128, alibi=True)
    rows = [(context, queries) for context in (544, 528, 529, 543, queries, 33, 48, 2049)]
    batch = make_batch(cuda_place, [c for c, _ in rows], [q for _, q in rows], 32, decodes=len(rows))
    cache, _ = filled(cuda_place, batch, heads, 32, torch.bfloat16, format)
    tokens = queries * len(rows)
    x = cuda_place.normal(tokens, 4096, dtype=torch.bfloat16)
    product = Linear(cuda_place.normal(heads.qkv_size, 4096, dtype=torch.bfloat16) / 64)
    qkv = cuda_place.poison(tokens, heads.qkv_size, dtype=torch.bfloat16)
    out = cuda_place.poison(tokens, 32 * 128, dtype=torch.bfloat16)
    cuda_place.settle()

    def step() -> None:
        cuda_place.ops.project_qkv(x, product, None, heads, batch, cache, out=qkv)
        cuda_place.ops.decode_attention(qkv, heads, batch, cache, out=out)

    graph, slots = capture(step), batch.kv_slots.long()
    numbers = cache.blocks if cache.scales is None else cache.scales
    for _ in range(3):
        numbers[slots // 32, :, :, slots % 32] = float("nan")
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        held = contents(cache)
        check_rows(out, qkv, rows, [row_of(held, batch, row) for row in range(len(rows))], heads)
