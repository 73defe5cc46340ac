"""The 8-bit cache: what is stored, by the definition of its formats; attention over it against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.batches import attend, make_batch, make_heads
from tests.kernels.conftest import Place
from tests.kernels.numeric import assert_close
from tests.rounded_cache import LARGEST, read_back, stored
from tridecode.backend.configuration.engine_config import CACHE_FORMATS
from tridecode.kernels.cpu import Cpu
from tridecode.kernels.formats.kv_rounding import CACHE_DTYPES, expanded, rounded
from tridecode.kernels.operands import Batch, CacheLayer, Heads
from tridecode.kernels.ops import Ops
from tridecode.kernels.reference import Reference

CPU = torch.device("cpu")
FORMATS = pytest.mark.parametrize("format", CACHE_FORMATS)
BLOCK = 16


@pytest.fixture
def place() -> Place:
    return Place(Reference(), CPU, torch.Generator().manual_seed(7))


def test_every_format_of_the_setting_has_a_dtype() -> None:
    assert set(CACHE_FORMATS) == set(CACHE_DTYPES) == set(LARGEST)


@FORMATS
@pytest.mark.parametrize("size", [1, 40, 128])
def test_stored_numbers_and_scales_are_those_of_the_format(place: Place, format: str, size: int) -> None:
    magnitudes = torch.logspace(-20, 20, 41)[:, None, None]
    x = place.normal(41, 25, size, dtype=torch.float32) * magnitudes
    values, scales = rounded(x, CACHE_DTYPES[format])
    wanted, wanted_scales = stored(x.numpy(), format)
    assert np.array_equal(scales.numpy(), wanted_scales[..., 0])
    assert np.array_equal(values.float().numpy(), wanted)
    error = (x.double() - values.double() * scales.double()[..., None]).abs().numpy()
    steps = wanted_scales / 2 if format == "int8" else np.maximum(x.abs().numpy() / 16, wanted_scales / 1024)
    assert (error <= steps * (1 + 1e-5)).all() and error.max() > 0 or size == 1


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_cache_gives_back_the_product_in_the_engines_dtype(place: Place, format: str, dtype) -> None:
    x = place.normal(50, 64, dtype=dtype, scale=30.0)
    found = expanded(*rounded(x, CACHE_DTYPES[format]), dtype)
    assert found.dtype == dtype
    error = (found.double() - torch.from_numpy(read_back(x.float().numpy(), format))).abs()
    assert (error <= torch.finfo(dtype).eps * x.abs().max()).all()


@FORMATS
def test_zeros_stay_and_numbers_that_are_none_stay_with_their_vector(format: str) -> None:
    x = torch.ones(7, 8)
    x[0] = 0.0
    x[1] = 1e-44
    x[2, 3], x[3, 3], x[4, 3] = torch.nan, torch.inf, -torch.inf
    x[5, 3] = 3e38
    back = expanded(*rounded(x, CACHE_DTYPES[format]), torch.float32)
    assert (back[0] == 0).all() and back[1].abs().max() < 1e-37
    assert back[2:5].isnan().all()
    assert back[5, 3] == pytest.approx(3e38) and back[5, 0].abs() < 3e36
    assert torch.allclose(back[6], x[6])


def written(ops: Ops, qkv: Tensor, heads: Heads, batch: Batch, format: str) -> CacheLayer:
    """The cache after finish_qkv of qkv (T, (H + 2K) * D), which changes qkv. All other places hold 120
    with the scale 1."""
    blocks, size = batch.block_tables.numel(), (2, heads.num_kv_heads, BLOCK)
    values = torch.full((blocks, *size, heads.head_size), 120.0).to(CACHE_DTYPES[format])
    cache = CacheLayer(values, torch.ones(blocks, *size))
    ops.finish_qkv(qkv, heads, batch, cache)
    return cache


def history(place: Place, contexts: list[int], queries: list[int]) -> tuple[Batch, Batch]:
    """The step that writes all tokens of rows, as prompts, and a later one over the same blocks."""
    step = make_batch(place, contexts, queries, BLOCK)
    before = make_batch(place, contexts, contexts, BLOCK)
    places = torch.cat([torch.arange(context) for context in contexts])
    rows = torch.repeat_interleave(torch.arange(len(contexts)), torch.tensor(contexts))
    blocks = step.block_tables[rows, places // BLOCK]
    before.block_tables, before.kv_slots = step.block_tables, (blocks * BLOCK + places % BLOCK).int()
    return before, step


@FORMATS
@pytest.mark.parametrize("ops", [Reference(), Cpu(batch_invariant=True)], ids=["reference", "invariant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 4, 64), (6, 2, 40), (4, 1, 96)])
def test_attention_is_that_over_rounded_keys_and_values(place: Place, shape, dtype, ops, format: str) -> None:
    """Decoding rows, a prompt with and one without tokens before it, within the bounds of an exact cache."""
    contexts, queries = [5, 33, 40, 70], [1, 1, 40, 30]
    heads = make_heads(place, *shape, alibi=True)
    before, step = history(place, contexts, queries)
    qkv = place.normal(sum(contexts), heads.qkv_size, dtype=dtype)
    width = heads.num_heads * heads.head_size
    kv = qkv[:, width:].unflatten(1, (2, heads.num_kv_heads, heads.head_size)).float().numpy()
    kv = torch.from_numpy(read_back(kv, format)).to(dtype).double()  # (T, 2, K, D)
    cache = written(ops, qkv, heads, before, format)
    ends = np.cumsum(contexts)
    new = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, queries)])
    mine, out = qkv[new].contiguous(), place.poison(len(new), width, dtype=dtype)
    ops.decode_attention(mine[:2], heads, step, cache, out=out[:2])
    ops.prefill_attention(mine[2:], heads, step, cache, out=out[2:])
    starts = step.query_starts.tolist()
    for row, (context, end) in enumerate(zip(contexts, ends)):
        part = slice(starts[row], starts[row + 1])
        k, v = kv[end - context : end].permute(1, 2, 0, 3)  # (K, L, D)
        q = mine[part, :width].unflatten(1, (-1, heads.head_size))
        assert_close("attention", out[part], attend(q, k, v, heads))


@FORMATS
def test_a_token_without_a_place_is_rounded_and_not_written(place: Place, format: str) -> None:
    heads = make_heads(place, 2, 2, 32)
    batch = make_batch(place, [3, 0], [3, 1], BLOCK)
    assert batch.kv_slots.tolist()[3] == -1
    qkv = place.normal(4, heads.qkv_size, dtype=torch.float32)
    wanted = read_back(qkv[:, 64:].unflatten(1, (2, 2, 32)).numpy(), format)
    cache = written(place.ops, qkv, heads, batch, format)
    assert np.allclose(qkv[:, 64:].unflatten(1, (2, 2, 32)).numpy(), wanted, rtol=1e-6, atol=0)
    assert cache.scales is not None
    assert int((cache.scales != 1).sum()) == 3 * 2 * 2 and (cache.scales[batch.block_tables[1]] == 1).all()
