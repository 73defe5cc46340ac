"""decode_attention and prefill_attention against float64, token by token, over a poisoned cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.batches import attend, context_of, make_batch, make_cache, make_heads
from tests.kernels.conftest import Place
from tests.kernels.numeric import assert_close
from tridecode.kernels.operands import Heads, Linear, Rope

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEADS = [(4, 4, 64), (6, 3, 80), (8, 2, 96), (4, 1, 112), (8, 2, 128), (6, 2, 160)]
HEADS += [(19, 1, 64), (2, 2, 256), (5, 5, 40)]


def decode_and_compare(place: Place, heads_shape, contexts, block_tokens, alibi, dtype, columns=0) -> None:
    heads = make_heads(place, *heads_shape, alibi=alibi)
    batch = make_batch(place, contexts, [1] * len(contexts), block_tokens)
    if columns:
        batch.block_tables = torch.nn.functional.pad(batch.block_tables, (0, columns))
    cache = make_cache(place, batch, heads, block_tokens, dtype)
    if place.device.type == "cpu":
        cache.blocks.nan_to_num_()  # the reference masks, and torch's attention spreads NaN through a mask
    qkv = place.normal(len(contexts), heads.qkv_size, dtype=dtype)
    out = place.poison(len(contexts), heads.num_heads * heads.head_size, dtype=dtype)
    place.settle()
    place.ops.decode_attention(qkv, heads, batch, cache, out=out)
    q = qkv[:, : heads.num_heads * heads.head_size].unflatten(1, (-1, heads.head_size))
    for row, context in enumerate(contexts):
        if context == 0:
            assert (out[row] == 0).all()
            continue
        k, v = context_of(cache, batch, row)
        assert_close("attention", out[row : row + 1], attend(q[row : row + 1], k, v, heads))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_decoding_rows_see_their_context(place: Place, heads, alibi: bool, dtype: torch.dtype):
    decode_and_compare(place, heads, [1, 0, 33, 16, 200, 15], 16, alibi, dtype)


@pytest.mark.parametrize("heads", [(8, 2, 128), (32, 16, 64)])
def test_short_contexts_share_a_step_with_long_ones(place: Place, heads):
    """A team has the parts of many rows, and begins behind the last tile of some."""
    rows = 256 if place.device.type == "cuda" else 60  # Reference has no teams
    contexts = [1 + 37 * i % 90 + (1500 if i % 50 == 7 else 0) for i in range(rows)]
    decode_and_compare(place, heads, contexts, 32, False, torch.bfloat16)


@pytest.mark.parametrize("size", [64, 80, 96, 112, 128, 160, 256])
@pytest.mark.parametrize("contexts", [[1], [16], [513, 1], [2049], [0, 3000, 40], [290, 33] * 6, [1100] * 16])
def test_heads_with_keys_of_their_own_decode_few_rows(place: Place, contexts: list[int], size: int):
    """On Hopper a cluster of blocks takes a head, or several a head with a long context."""
    decode_and_compare(place, (4, 4, size), contexts, 16, size == 96, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [3, 20, 70, 140])
def test_any_number_of_rows_has_heads_of_256(cuda_place: Place, rows: int, dtype: torch.dtype):
    """One block per multiprocessor of 132, two with 20 and 70 rows, and teams of a warp with 140."""
    contexts = [1 + 53 * i % 310 + (900 if i % 30 == 7 else 0) for i in range(rows)]
    decode_and_compare(cuda_place, (16, 8, 256), contexts, 32, False, dtype)


@pytest.mark.parametrize("size", [64, 80, 96, 112, 128])
@pytest.mark.parametrize("contexts", [[1], [16], [513, 1], [2049], [0, 3000, 40]])
def test_few_rows_decode_with_room_for_long_contexts(place: Place, contexts: list[int], size: int):
    """The width of the block tables decides how a cluster loads its tiles."""
    columns = (1 << 26) // (len(contexts) * 16 * 4 * size * 4)
    decode_and_compare(place, (4, 4, size), contexts, 16, size == 96, torch.bfloat16, columns)


@pytest.mark.parametrize("contexts", [[1], [17], [544], [1, 500], [2100, 0], [3000, 70], [9000]])
@pytest.mark.parametrize("heads", [(32, 8, 128), (14, 2, 64), (8, 1, 80), (32, 8, 160), (8, 1, 256)])
def test_groups_of_heads_decode_few_rows(place: Place, contexts: list[int], heads):
    """On Hopper a cluster of blocks takes a kv head with its query heads, several a long context."""
    decode_and_compare(place, heads, contexts, 16, heads[2] == 80, torch.bfloat16)


@pytest.mark.parametrize("contexts", [[17], [544], [3000, 70]])
@pytest.mark.parametrize("heads", [(4, 4, 128), (32, 8, 128), (8, 1, 80), (6, 3, 256)])
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float16, 65504.0), (torch.bfloat16, 1e16)])
@pytest.mark.parametrize("lowest", ["all", "first half", "last half"])
def test_scores_may_be_as_low_as_finite_inputs_make_them(
    place: Place, contexts: list[int], heads, dtype: torch.dtype, largest: float, lowest: str
):
    """No score is minus infinity, so the maximum of a tile, a warp or a cluster that holds only the lowest
    scores is finite, and its keys have weights: equal ones, or zero next to the highest scores."""
    shape = make_heads(place, *heads)
    batch = make_batch(place, contexts, [1] * len(contexts), 16)
    cache = make_cache(place, batch, shape, 16, dtype)
    cache.blocks.nan_to_num_()
    held = []
    for row, context in enumerate(contexts):
        position = torch.arange(context)
        low = {"all": position >= 0, "first half": position < context // 2}.get(
            lowest, position >= context // 2
        )
        keys = torch.where(low, -largest, largest).to(dtype).view(-1, 1, 1).expand(-1, heads[1], heads[2])
        values = torch.randn(context, heads[1], heads[2], generator=place.generator).to(dtype)
        at = batch.block_tables[row].long().cpu()[position // 16]
        both = torch.stack([keys, values], 1).to(place.device)  # (L, 2, K, D)
        cache.blocks[at.to(place.device), :, :, (position % 16).to(place.device)] = both
        held.append(both.double().cpu().permute(1, 2, 0, 3))
    qkv = torch.full((len(contexts), shape.qkv_size), largest, dtype=dtype, device=place.device)
    out = place.poison(len(contexts), shape.num_heads * shape.head_size, dtype=dtype)
    place.settle()
    place.ops.decode_attention(qkv, shape, batch, cache, out=out)
    q = qkv[:, : shape.num_heads * shape.head_size].unflatten(1, (-1, shape.head_size))
    for row in range(len(contexts)):
        k, v = held[row]
        assert_close("attention", out[row : row + 1], attend(q[row : row + 1], k, v, shape))


@pytest.mark.parametrize("block_tokens", [16, 32, 64])
@pytest.mark.parametrize("contexts", [[1], [31, 32, 33], [0, 0, 2049, 0], [63, 64, 65, 1] * 6, [300] * 19])
def test_any_lengths_share_a_step(place: Place, contexts: list[int], block_tokens: int):
    decode_and_compare(place, (8, 2, 128), contexts, block_tokens, True, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("fresh", [True, False])
def test_prompts_see_what_is_before_them(place: Place, fresh: bool, heads, alibi: bool, dtype: torch.dtype):
    queries = [1, 1, 2, 129, 40, 17]
    contexts = [5, 70, *queries[2:]] if fresh else [5, 70, 2, 150, 64 + 40, 17 + 300]
    prompts_and_compare(place, heads, contexts, queries, alibi, dtype)


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("heads", [(2, 2, 64), (4, 2, 128)])
@pytest.mark.parametrize("before", [0, 16, 40, 64, 100, 300])
def test_prompts_of_several_tiles_see_what_is_before_them(place: Place, heads, before: int, alibi: bool):
    """Each half of a tile may be the last that a warp group of the kernel for Hopper sees."""
    queries = [1, 1, 63, 64, 65, 128, 200, 300, 513]
    contexts = [5, 70, *(length + before for length in queries[2:])]
    prompts_and_compare(place, heads, contexts, queries, alibi, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("alibi", [False, True])
def test_prompts_of_many_heads_come_in_sections(cuda_place: Place, alibi: bool):
    """Enough heads for the Hopper kernel to process them in more than eight sections."""
    queries = [513, 2, 300, 129, 400, 17, 513, 64, 200, 500, 333, 70, 5]
    prompts_and_compare(cuda_place, (32, 8, 128), queries, queries, alibi, torch.bfloat16)


@pytest.fixture
def limited(cuda_place: Place) -> Iterator[Place]:
    """A place whose operations' prompt_shared_bytes the test sets."""
    yield cuda_place
    cuda_place.ops.gpu.prompt_shared_bytes = 0


#: bytes of shared memory of a block on sm_75, on sm_86, 89 and 120, on sm_80, and on sm_90
SHARED = [64 << 10, 99 << 10, 163 << 10, 227 << 10]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("size", [64, 80, 96, 112, 128, 160, 256])
@pytest.mark.parametrize("limit", [1 << 10, *SHARED])
def test_prompts_need_no_more_shared_memory_than_there_is(
    limited: Place, limit, size: int, fresh: bool, dtype
):
    """Tiles of 128 and of 64 queries, and the kernel without tiles."""
    queries = [2, 129, 40, 200]
    contexts = queries if fresh else [2, 150, 64 + 40, 300]
    limited.ops.gpu.prompt_shared_bytes = limit
    prompts_and_compare(limited, (4, 2, size), contexts, queries, size in (80, 128), dtype)


@pytest.mark.gpu
def test_every_head_size_with_tiles_has_some_on_every_card(cuda_place: Place):
    queries = cuda_place.ops.gpu.library.prefill_attention_queries
    assert {queries(size, limit) for size in (64, 80, 96, 112) for limit in SHARED} == {128}
    assert [queries(128, limit) for limit in SHARED] == [64, 128, 128, 128]
    assert [queries(256, limit) for limit in SHARED] == [64, 64, 128, 128]
    assert queries(40, SHARED[-1]) == queries(64, 1 << 10) == 1


def prompts_and_compare(place: Place, heads, contexts, queries, alibi: bool, dtype: torch.dtype) -> None:
    """Rows of one query, at the front, are decoding rows, and not computed."""
    shape = make_heads(place, *heads, alibi=alibi)
    batch = make_batch(place, contexts, queries, 16)
    cache = make_cache(place, batch, shape, 16, dtype)
    decodes = batch.num_decodes
    qkv = place.normal(sum(queries[decodes:]), shape.qkv_size, dtype=dtype)
    starts = [start - decodes for start in batch.query_starts.tolist()]
    width = shape.num_heads * shape.head_size
    for row in range(decodes, len(queries)):  # the new tokens' keys and values are in the cache already
        mine = qkv[starts[row] : starts[row + 1], width:].unflatten(
            1, (2, shape.num_kv_heads, shape.head_size)
        )
        for i, position in enumerate(range(contexts[row] - queries[row], contexts[row])):
            cache.blocks[int(batch.block_tables[row, position // 16]), :, :, position % 16] = mine[i]
    out = place.poison(qkv.shape[0], width, dtype=dtype)
    place.settle()
    place.ops.prefill_attention(qkv, shape, batch, cache, out=out)
    q = qkv[:, :width].unflatten(1, (-1, shape.head_size))
    for row in range(decodes, len(queries)):
        k, v = context_of(cache, batch, row)
        part = slice(starts[row], starts[row + 1])
        assert_close("attention", out[part], attend(q[part], k, v, shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4, 64), (8, 2, 128), (2, 2, 256)])
def test_a_prompt_beside_numbers_that_are_none_is_as_it_is_alone(place: Place, heads, dtype: torch.dtype):
    shape = make_heads(place, *heads, alibi=True)
    queries = [40, 130, 33]
    batch = make_batch(place, queries, queries, 16)
    cache = make_cache(place, batch, shape, 16, dtype)
    qkv = place.normal(sum(queries), shape.qkv_size, dtype=dtype)
    width = shape.num_heads * shape.head_size
    out, beside = (place.poison(sum(queries), width, dtype=dtype) for _ in range(2))
    place.settle()
    place.ops.prefill_attention(qkv, shape, batch, cache, out=out)
    qkv[40:170] = float("nan")
    place.settle()
    place.ops.prefill_attention(qkv, shape, batch, cache, out=beside)
    assert torch.isfinite(out).all() and torch.isnan(beside[40:170]).all()
    assert torch.equal(beside[:40], out[:40]) and torch.equal(beside[170:], out[170:])


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("fresh", [True, False])
def test_each_key_position_may_have_a_bias(place: Place, fresh: bool, kv_heads: int):
    """A decoding row and a prompt; layers of one batch keep their own biases."""
    contexts, queries = [40, 33 if fresh else 150], [1, 33]
    batch, dtype, size = make_batch(place, contexts, queries, 16), torch.float32, 4 * 32
    for _ in range(2):  # layers
        bias = torch.randn(4, 150, generator=place.generator).to(place.device)
        heads = Heads(4, kv_heads, 32, 32**-0.5, key_bias=bias)
        cache = make_cache(place, batch, heads, 16, dtype)
        cache.blocks.nan_to_num_()
        qkv, out = place.normal(34, heads.qkv_size, dtype=dtype), place.poison(34, size, dtype=dtype)
        held = qkv[1:, size:].unflatten(1, (2, kv_heads, 32))
        for i, position in enumerate(range(contexts[1] - 33, contexts[1])):
            cache.blocks[int(batch.block_tables[1, position // 16]), :, :, position % 16] = held[i]
        place.settle()
        place.ops.decode_attention(qkv[:1], heads, batch, cache, out=out[:1])
        place.ops.prefill_attention(qkv[1:], heads, batch, cache, out=out[1:])
        q = qkv[:, :size].unflatten(1, (4, 32))
        for row, part in enumerate((slice(0, 1), slice(1, 34))):
            k, v = context_of(cache, batch, row)
            assert_close("attention", out[part], attend(q[part], k, v, heads))


def test_beyond_the_last_column_a_key_bias_stays(place: Place):
    """A cache may hold more positions than the table: of blocks that are not full."""
    heads = Heads(2, 2, 32, 1.0, key_bias=torch.zeros(2, 5, device=place.device))
    batch = make_batch(place, [5], [1], 16)
    cache = make_cache(place, batch, heads, 16, torch.float32)
    cache.blocks.nan_to_num_()
    qkv = place.normal(1, heads.qkv_size, dtype=torch.float32)
    out = place.poison(1, 64, dtype=torch.float32)
    place.settle()
    place.ops.decode_attention(qkv, heads, batch, cache, out=out)
    k, v = context_of(cache, batch, 0)
    assert_close("attention", out, attend(qkv[:, :64].unflatten(1, (2, 32)), k, v, heads))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_layers_of_one_batch_keep_their_own_slopes(place: Place, kv_heads: int):
    batch, dtype = make_batch(place, [5, 40, 17], [1, 1, 1], 16), torch.float32
    for _ in range(3):  # layers
        heads = make_heads(place, 4, kv_heads, 32, alibi=True)
        cache = make_cache(place, batch, heads, 16, dtype)
        cache.blocks.nan_to_num_()
        qkv, out = place.normal(3, heads.qkv_size, dtype=dtype), place.poison(3, 4 * 32, dtype=dtype)
        place.settle()
        place.ops.decode_attention(qkv, heads, batch, cache, out=out)
        q = qkv[:, : 4 * 32].unflatten(1, (4, 32))
        for row in range(3):
            k, v = context_of(cache, batch, row)
            assert_close("attention", out[row : row + 1], attend(q[row : row + 1], k, v, heads))


def test_layers_of_one_batch_keep_their_own_angles(place: Place):
    batch, dtype, size = make_batch(place, [5, 40, 17], [1, 1, 1], 16), torch.float32, 32
    for _ in range(3):  # layers
        angles = torch.rand(64, size // 2, generator=place.generator).to(place.device) * 6
        heads = Heads(4, 4, size, 1.0, Rope(angles.cos(), angles.sin()))
        cache = make_cache(place, batch, heads, 16, dtype)
        x, out = place.normal(3, 24, dtype=dtype), place.poison(3, heads.qkv_size, dtype=dtype)
        weight = place.normal(heads.qkv_size, 24, dtype=dtype)
        place.settle()
        place.ops.project_qkv(x, Linear(weight), None, heads, batch, cache, out=out)
        product = (x.double() @ weight.double().t())[:, : 4 * size].unflatten(1, (4, size)).cpu()
        turn = torch.polar(torch.ones(()).double(), angles[batch.positions.long()].double().cpu())[:, None]
        turned = torch.complex(product[..., : size // 2], product[..., size // 2 :]) * turn
        wanted = torch.cat([turned.real, turned.imag], dim=-1).flatten(1)
        assert_close("linear", out[:, : 4 * size], wanted)
