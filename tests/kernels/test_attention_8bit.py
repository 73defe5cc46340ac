"""The 8-bit cache on every device: what project_qkv stores, by the definition of its formats in numpy;
attention over it against float64, over a poisoned cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.batches import attend, make_batch, make_heads
from tests.kernels.conftest import Place
from tests.kernels.numeric import assert_close
from tests.rounded_cache import stored
from tridecode.backend.configuration.engine_config import CACHE_FORMATS
from tridecode.kernels.formats.kv_rounding import CACHE_DTYPES, expanded, rounded
from tridecode.kernels.operands import Batch, CacheLayer, Heads, Linear, Norm, Rope

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMATS = pytest.mark.parametrize("format", CACHE_FORMATS)
HEADS = [(4, 4, 64), (6, 3, 80), (8, 2, 96), (4, 1, 112), (8, 2, 128), (6, 2, 160)]
HEADS += [(19, 1, 64), (2, 2, 256), (5, 5, 40)]
BLOCK = 16
#: of 256 rows: mostly of a few tiles, some of a hundred
UNEVEN = [1 + 37 * i % 90 + (1500 if i % 50 == 7 else 0) for i in range(256)]
#: by how the rows of 8 kv heads are divided on a card of 132 multiprocessors (csrc/attention/decode_runs.cuh)
DIVISIONS = {
    "chunks of few rows, for blocks": [700, 33, 1, 300],
    "chunks of more than a warp has lanes, for blocks": [70] * 33,
    "whole rows, for blocks": [200] * 64,
    "two rows a block": [120] * 128,
    "whole rows, for warps": [90] * 192,
    "whole rows, for more warps": [50] * 256,
    "one row in seven chunks, for warps": [300] * 150 + [2000],
    "one row too long for chunks": [20] * 150 + [4500],
    "runs of rows, one of them cut": [60 + 7 * i % 50 for i in range(300)] + [9000],
    "four rows a warp": [33] * 1056,
}


def empty_cache(place: Place, batch: Batch, heads: Heads, block_tokens: int, format: str) -> CacheLayer:
    """Every place is poisoned: scales are NaN, and numbers NaN or, in int8, -128."""
    shape = (batch.block_tables.numel(), 2, heads.num_kv_heads, block_tokens)
    byte = 0x7F if format == "fp8" else -128
    blocks = torch.full((*shape, heads.head_size), byte, dtype=torch.int8, device=place.device)
    scales = torch.full(shape, float("nan"), device=place.device)
    return CacheLayer(blocks.view(CACHE_DTYPES[format]), scales)


def filled_cache(
    place: Place, batch: Batch, heads: Heads, block_tokens: int, format: str, spread: float
) -> tuple[CacheLayer, list[tuple[Tensor, Tensor]]]:
    """Keys and values of each row's context, and what they stand for: (K, L, D) float64 each. Magnitudes of
    values differ by up to `spread` from token to token, of keys by up to 2."""
    cache, contexts = empty_cache(place, batch, heads, block_tokens, format), []
    assert cache.scales is not None
    if place.device.type == "cpu":  # the reference masks, and torch's attention spreads NaN through a mask
        cache.tensors[0].zero_()
        cache.scales.zero_()
    tables = batch.block_tables.cpu().long()
    for row, length in enumerate(batch.context_lens.tolist()):
        x = place.normal(length, 2, heads.num_kv_heads, heads.head_size, dtype=torch.float32).cpu()
        powers = torch.rand(length, 2, heads.num_kv_heads, 1, generator=place.generator)
        x[:, 0] *= 0.5 * 2 ** powers[:, 0]
        x[:, 1] *= 10 / spread * spread ** powers[:, 1]
        values, scales = rounded(x, CACHE_DTYPES[format])
        places = torch.arange(length)
        blocks, offsets = tables[row, places // block_tokens], places % block_tokens
        for held, new in zip(cache.tensors, (values.view(torch.int8), scales)):
            held[blocks.to(place.device), :, :, offsets.to(place.device)] = new.to(place.device)
        both = (values.double() * scales.double()[..., None]).permute(1, 2, 0, 3)
        contexts.append((both[0], both[1]))
    return cache, contexts


def decode_and_compare(place: Place, heads_shape, contexts, block_tokens, alibi, dtype, format) -> None:
    heads = make_heads(place, *heads_shape, alibi=alibi)
    batch = make_batch(place, contexts, [1] * len(contexts), block_tokens)
    cache, kv = filled_cache(place, batch, heads, block_tokens, format, spread=1e4)
    qkv = place.normal(len(contexts), heads.qkv_size, dtype=dtype)
    out = place.poison(len(contexts), heads.num_heads * heads.head_size, dtype=dtype)
    place.settle()
    place.ops.decode_attention(qkv, heads, batch, cache, out=out)
    q = qkv[:, : heads.num_heads * heads.head_size].unflatten(1, (-1, heads.head_size))
    for row, context in enumerate(contexts):
        if context == 0:
            assert (out[row] == 0).all()
            continue
        assert_close("attention", out[row : row + 1], attend(q[row : row + 1], *kv[row], heads))


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_tokens", [16, 32])  # a copy on a GPU takes 32 tokens of one block
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_decoding_rows_see_their_context(
    place: Place, heads, alibi: bool, block_tokens: int, dtype, format: str
):
    decode_and_compare(place, heads, [1, 0, 33, 16, 200, 15], block_tokens, alibi, dtype, format)


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_tokens", [16, 32, 5])
@pytest.mark.parametrize("contexts", [[1], [300, 7], [0, 0, 2049, 0], [63, 64, 65, 1] * 6, [300] * 19])
def test_any_lengths_share_a_step(place: Place, contexts, block_tokens: int, dtype, format: str):
    decode_and_compare(place, (8, 2, 128), contexts, block_tokens, True, dtype, format)


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("contexts", [[16], [513, 1], [0, 3000, 40], [290, 33] * 6])
def test_heads_with_keys_of_their_own_decode_few_rows(place: Place, contexts, size: int, dtype, format: str):
    decode_and_compare(place, (4, 4, size), contexts, 16, size == 80, dtype, format)


@FORMATS
@pytest.mark.parametrize("contexts", [[17], [544], [1, 500], [3000, 70]])
@pytest.mark.parametrize("heads", [(32, 8, 128), (14, 2, 64), (32, 8, 160), (8, 1, 256)])
def test_groups_of_heads_decode_few_rows(place: Place, contexts, heads, format: str):
    decode_and_compare(place, heads, contexts, 16, False, torch.bfloat16, format)


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(8, 2, 128), (16, 8, 64), (32, 16, 64)])
def test_short_contexts_share_a_step_with_long_ones(place: Place, heads, dtype, format: str):
    """A team has the parts of many rows, and begins behind the last tile of some."""
    contexts = UNEVEN if place.device.type == "cuda" else UNEVEN[:60]  # Reference has no teams
    decode_and_compare(place, heads, contexts, 32, False, dtype, format)


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("contexts", DIVISIONS.values(), ids=DIVISIONS)
def test_teams_divide_a_step_in_every_way(cuda_place: Place, contexts: list[int], format: str):
    decode_and_compare(cuda_place, (32, 8, 64), contexts, 32, False, torch.bfloat16, format)


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("rows", [3, 20, 70, 140])
def test_any_number_of_rows_has_heads_of_256(cuda_place: Place, rows: int, format: str):
    contexts = [1 + 53 * i % 310 + (900 if i % 30 == 7 else 0) for i in range(rows)]
    decode_and_compare(cuda_place, (16, 8, 256), contexts, 32, False, torch.bfloat16, format)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["", *CACHE_FORMATS])
@pytest.mark.parametrize(
    "contexts", [[300] * 40, [40] * 150 + [6000], UNEVEN], ids=["alike", "long", "uneven"]
)
def test_who_comes_last_does_not_change_a_bit(cuda_place: Place, contexts: list[int], format: str):
    """The last team to arrive adds what the others have, in their order."""
    place, heads = cuda_place, make_heads(cuda_place, 32, 8, 128)
    batch = make_batch(place, contexts, [1] * len(contexts), 32)
    shape = (batch.block_tables.numel(), 2, 8, 32, 128)
    blocks = torch.randn(shape, device=place.device).to(torch.bfloat16)
    cache = CacheLayer(*rounded(blocks, CACHE_DTYPES[format])) if format else CacheLayer(blocks)
    qkv = place.normal(len(contexts), heads.qkv_size, dtype=torch.bfloat16)
    outs = []
    for _ in range(20):
        out = place.poison(len(contexts), 32 * 128, dtype=torch.bfloat16)
        place.settle()
        place.ops.decode_attention(qkv, heads, batch, cache, out=out)
        outs.append(out)
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_numbers_of_a_cache_count(place: Place, dtype: torch.dtype):
    """fp8: keys and values of 1 to 7 / 512, subnormal in E4M3, times scales that make them large."""
    heads = make_heads(place, 8, 2, 128)
    batch = make_batch(place, [70, 3], [1, 1], BLOCK)
    cache = empty_cache(place, batch, heads, BLOCK, "fp8")
    assert cache.scales is not None
    bits = torch.randint(1, 8, cache.blocks.shape, generator=place.generator).to(torch.int8)
    signs = torch.randint(0, 2, cache.blocks.shape, generator=place.generator).to(torch.int8) * -128
    cache.tensors[0].view(torch.int8).copy_(bits | signs)
    cache.scales.fill_(64.0)
    qkv, out = place.normal(2, heads.qkv_size, dtype=dtype), place.poison(2, 8 * 128, dtype=dtype)
    place.settle()
    place.ops.decode_attention(qkv, heads, batch, cache, out=out)
    numbers = (bits.double() / 512 * 64 * torch.where(signs < 0, -1.0, 1.0)).transpose(0, 1)
    q = qkv[:, : 8 * 128].unflatten(1, (-1, 128))
    for row, context in enumerate((70, 3)):
        table = batch.block_tables[row].cpu().long()
        keys, values = (one[table].transpose(0, 1).flatten(1, 2)[:, :context] for one in numbers)
        assert_close("attention", out[row : row + 1], attend(q[row : row + 1], keys, values, heads))


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_of_any_magnitude_keep_their_digits(place: Place, dtype: torch.dtype, format: str):
    """bfloat16 has more exponents than the halves of the product: those of a head differ by 2^20, of heads by
    2^130. The largest meet zeros, so that the others decide."""
    heads, contexts = make_heads(place, 8, 2, 128), [70, 600, 3]
    batch = make_batch(place, contexts, [1] * len(contexts), BLOCK)
    cache, kv = filled_cache(place, batch, heads, BLOCK, format, spread=10)
    cache.blocks.view(torch.int8)[:, 0, :, :, 0] = 0
    qkv = place.normal(len(contexts), heads.qkv_size, dtype=dtype)
    q = qkv[:, : 8 * 128].unflatten(1, (-1, 128))
    q *= 2.0 ** torch.tensor([-126, -60, -8, 0, 2, -30, -1, 1], device=place.device)[:, None]
    q[:, :, 0] = q[:, :, 1:].abs().amax(-1) * 2**20
    out = place.poison(len(contexts), 8 * 128, dtype=dtype)
    place.settle()
    place.ops.decode_attention(qkv, heads, batch, cache, out=out)
    for row, (keys, values) in enumerate(kv):
        keys[:, :, 0] = 0
        assert_close("attention", out[row : row + 1], attend(q[row : row + 1], keys, values, heads))


@contextmanager
def room_for(place: Place, rows: int, batch: Batch, cache: CacheLayer, itemsize: int) -> Iterator[None]:
    """Limit scratch memory to the dequantised contexts of this many rows; 0: keep what there is."""
    if not rows or place.device.type == "cpu":
        yield
        return
    held = place.ops.gpu.arenas.pop("expanded", None)
    columns = -(-batch.max_context // cache.block_tokens)
    place.ops.gpu.arenas["expanded"] = place.ops.gpu.bytes(rows * columns * cache.blocks.stride(0) * itemsize)
    yield
    place.ops.gpu.arenas.pop("expanded")
    if held is not None:
        place.ops.gpu.arenas["expanded"] = held


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", [0, 1, 2], ids=["all rows", "row by row", "two rows"])
def test_prompts_see_what_is_before_them(place: Place, rows: int, heads, alibi: bool, dtype, format: str):
    shape = make_heads(place, *heads, alibi=alibi)
    queries, contexts = [1, 1, 2, 129, 40, 17, 33], [5, 70, 2, 150, 64 + 40, 17 + 300, 33]
    batch = make_batch(place, contexts, queries, BLOCK)
    cache, kv = filled_cache(place, batch, shape, BLOCK, format, spread=10)
    decodes = batch.num_decodes
    assert decodes == 2 and not batch.fresh_prompts
    qkv = place.normal(sum(queries[decodes:]), shape.qkv_size, dtype=dtype)
    starts = [start - decodes for start in batch.query_starts.tolist()]
    width = shape.num_heads * shape.head_size
    for row in range(decodes, len(queries)):  # the new tokens' keys and values, as project_qkv leaves them
        new = torch.stack(kv[row])[:, :, contexts[row] - queries[row] :].permute(2, 0, 1, 3)
        qkv[starts[row] : starts[row + 1], width:] = new.flatten(1).to(dtype).to(place.device)
    out = place.poison(qkv.shape[0], width, dtype=dtype)
    place.settle()
    with room_for(place, rows, batch, cache, dtype.itemsize):
        place.ops.prefill_attention(qkv, shape, batch, cache, out=out)
    q = qkv[:, :width].unflatten(1, (-1, shape.head_size))
    for row in range(decodes, len(queries)):
        part = slice(starts[row], starts[row + 1])
        assert_close("attention", out[part], attend(q[part], *kv[row], shape))


def rotated(x: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """x (T, heads, D) float64, rotated as Su et al. 2021."""
    angles = torch.polar(torch.ones(()).double(), torch.atan2(rope.sin, rope.cos).double().cpu())
    turn = angles[positions.long().cpu()][:, None]  # (T, 1, size / 2)
    part, rest = x[..., : rope.size], x[..., rope.size :]
    pairs = part.unflatten(-1, (-1, 2)) if rope.interleaved else part.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.complex(pairs[..., 0], pairs[..., 1]) * turn
    both = torch.stack([turned.real, turned.imag], dim=-1)
    both = both if rope.interleaved else both.transpose(-1, -2)
    return torch.cat([both.flatten(-2), rest], dim=-1)


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turn", [None, (1.0, False), (1.0, True), (0.5, False), (0.25, True)])
@pytest.mark.parametrize("shape", [(4, 2, 64), (3, 1, 128), (2, 2, 256), (5, 5, 40), (4, 4, 80), (2, 1, 36)])
def test_keys_and_values_are_rotated_rounded_and_stored(place: Place, shape, turn, dtype, format: str):
    """Values are stored to the last bit as the format says, keys within the rounding of their rotation; `out`
    holds what a reader of the cache gets."""
    rotate_round_and_compare(place, shape, turn, dtype, format, [40, 0, 17, 9], [1, 1, 17, 5])


@FORMATS
@pytest.mark.parametrize("turn", [None, (1.0, False)])
@pytest.mark.parametrize("shape", [(16, 8, 128), (20, 5, 64)])
def test_many_tokens_are_rotated_rounded_and_stored(place: Place, shape, turn, format: str):
    rotate_round_and_compare(place, shape, turn, torch.bfloat16, format, [9, 0, 600], [1, 1, 600])


def rotate_round_and_compare(place: Place, shape, turn, dtype, format: str, contexts, queries) -> None:
    """One row is padding."""
    heads = make_heads(place, *shape)
    if turn is not None:
        size = int(heads.head_size * turn[0]) // 2 * 2
        angles = torch.rand(max(contexts), size // 2, generator=place.generator).to(place.device) * 6
        rope = Rope(angles.cos(), angles.sin(), turn[1])
        heads = Heads(heads.num_heads, heads.num_kv_heads, heads.head_size, heads.scale, rope)
    batch = make_batch(place, contexts, queries, BLOCK)
    cache = empty_cache(place, batch, heads, BLOCK, format)
    tokens = batch.num_tokens
    qkv = place.normal(tokens, heads.qkv_size, dtype=dtype)
    qkv *= (10 ** (torch.rand(tokens, 1, generator=place.generator) * 4 - 2)).to(dtype).to(place.device)
    before = qkv.unflatten(1, (-1, heads.head_size)).double().cpu()
    place.settle()
    place.ops.finish_qkv(qkv, heads, batch, cache)
    after = qkv.unflatten(1, (-1, heads.head_size)).cpu()
    q, k = heads.num_heads, heads.num_heads + heads.num_kv_heads
    wanted = before.clone()
    if heads.rope is not None:
        wanted[:, :k] = rotated(before[:, :k], heads.rope, batch.positions)
    eps = torch.finfo(dtype).eps
    largest = wanted.abs().amax(-1, keepdim=True)
    assert ((after[:, :q].double() - wanted[:, :q]).abs() <= 2 * eps * largest[:, :q]).all()

    written = batch.kv_slots.cpu().long()
    kept = written >= 0
    assert int((~kept).sum()) == 1  # the padded row
    blocks, offsets = written[kept] // BLOCK, written[kept] % BLOCK
    values = cache.tensors[0].cpu()[blocks, :, :, offsets].view(CACHE_DTYPES[format])  # (n, 2, K, D)
    scales = cache.tensors[1].cpu()[blocks, :, :, offsets]
    numbers, exact = stored(before[kept][:, k:].float().numpy(), format)
    assert np.array_equal(scales[:, 1].numpy(), exact[..., 0])
    assert np.array_equal(values[:, 1].float().numpy(), numbers)
    back = expanded(values, scales, dtype)
    assert torch.equal(back.flatten(1, 2), after[kept][:, q:])
    scale = scales[:, 0].double()[..., None]
    x = wanted[kept][:, q:k]
    step = scale / 2 if format == "int8" else torch.maximum(x.abs() / 16, scale / 1024)
    off = (values[:, 0].double() * scale - x).abs()
    assert (off <= step * (1 + 1e-3) + 2 * eps * largest[kept][:, q:k]).all(), off.max()

    untouched = torch.ones(cache.blocks.shape[0], BLOCK, dtype=torch.bool)
    untouched[blocks, offsets] = False
    assert cache.scales is not None
    assert cache.scales.cpu().permute(0, 3, 1, 2)[untouched].isnan().all()
    padded = int((~kept).nonzero())
    assert torch.equal(
        after[padded, k:], expanded(*rounded(before[padded, k:].to(dtype), CACHE_DTYPES[format]), dtype)
    )


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES)
def test_projections_of_any_size_round_what_they_write(place: Place, dtype: torch.dtype, format: str):
    """Covers rotation and a norm, which the GEMM's own epilogue would otherwise apply."""
    angles = torch.rand(64, 32, generator=place.generator).to(place.device) * 6
    heads = Heads(4, 2, 64, 0.125, Rope(angles.cos(), angles.sin()))
    for tokens in (1, 2, 7, 40):
        batch = make_batch(place, [tokens], [tokens], BLOCK)
        cache, inputs = empty_cache(place, batch, heads, BLOCK, format), 128
        x, weight = (
            place.normal(tokens, inputs, dtype=dtype),
            place.normal(512, inputs, dtype=dtype, scale=0.1),
        )
        norm = Norm(place.normal(inputs, dtype=dtype), None, 1e-5)
        out = place.poison(tokens, 512, dtype=dtype)
        place.settle()
        place.ops.project_qkv(x, Linear(weight), norm, heads, batch, cache, out=out)
        x64 = x.double()
        normed = x64 * (x64.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()
        product = (normed @ weight.double().t()).cpu().unflatten(1, (-1, 64))
        assert heads.rope is not None
        product[:, :6] = rotated(product[:, :6], heads.rope, batch.positions)
        assert_close("linear", out[:, :256], product[:, :4].flatten(1))
        wanted = product[:, 4:]
        scale = wanted.abs().amax(-1, keepdim=True) / (127 if format == "int8" else 448)
        step = scale / 2 if format == "int8" else torch.maximum(wanted.abs() / 16, scale / 1024)
        off = (out[:, 256:].double().cpu().unflatten(1, (-1, 64)) - wanted).abs()
        allowed = 1.01 * step + 16 * torch.finfo(dtype).eps * (wanted.abs() + wanted.abs().mean())
        assert (off <= allowed).all(), (off - allowed).max()


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_that_are_none_stay_in_their_head_and_row(place: Place, dtype: torch.dtype, format: str):
    heads = make_heads(place, 4, 2, 64)
    batch = make_batch(place, [3, 3, 3], [3, 3, 3], BLOCK)
    cache = empty_cache(place, batch, heads, BLOCK, format)
    qkv = place.normal(9, heads.qkv_size, dtype=dtype)
    qkv[1, (4 + 1) * 64 + 5] = float("inf")  # a key of row 0, head 1
    qkv[4, (4 + 2 + 0) * 64 + 7] = float("nan")  # a value of row 1, head 0
    if place.device.type == "cpu":
        cache.tensors[0].zero_(), cache.tensors[1].zero_()
    place.settle()
    place.ops.finish_qkv(qkv, heads, batch, cache)
    step = make_batch(place, [3, 3, 3], [1, 1, 1], BLOCK)
    step.block_tables = batch.block_tables
    out = place.poison(3, 256, dtype=dtype)
    place.settle()
    place.ops.decode_attention(qkv[2::3].contiguous(), heads, step, cache, out=out)
    parts = out.unflatten(1, (2, 128)).isnan().cpu()
    assert parts[0, 1].all() and parts[1, 0].all()
    parts[0, 1] = parts[1, 0] = False
    assert not parts.any()
